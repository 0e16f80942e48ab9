// Groups of codes with a step and a least number, x = step * code + least, both in f16, as
// llama.cpp's q4_1 has them: what several formats store once they have changed the row's basis.
#pragma once

#include "format/format.hpp"
#include "format/packed_codes.hpp"
#include "format/record.hpp"

namespace kvrt {

/// Returns how many numbers saturated. `group` is at most 256; of codes of 3 bits it is the row.
template <uint32_t bits>
uint32_t encode_affine_groups(const float* row, uint32_t dim, uint32_t group, std::byte* record) {
    constexpr float last_code = (1u << bits) - 1;
    std::byte* meta = record + dim * bits / 8;
    uint32_t saturated = 0;
    for (uint32_t at = 0; at < dim; at += group, meta += 4) {
        const uint32_t count = std::min(group, dim - at);
        const group_reach reach = reach_of(row + at, count);
        uint8_t codes[256] = {};
        if (reach.finite) {
            const float least = std::clamp(reach.least, -largest_f16, largest_f16);
            const float step = std::min((reach.largest - reach.least) / last_code,
                                        largest_f16);  // also of infinity
            const float inverse = reciprocal_of(step);
            store_f16(meta, step);
            store_f16(meta + 2, least);
            // Without a step there are no codes that say it.
            if (step == 0.0f && least != reach.least) saturated += count;
            for (uint32_t i = 0; i < count; ++i) {
                const float code = (row[at + i] - least) * inverse + 0.5f;
                saturated += code < 0.0f || code >= last_code + 2.0f ? 1 : 0;
                codes[i] = static_cast<uint8_t>(std::clamp(code, 0.0f, last_code));
            }
        } else {
            store_f16(meta, NAN);
            store_f16(meta + 2, NAN);
        }
        store_codes<bits>(codes, count, record + at * bits / 8);
    }
    return saturated;
}

template <uint32_t bits>
void decode_affine_groups(const std::byte* record, uint32_t dim, uint32_t group, float* row) {
    const std::byte* meta = record + dim * bits / 8;
    for (uint32_t at = 0; at < dim; at += group, meta += 4) {
        const uint32_t count = std::min(group, dim - at);
        const float step = load_f16(meta);
        const float least = load_f16(meta + 2);
        uint8_t codes[256];
        load_codes<bits>(record + at * bits / 8, count, codes);
        for (uint32_t i = 0; i < count; ++i) {
            row[at + i] = static_cast<float>(codes[i]) * step + least;
        }
    }
}

/// How kernels read records of these groups.
template <uint32_t bits>
constexpr code_reading affine_reading = {whole_codes(bits), group_kind::f16_step_least, 0.0f, 1.0f};

}  // namespace kvrt
