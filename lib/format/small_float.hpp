// Numbers of eight bits and less, as the Open Compute Project and NVIDIA define them.
//
//   e4m3   sign, 4 exponent bits, 3 of mantissa; largest 448, smallest 2^-9, one NaN, no infinity
//   e5m2   sign, 5 and 2; largest 57344, with infinities and NaNs as in f16, whose upper half it is
//   e2m1   sign, 2 and 1: 0, 0.5, 1, 1.5, 2, 3, 4, 6
//   e8m0   a power of two, 2^(code - 127); 255 is NaN
//
// Conversions round to nearest even. Magnitudes beyond the largest number saturate to it, infinity
// among them; NaN stays NaN, where there is one.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>

#include "format/element.hpp"

namespace kvrt {

inline constexpr float largest_e4m3 = 448.0f;
inline constexpr float largest_e5m2 = 57344.0f;
inline constexpr float largest_e2m1 = 6.0f;

/// A float to the nearest number of `mantissa_bits` whose exponents begin at `least_exponent`, as
/// bits without sign: subnormals below it, ties to even. The magnitude is finite.
inline uint32_t round_magnitude(float magnitude, int mantissa_bits, int least_exponent) {
    const int exponent = static_cast<int>(std::bit_cast<uint32_t>(magnitude) >> 23) - 127;
    const int unit = (exponent < least_exponent ? least_exponent : exponent) - mantissa_bits;
    // In units of the last place the magnitude is below 2^(mantissa_bits + 1), and exact.
    const float scaled = std::ldexp(magnitude, -unit);
    const uint32_t whole = static_cast<uint32_t>(std::nearbyint(scaled));
    // Mantissas that reach the next power of two carry into the exponent by themselves.
    const int steps = exponent < least_exponent ? 0 : exponent - least_exponent;
    return whole + (static_cast<uint32_t>(steps) << mantissa_bits);
}

inline float e4m3_to_f32(uint8_t bits) {
    const uint32_t magnitude = bits & 0x7fu;
    const float sign = (bits & 0x80u) != 0 ? -1.0f : 1.0f;
    if (magnitude == 0x7fu) return std::bit_cast<float>(0x7fc00000u | uint32_t{bits & 0x80u} << 24);
    const uint32_t exponent = magnitude >> 3;
    const uint32_t mantissa = magnitude & 7u;
    if (exponent == 0) return sign * static_cast<float>(mantissa) * 0x1p-9f;
    return sign * std::bit_cast<float>((exponent + 120) << 23 | mantissa << 20);
}

inline uint8_t f32_to_e4m3(float value) {
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) return static_cast<uint8_t>(sign | 0x7f);
    const float magnitude = std::fabs(value);
    if (magnitude >= largest_e4m3) return static_cast<uint8_t>(sign | 0x7e);
    return static_cast<uint8_t>(sign | round_magnitude(magnitude, 3, -6));
}

inline float e5m2_to_f32(uint8_t bits) { return f16_to_f32(static_cast<uint16_t>(bits << 8)); }

inline uint8_t f32_to_e5m2(float value) {
    const uint8_t sign = std::signbit(value) ? 0x80 : 0;
    if (std::isnan(value)) return static_cast<uint8_t>(sign | 0x7f);
    const float magnitude = std::fabs(value);
    if (magnitude >= largest_e5m2) return static_cast<uint8_t>(sign | 0x7b);
    return static_cast<uint8_t>(sign | round_magnitude(magnitude, 2, -14));
}

/// Twice the value of an e2m1 code, an integer.
alignas(16) inline constexpr std::array<int8_t, 16> e2m1_doubled = {0, 1,  2,  3,  4,  6,  8,  12,
                                                                    0, -1, -2, -3, -4, -6, -8, -12};

inline uint8_t f32_to_e2m1(float value) {
    const uint8_t sign = std::signbit(value) ? 8 : 0;
    const float magnitude = std::fabs(value);
    if (!(magnitude < largest_e2m1)) return static_cast<uint8_t>(sign | 7);
    return static_cast<uint8_t>(sign | round_magnitude(magnitude, 1, 0));
}

inline float e8m0_to_f32(uint8_t code) {
    if (code == 0) return 0x1p-127f;
    if (code == 255) return std::bit_cast<float>(0x7fc00000u);
    return std::bit_cast<float>(uint32_t{code} << 23);
}

}  // namespace kvrt
