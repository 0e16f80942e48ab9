#include "evaluate/retention_command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "evaluate/options.hpp"
#include "evaluate/retention_prompts.hpp"
#include "evaluate/tasks.hpp"

namespace evaluate {

namespace {

constexpr std::uint32_t most_tokens = 1u << 20;

outcome<nothing> read_lengths(std::string_view word, std::vector<std::uint32_t>& lengths) {
    lengths.clear();
    for (std::size_t start = 0; start <= word.size();) {
        const std::size_t end = std::min(word.find(',', start), word.size());
        std::uint32_t length = 0;
        if (auto done = read_number("--context-tokens", word.substr(start, end - start), 64,
                                    most_tokens, length);
            !done) {
            return done;
        }
        lengths.push_back(length);
        start = end + 1;
    }
    return nothing{};
}

// What is a list or a name of something.
outcome<bool> read_list(std::string_view option, std::string_view word, retention_command& read) {
    const auto failed = [&](const error& failure) {
        return error{fmt::format("{}: {}", option, failure.message)};
    };
    if (option == "--methods") {
        auto list = parse_methods(word);
        if (!list) {
            return failed(list.failure());
        }
        read.methods = std::move(*list);
    } else if (option == "--budgets") {
        auto list = parse_budgets(word);
        if (!list) {
            return failed(list.failure());
        }
        read.budgets = std::move(*list);
    } else if (option == "--format") {
        auto stored = parse_configuration(word);
        if (!stored) {
            return failed(stored.failure());
        }
        read.stored = std::move(*stored);
    } else if (option == "--context-tokens") {
        if (auto done = read_lengths(word, read.context_tokens); !done) {
            return done.failure();
        }
    } else {
        return false;
    }
    return true;
}

outcome<nothing> read_value(std::string_view option, std::string_view word,
                            retention_command& read) {
    const auto listed = read_list(option, word, read);
    if (!listed) {
        return listed.failure();
    }
    if (*listed) {
        return nothing{};
    }
    const text_option texts[] = {{"--model", &read.model},
                                 {"--text", &read.text},
                                 {"--report", &read.report},
                                 {"--plot", &read.plot}};
    const number_option numbers[] = {{"--value-reserve", 0, 100, &read.value_reserve},
                                     {"--tokens", 0, most_tokens, &read.tokens},
                                     {"--window", 64, most_tokens, &read.window},
                                     {"--chunk", 1, 1024, &read.chunk},
                                     {"--contexts", 0, 4096, &read.contexts},
                                     {"--together", 0, 1, &read.together},
                                     {"--prompts", 0, writing_prompts, &read.prompts},
                                     {"--written", 2, most_tokens, &read.written},
                                     {"--threads", 1, 1024, &read.threads}};
    return read_option(option, word, {texts, numbers, " beside --retention"});
}

outcome<nothing> check_together(const retention_command& read) {
    if (read.model.empty()) {
        return error{"--model is missing: the path of a GGUF file"};
    }
    if (read.text.empty()) {
        return error{"--text is missing: the path of a text in UTF-8"};
    }
    if (read.tokens != 0 && read.tokens < read.window) {
        return error{
            fmt::format("--tokens is {}, less than a --window of {}", read.tokens, read.window)};
    }
    if (read.tokens == 0 && read.contexts == 0 && read.prompts == 0) {
        return error{"--tokens, --contexts and --prompts are all 0: nothing is left to measure"};
    }
    return nothing{};
}

}  // namespace

outcome<retention_command> parse_retention(std::span<const char* const> words) {
    retention_command read;
    read.methods = *parse_methods("all");
    read.budgets = *parse_budgets("50,25,12.5,6");
    for (std::size_t i = 0; i < words.size(); ++i) {
        const std::string_view option = words[i];
        if (option == "--help" || option == "-h") {
            read.help = true;
            return read;
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
    return read;
}

std::string retention_usage() {
    return fmt::format(
        "usage: evaluate --retention --model FILE --text FILE [options]\n"
        "\n"
        "Measures what a Llama-family model loses when tokens are evicted from its KV cache, by "
        "method\n"
        "and budget, against the f16 cache that keeps all: in real text, in tasks, in long "
        "writing.\n"
        "\n"
        "  --model FILE     the model, in GGUF\n"
        "  --text FILE      the text, in UTF-8\n"
        "  --methods LIST   between commas, or all; full and random_pp are always among them\n"
        "                   ({})\n"
        "  --budgets LIST   percent of a context's length (50,25,12.5,6)\n"
        "  --value-reserve N\n"
        "                   percent of each budget for tokens whose values range widest, whatever\n"
        "                   their scores (0: as the scorer has it)\n"
        "  --format FORMAT  how all contenders are stored: KEYS[/VALUES][@EDGE], such as\n"
        "                   int8_token+rotate (f16); without methods that demote, if it codes "
        "rows\n"
        "  --tokens N       how much of the text is read, in whole windows; 0: none (8192)\n"
        "  --window N       tokens of a sequence (2048)\n"
        "  --chunk N        tokens of a step; the budget is held behind each (64)\n"
        "  --contexts N     of needle and copy tasks, of each length, with a needle and a list at\n"
        "                   depths of {} %; 0: none (6)\n"
        "  --context-tokens LIST\n"
        "                   their lengths, between commas (1024,3072)\n"
        "  --together N     1: contexts are asked for all their needles at once, too (0)\n"
        "  --prompts N      of {} that are answered at length; 0: none (3)\n"
        "  --written N      tokens of an answer (768)\n"
        "  --threads N      threads (one per processor)\n"
        "  --report FILE    write all numbers as JSON\n"
        "  --plot FILE      draw quality against budget as SVG\n",
        method_names(), fmt::join(depths, ", "), writing_prompts);
}

}  // namespace evaluate
