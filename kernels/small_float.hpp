// Conversions of small floating point in integer arithmetic: sm_80 has no instructions for it, and
// the bytes must be those of format/small_float.hpp everywhere.
#pragma once

#include "kernels/context.hpp"

namespace kvrt::kernels {

/// `magnitude` has no sign; below `first_normal` it is rounded to whole numbers of 1 / subnormals.
/// Saturates at `largest`.
template <class Cx, uint32_t mantissa_bits, uint32_t bias>
KVRT_DEVICE uint32_t round_small(float magnitude, float largest, uint32_t largest_code,
                                 float first_normal, float subnormals) {
    if (magnitude >= largest) return largest_code;
    if (magnitude < first_normal) {
        // The sum's last place is 1, so the addition rounds, to even.
        constexpr float whole = 8388608.0f;
        return Cx::f32_to_bits(magnitude * subnormals + whole) - Cx::f32_to_bits(whole);
    }
    constexpr uint32_t dropped = 23 - mantissa_bits;
    const uint32_t bits = Cx::f32_to_bits(magnitude);
    const uint32_t rounded = bits + ((1u << (dropped - 1)) - 1) + ((bits >> dropped) & 1u);
    return (rounded >> dropped) - ((127 - bias) << mantissa_bits);
}

template <class Cx>
KVRT_DEVICE uint32_t f32_to_e4m3(float value) {
    const uint32_t bits = Cx::f32_to_bits(value);
    const uint32_t sign = bits >> 31 << 7, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7fu;
    return sign | round_small<Cx, 3, 7>(Cx::bits_to_f32(magnitude), 448.0f, 0x7eu, 0x1p-6f, 512.0f);
}

template <class Cx>
KVRT_DEVICE uint32_t f32_to_e5m2(float value) {
    const uint32_t bits = Cx::f32_to_bits(value);
    const uint32_t sign = bits >> 31 << 7, magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7fu;
    return sign |
           round_small<Cx, 2, 15>(Cx::bits_to_f32(magnitude), 57344.0f, 0x7bu, 0x1p-14f, 65536.0f);
}

/// What is not below the largest number becomes it, NaN among it.
template <class Cx>
KVRT_DEVICE uint32_t f32_to_e2m1(float value) {
    const uint32_t bits = Cx::f32_to_bits(value);
    const float magnitude = Cx::bits_to_f32(bits & 0x7fffffffu);
    if (!(magnitude < 6.0f)) return bits >> 31 << 3 | 7u;
    return bits >> 31 << 3 | round_small<Cx, 1, 1>(magnitude, 6.0f, 7u, 1.0f, 2.0f);
}

template <class Cx>
KVRT_DEVICE float e4m3_to_f32(uint32_t code) {
    const uint32_t sign = (code & 0x80u) << 24;
    if ((code & 0x7fu) == 0x7fu) return Cx::bits_to_f32(sign | 0x7fc00000u);
    // The same exponent and mantissa stand for 2^-8 of it in f16.
    const uint32_t half = sign >> 16 | (code & 0x7fu) << 7;
    return Cx::f16_to_f32(static_cast<uint16_t>(half)) * 256.0f;
}

template <class Cx>
KVRT_DEVICE float e5m2_to_f32(uint32_t code) {
    return Cx::f16_to_f32(static_cast<uint16_t>(code << 8));
}

/// Twice the number of an e2m1 code, a whole one.
template <class Cx>
KVRT_DEVICE float e2m1_doubled(uint32_t code) {
    const uint32_t exponent = code >> 1 & 3u, mantissa = code & 1u;
    const uint32_t doubled = exponent == 0 ? mantissa : (2 + mantissa) << (exponent - 1);
    return static_cast<float>((code & 8u) != 0 ? -static_cast<int32_t>(doubled)
                                               : static_cast<int32_t>(doubled));
}

template <class Cx>
KVRT_DEVICE float e8m0_to_f32(uint32_t code) {
    if (code == 255) return Cx::bits_to_f32(0x7fc00000u);
    return Cx::bits_to_f32(code == 0 ? 0x00400000u : code << 23);
}

}  // namespace kvrt::kernels
