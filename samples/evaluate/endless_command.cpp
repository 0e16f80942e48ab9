#include "evaluate/endless_command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "evaluate/options.hpp"

namespace evaluate {

namespace {

outcome<nothing> read_value(std::string_view option, std::string_view word, endless_command& read) {
    if (option == "--positions") {
        if (word != "cache" && word != "text") {
            return error{fmt::format("--positions is '{}', it must be cache or text", word)};
        }
        read.options.cache_positions = word == "cache";
        return nothing{};
    }
    constexpr std::uint32_t most_tokens = 1u << 30;
    const text_option texts[] = {
        {"--model", &read.model}, {"--text", &read.text}, {"--report", &read.report}};
    const number_option numbers[] = {{"--tokens", 1, most_tokens, &read.tokens},
                                     {"--pass", 1, most_tokens, &read.pass},
                                     {"--stretches", 1, 1u << 16, &read.stretches},
                                     {"--budget", 1, 1u << 20, &read.options.budget},
                                     {"--sinks", 0, 1u << 20, &read.options.sinks},
                                     {"--chunk", 1, 1024, &read.options.chunk},
                                     {"--score-every", 1, 1024, &read.options.score_every},
                                     {"--threads", 1, 1024, &read.options.threads}};
    return read_option(option, word, {texts, numbers, " beside --endless"});
}

outcome<nothing> finish(endless_command& read) {
    if (read.model.empty()) {
        return error{"--model is missing: the path of a GGUF file"};
    }
    if (read.text.empty()) {
        return error{"--text is missing: the path of a text in UTF-8"};
    }
    const std::uint32_t chunk = read.options.chunk;
    if (read.tokens < chunk) {
        return error{fmt::format("--tokens is {}, less than a --chunk of {}", read.tokens, chunk)};
    }
    const std::uint32_t chunks = read.tokens / chunk;
    read.options.tokens = std::uint64_t{chunks} * chunk;
    read.options.stretch = std::uint64_t{std::max(1u, chunks / read.stretches)} * chunk;
    return nothing{};
}

}  // namespace

outcome<endless_command> parse_endless(std::span<const char* const> words) {
    endless_command read;
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
    if (auto finished = finish(read); !finished) {
        return finished.failure();
    }
    return read;
}

std::string endless_usage() {
    return "usage: evaluate --endless --model FILE --text FILE [options]\n"
           "\n"
           "Reads a text over and over as one sequence that keeps its first and its newest "
           "tokens,\n"
           "far beyond the model's context, and says by stretches how well the next token is "
           "predicted:\n"
           "of all, and beside the first pass over the same text.\n"
           "\n"
           "  --model FILE     the model, in GGUF\n"
           "  --text FILE      the text, in UTF-8\n"
           "  --tokens N       to be read, in whole chunks (1048576)\n"
           "  --pass N         tokens of the text before it begins again (all)\n"
           "  --positions WAY  tokens are rotated by their places in the cache, or in the text "
           "(cache)\n"
           "  --budget N       tokens retained (1024)\n"
           "  --sinks N        of them, the first ones of the text (4)\n"
           "  --chunk N        tokens of a step; a round follows each (128)\n"
           "  --score-every N  of so many chunks one is scored (4)\n"
           "  --stretches N    rows of the table, about (16)\n"
           "  --threads N      threads (one per processor)\n"
           "  --report FILE    write all numbers as JSON\n";
}

}  // namespace evaluate
