// What an evaluation found, and its forms: a table in Markdown and a report in JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "evaluate/configuration.hpp"
#include "evaluate/tasks.hpp"

namespace evaluate {

struct result {
    std::string configuration;
    double bytes_per_token = 0;  // of all layers
    double perplexity = 0;
    double mean_divergence = 0;  // KL(f16 || this), nats per token
    double percentile_99_divergence = 0;
    double agreement = 0;  // share of tokens whose likeliest is f16's
    std::optional<task_scores> tasks;
    double seconds = 0;
};

struct evaluation {
    std::string model;  // names of files, without their folders
    std::string text;
    std::uint64_t tokens = 0;  // read by each configuration
    std::uint64_t scored = 0;
    std::uint32_t window = 0;
    std::uint32_t chunk = 0;
    std::uint32_t contexts = 0;  // of the tasks
    std::uint32_t context_tokens = 0;
    result reference;  // the f16 cache
    std::vector<result> results;
};

// Bytes per token of one result, as a share of the reference's.
double relative_bytes(const evaluation& done, const result& one);

std::string table(const evaluation& done);
// Numbers that are not finite are null.
std::string report(const evaluation& done);

}  // namespace evaluate
