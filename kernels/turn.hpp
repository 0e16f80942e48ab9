// Keys and queries turned by a position, as rotary embedding does (format/position_rotation.hpp).
#pragma once

#include "kernels/row.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t turning_digit_bits = 8;
inline constexpr uint32_t turning_digit_values = 1u << turning_digit_bits;

struct turning_factor {
    float cosine, sine;
};

/// Of one pair of channels.
template <class Cx>
KVRT_DEVICE turning_factor turning_of(const turning_place& turning, uint32_t position,
                                      uint32_t pair) {
    const float* table = turning.table + pair;
    const uint64_t entry = 2 * uint64_t{turning.pairs};
    const auto entry_of = [&](uint32_t digit) {
        const float* const at = table + digit * entry;
        return turning_factor{Cx::template load_constant<float>(at),
                              Cx::template load_constant<float>(at + turning.pairs)};
    };
    turning_factor factor = entry_of(position % turning_digit_values);
    for (position >>= turning_digit_bits; position != 0; position >>= turning_digit_bits) {
        table += turning_digit_values * entry;
        const uint32_t digit = position % turning_digit_values;
        if (digit == 0) continue;
        const turning_factor by = entry_of(digit);
        factor = {factor.cosine * by.cosine - factor.sine * by.sine,
                  factor.cosine * by.sine + factor.sine * by.cosine};
    }
    return factor;
}

/// Channels [first, first + 8) of a row, first being a multiple of 8, beside lanes that have the
/// others in order. Pairs that are not neighbours lie a multiple of 8 channels apart.
template <class Cx>
KVRT_DEVICE void turn_channels(const turning_place& turning, uint32_t position, uint32_t first,
                               float (&row)[lane_channels]) {
    const uint32_t pairs = turning.pairs;
    if (turning.interleaved) {
        change_in_turn<2>(row, [&](uint32_t i, float(&both)[2]) {
            if (first + i >= 2 * pairs) return;
            const turning_factor by = turning_of<Cx>(turning, position, (first + i) / 2);
            const float real = both[0], imaginary = both[1];
            both[0] = turning.gain * (real * by.cosine - imaginary * by.sine);
            both[1] = turning.gain * (real * by.sine + imaginary * by.cosine);
        });
        return;
    }
    const bool turned = first < 2 * pairs, is_real = first < pairs;
    const uint32_t apart = is_real ? pairs / lane_channels : 0u - pairs / lane_channels;
    change_in_turn<1>(row, [&](uint32_t i, float(&one)[1]) {
        const float other = Cx::shuffle(one[0], turned ? Cx::lane() + apart : Cx::lane());
        if (!turned) return;
        const uint32_t pair = is_real ? first + i : first + i - pairs;
        const turning_factor by = turning_of<Cx>(turning, position, pair);
        one[0] = turning.gain * (is_real ? one[0] * by.cosine - other * by.sine
                                         : other * by.sine + one[0] * by.cosine);
    });
}

}  // namespace kvrt::kernels
