// A row of one head in the registers of a warp: 8 channels a lane, and lanes without any where a
// row is shorter than 256. Loading, its reach, and the basis of format/rotation.hpp.
#pragma once

#include "kernels/layout.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t lane_channels = 8;

template <class Cx>
KVRT_DEVICE bool lane_is_active(uint32_t dim) {
    return Cx::lane() * lane_channels < dim;
}

template <class Cx, number input>
KVRT_DEVICE float load_number(const std::byte* address) {
    if constexpr (input == number::f32) {
        return Cx::template load_constant<float>(address);
    } else {
        const uint16_t bits = Cx::template load_constant<uint16_t>(address);
        return input == number::f16 ? Cx::f16_to_f32(bits) : Cx::bf16_to_f32(bits);
    }
}

/// 8 channels of a row, `stride` elements apart; in 16 bytes at a time where they lie so.
template <class Cx, number input>
KVRT_DEVICE void load_channels(const std::byte* address, int64_t stride,
                               float (&row)[lane_channels]) {
    constexpr uint32_t size = number_bytes(input);
    if (stride != 1 || reinterpret_cast<uintptr_t>(address) % 16 != 0) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            row[i] = load_number<Cx, input>(address + int64_t{i} * stride * size);
        }
        return;
    }
    if constexpr (input == number::f32) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; i += 4) {
            const word4 four = Cx::template load_constant<word4>(address + i * size);
            row[i] = Cx::bits_to_f32(four.x);
            row[i + 1] = Cx::bits_to_f32(four.y);
            row[i + 2] = Cx::bits_to_f32(four.z);
            row[i + 3] = Cx::bits_to_f32(four.w);
        }
    } else {
        const word4 eight = Cx::template load_constant<word4>(address);
        const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            const uint16_t bits = static_cast<uint16_t>(pairs[i / 2] >> (16 * (i % 2)));
            row[i] = input == number::f16 ? Cx::f16_to_f32(bits) : Cx::bf16_to_f32(bits);
        }
    }
}

/// The same where the type is known to the launch alone.
template <class Cx>
KVRT_DEVICE void load_channels(number type, const std::byte* address, int64_t stride,
                               float (&row)[lane_channels]) {
    if (type == number::f32) {
        load_channels<Cx, number::f32>(address, stride, row);
    } else if (type == number::f16) {
        load_channels<Cx, number::f16>(address, stride, row);
    } else {
        load_channels<Cx, number::bf16>(address, stride, row);
    }
}

template <class Cx>
KVRT_DEVICE uint16_t to_half_width(float value, number type) {
    return type == number::f16 ? Cx::f32_to_f16(value) : Cx::f32_to_bf16(value);
}

/// 8 channels of a row to numbers `stride` bytes apart, each rounded once, to nearest even.
template <class Cx>
KVRT_DEVICE void store_channels(number type, std::byte* address, int64_t stride,
                                const float (&row)[lane_channels]) {
    if (type == number::f32) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            Cx::store(address + int64_t{i} * stride, row[i]);
        }
        return;
    }
    uint32_t bits[lane_channels];
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) bits[i] = to_half_width<Cx>(row[i], type);
    if (stride == 2 && reinterpret_cast<uintptr_t>(address) % 16 == 0) {
        Cx::store(address, word4{bits[0] | bits[1] << 16, bits[2] | bits[3] << 16,
                                 bits[4] | bits[5] << 16, bits[6] | bits[7] << 16});
        return;
    }
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        Cx::store(address + int64_t{i} * stride, static_cast<uint16_t>(bits[i]));
    }
}

/// Replaces `together` channels after the other by change(first of them, them), not all side by
/// side, which takes registers.
template <uint32_t together, class changing>
KVRT_DEVICE void change_in_turn(float (&row)[lane_channels], const changing& change) {
    KVRT_ROLLED
    for (uint32_t i = 0; i < lane_channels; i += together) {
        float some[together];
        KVRT_UNROLL
        for (uint32_t k = 0; k < together; ++k) some[k] = row[k];
        change(i, some);
        KVRT_UNROLL
        for (uint32_t k = 0; k + together < lane_channels; ++k) row[k] = row[k + together];
        KVRT_UNROLL
        for (uint32_t k = 0; k < together; ++k) row[lane_channels - together + k] = some[k];
    }
}

