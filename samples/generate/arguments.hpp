// The command line of the program.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "chat.hpp"
#include "outcome.hpp"
#include "writer.hpp"

namespace generate {

struct arguments {
    bool help = false;
    bool demo = false;
    std::string model;
    std::vector<std::string> prompts;          // several only with `record`
    std::string report;                        // path of a JSON file, or empty
    std::string record;                        // path of a trace, or empty
    std::vector<std::uint32_t> record_layers;  // ascending; empty: the recorder's choice
    prompt_style style = prompt_style::chat;
    writing_options writing;
};

// `words` are the program's arguments without its name. The error says which one is wrong and what
// would be right.
outcome<arguments> parse_arguments(std::span<const char* const> words);

const char* usage();

}  // namespace generate
