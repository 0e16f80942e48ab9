// What was found of methods of eviction: the table, the report and the plot.
#include "evaluate/retention_results.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <string>

#include "wellformed.hpp"

using namespace evaluate;

namespace {

logits_found logits(double divergence) {
    logits_found found;
    found.scored = 1000;
    found.perplexity = 21.5;
    found.reference_perplexity = 20.25;
    found.mean_divergence = divergence;
    found.percentile_99_divergence = 10 * divergence;
    found.agreement = 0.875;
    found.steady_bytes = 0.25;
    found.peak_bytes = 0.28125;
    return found;
}

// Two lengths, so that sums over them show.
std::vector<tasks_found> tasks() {
    tasks_found one;
    one.context_tokens = 1024;
    one.unseen.scores.needle[0] = {1, 4};
    one.unseen.scores.copy[4] = {1, 8};
    one.seen.scores.needle[0] = {3, 4};
    one.seen.scores.copy[4] = {8, 8};
    one.unseen.loss = 12.5;
    one.unseen.tokens = 10;
    std::vector<tasks_found> two = {one, one};
    two[1].unseen.loss = 7.5;
    two[1].context_tokens = 4096;
    two[1].seen.scores.needle[0] = {2, 4};
    return two;
}

retention_found everything() {
    retention_found found;
    found.model = "m \"1\" <&>.gguf";
    found.text = "t\n\x01\xff.txt";
    found.stored = "int8_token+rotate";
    found.window = 2048;
    found.windows = 3;
    found.contexts = 2;
    found.context_tokens = {1024, 4096};
    found.prompts = 2;
    found.written = 512;
    for (const double percent : {25.0, 12.5}) {
        for (const char* method : {"full", "random_pp", "snapkv"}) {
            contender_found one;
            one.method = method;
            one.percent = percent;
            one.text = logits(one.method == "full" ? 0 : 0.03125);
            one.tasks = tasks();
            one.drift = logits(one.method == "full" ? 0 : 0.5);
            one.repeated = 0.5;
            one.repeated_by_prompt = {0.25, 0.75};
            found.contenders.push_back(one);
        }
    }
    return found;
}

bool has(const std::string& text, std::string_view part) {
    return text.find(part) != std::string::npos;
}

// Without what aligns columns.
std::string squeezed(const std::string& text) {
    std::string kept;
    for (const char character : text) {
        if (character != ' ' || kept.empty() || kept.back() != ' ') {
            kept += character;
        }
    }
    return kept;
}

std::size_t count(const std::string& text, std::string_view part) {
    std::size_t found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
        ++found;
    }
    return found;
}

}  // namespace

TEST_CASE("retention results: the table") {
    const std::string text = squeezed(table(everything()));
    CHECK(count(text, "\n") == 2 + 6);
    CHECK(has(text, "| budget | method | bytes | peak | perplexity | mean KL |"));
    // 1 of 4 and 1 of 8 twice; 3 and 2 of 4, 8 of 8 twice.
    CHECK(has(text,
              "| 12.5 % | snapkv | 25.0 % | 28.1 % | 21.50 | 0.0312 | 0.312 | 87.5 % | "
              "2 of 8 | 12.5 % | 1.00 | 5 of 8 | 100.0 % | 0.00 | 0.500 | 50.0 % |"));
    CHECK(count(text, "repeated") == 1);

    // What was not measured has no columns.
    retention_found part = everything();
    part.windows = part.prompts = 0;
    for (contender_found& one : part.contenders) {
        one.text.reset();
        one.drift.reset();
    }
    const std::string tasks_alone = squeezed(table(part));
    CHECK_FALSE(has(tasks_alone, "perplexity"));
    CHECK_FALSE(has(tasks_alone, "drift"));
    CHECK(has(tasks_alone, "| 25 % | full | 2 of 8 |"));
}

TEST_CASE("retention results: the report is JSON and the plot is SVG, whatever was measured") {
    retention_found found = everything();
    found.contenders[4].text->mean_divergence = std::numeric_limits<double>::infinity();
    found.contenders[5].text->perplexity = std::numeric_limits<double>::quiet_NaN();
    for (int parts = 0; parts < 8; ++parts) {
        CAPTURE(parts);
        retention_found some = found;
        some.windows = (parts & 1) != 0 ? 3 : 0;
        some.contexts = (parts & 2) != 0 ? 2 : 0;
        some.prompts = (parts & 4) != 0 ? 2 : 0;
        for (contender_found& one : some.contenders) {
            if (some.windows == 0) {
                one.text.reset();
            }
            if (some.contexts == 0) {
                one.tasks.clear();
            }
            if (some.prompts == 0) {
                one.drift.reset();
            }
        }
        const std::string json = report(some);
        CHECK(wellformed::is_json(json));
        CHECK(count(json, "\"method\"") == 6);
        CHECK(count(json, "\"question_unseen\"") == (some.contexts != 0 ? 12 : 0));
        const std::string svg = plot(some);
        CHECK(wellformed::is_xml(svg));
        const std::size_t panels = (some.windows != 0 ? 1 : 0) + (some.contexts != 0 ? 6 : 0) +
                                   (some.prompts != 0 ? 1 : 0);
        CHECK(count(svg, "<polyline") == panels * 3);
        CHECK(count(svg, ">snapkv<") == 1);
    }
    CHECK(has(report(found), "\"mean_kl\": 0.03125"));
    CHECK(has(report(found), "\"mean_kl\": null"));
    CHECK(has(report(found), "\"needle_recall\": 0.75"));
    CHECK(has(report(found), "\"answer_loss\": 1.25"));

    // A single budget, and a divergence of nothing, have an axis too.
    found.contenders.resize(1);
    CHECK(wellformed::is_xml(plot(found)));
    CHECK_FALSE(has(plot(found), "nan"));
    CHECK_FALSE(has(plot(found), "inf"));
}
