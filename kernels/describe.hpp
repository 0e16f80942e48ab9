// From the library's descriptions of layouts to those of kernels. For the host: no kernel includes
// it.
#pragma once

#include "format/tile.hpp"
#include "kernels/layout.hpp"
#include "memory/block_id.hpp"

namespace kvrt::kernels {

/// False where no kernel reads or writes operands like this one.
inline bool describe(const operand_layout& from, operand_place& to) {
    if (from.tiled() || from.rotated || from.inline_form) return false;
    switch (from.format->id) {
        case KV_FORMAT_INT8_TOKEN:
            to.codes = coding::int8_token;
            break;
        case KV_FORMAT_INT4_TOKEN:
            to.codes = coding::int4_token;
            break;
        case KV_FORMAT_FP8_TOKEN:
            to.codes = coding::fp8_token;
            break;
        case KV_FORMAT_FP8_E4M3:
            to.codes = coding::fp8_e4m3;
            break;
        case KV_FORMAT_FP8_E5M2:
            to.codes = coding::fp8_e5m2;
            break;
        default:
            if (!from.plain()) return false;
            to.codes = coding::plain;
    }
    const auto bytes = [&](int64_t words) {
        return static_cast<uint32_t>(words * int64_t{from.word_bytes});
    };
    to.type = static_cast<number>(from.type);
    to.dim = from.dim;
    to.words = from.words;
    to.word_bytes = from.word_bytes;
    to.offset = static_cast<uint32_t>(from.offset);
    to.group_stride = bytes(from.group_stride);
    to.slot_stride = bytes(from.slot_stride);
    to.head_stride = bytes(from.head_stride);
    to.word_stride = bytes(from.word_stride);
    to.scales = nullptr;  // the caller puts its device copy of from.scales here
    return true;
}

inline bool describe(const tile_layout& from, block_place& to) {
    to.block_tokens = from.block_tokens;
    to.kv_heads = from.kv_heads;
    to.block_bytes = from.block_bytes;
    return describe(from.keys, to.keys) && describe(from.values, to.values);
}

/// `base` is the device's copy of the store.
inline position_place describe(const position_store& from, uint32_t* base) {
    return {base,
            from.numbering.reciprocal,
            units_per_slab,
            from.numbering.blocks_per_slab,
            from.block_stride,
            from.block_tokens};
}

}  // namespace kvrt::kernels
