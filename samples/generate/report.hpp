// What runs came to: as JSON for programs, as a table for people.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "outcome.hpp"
#include "writer.hpp"

namespace generate {

// A list, one object per run.
std::string report_json(std::span<const writing_result> runs);

outcome<nothing> write_report(const std::string& path, std::span<const writing_result> runs);

// A row per fact, a column per run.
std::string report_table(std::span<const writing_result> runs);

// A string in JSON, quotes included; invalid UTF-8 becomes U+FFFD.
std::string json_string(std::string_view text);

// "1536 in all 30 layers", or the range where layers differ.
std::string retained_summary(std::span<const std::uint64_t> per_layer);

// "12.3 MiB"
std::string readable_bytes(std::uint64_t bytes);

}  // namespace generate
