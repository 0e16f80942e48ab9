// The command line behind --retention.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "evaluate/configuration.hpp"
#include "evaluate/retention_methods.hpp"

namespace evaluate {

struct retention_command {
    bool help = false;
    std::string model;
    std::string text;
    std::string report;  // path of a JSON file, or empty
    std::string plot;    // path of an SVG file, or empty
    std::vector<const retention_method*> methods;
    std::vector<double> budgets;      // percent
    std::uint32_t value_reserve = 0;  // percent of each budget
    configuration stored = reference_configuration();
    std::uint32_t tokens = 8192;  // of the text; 0: it is left out
    std::uint32_t window = 2048;
    std::uint32_t chunk = 64;
    std::uint32_t contexts = 6;  // of the tasks, of each length; 0: they are left out
    std::vector<std::uint32_t> context_tokens = {1024, 3072};
    std::uint32_t together = 0;  // 1: tasks ask for all needles of a context at once, too
    std::uint32_t prompts = 3;   // that are answered at length; 0: this is left out
    std::uint32_t written = 768;
    std::uint32_t threads = 0;  // 0: one per processor
};

// `words` are those behind --retention. The error says which one is wrong and what would be right.
outcome<retention_command> parse_retention(std::span<const char* const> words);

std::string retention_usage();

}  // namespace evaluate
