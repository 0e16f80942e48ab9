// Codes of TurboQuant's keys (format/turbo.cpp). Its values are affine (encode_groups.hpp).
//
// Bytes are to be those of the CPU, which sums squares in double from the first channel to the
// last: so does this, handing the sum from lane to lane. All other sums here are of whole numbers.
#pragma once

#include "kernels/encode_groups.hpp"

namespace kvrt::kernels {

/// format/normal_levels.hpp: the positive levels, a byte each, from the least on. Tables of
/// constants are memory on a GPU, and these are none.
template <uint32_t bits>
struct turbo_levels;
template <>
struct turbo_levels<4> {
    static constexpr double unit = 1.0 / 38.146;
    static constexpr uint64_t packed = 0x684f3e3024190f05;
};
template <>
struct turbo_levels<3> {
    static constexpr double unit = 1.0 / 40.905;
    static constexpr uint64_t packed = 0x58371f0a;
};

template <uint32_t bits>
KVRT_BOTH constexpr uint32_t level_size(uint32_t level) {
    return static_cast<uint32_t>(turbo_levels<bits>::packed >> (8 * level)) & 0xffu;
}

/// Codes of row[i] * inverse, and the sum of the squares of their levels over the row.
template <class Cx, uint32_t bits>
KVRT_DEVICE uint32_t nearest_levels(const float (&row)[lane_channels], double inverse, bool active,
                                    uint32_t (&codes)[lane_channels]) {
    constexpr uint32_t half = 1u << (bits - 1);
    uint32_t squares = 0;
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        const float size = magnitude_of<Cx>(static_cast<float>(double{row[i]} * inverse));
        uint32_t level = 0;
        KVRT_UNROLL
        for (uint32_t next = 1; next < half; ++next) {
            const float middle =
                static_cast<float>(level_size<bits>(next - 1) + level_size<bits>(next)) / 2.0f;
            level += size > middle ? 1 : 0;
        }
        const uint32_t level_number = level_size<bits>(level);
        if (active) squares += level_number * level_number;
        const bool negative = Cx::f32_to_bits(row[i]) >> 31 != 0;
        codes[i] = negative ? half - 1 - level : half + level;
    }
    return Cx::reduce_add(squares);
}

/// Of the row's squares, in order.
template <class Cx>
KVRT_DEVICE double sum_of_squares(uint32_t dim, const float (&row)[lane_channels]) {
    double sum = 0.0;
    for (uint32_t lane = 0; lane * lane_channels < dim; ++lane) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) sum += double{row[i]} * double{row[i]};
        sum = Cx::shuffle(sum, lane);
    }
    return sum;
}

template <class Cx, uint32_t bits>
KVRT_DEVICE encoded_row encode_turbo(uint32_t dim, bool active, const float (&row)[lane_channels],
                                     uint32_t (&codes)[lane_channels]) {
    constexpr uint32_t half = 1u << (bits - 1);
    constexpr double unit = turbo_levels<bits>::unit;
    encoded_row done;
    bool finite = true;
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        finite = finite && (!active || is_finite<Cx>(row[i]));
        codes[i] = 0;
    }
    if (Cx::ballot(!finite) != 0) {
        done.meta = f16_nan;
        return done;
    }
    const double squares = sum_of_squares<Cx>(dim, row);
    if (squares == 0.0) {
        nearest_levels<Cx, bits>(row, 0.0, active, codes);
        return done;
    }
    const double norm = Cx::square_root(squares);
    const double inverse = Cx::square_root(static_cast<double>(dim)) / norm / unit;
    const double levels = nearest_levels<Cx, bits>(row, inverse, active, codes);
    double factor = norm / Cx::square_root(levels) / unit;
    if (factor > double{largest_f16}) {  // the nearest that the largest factor admits
        factor = double{largest_f16};
        nearest_levels<Cx, bits>(row, 1.0 / (factor * unit), active, codes);
        constexpr float last = static_cast<float>(level_size<bits>(half - 1));
        constexpr float before = static_cast<float>(level_size<bits>(half - 2));
        const double reach = factor * unit * double{last * 1.5f - before * 0.5f};
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            if (active && double{magnitude_of<Cx>(row[i])} > reach) ++done.saturated;
        }
    }
    done.meta = Cx::f32_to_f16(static_cast<float>(factor));
    return done;
}

}  // namespace kvrt::kernels
