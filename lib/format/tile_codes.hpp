// Pieces that the tile-local formats share: steps and least numbers that reach every number of
// theirs once they are stored, codes of a row, and codes arranged for kernels that read 16 slots
// side by side.
#pragma once

#include <algorithm>

#include "format/format.hpp"
#include "format/packed_codes.hpp"
#include "format/record.hpp"

namespace kvrt {

/// Numbers of f16.
struct stored_affine {
    float step = 0.0f, least = 0.0f;

    /// What takes a number's distance from `least` to its code; 0 where all codes are 0.
    float inverse() const { return step > 0.0f ? 1.0f / step : 0.0f; }
};

/// The largest number of f16 that is not above x, if there is one.
inline float round_down_to_f16(float x) {
    const float bounded = std::clamp(x, -largest_f16, largest_f16);
    uint16_t bits = f32_to_f16(bounded);
    if (f16_to_f32(bits) > bounded) {
        bits = static_cast<uint16_t>(bits + ((bits & 0x8000u) != 0 ? 1 : -1));
    }
    return f16_to_f32(bits);
}

/// The step and the least number of codes up to `last_code` that come within half a step of every
/// number from `least` to `largest`, as far as f16 goes.
inline stored_affine affine_over(float least, float largest, float last_code) {
    stored_affine made;
    made.least = round_down_to_f16(least);
    const float range = largest - made.least;
    uint16_t bits = f32_to_f16(std::min(range / last_code, largest_f16));
    made.step = f16_to_f32(bits);
    if ((last_code + 0.5f) * made.step < range && made.step < largest_f16) {  // a subnormal step
        made.step = f16_to_f32(++bits);
    }
    return made;
}

/// The nearest code. A NaN, of which the group's metadata tell, has code 0.
inline uint8_t nearest_code(float x, float least, float inverse, float last_code) {
    const float code = std::max(0.0f, (x - least) * inverse + 0.5f);
    return static_cast<uint8_t>(static_cast<int32_t>(std::min(last_code, code)));
}

// ---- Codes of a tile --------------------------------------------------------------------------

/// Of a row, padded.
constexpr uint32_t code_words(uint32_t dim, uint32_t bits) {
    return (dim * bits / 8 + record_word - 1) / record_word;
}

/// Row-major codes: [slot][words].
struct code_rows {
    static constexpr uint32_t word_stride = record_word;
    static uint32_t at(uint32_t slot, uint32_t words) { return slot * words * record_word; }
};

/// Codes side by side, as in native key tiles of records: [slot / 16][word][slot % 16].
struct code_columns {
    static constexpr uint32_t slots = 16, word_stride = slots * record_word;
    static uint32_t at(uint32_t slot, uint32_t words) {
        return (slot / slots * words * slots + slot % slots) * record_word;
    }
};

template <class arrangement, uint32_t bits>
void store_tile_codes(const uint8_t* codes, uint32_t dim, uint32_t slot, std::byte* tile) {
    std::byte bytes[widest_row * bits / 8 + record_word] = {};
    store_codes<bits>(codes, dim, bytes);
    const uint32_t words = code_words(dim, bits);
    std::byte* target = tile + arrangement::at(slot, words);
    for (uint32_t w = 0; w < words; ++w) {
        std::memcpy(target + w * arrangement::word_stride, bytes + w * record_word, record_word);
    }
}

template <class arrangement, uint32_t bits>
void load_tile_codes(const std::byte* tile, uint32_t dim, uint32_t slot, uint8_t* codes) {
    std::byte bytes[widest_row * bits / 8 + record_word];
    const uint32_t words = code_words(dim, bits);
    const std::byte* source = tile + arrangement::at(slot, words);
    for (uint32_t w = 0; w < words; ++w) {
        std::memcpy(bytes + w * record_word, source + w * arrangement::word_stride, record_word);
    }
    load_codes<bits>(bytes, dim, codes);
}

inline void load_f16s(const std::byte* from, uint32_t count, float* numbers) {
    for (uint32_t i = 0; i < count; ++i) numbers[i] = load_f16(from + i * sizeof(uint16_t));
}

}  // namespace kvrt
