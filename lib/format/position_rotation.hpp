// Turning the pairs of channels of a row by its position, as rotary embedding does: what formats
// need that know something of keys before it. The model's layer says how (model/rope.hpp).
//
// Pair b at position p is multiplied by e^(i p f[b]). p is cut into four digits of 8 bits, and a
// table holds the factor of each value of each digit, computed in double and stored as f32: no
// cosine is computed later, and a row costs at most three more products per pair, none for digits
// of 0. What comes out is within 1e-6 of the factor in double, for every position below 2^31.
//
// Sums over the pairs at 64 positions in a row need half as many products as at any others: with y
// counted from the middle of such a window, a cos(y f) + c sin(y f) and its mirror image at -y come
// of the same two products. Behind the digits the table has the factors from a window's first
// position to its middle, and the cosines and sines of y = 1/2, 3/2 ... 63/2.
#pragma once

#include <cstdint>

namespace kvrt {

inline constexpr uint32_t most_turned_pairs = 128;
inline constexpr uint32_t window_positions = 64;
inline constexpr uint32_t half_window = window_positions / 2;
inline constexpr uint32_t turning_digits = 4, turning_digit_bits = 8;
inline constexpr uint32_t turning_digit_values = 1u << turning_digit_bits;

struct position_rotation {
    uint32_t pairs = 0;            ///< channels [0, 2 * pairs) are turned; 0: none
    bool interleaved = false;      ///< pairs are (2b, 2b + 1), else (b, b + pairs)
    float gain = 1.0f;             ///< on turned channels
    const float* table = nullptr;  ///< [4][256][cosines, sines][pairs], then what follows
    const double* inverse_frequencies = nullptr;  ///< [pairs], what the table was made of

    /// [cosines, sines][pairs], of 63/2.
    const float* to_middle() const {
        return table + uint64_t{turning_digits} * turning_digit_values * 2 * pairs;
    }
    /// [cosines, sines][pairs][half_window], of n + 1/2.
    const float* from_middle() const { return to_middle() + 2 * uint64_t{pairs}; }
};

/// Floats of a table.
uint64_t turning_table_floats(uint32_t pairs);

/// inverse_frequencies are [pairs], in radians per position.
void fill_turning_table(const double* inverse_frequencies, uint32_t pairs, float* table);

/// From before the rotation to behind it: turned by the position, times the gain.
void turn_row(const position_rotation& rotation, uint32_t position, float* row);

}  // namespace kvrt
