// Rows of one head from their place in a block to registers, 8 channels a lane, in the basis that
// they are stored in: the numbers are those of the library's decoders (lib/format/), NaNs any NaN.
#pragma once

#include "kernels/codes.hpp"
#include "kernels/level.hpp"
#include "kernels/tile.hpp"

namespace kvrt::kernels {

/// Channels [first, first + 8) of slot `slot` of a tile.
template <class Cx>
KVRT_DEVICE void open_tile(const operand_place& operand, const std::byte* tile, uint32_t slot,
                           uint32_t first, float (&row)[lane_channels]) {
    const tile_shape shape = shape_of_tile(operand);
    const uint32_t stride = shape.code_at(slot, 1) - shape.code_at(slot, 0);
    const stored_record<Cx> codes{
        tile + shape.code_at(slot, 0), stride, false, {shape.code_bits, 0, 0}, operand.dim};
    const uint32_t eight[2] = {codes.four_codes(first), codes.four_codes(first + 4)};
    scale_codes<Cx, code_numbers::whole>(eight, {1.0f, 0.0f}, row);
    float channel[lane_channels];
    if (shape.values()) {
        const float step = load_number<Cx, number::f16>(tile + shape.token_steps() + slot * 2);
        const float least = load_number<Cx, number::f16>(tile + shape.token_leasts() + slot * 2);
        load_channels<Cx, number::f16>(tile + shape.channel_factors() + first * 2, 1, channel);
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) row[i] = (row[i] * step + least) * channel[i];
        return;
    }
    load_channels<Cx, number::f16>(tile + shape.channel_steps(slot) + first * 2, 1, channel);
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) row[i] *= channel[i];
    load_channels<Cx, number::f16>(tile + shape.channel_leasts(slot) + first * 2, 1, channel);
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) row[i] += channel[i];
    if (shape.kivi()) return;
    const float factor = load_number<Cx, number::f16>(tile + shape.token_factors() + slot * 2);
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) row[i] *= factor;
}

/// Channels [first, first + 8) of [slot, head] of the block at `block`, first being a multiple of 8
/// below dim; affine4's before they are brought back.
template <class Cx>
KVRT_DEVICE void open_channels(const operand_place& operand, const std::byte* block, uint32_t slot,
                               uint32_t head, uint32_t first, float (&row)[lane_channels]) {
    if (is_tile(operand.codes)) {
        const std::byte* const tile = block + operand.offset + head * operand.head_stride;
        return open_tile<Cx>(operand, tile, slot, first, row);
    }
    const std::byte* const source = block + operand.at(slot, head, 0);
    if (operand.codes == coding::plain) {
        return load_channels<Cx>(operand.type, source + first * operand.word_stride,
                                 operand.word_stride / operand.word_bytes, row);
    }
    open_record<Cx>(operand, source, head, first, row);
}

/// The row of [slot, head] of the block at `block`, by a warp.
template <class Cx>
KVRT_DEVICE void load_row(const operand_place& operand, const std::byte* block, uint32_t slot,
                          uint32_t head, uint32_t position, float (&row)[lane_channels]) {
    const uint32_t first = Cx::lane() * lane_channels;
    if (first < operand.dim) open_channels<Cx>(operand, block, slot, head, first, row);
    if (operand.codes == coding::affine4) {
        unlevel_channels<Cx>(operand, head, position, first, row);
    }
}

}  // namespace kvrt::kernels
