// The command line behind --endless.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "evaluate/endless_text.hpp"

namespace evaluate {

struct endless_command {
    bool help = false;
    std::string model;
    std::string text;
    std::string report;  // path of a JSON file, or empty
    std::uint32_t tokens = 1u << 20;
    std::uint32_t pass = 0;        // tokens of the text before it begins again; 0: all it has
    std::uint32_t stretches = 16;  // rows of the table
    endless_options options;       // its tokens and stretches in whole chunks
};

// `words` are those behind --endless. The error says which one is wrong and what would be right.
outcome<endless_command> parse_endless(std::span<const char* const> words);

std::string endless_usage();

}  // namespace evaluate
