// The weight types of GGUF files that this engine reads, and their way to f32.
//
// A tensor is a sequence of blocks: `block_elements` weights stored in `block_bytes` bytes. Rows
// are whole numbers of blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "outcome.hpp"

namespace generate {

// The numbers are those of the file format.
enum class weight_type : std::uint32_t {
    f32 = 0,
    f16 = 1,
    q4_0 = 2,
    q4_1 = 3,
    q5_0 = 6,
    q5_1 = 7,
    q8_0 = 8,
    q4_k = 12,
    q5_k = 13,
    q6_k = 14,
    bf16 = 30,
};

struct weight_layout {
    weight_type type;
    const char* name;
    std::size_t block_elements;
    std::size_t block_bytes;
};

// NULL for a type that this engine does not read.
const weight_layout* find_weight_layout(std::uint32_t type_id);

// "F32, F16, ...", for messages.
const char* readable_weight_types();

// Fails unless `bytes` is exactly what `out.size()` weights of that type occupy.
outcome<nothing> dequantize(weight_type type, std::span<const std::byte> bytes,
                            std::span<float> out);

float half_to_float(std::uint16_t bits);

}  // namespace generate
