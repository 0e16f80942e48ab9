// Pieces that the formats' encoders and decoders share: metadata in records, the reach of a group.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "format/element.hpp"

namespace kvrt {

inline constexpr float largest_f16 = 65504.0f;

template <class number>
void store_number(std::byte* address, number value) {
    std::memcpy(address, &value, sizeof value);
}

template <class number>
number load_number(const std::byte* address) {
    number value;
    std::memcpy(&value, address, sizeof value);
    return value;
}

inline void store_f16(std::byte* address, float value) { store_number(address, f32_to_f16(value)); }
inline float load_f16(const std::byte* address) {
    return f16_to_f32(load_number<uint16_t>(address));
}

/// 1 / step. 0 for a step of 0, and for steps below 2^-128, whose reciprocal is infinite: what they
/// would count becomes 0.
inline float reciprocal_of(float step) {
    const float reciprocal = 1.0f / step;
    return std::isfinite(reciprocal) ? reciprocal : 0.0f;
}

/// Least and largest number of a group, and whether all are finite. A group that is not finite has
/// no codes: its metadata become NaN, and with them the whole group.
struct group_reach {
    float least = 0.0f, largest = 0.0f;
    bool finite = true;

    float magnitude() const { return std::fabs(std::max(-least, largest)); }  ///< never -0
};

inline group_reach reach_of(const float* row, uint32_t count) {
    group_reach reach{row[0], row[0], true};
    float flaw = 0.0f;  // x * 0 is NaN unless x is finite
    for (uint32_t i = 0; i < count; ++i) {
        reach.least = std::min(reach.least, row[i]);
        reach.largest = std::max(reach.largest, row[i]);
        flaw += row[i] * 0.0f;
    }
    reach.finite = flaw == 0.0f;
    return reach;
}

}  // namespace kvrt
