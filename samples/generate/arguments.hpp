// The command line of the program.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "chat.hpp"
#include "outcome.hpp"
#include "writer.hpp"

namespace generate {

struct arguments {
    bool help = false;
    bool demo = false;
    std::string model;
    std::string prompt;
    std::string report;  // path of a JSON file, or empty
    prompt_style style = prompt_style::chat;
    writing_options writing;
};

// `words` are the program's arguments without its name. The error says which one is wrong and what
// would be right.
outcome<arguments> parse_arguments(std::span<const char* const> words);

const char* usage();

}  // namespace generate
