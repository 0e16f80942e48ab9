#include "evaluate/options.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string_view>

#include "evaluate/tasks.hpp"

namespace evaluate {

outcome<nothing> read_number(std::string_view option, std::string_view word, std::uint32_t least,
                             std::uint32_t most, std::uint32_t& target) {
    std::uint32_t value = 0;
    const auto [end, status] = std::from_chars(word.data(), word.data() + word.size(), value);
    const bool whole = status == std::errc() && end == word.data() + word.size();
    if (!whole || value < least || value > most) {
        return error{fmt::format("{} is '{}', it must be a number from {} to {}", option, word,
                                 least, most)};
    }
    target = value;
    return nothing{};
}

outcome<nothing> read_option(std::string_view option, std::string_view word,
                             const option_table& table) {
    for (const text_option& one : table.texts) {
        if (one.name == option) {
            if (word.empty()) {
                return error{fmt::format("{} is empty, it must be the path of a file", option)};
            }
            *one.target = word;
            return nothing{};
        }
    }
    for (const number_option& one : table.numbers) {
        if (one.name == option) {
            return read_number(option, word, one.least, one.most, *one.target);
        }
    }
    return error{fmt::format("'{}' is not an option{}", option, table.where)};
}

namespace {

outcome<nothing> read_formats(std::string_view word, program_options& read) {
    auto list = parse_configurations(word);
    if (!list) {
        return error{fmt::format("--formats: {}", list.message())};
    }
    read.configurations = std::move(*list);
    read.chosen = true;
    return nothing{};
}

outcome<nothing> read_value(std::string_view option, std::string_view word, program_options& read) {
    constexpr std::uint32_t most_tokens = 1u << 24;
    if (option == "--formats") {
        return read_formats(word, read);
    }
    const text_option texts[] = {{"--model", &read.model},
                                 {"--text", &read.text},
                                 {"--report", &read.report},
                                 {"--plot", &read.plot}};
    const number_option numbers[] = {{"--tokens", 4, most_tokens, &read.tokens},
                                     {"--window", 4, 1u << 20, &read.window},
                                     {"--chunk", 1, 8192, &read.chunk},
                                     {"--contexts", 1, 4096, &read.contexts},
                                     {"--context-tokens", 4, 1u << 20, &read.context_tokens},
                                     {"--threads", 1, 1024, &read.threads}};
    return read_option(option, word, {texts, numbers, ""});
}

outcome<nothing> check_together(const program_options& read) {
    if (read.model.empty()) {
        return error{"--model is missing: the path of a GGUF file"};
    }
    if (read.text.empty()) {
        return error{"--text is missing: the path of a text in UTF-8"};
    }
    if (read.tokens < read.window) {
        return error{
            fmt::format("--tokens is {}, less than a --window of {}", read.tokens, read.window)};
    }
    return nothing{};
}

}  // namespace

outcome<program_options> parse_options(std::span<const char* const> words) {
    program_options read;
    for (std::size_t i = 0; i < words.size(); ++i) {
        const std::string_view option = words[i];
        if (option == "--help" || option == "-h") {
            read.help = true;
            return read;
        }
        if (option == "--tasks") {
            read.tasks = true;
            continue;
        }
        if (i + 1 == words.size()) {
            return error{fmt::format("'{}' is not an option, or needs a value behind it", option)};
        }
        if (auto done = read_value(option, words[++i], read); !done) {
            return done.failure();
        }
    }
    if (auto checked = check_together(read); !checked) {
        return checked.failure();
    }
    if (!read.chosen) {
        auto all = parse_configurations(default_configurations);
        if (!all) {
            return all.failure();
        }
        read.configurations = std::move(*all);
    }
    return read;
}

std::string usage() {
    return fmt::format(
        "usage: evaluate --model FILE --text FILE [options]\n"
        "       evaluate --retention ... (methods of eviction: see evaluate --retention --help)\n"
        "       evaluate --endless ... (a sequence without an end: see evaluate --endless --help)\n"
        "\n"
        "Measures what a Llama-family model loses by each way of storing its KV cache, on real "
        "text,\n"
        "against the f16 cache: perplexity, KL divergence, top-1 agreement, and bytes per token.\n"
        "\n"
        "  --model FILE     the model, in GGUF\n"
        "  --text FILE      the text, in UTF-8\n"
        "  --tokens N       how much of the text is read, in whole windows (32768)\n"
        "  --window N       tokens of a sequence; its first half is context, its second half is\n"
        "                   scored (2048)\n"
        "  --chunk N        tokens of a step (64)\n"
        "  --formats LIST   what is evaluated, between commas: KEYS[/VALUES][@EDGE], such as\n"
        "                   q8_0/q4_0 or int4_token+rotate@2, where @2 leaves the first two and\n"
        "                   the last two layers in f16 (a list of {})\n"
        "                   formats: {}\n"
        "  --tasks          also needle and copy tasks at depths of {} %\n"
        "  --contexts N     of the tasks, each with a needle and a list at every depth (8)\n"
        "  --context-tokens N\n"
        "                   length of each (1792)\n"
        "  --threads N      threads (one per processor)\n"
        "  --report FILE    write all numbers as JSON\n"
        "  --plot FILE      write divergence against bytes as SVG\n",
        1 + std::count(default_configurations.begin(), default_configurations.end(), ','),
        format_names(), fmt::join(depths, ", "));
}

}  // namespace evaluate
