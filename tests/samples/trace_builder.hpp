// Traces made by formula, with outputs from a plain softmax in double: what a replay must come to,
// without the library's help. Nothing is evicted in them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "trace/trace.hpp"

struct trace_shape {
    std::uint32_t layers = 2;
    std::uint32_t query_heads = 4;
    std::uint32_t kv_heads = 2;
    std::uint32_t head_dim = 32;
    std::uint32_t format = 2;  // KV_FORMAT_F16
    // Turns of each request: rows, and how many of them were accepted.
    std::vector<std::vector<std::pair<std::uint32_t, std::uint32_t>>> requests;
};

trace::recording make_trace(const trace_shape& shape);

// Puts the checksum of all before it into the last eight bytes.
void seal(std::vector<std::byte>& file);

// What the last output_rows of a turn see: the request's accepted tokens before it, and the turn's
// own up to each row. [output_rows, query_heads, head_dim]
std::vector<float> softmax_outputs(const trace::recording& from, const trace::request& request,
                                   std::size_t turn, std::size_t layer);
