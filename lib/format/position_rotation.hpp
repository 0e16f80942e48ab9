// Turning the pairs of channels of a row by its position, as rotary embedding does: what formats
// need that know something of keys before it. The model's layer says how (model/rope.hpp).
//
// Pair b at position p is multiplied by e^(i p f[b]). p is cut into four digits of 8 bits, and a
// table holds the factor of each value of each digit, computed in double and stored as f32: no
// cosine is computed later, and a row costs at most three more products per pair, none for digits
// of 0. What comes out is within 1e-6 of the factor in double, for every position below 2^31.
#pragma once

#include <cstdint>

namespace kvrt {

inline constexpr uint32_t most_turned_pairs = 128;

struct position_rotation {
    uint32_t pairs = 0;            ///< channels [0, 2 * pairs) are turned; 0: none
    bool interleaved = false;      ///< pairs are (2b, 2b + 1), else (b, b + pairs)
    float gain = 1.0f;             ///< on turned channels
    const float* table = nullptr;  ///< [4][256][cosines, sines][pairs]
};

/// Floats of a table.
uint64_t turning_table_floats(uint32_t pairs);

/// inverse_frequencies are [pairs], in radians per position.
void fill_turning_table(const double* inverse_frequencies, uint32_t pairs, float* table);

/// From before the rotation to behind it: turned by the position, times the gain.
void turn_row(const position_rotation& rotation, uint32_t position, float* row);

}  // namespace kvrt
