// Conversions of 8-bit floating point in integer arithmetic: sm_80 has no instructions for it, and
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

}  // namespace kvrt::kernels