template <class Cx>
KVRT_DEVICE bool is_finite(float x) {
    return (Cx::f32_to_bits(x) & 0x7f800000u) != 0x7f800000u;
}
template <class Cx>
KVRT_DEVICE float magnitude_of(float x) {
    return Cx::bits_to_f32(Cx::f32_to_bits(x) & 0x7fffffffu);
}

/// Least and largest number of a group, and whether all are finite. Of equal numbers the first is
/// taken, so that 0 and -0 come out as in a loop over the group.
struct row_reach {
    float least, largest;
    bool finite;
};

/// Lanes that this one shares a group with, when groups have `lanes` each, a power of two.
template <class Cx>
KVRT_DEVICE uint32_t group_mask(uint32_t lanes) {
    return (lanes == warp_lanes ? whole_warp : (1u << lanes) - 1) << Cx::lane() / lanes * lanes;
}

/// Of a group without active lanes it says nothing of use.
template <class Cx>
KVRT_DEVICE row_reach reach_of_group(const float (&row)[lane_channels], bool active,
                                     uint32_t lanes) {
    row_reach reach = {Cx::bits_to_f32(0x7f800000u), Cx::bits_to_f32(0xff800000u), true};
    if (active) {
        reach.least = reach.largest = row[0];
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            if (row[i] < reach.least) reach.least = row[i];
            if (reach.largest < row[i]) reach.largest = row[i];
            reach.finite = reach.finite && is_finite<Cx>(row[i]);
        }
    }
    reach.finite = (Cx::ballot(!reach.finite) & group_mask<Cx>(lanes)) == 0;
    for (uint32_t bits = 1; bits < lanes; bits *= 2) {
        const float least = Cx::shuffle_xor(reach.least, bits);
        const float largest = Cx::shuffle_xor(reach.largest, bits);
        const bool second = (Cx::lane() & bits) != 0;
        // Whoever is second gives way when equal.
        if (second ? !(reach.least < least) : least < reach.least) reach.least = least;
        if (second ? !(largest < reach.largest) : reach.largest < largest) reach.largest = largest;
    }
    return reach;
}

/// The largest magnitude of a group that is finite; never -0.
template <class Cx>
KVRT_DEVICE float reach_magnitude(const row_reach& reach) {
    return magnitude_of<Cx>(-reach.least < reach.largest ? reach.largest : -reach.least);
}

/// 1 / step; 0 for a step of 0, and where the reciprocal is infinite.
template <class Cx>
KVRT_DEVICE float reciprocal_of(float step) {
    const float reciprocal = 1.0f / step;
    return is_finite<Cx>(reciprocal) ? reciprocal : 0.0f;
}

/// To the other basis, or back. All lanes call it.
template <class Cx>
KVRT_DEVICE void rotate_channels(uint32_t dim, float (&row)[lane_channels]) {
    const uint32_t block = dim & (~dim + 1);
    KVRT_UNROLL
    for (uint32_t half = 1; half < lane_channels; half *= 2) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            if ((i & half) != 0) continue;
            const float a = row[i], b = row[i + half];
            row[i] = a + b;
            row[i + half] = a - b;
        }
    }
    for (uint32_t half = lane_channels; half < block; half *= 2) {
        const uint32_t bits = half / lane_channels;
        const bool second = (Cx::lane() & bits) != 0;
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            const float other = Cx::shuffle_xor(row[i], bits);
            row[i] = second ? other - row[i] : row[i] + other;
        }
    }
    // 1 / sqrt(block) of a power of two.
    uint32_t exponent = 0;
    while (block >> exponent > 1) ++exponent;
    constexpr float root_of_two = 1.41421356237309505f;
    float scale = Cx::bits_to_f32((127 - exponent / 2) << 23);
    if (exponent % 2 != 0) scale *= 1.0f / root_of_two;
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) row[i] *= scale;
}

}  // namespace kvrt::kernels
