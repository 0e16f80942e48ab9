// What the reading and the writing of a trace have in common: the magic and the bounds of counts.
#pragma once

#include <bit>
#include <cstdint>
#include <string>

#include "trace/trace.hpp"

namespace trace {

// Numbers go between memory and file as they are.
static_assert(std::endian::native == std::endian::little, "traces are little-endian");

inline constexpr char magic[] = {'K', 'V', 'T', 'R', 'A', 'C', 'E', '1'};
inline constexpr std::uint32_t most_layers = 64;
inline constexpr std::uint32_t most_heads = 1024;
inline constexpr std::uint32_t least_head_dim = 32;
inline constexpr std::uint32_t most_head_dim = 256;
inline constexpr std::uint32_t most_requests = 4096;
inline constexpr std::uint32_t most_turns = 65536;
inline constexpr std::uint32_t most_rows = 8192;
inline constexpr std::uint32_t no_rotation = 0;  // KV_ROPE_NONE

inline void check_range(const char* what, std::uint64_t value, std::uint64_t least,
                        std::uint64_t most) {
    if (value < least || value > most) {
        throw error(std::string(what) + " is " + std::to_string(value) + ", it must be " +
                    std::to_string(least) + " to " + std::to_string(most));
    }
}

inline void check_geometry(const recording& shape, std::uint64_t rope_dimensions) {
    check_range("query_heads", shape.query_heads, 1, most_heads);
    check_range("kv_heads", shape.kv_heads, 1, shape.query_heads);
    check_range("head_dim", shape.head_dim, least_head_dim, most_head_dim);
    check_range("rope_dimensions", rope_dimensions, 0, shape.head_dim);
    if (shape.query_heads % shape.kv_heads != 0) {
        throw error("query_heads is " + std::to_string(shape.query_heads) +
                    ", it must be a multiple of kv_heads, " + std::to_string(shape.kv_heads));
    }
    if (shape.head_dim % 8 != 0) {
        throw error("head_dim is " + std::to_string(shape.head_dim) +
                    ", it must be a multiple of 8");
    }
    if (rope_dimensions % 2 != 0 || (rope_dimensions == 0) != (shape.rope_style == no_rotation)) {
        throw error("rope_dimensions is " + std::to_string(rope_dimensions) +
                    ", it must be even, and 0 exactly when nothing is rotated");
    }
}

}  // namespace trace
