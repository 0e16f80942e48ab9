#include "evaluate/endless_run.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>

#include "evaluate/endless_results.hpp"
#include "evaluate/files.hpp"

namespace evaluate {

outcome<nothing> run_endless(const endless_command& wanted) {
    const auto report_file = open_output(wanted.report);
    if (!report_file) {
        return report_file.failure();
    }
    const auto opened = open_inputs(wanted.model, wanted.text);
    if (!opened) {
        return opened.failure();
    }
    const generate::tokenizer& words = opened->words;
    auto tokens = words.encode(opened->text(), generate::special_tokens::as_text);
    if (wanted.pass != 0) {
        if (tokens.size() < wanted.pass) {
            return error{fmt::format("the text has {} tokens, --pass wants {}: give a longer text",
                                     tokens.size(), wanted.pass)};
        }
        tokens.resize(wanted.pass);
    }
    if (!tokens.empty() && words.begins_with_marker() && words.begin_of_text()) {
        tokens.front() = *words.begin_of_text();
    }

    endless_found found;
    found.model = std::filesystem::path(wanted.model).filename().string();
    found.text = std::filesystem::path(wanted.text).filename().string();
    found.options = wanted.options;
    const auto begun = std::chrono::steady_clock::now();
    auto scores =
        read_endlessly(opened->model, tokens, wanted.options, [&](const endless_stretch& one) {
            std::fprintf(stderr, "token %llu of %llu\n", static_cast<unsigned long long>(one.end),
                         static_cast<unsigned long long>(wanted.options.tokens));
        });
    if (!scores) {
        return scores.failure();
    }
    found.scores = std::move(*scores);
    found.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    std::fputs(table(found).c_str(), stdout);
    return write(*report_file, report(found));
}

}  // namespace evaluate
