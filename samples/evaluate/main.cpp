// The program: reads the arguments, loads the model, and evaluates every configuration that this
// library can store; or, with --retention as its first argument, methods of eviction, and with
// --endless one sequence without an end.
//
// The table goes to standard output, everything else to standard error. Exit status: 0 done, 1 the
// model, the text or the evaluation failed, 2 the arguments were wrong.
#include <fmt/format.h>

#include <chrono>
#include <cstdio>
#include <filesystem>

#include "evaluate/calibration.hpp"
#include "evaluate/endless_run.hpp"
#include "evaluate/files.hpp"
#include "evaluate/options.hpp"
#include "evaluate/plot.hpp"
#include "evaluate/program.hpp"
#include "evaluate/results.hpp"
#include "evaluate/retention_run.hpp"
#include "evaluate/text_run.hpp"

namespace evaluate {

namespace {

// What is evaluated: all that was asked for, or of the default list what the library stores.
outcome<std::vector<configuration>> choose(const program_options& wanted) {
    kv_capabilities_report can = KV_INIT(kv_capabilities_report);
    if (kv_capabilities(&can) != KV_OK) {
        return error{"the library does not say what it can"};
    }
    std::vector<configuration> chosen;
    for (const configuration& one : wanted.configurations) {
        if (is_stored(one, can.formats)) {
            chosen.push_back(one);
        } else if (wanted.chosen) {
            return error{fmt::format("this library does not store '{}'", one.name)};
        } else {
            std::fprintf(stderr, "left out, this library does not store it: %s\n",
                         one.name.c_str());
        }
    }
    return chosen;
}

result result_of(const std::string& name, const text_scores& scores) {
    result one;
    one.configuration = name;
    one.bytes_per_token = scores.bytes_per_token;
    one.perplexity = scores.sums.perplexity();
    one.mean_divergence = scores.sums.mean_divergence();
    one.percentile_99_divergence = scores.sums.percentile_divergence(0.99);
    one.agreement = scores.sums.agreement();
    one.seconds = scores.seconds;
    return one;
}

using key_channels = std::vector<channel_constants>;

// Tokens of the text that are read in whole windows, and those behind them that constants are
// measured on, where a configuration needs any.
struct text_parts {
    std::vector<generate::token_id> scored;
    std::vector<generate::token_id> measured;
};

outcome<text_parts> cut_text(const generate::tokenizer& words, std::string_view text,
                             std::size_t most_measured, const program_options& wanted) {
    const std::size_t scored = wanted.tokens / wanted.window * std::size_t{wanted.window};
    const auto tokens = words.encode(text, generate::special_tokens::as_text);
    if (tokens.size() < scored + most_measured) {
        return error{
            fmt::format("the text has {} tokens, wanted are {}, and {} to measure constants on: "
                        "give a longer text, or fewer --tokens",
                        tokens.size(), scored, most_measured)};
    }
    const auto part = [&](std::size_t first, std::size_t count) {
        const auto begin = tokens.begin() + static_cast<std::ptrdiff_t>(first);
        return std::vector(begin, begin + static_cast<std::ptrdiff_t>(count));
    };
    return text_parts{part(0, scored), part(scored, most_measured)};
}

outcome<nothing> read_text(const generate::llama_model& model, const generate::tokenizer& words,
                           std::span<const generate::token_id> tokens,
                           std::span<const configuration> chosen, const key_channels& channels,
                           const program_options& wanted, evaluation& done) {
    text_options options;
    options.window = wanted.window;
    options.chunk = wanted.chunk;
    options.threads = wanted.threads;
    options.key_channels = channels;
    if (words.begins_with_marker()) {
        options.marker = words.begin_of_text();
    }
    const auto scores =
        score_text(model, tokens, chosen, options, [](std::size_t read, std::size_t windows) {
            std::fprintf(stderr, "window %zu of %zu\n", read, windows);
        });
    if (!scores) {
        return scores.failure();
    }
    done.tokens = tokens.size();
    done.scored = scores->reference.sums.count();
    done.reference = result_of(reference_configuration().name, scores->reference);
    for (std::size_t i = 0; i < chosen.size(); ++i) {
        done.results.push_back(result_of(chosen[i].name, scores->others[i]));
    }
    return nothing{};
}

outcome<nothing> do_tasks(const generate::llama_model& model, const generate::tokenizer& words,
                          std::string_view text, std::span<const configuration> chosen,
                          const key_channels& channels, const program_options& wanted,
                          evaluation& done) {
    std::vector<task_context> contexts;
    for (std::uint32_t i = 0; i < wanted.contexts; ++i) {
        // Anywhere in the text, so that the contexts differ, but the last part is left for the one
        // that begins last.
        const std::size_t offset = text.size() / (wanted.contexts + 1) * i;
        auto made = make_context(words, text, offset, wanted.context_tokens, 1 + i);
        if (!made) {
            return made.failure();
        }
        contexts.push_back(std::move(*made));
    }
    done.contexts = wanted.contexts;
    done.context_tokens = wanted.context_tokens;
    const task_options options = {wanted.chunk, wanted.threads, channels};
    const auto run = [&](const configuration& one, result& into) -> outcome<nothing> {
        const auto begun = std::chrono::steady_clock::now();
        auto scores = run_tasks(model, contexts, one, options);
        if (!scores) {
            return scores.failure();
        }
        into.tasks = *scores;
        into.seconds +=
            std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
        std::fprintf(stderr, "tasks %s: needles %llu of %llu, copied %.1f %%\n", one.name.c_str(),
                     static_cast<unsigned long long>(scores->all_needles().right),
                     static_cast<unsigned long long>(scores->all_needles().all),
                     100 * scores->all_copied().share());
        return nothing{};
    };
    if (auto finished = run(reference_configuration(), done.reference); !finished) {
        return finished;
    }
    for (std::size_t i = 0; i < chosen.size(); ++i) {
        if (auto finished = run(chosen[i], done.results[i]); !finished) {
            return finished;
        }
    }
    return nothing{};
}

outcome<nothing> run(const program_options& wanted) {
    const auto chosen = choose(wanted);
    if (!chosen) {
        return chosen.failure();
    }
    const auto report_file = open_output(wanted.report);
    if (!report_file) {
        return report_file.failure();
    }
    const auto plot_file = open_output(wanted.plot);
    if (!plot_file) {
        return plot_file.failure();
    }
    const auto opened = open_inputs(wanted.model, wanted.text);
    if (!opened) {
        return opened.failure();
    }
    const generate::tokenizer& words = opened->words;
    const generate::llama_model& model = opened->model;
    const std::string_view text = opened->text();

    evaluation done;
    done.model = std::filesystem::path(wanted.model).filename().string();
    done.text = std::filesystem::path(wanted.text).filename().string();
    done.window = wanted.window;
    done.chunk = wanted.chunk;
    const bool measure = needs_key_channels(*chosen);
    const auto parts = cut_text(
        words, text, measure ? std::min(calibration_tokens, model.config.context) : 0, wanted);
    if (!parts) {
        return parts.failure();
    }
    key_channels channels;
    if (measure) {
        auto measured = measure_key_channels(model, parts->measured, wanted.chunk, wanted.threads);
        if (!measured) {
            return measured.failure();
        }
        channels = std::move(*measured);
    }
    if (auto read = read_text(model, words, parts->scored, *chosen, channels, wanted, done);
        !read) {
        return read;
    }
    if (wanted.tasks) {
        if (auto asked = do_tasks(model, words, text, *chosen, channels, wanted, done); !asked) {
            return asked;
        }
    }
    std::fputs(table(done).c_str(), stdout);
    if (auto written = write(*report_file, report(done)); !written) {
        return written;
    }
    return write(*plot_file, plot(done));
}

}  // namespace

}  // namespace evaluate

int main(int count, char** words) {
    using namespace evaluate;
    const auto given =
        std::span<const char* const>(words, static_cast<std::size_t>(count)).subspan(1);
    const std::string_view first = given.empty() ? std::string_view() : given.front();
    if (first == "--retention") {
        return run_words(given.subspan(1), parse_retention, retention_usage, run_retention);
    }
    if (first == "--endless") {
        return run_words(given.subspan(1), parse_endless, endless_usage, run_endless);
    }
    return run_words(given, parse_options, usage, run);
}
