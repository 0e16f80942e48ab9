#include "arguments.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>

namespace generate {

namespace {

constexpr std::size_t most_recorded_layers = 64;  // of the trace's format

template <class number_type>
outcome<nothing> read_number(std::string_view option, std::string_view word, number_type least,
                             number_type most, number_type& target) {
    number_type value{};
    const auto [end, status] = std::from_chars(word.data(), word.data() + word.size(), value);
    const bool whole = status == std::errc() && end == word.data() + word.size();
    if (!whole || !(value >= least && value <= most)) {  // also refuses what is not a number
        return error{fmt::format("{} is '{}', it must be a number from {} to {}", option, word,
                                 least, most)};
    }
    target = value;
    return nothing{};
}

outcome<nothing> read_name(std::string_view option, std::string_view word,
                           std::span<const std::string_view> names, std::string& target) {
    if (std::find(names.begin(), names.end(), word) == names.end()) {
        std::string list;
        for (const std::string_view name : names) {
            list += list.empty() ? "" : ", ";
            list += name;
        }
        return error{fmt::format("{} is '{}', it must be one of: {}", option, word, list)};
    }
    target = word;
    return nothing{};
}

// Layer numbers between commas, ascending.
outcome<nothing> read_layers(std::string_view option, std::string_view word,
                             std::vector<std::uint32_t>& target) {
    target.clear();
    const char* const end = word.data() + word.size();
    for (const char* next = word.data(); next <= end; ++next) {
        std::uint32_t layer = 0;
        const auto [behind, status] = std::from_chars(next, end, layer);
        const bool whole = status == std::errc() && (behind == end || *behind == ',');
        if (!whole || (!target.empty() && layer <= target.back()) ||
            target.size() == most_recorded_layers) {
            return error{
                fmt::format("{} is '{}', it must be layer numbers in ascending order, at "
                            "most {}, like 3,17",
                            option, word, most_recorded_layers)};
        }
        target.push_back(layer);
        next = behind;
    }
    return nothing{};
}

// Options that stand alone. False if there is none of this name.
bool read_switch(std::string_view option, arguments& read) {
    if (option == "--help" || option == "-h") {
        read.help = true;
    } else if (option == "--demo") {
        read.demo = true;
    } else if (option == "--raw") {
        read.style = prompt_style::raw;
    } else if (option == "--evict-prompt") {
        read.writing.evict_prompt = true;
    } else if (option == "--cache-positions") {
        read.writing.cache_positions = true;
    } else {
        return false;
    }
    return true;
}

bool takes_value(std::string_view option) {
    constexpr std::string_view options[] = {
        "--model",  "--prompt",        "--report", "--tokens",         "--policy",
        "--budget", "--every",         "--format", "--seed",           "--temperature",
        "--top-p",  "--threads",       "--record", "--repeat-penalty", "--chunk",
        "--drafts", "--record-layers", "--preset", "--device"};
    return std::find(std::begin(options), std::end(options), option) != std::end(options);
}

outcome<nothing> read_value(std::string_view option, std::string_view word, arguments& read) {
    writing_options& writing = read.writing;
    constexpr std::uint32_t most = 1u << 20;
    if (option == "--model") {
        read.model = word;
    } else if (option == "--prompt") {
        read.prompts.emplace_back(word);
    } else if (option == "--report") {
        read.report = word;
    } else if (option == "--record") {
        read.record = word;
    } else if (option == "--record-layers") {
        return read_layers(option, word, read.record_layers);
    } else if (option == "--policy") {
        return read_name(option, word, policy_names, writing.policy);
    } else if (option == "--format") {
        return read_name(option, word, format_names, writing.format);
    } else if (option == "--preset") {
        return read_name(option, word, preset_names, writing.preset);
    } else if (option == "--device") {
        return read_name(option, word, device_names, writing.device);
    } else if (option == "--tokens") {
        return read_number<std::uint32_t>(option, word, 1, most, writing.tokens);
    } else if (option == "--budget") {
        return read_number<std::uint32_t>(option, word, 1, most, writing.budget);
    } else if (option == "--every") {
        return read_number<std::uint32_t>(option, word, 1, most, writing.every);
    } else if (option == "--chunk") {
        return read_number<std::uint32_t>(option, word, 1, 8192, writing.chunk);
    } else if (option == "--drafts") {
        return read_number<std::uint32_t>(option, word, 0, 15, writing.drafts);
    } else if (option == "--seed") {
        return read_number<std::uint64_t>(option, word, 0, ~std::uint64_t{0}, writing.seed);
    } else if (option == "--temperature") {
        return read_number<double>(option, word, 0, 10, writing.temperature);
    } else if (option == "--top-p") {
        return read_number<double>(option, word, 0, 1, writing.top_p);
    } else if (option == "--repeat-penalty") {
        return read_number<double>(option, word, 1, 10, writing.repeat_penalty);
    } else {
        return read_number<std::uint32_t>(option, word, 1, 1024, writing.threads);
    }
    return nothing{};
}

// What is missing, or has no meaning beside the rest.
outcome<nothing> check_together(const arguments& read) {
    if (read.model.empty()) {
        return error{"--model is missing: the path of a GGUF file"};
    }
    const bool empty_prompt = std::any_of(read.prompts.begin(), read.prompts.end(),
                                          [](const std::string& prompt) { return prompt.empty(); });
    if (!read.demo && (read.prompts.empty() || empty_prompt)) {
        return error{"--prompt is missing: the text to answer, or --demo"};
    }
    if (read.record.empty() && read.prompts.size() > 1) {
        return error{"--prompt is there several times: that is for --record, each a request"};
    }
    if (read.record.empty() && !read.record_layers.empty()) {
        return error{"--record-layers says which layers --record writes: give --record FILE too"};
    }
    if (!read.record.empty() && read.writing.policy == "random") {
        return error{
            "--record takes no --policy random: its draws depend on which layers there are"};
    }
    if (!read.record.empty() && read.writing.preset != "none") {
        return error{"--record takes no --preset: a trace names one format for all of its layers"};
    }
    if (!read.record.empty() && read.writing.device != "cpu") {
        return error{
            "--record takes no --device cuda: a trace holds outputs that the CPU has bit by bit"};
    }
    if (!read.record.empty() && read.writing.cache_positions) {
        return error{"--record takes no --cache-positions: a trace holds rotated keys"};
    }
    if (read.writing.cache_positions && read.writing.policy == "triattention") {
        return error{
            "--cache-positions takes no --policy triattention, which scores keys where they stand "
            "in the text"};
    }
    return nothing{};
}

}  // namespace

outcome<arguments> parse_arguments(std::span<const char* const> words) {
    arguments read;
    bool tokens_given = false;
    std::string_view chosen_by_demo;  // an option that has no meaning beside --demo
    for (std::size_t i = 0; i < words.size(); ++i) {
        const std::string_view option = words[i];
        const bool alone = read_switch(option, read);
        if (!alone) {
            if (!takes_value(option)) {
                return error{fmt::format("'{}' is not an option", option)};
            }
            if (i + 1 == words.size()) {
                return error{fmt::format("{} needs a value behind it", option)};
            }
            if (auto done = read_value(option, words[++i], read); !done) {
                return done.failure();
            }
        }
        tokens_given = tokens_given || option == "--tokens";
        constexpr std::string_view of_one_text[] = {
            "--prompt", "--policy", "--temperature",  "--top-p",          "--repeat-penalty",
            "--raw",    "--record", "--evict-prompt", "--cache-positions"};
        if (std::find(std::begin(of_one_text), std::end(of_one_text), option) !=
            std::end(of_one_text)) {
            chosen_by_demo = option;
        }
    }
    if (read.help) {
        return read;
    }
    if (read.demo && !chosen_by_demo.empty()) {
        return error{fmt::format("--demo brings its own texts, policies and sampling: leave {} out",
                                 chosen_by_demo)};
    }
    if (auto checked = check_together(read); !checked) {
        return checked.failure();
    }
    if (read.demo && !tokens_given) {
        read.writing.tokens = 1500;
    }
    return read;
}

const char* usage() {
    return "usage: generate --model FILE --prompt TEXT [options]\n"
           "       generate --model FILE --record FILE --prompt TEXT [--prompt TEXT ...] "
           "[options]\n"
           "       generate --model FILE --demo [--tokens N] [--budget B] [--every N] [--report "
           "FILE]\n"
           "\n"
           "Writes text with a Llama-family model, its KV cache kept by libkvrt.\n"
           "\n"
           "  --model FILE          the model, in GGUF\n"
           "  --prompt TEXT         what to answer\n"
           "  --raw                 continue the text as it is, without the chat template\n"
           "  --tokens N            write at most N tokens (200; in the demo 1500, exactly)\n"
           "  --policy NAME         full, triattention, streaming, key-norm or random (full)\n"
           "  --budget B            tokens retained per layer and head (512)\n"
           "  --every N             tokens between two rounds of compaction (128)\n"
           "  --format NAME         how keys and values are stored: f16, bf16 or f32 (f16)\n"
           "  --preset NAME         stored in fewer bits by one of the library's presets, "
           "near-lossless,\n"
           "                        balanced or smallest; layers that it spares keep the format "
           "(none)\n"
           "  --device NAME         where the cache is, and attention: cpu, or cuda, the first "
           "NVIDIA\n"
           "                        GPU (cpu)\n"
           "  --temperature T       0: always the likeliest token (0)\n"
           "  --top-p P             draw among the likeliest tokens that make up this share "
           "(0.95)\n"
           "  --repeat-penalty R    shrink logits of recent tokens by this factor (1: off)\n"
           "  --seed S              of the draws (1)\n"
           "  --threads N           threads (one per processor)\n"
           "  --chunk N             tokens of the prompt in a step (128)\n"
           "  --drafts N            guess up to N tokens from the text so far, and verify them in\n"
           "                        one step; the text stays the same with a full cache (0)\n"
           "  --evict-prompt        the policy may drop tokens of the prompt too\n"
           "  --cache-positions     rotate by places in the cache, not in the text: with a policy, "
           "texts\n"
           "                        may be longer than the model's context\n"
           "  --record FILE         write what some layers hand to the library, and get back, as "
           "a\n"
           "                        trace (docs/trace.md); each further --prompt is a request\n"
           "  --record-layers LIST  which layers, like 3,17 (after 1/4 and 3/4 of the model)\n"
           "  --report FILE         write what happened as JSON\n"
           "  --demo                write one long text twice: with a full cache, and with\n"
           "                        TriAttention at a budget of 512 tokens, and compare\n";
}

}  // namespace generate
