// What sealing a head's rows into a tile is made of, whatever the format: where the rows come from,
// steps and least numbers that reach every number once they are stored, codes
// (format/tile_codes.hpp).
#pragma once

#include "kernels/encode_groups.hpp"
#include "kernels/tile.hpp"

namespace kvrt::kernels {

/// Plain rows of one head in a block.
struct raw_rows {
    const operand_place& operand;
    const std::byte* block;
    uint32_t head;

    template <class Cx>
    KVRT_DEVICE float at(uint32_t slot, uint32_t channel) const {
        const std::byte* const address = block + operand.at(slot, head, channel);
        if (operand.type == number::f16) return load_number<Cx, number::f16>(address);
        if (operand.type == number::f32) return load_number<Cx, number::f32>(address);
        return load_number<Cx, number::bf16>(address);
    }
};

/// Numbers of f16, and their bits.
struct stored_affine {
    float step, least;
    uint32_t step_bits, least_bits;

    /// What takes a number's distance from `least` to its code; 0 where all codes are 0.
    KVRT_DEVICE float inverse() const { return step > 0.0f ? 1.0f / step : 0.0f; }
};

template <class Cx>
KVRT_DEVICE stored_affine affine_of_nan() {
    const float nan = Cx::bits_to_f32(0x7fc00000u);
    return {nan, nan, f16_nan, f16_nan};
}

/// The step and the least number of codes up to `last_code` that come within half a step of every
/// number from `least` to `largest`, as far as f16 goes.
template <class Cx>
KVRT_DEVICE stored_affine affine_over(float least, float largest, float last_code) {
    const auto number_of = [](uint32_t bits) {
        return Cx::f16_to_f32(static_cast<uint16_t>(bits));
    };
    stored_affine made;
    const float bounded = clamp_f16(least);
    made.least_bits = Cx::f32_to_f16(bounded);
    if (number_of(made.least_bits) > bounded) {  // it is to be at or below
        made.least_bits += (made.least_bits & 0x8000u) != 0 ? 1 : -1;
    }
    made.least = number_of(made.least_bits);
    const float range = largest - made.least;
    const float wanted = range / last_code;
    made.step_bits = Cx::f32_to_f16(largest_f16 < wanted ? largest_f16 : wanted);
    made.step = number_of(made.step_bits);
    if ((last_code + 0.5f) * made.step < range && made.step < largest_f16) {  // a subnormal step
        made.step = number_of(++made.step_bits);
    }
    return made;
}

/// The nearest code. A NaN, of which the group's metadata tell, has code 0.
KVRT_BOTH uint32_t nearest_code(float x, float least, float inverse, float last_code) {
    float code = (x - least) * inverse + 0.5f;
    code = 0.0f < code ? code : 0.0f;
    return static_cast<uint32_t>(static_cast<int32_t>(code < last_code ? code : last_code));
}

KVRT_BOTH constexpr float last_code_of(const tile_shape& shape) {
    return static_cast<float>((1u << shape.code_bits) - 1);
}

/// All codes of a tile, by the block's threads; code(slot, channel) says which.
template <class Cx, class callable>
KVRT_DEVICE void store_tile_codes(const tile_shape& shape, std::byte* tile, const callable& code) {
    const uint32_t words = shape.code_words(), bytes = shape.code_bytes();
    for (uint32_t i = Cx::thread(); i < words * shape.tokens; i += Cx::threads()) {
        // Neighbouring threads have neighbouring words of the tile.
        const bool by_rows = shape.values();
        const uint32_t slot =
            by_rows ? i / words
                    : i / (words * slots_of_group) * slots_of_group + i % slots_of_group;
        const uint32_t word = by_rows ? i % words : i / slots_of_group % words;
        uint32_t bits = 0;
        for (uint32_t b = 0; b < 4; ++b) {
            const uint32_t byte = word * 4 + b;
            if (byte >= bytes) continue;  // padding
            for (uint32_t k = 0; k < 8 / shape.code_bits; ++k) {
                bits |= code(slot, byte + k * bytes) << (8 * b + k * shape.code_bits);
            }
        }
        Cx::store(tile + i * 4, bits);
    }
}

/// Zeros behind the metadata.
template <class Cx>
KVRT_DEVICE void fill_tile_end(const tile_shape& shape, std::byte* tile) {
    for (uint32_t at = shape.end() + 2 * Cx::thread(); at < shape.bytes(); at += 2 * Cx::threads())
        Cx::store(tile + at, uint16_t{0});
}

template <class Cx>
KVRT_DEVICE void store_f16_bits(std::byte* address, uint32_t bits) {
    Cx::store(address, static_cast<uint16_t>(bits));
}

}  // namespace kvrt::kernels
