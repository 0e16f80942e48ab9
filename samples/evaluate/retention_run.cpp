#include "evaluate/retention_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <numeric>

#include "chat.hpp"
#include "evaluate/calibration.hpp"
#include "evaluate/files.hpp"
#include "evaluate/retention_prompts.hpp"
#include "evaluate/retention_results.hpp"
#include "evaluate/retention_tasks.hpp"
#include "evaluate/retention_text.hpp"
#include "evaluate/retention_writing.hpp"

namespace evaluate {

namespace {

using generate::token_id;

class stopwatch {
  public:
    double seconds() const {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
    }

  private:
    std::chrono::steady_clock::time_point begun_ = std::chrono::steady_clock::now();
};

logits_found found_in(const retained_text& scores) {
    logits_found found;
    found.scored = scores.sums.count();
    found.perplexity = scores.sums.perplexity();
    found.reference_perplexity = scores.reference.perplexity();
    found.mean_divergence = scores.sums.mean_divergence();
    found.percentile_99_divergence = scores.sums.percentile_divergence(0.99);
    found.agreement = scores.sums.agreement();
    found.steady_bytes = scores.steady_bytes;
    found.peak_bytes = scores.peak_bytes;
    return found;
}

// Everything that the parts work with.
struct evaluation_parts {
    const inputs& opened;
    const retention_command& wanted;
    std::span<const contender> contenders;
    retention_options options;
    retention_found& found;
};

void say(const char* part, std::size_t done, std::size_t all) {
    std::fprintf(stderr, "%s %zu of %zu\n", part, done, all);
}

// Windows of the text, and constants measured on what is behind them.
outcome<std::vector<text_window>> cut_text(evaluation_parts& parts) {
    const retention_command& wanted = parts.wanted;
    const generate::tokenizer& words = parts.opened.words;
    const generate::llama_model& model = parts.opened.model;
    const std::size_t windows = wanted.tokens / wanted.window;
    const std::size_t scored = windows * wanted.window;
    const std::size_t measured = std::min(calibration_tokens, model.config.context);
    // A token has a byte at least: the whole text is never needed.
    const auto tokens = words.encode(parts.opened.text(), generate::special_tokens::as_text);
    if (tokens.size() < scored + measured) {
        return error{
            fmt::format("the text has {} tokens, wanted are {}, and {} to measure constants on: "
                        "give a longer text, or fewer --tokens",
                        tokens.size(), scored, measured)};
    }
    const auto behind = std::span(tokens).subspan(scored, measured);
    if (needs_key_channels({&wanted.stored, 1})) {
        auto channels = measure_key_channels(model, behind, wanted.chunk, wanted.threads);
        if (!channels) {
            return channels.failure();
        }
        parts.options.key_channels = std::move(*channels);
    }
    auto statistics = measure_queries(model, behind, wanted.chunk, wanted.threads);
    if (!statistics) {
        return statistics.failure();
    }
    parts.options.statistics = std::move(*statistics);

    std::vector<text_window> cut;
    for (std::size_t i = 0; i < windows; ++i) {
        const auto part = std::span(tokens).subspan(i * wanted.window, wanted.window);
        cut.push_back({{part.begin(), part.end()}, protected_beginning});
        if (words.begins_with_marker() && words.begin_of_text()) {
            cut.back().tokens.front() = *words.begin_of_text();
        }
    }
    return cut;
}

outcome<nothing> read_text(evaluation_parts& parts, std::span<const text_window> windows) {
    const stopwatch watch;
    const auto scores =
        score_windows(parts.opened.model, windows, parts.contenders, parts.options,
                      [](std::size_t done, std::size_t all) { say("window", done, all); });
    if (!scores) {
        return scores.failure();
    }
    for (std::size_t i = 0; i < parts.contenders.size(); ++i) {
        parts.found.contenders[i].text = found_in((*scores)[i]);
    }
    parts.found.text_seconds = watch.seconds();
    return nothing{};
}

outcome<nothing> do_tasks(evaluation_parts& parts) {
    const stopwatch watch;
    const retention_command& wanted = parts.wanted;
    const std::string_view text = parts.opened.text();
    for (const std::uint32_t length : wanted.context_tokens) {
        std::vector<task_context> contexts;
        for (std::uint32_t i = 0; i < wanted.contexts; ++i) {
            // Anywhere in the text, but the last part is left for the one that begins last.
            const std::size_t offset = text.size() / (wanted.contexts + 1) * i;
            auto made = make_context(parts.opened.words, text, offset, length, 1 + i);
            if (!made) {
                return made.failure();
            }
            contexts.push_back(std::move(*made));
        }
        const auto scores =
            run_tasks(parts.opened.model, contexts, parts.contenders, parts.options,
                      [](std::size_t done, std::size_t all) { say("context", done, all); });
        if (!scores) {
            return scores.failure();
        }
        for (std::size_t i = 0; i < parts.contenders.size(); ++i) {
            const retained_tasks& one = (*scores)[i];
            parts.found.contenders[i].tasks.push_back(
                {length, one.unseen, one.seen, one.unseen_together, one.seen_together});
        }
    }
    parts.found.task_seconds = watch.seconds();
    return nothing{};
}

// As a chat where the model has one, else as a text to continue.
outcome<std::vector<std::vector<token_id>>> encode_prompts(const inputs& opened,
                                                           std::size_t count) {
    std::vector<std::vector<token_id>> prompts;
    for (const std::string_view prompt : std::span(prompts_at_length).first(count)) {
        auto tokens =
            prompt_tokens(opened.file, opened.words, prompt, generate::prompt_style::chat);
        if (!tokens) {
            tokens = prompt_tokens(opened.file, opened.words, prompt, generate::prompt_style::raw);
        }
        if (!tokens) {
            return tokens.failure();
        }
        prompts.push_back(std::move(*tokens));
    }
    return prompts;
}

// Every contender writes by itself; then all read what the full cache has written, which comes
// first.
outcome<nothing> do_writing(evaluation_parts& parts) {
    const stopwatch watch;
    const auto prompts = encode_prompts(parts.opened, parts.wanted.prompts);
    if (!prompts) {
        return prompts.failure();
    }
    const auto texts =
        write_texts(parts.opened.model, *prompts, parts.wanted.written,
                    parts.opened.words.end_of_text(), parts.contenders, parts.options,
                    [](std::size_t done, std::size_t all) { say("token", done, all); });
    if (!texts) {
        return texts.failure();
    }
    std::vector<text_window> windows;
    for (std::size_t i = 0; i < prompts->size(); ++i) {
        text_window window = {(*prompts)[i], static_cast<std::uint32_t>((*prompts)[i].size())};
        const auto& written = texts->front()[i].tokens;
        window.tokens.insert(window.tokens.end(), written.begin(), written.end());
        windows.push_back(std::move(window));
    }
    retention_options options = parts.options;
    options.chunk = writing_interval;
    const auto drift =
        score_windows(parts.opened.model, windows, parts.contenders, options,
                      [](std::size_t done, std::size_t all) { say("written text", done, all); });
    if (!drift) {
        return drift.failure();
    }
    for (std::size_t i = 0; i < parts.contenders.size(); ++i) {
        contender_found& one = parts.found.contenders[i];
        one.drift = found_in((*drift)[i]);
        for (const written_text& text : (*texts)[i]) {
            one.repeated_by_prompt.push_back(text.repeated);
        }
        one.repeated =
            std::accumulate(one.repeated_by_prompt.begin(), one.repeated_by_prompt.end(), 0.0) /
            static_cast<double>(prompts->size());
    }
    parts.found.writing_seconds = watch.seconds();
    return nothing{};
}

retention_found describe(const retention_command& wanted, std::span<const contender> contenders) {
    retention_found found;
    found.model = std::filesystem::path(wanted.model).filename().string();
    found.text = std::filesystem::path(wanted.text).filename().string();
    found.stored = wanted.stored.name;
    found.window = wanted.window;
    found.windows = wanted.tokens / wanted.window;
    found.chunk = wanted.chunk;
    found.contexts = wanted.contexts;
    if (wanted.contexts != 0) {
        found.context_tokens = wanted.context_tokens;
        found.together = wanted.together != 0;
    }
    found.prompts = wanted.prompts;
    found.written = wanted.prompts != 0 ? wanted.written : 0;
    for (const contender& one : contenders) {
        found.contenders.push_back({});
        found.contenders.back().method =
            one.method->value_reserve == 0
                ? std::string(one.method->name)
                : fmt::format("{}, {} % in reserve", one.method->name, one.method->value_reserve);
        found.contenders.back().percent = one.percent;
    }
    return found;
}

}  // namespace

outcome<nothing> run_retention(const retention_command& wanted) {
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
    const auto methods = methods_stored_as(wanted.stored, wanted.methods);
    if (methods.size() != wanted.methods.size()) {
        std::fprintf(stderr, "methods that demote rows are left out: %s has coded them before\n",
                     wanted.stored.name.c_str());
    }
    const auto reserving = with_value_reserve(methods, wanted.value_reserve);
    std::vector<const retention_method*> chosen;
    for (const retention_method& one : reserving) {
        chosen.push_back(&one);
    }
    const auto contenders = contenders_of(chosen, wanted.budgets);
    retention_found found = describe(wanted, contenders);
    evaluation_parts parts = {*opened, wanted, contenders, {}, found};
    parts.options.stored = wanted.stored;
    parts.options.chunk = wanted.chunk;
    parts.options.together = wanted.together != 0;
    parts.options.threads = wanted.threads;
    const auto windows = cut_text(parts);
    if (!windows) {
        return windows.failure();
    }
    if (!windows->empty()) {
        if (auto done = read_text(parts, *windows); !done) {
            return done;
        }
    }
    if (wanted.contexts != 0) {
        if (auto done = do_tasks(parts); !done) {
            return done;
        }
    }
    if (wanted.prompts != 0) {
        if (auto done = do_writing(parts); !done) {
            return done;
        }
    }
    std::fputs(table(found).c_str(), stdout);
    if (auto written = write(*report_file, report(found)); !written) {
        return written;
    }
    return write(*plot_file, plot(found));
}

}  // namespace evaluate
