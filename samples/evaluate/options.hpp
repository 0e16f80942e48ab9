// The command line of the program.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "evaluate/configuration.hpp"

namespace evaluate {

struct program_options {
    bool help = false;
    bool tasks = false;
    std::string model;
    std::string text;
    std::string report;  // path of a JSON file, or empty
    std::string plot;    // path of an SVG file, or empty
    std::uint32_t tokens = 32768;
    std::uint32_t window = 2048;
    std::uint32_t chunk = 64;
    std::uint32_t contexts = 8;
    std::uint32_t context_tokens = 1792;
    std::uint32_t threads = 0;  // 0: one per processor
    std::vector<configuration> configurations;
    bool chosen = false;  // the configurations were asked for by name
};

// `words` are the program's arguments without its name. The error says which one is wrong and what
// would be right.
outcome<program_options> parse_options(std::span<const char* const> words);

std::string usage();

// The value of an option, a whole number from `least` to `most`.
outcome<nothing> read_number(std::string_view option, std::string_view word, std::uint32_t least,
                             std::uint32_t most, std::uint32_t& target);

// Options with a value: paths, and whole numbers with their bounds.
struct text_option {
    std::string_view name;
    std::string* target;
};
struct number_option {
    std::string_view name;
    std::uint32_t least;
    std::uint32_t most;
    std::uint32_t* target;
};
struct option_table {
    std::span<const text_option> texts;
    std::span<const number_option> numbers;
    std::string_view where;  // behind "is not an option"
};

// Reads the value of an option of the table.
outcome<nothing> read_option(std::string_view option, std::string_view word,
                             const option_table& table);

}  // namespace evaluate
