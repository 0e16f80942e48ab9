// What is evaluated: a configuration says how keys and values are stored, by a text that is also
// its name.
//
//     KEYS[/VALUES][@EDGE]      int8_token    q8_0/q4_0    int4_token+rotate@2
//
// KEYS and VALUES are a format of the library, in lower case, and +rotate behind it for rotated
// rows; values are stored as keys are where nothing is said. @EDGE keeps the first EDGE and the
// last EDGE layers in f16.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "kv_cache.hpp"
#include "outcome.hpp"

namespace evaluate {

using generate::error;
using generate::layer_storage;
using generate::nothing;
using generate::operand_storage;
using generate::outcome;

struct configuration {
    std::string name;
    layer_storage storage;
    std::uint32_t edge_layers = 0;
};

// What all others are measured against.
configuration reference_configuration();

outcome<configuration> parse_configuration(std::string_view text);

// Texts between commas. A name that comes twice is an error.
outcome<std::vector<configuration>> parse_configurations(std::string_view list);

// What is evaluated where nothing else is asked for.
extern const std::string_view default_configurations;

// Whether a library stores it: `formats` is of its kv_capabilities_report.
bool is_stored(const configuration& one, std::uint64_t formats);

// A storage for each layer of a model.
std::vector<layer_storage> storage_of_layers(const configuration& one, std::uint32_t layers);

// Words for the --formats option: every format's name, between commas.
std::string format_names();

}  // namespace evaluate
