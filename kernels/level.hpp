// affine4's levelling of keys: what is stored is what is left of a key once its head's mean, turned
// by the key's position, is taken off and each channel is divided by its scale, in the basis of
// format/rotation.hpp (format/affine4.cpp, position_rotation.cpp).
#pragma once

#include "kernels/turn.hpp"

namespace kvrt::kernels {

/// What a channel's mean is where the token stands.
template <class Cx>
KVRT_DEVICE float turned_mean(const operand_place& operand, uint32_t head, uint32_t position,
                              uint32_t channel) {
    const float* const means = operand.channel_means + uint64_t{head} * operand.dim;
    const uint32_t pairs = operand.turning.pairs;
    if (channel >= 2 * pairs) return Cx::template load_constant<float>(means + channel);
    const bool interleaved = operand.turning.interleaved;
    const uint32_t pair = interleaved ? channel / 2 : channel % pairs;
    const bool is_real = interleaved ? channel % 2 == 0 : channel < pairs;
    const float real = Cx::template load_constant<float>(means + (interleaved ? 2 * pair : pair));
    const float imaginary =
        Cx::template load_constant<float>(means + (interleaved ? 2 * pair + 1 : pair + pairs));
    const turning_factor factor = turning_of<Cx>(operand.turning, position, pair);
    const float cosine = operand.turning.gain * factor.cosine;
    const float sine = operand.turning.gain * factor.sine;
    return is_real ? real * cosine - imaginary * sine : real * sine + imaginary * cosine;
}

template <class Cx>
KVRT_DEVICE float channel_scale(const operand_place& operand, uint32_t head, uint32_t channel) {
    return Cx::template load_constant<float>(operand.channel_scales + uint64_t{head} * operand.dim +
                                             channel);
}

/// All lanes call these.
template <class Cx>
KVRT_DEVICE void level_channels(const operand_place& operand, uint32_t head, uint32_t position,
                                float (&row)[lane_channels]) {
    const uint32_t first = Cx::lane() * lane_channels;
    for (uint32_t i = 0; i < lane_channels && first < operand.dim; ++i) {
        row[i] = (row[i] - turned_mean<Cx>(operand, head, position, first + i)) /
                 channel_scale<Cx>(operand, head, first + i);
    }
    rotate_channels<Cx>(operand.dim, row);
}

/// The other way round; of a lane that has the channels from `first` on, beside those that have the
/// others of its row.
template <class Cx>
KVRT_DEVICE void unlevel_channels(const operand_place& operand, uint32_t head, uint32_t position,
                                  uint32_t first, float (&row)[lane_channels]) {
    rotate_channels<Cx>(operand.dim, row);
    change_in_turn<1>(row, [&](uint32_t i, float(&one)[1]) {
        if (first >= operand.dim) return;
        one[0] = one[0] * channel_scale<Cx>(operand, head, first + i) +
                 turned_mean<Cx>(operand, head, position, first + i);
    });
}

}  // namespace kvrt::kernels
