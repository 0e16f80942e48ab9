// A row of one head from its place in a block to a warp's registers, in the basis it is stored in:
// the numbers are those of the library's decoders (lib/format/), NaNs any NaN.
#pragma once

#include "kernels/encode.hpp"
#include "kernels/tile.hpp"

namespace kvrt::kernels {

template <class Cx>
KVRT_DEVICE float low_f16(uint32_t bits) {
    return Cx::f16_to_f32(static_cast<uint16_t>(bits));
}
template <class Cx>
KVRT_DEVICE float high_f16(uint32_t bits) {
    return Cx::f16_to_f32(static_cast<uint16_t>(bits >> 16));
}

/// A code of TurboQuant's keys as a number, without the row's factor.
template <uint32_t bits>
KVRT_DEVICE float level_of_code(uint32_t code) {
    constexpr uint32_t half = 1u << (bits - 1);
    const double size = level_size<bits>(code < half ? half - 1 - code : code - half);
    return static_cast<float>(turbo_levels<bits>::unit * (code < half ? -size : size));
}

/// One number of a record, of affine4 before it is brought back. `meta` is that of its group.
template <class Cx>
KVRT_DEVICE float number_of_code(coding codes, uint32_t code, uint32_t meta, float scale) {
    const float whole = static_cast<float>(static_cast<int32_t>(code));
    const float signed_whole = static_cast<float>(static_cast<int8_t>(code));
    switch (codes) {
        case coding::fp8_e4m3:
            return scale * e4m3_to_f32<Cx>(code);
        case coding::fp8_e5m2:
            return scale * e5m2_to_f32<Cx>(code);
        case coding::fp8_token:
            return Cx::bits_to_f32(meta) * e4m3_to_f32<Cx>(code);
        case coding::int8_token:
            return Cx::bits_to_f32(meta) * signed_whole;
        case coding::q8_0:
            return signed_whole * low_f16<Cx>(meta);
        case coding::q4_0:
            return (whole - 8.0f) * low_f16<Cx>(meta);
        case coding::nvfp4:
            return 0.5f * (scale * e4m3_to_f32<Cx>(meta)) * e2m1_doubled<Cx>(code);
        case coding::mxfp4:
            return 0.5f * e8m0_to_f32<Cx>(meta) * e2m1_doubled<Cx>(code);
        case coding::turbo4_keys:
            return low_f16<Cx>(meta) * level_of_code<4>(code);
        case coding::turbo3_keys:
            return low_f16<Cx>(meta) * level_of_code<3>(code);
        default:
            return whole * low_f16<Cx>(meta) + high_f16<Cx>(meta);
    }
}

/// The codes of slot `slot` of a tile as a record without metadata, complete for all lanes.
template <class Cx>
KVRT_DEVICE void take_tile_codes(const tile_shape& shape, const std::byte* tile, uint32_t slot,
                                 std::byte* record) {
    for (uint32_t word = Cx::lane(); word < shape.code_words(); word += warp_lanes) {
        Cx::store(record + word * 4,
                  Cx::template load_constant<uint32_t>(tile + shape.code_at(slot, word)));
    }
    Cx::warp_barrier();
}

template <class Cx>
KVRT_DEVICE void decode_tile_row(const operand_place& operand, const std::byte* tile, uint32_t slot,
                                 float (&row)[lane_channels], std::byte* record) {
    const tile_shape shape = shape_of_tile(operand);
    take_tile_codes<Cx>(shape, tile, slot, record);
    const uint32_t first = Cx::lane() * lane_channels;
    if (first >= operand.dim) return;
    const record_shape codes{shape.code_bits, 0, 0};
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        row[i] = static_cast<float>(code_at<Cx>(codes, operand.dim, record, first + i));
    }
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

/// The row of [slot, head] of the block at `block`. `record` is warp_record_bytes of this warp's
/// own, which other rows may have next once all lanes are through.
template <class Cx>
KVRT_DEVICE void load_row(const operand_place& operand, const std::byte* block, uint32_t slot,
                          uint32_t head, uint32_t position, float (&row)[lane_channels],
                          std::byte* record) {
    const uint32_t first = Cx::lane() * lane_channels;
    if (is_tile(operand.codes)) {
        const std::byte* const tile = block + operand.offset + head * operand.head_stride;
        return decode_tile_row<Cx>(operand, tile, slot, row, record);
    }
    const std::byte* const source = block + operand.at(slot, head, 0);
    if (operand.codes == coding::plain) {
        if (first >= operand.dim) return;
        return load_channels<Cx>(operand.type, source + first * operand.word_stride,
                                 operand.word_stride / operand.word_bytes, row);
    }
    take_record<Cx>(operand, source, record);
    const record_shape shape = shape_of(operand.codes);
    const float scale = static_scale<Cx>(operand, head);
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        if (first >= operand.dim) continue;
        const uint32_t code = code_at<Cx>(shape, operand.dim, record, first + i);
        const uint32_t meta = meta_at<Cx>(shape, operand.dim, record, first + i);
        row[i] = number_of_code<Cx>(operand.codes, code, meta, scale);
    }
    if (operand.codes == coding::affine4) unlevel_channels<Cx>(operand, head, position, row);
}

}  // namespace kvrt::kernels
