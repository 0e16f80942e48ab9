// What was found of methods of eviction, and its forms: a table in Markdown, a report in JSON, a
// plot in SVG.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "evaluate/retention_methods.hpp"
#include "evaluate/retention_tasks.hpp"

namespace evaluate {

// Logits beside the f16 cache's that keeps all, on the same text.
struct logits_found {
    std::uint64_t scored = 0;
    double perplexity = 0;
    double reference_perplexity = 0;  // of the same tokens
    double mean_divergence = 0;       // nats per token
    double percentile_99_divergence = 0;
    double agreement = 0;     // share of tokens whose likeliest is the reference's
    double steady_bytes = 0;  // shares of the reference's bytes
    double peak_bytes = 0;
};

struct tasks_found {
    std::uint32_t context_tokens = 0;
    task_answers unseen;  // the question
    task_answers seen;
    task_answers unseen_together;  // asked for all needles at once
    task_answers seen_together;
};

struct contender_found {
    std::string method;
    double percent = 0;
    std::optional<logits_found> text;
    std::vector<tasks_found> tasks;     // by length of the contexts
    std::optional<logits_found> drift;  // on what the full cache has written
    double repeated = 0;                // of what it writes itself
    std::vector<double> repeated_by_prompt;

    // Of all lengths.
    task_scores::ratio needles(bool seen) const;
    task_scores::ratio needles_together(bool seen) const;
    task_scores::ratio copied(bool seen) const;
    double answer_loss(bool seen) const;  // nats per token
};

struct retention_found {
    std::string model;  // names of files, without their folders
    std::string text;
    std::string stored;
    std::uint32_t window = 0;
    std::uint32_t windows = 0;
    std::uint32_t chunk = 0;
    std::uint32_t contexts = 0;  // of each length
    std::vector<std::uint32_t> context_tokens;
    bool together = false;
    std::uint32_t prompts = 0;
    std::uint32_t written = 0;
    double text_seconds = 0;
    double task_seconds = 0;
    double writing_seconds = 0;
    std::vector<contender_found> contenders;  // budget by budget
};

std::string table(const retention_found& found);
// Numbers that are not finite are null.
std::string report(const retention_found& found);
// Quality against budget, a line a method, a panel for each measure.
std::string plot(const retention_found& found);

}  // namespace evaluate
