// From the library's descriptions of layouts to those of kernels. For the host: no kernel includes
// it.
#pragma once

#include "format/tile.hpp"
#include "kernels/layout.hpp"
#include "memory/block_id.hpp"

namespace kvrt::kernels {

/// How kernels call what a format stores in a role. False where none of them knows it.
inline bool coding_of(const format_description& format, bool keys, coding& to) {
    struct known {
        uint32_t id;
        coding keys, values;
    };
    static constexpr known all[] = {
        {KV_FORMAT_INT8_TOKEN, coding::int8_token, coding::int8_token},
        {KV_FORMAT_INT4_TOKEN, coding::int4_token, coding::int4_token},
        {KV_FORMAT_FP8_TOKEN, coding::fp8_token, coding::fp8_token},
        {KV_FORMAT_FP8_E4M3, coding::fp8_e4m3, coding::fp8_e4m3},
        {KV_FORMAT_FP8_E5M2, coding::fp8_e5m2, coding::fp8_e5m2},
        {KV_FORMAT_Q8_0, coding::q8_0, coding::q8_0},
        {KV_FORMAT_Q4_0, coding::q4_0, coding::q4_0},
        {KV_FORMAT_Q4_1, coding::q4_1, coding::q4_1},
        {KV_FORMAT_NVFP4, coding::nvfp4, coding::nvfp4},
        {KV_FORMAT_MXFP4, coding::mxfp4, coding::mxfp4},
        {KV_FORMAT_KIVI4, coding::kivi4_tile, coding::q4_1},
        {KV_FORMAT_KIVI2, coding::kivi2_tile, coding::kivi2_values},
        {KV_FORMAT_KVARN4, coding::kvarn4_key_tile, coding::kvarn4_value_tile},
        {KV_FORMAT_KVARN2, coding::kvarn2_key_tile, coding::kvarn2_value_tile},
        {KV_FORMAT_TURBO4, coding::turbo4_keys, coding::int4_token},
        {KV_FORMAT_TURBO3, coding::turbo3_keys, coding::turbo3_values},
        {KV_FORMAT_AFFINE4, coding::affine4, coding::affine4},
    };
    for (const known& each : all) {
        if (each.id != format.id) continue;
        to = keys ? each.keys : each.values;
        return true;
    }
    to = coding::plain;
    return format.plain();
}

/// False where no kernel knows how the operand is stored. Of the constants only what is no pointer
/// is filled in; the caller puts its device's copies of the others beside it.
inline bool describe(const operand_layout& from, bool keys, operand_place& to) {
    if (!coding_of(*from.format, keys, to.codes)) return false;
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
    to.inline_form = from.inline_form;
    to.rotated = from.rotated;
    to.tile_tokens = from.tile_tokens;
    to.scales = to.channel_means = to.channel_scales = nullptr;
    to.turning = {};
    if (from.turning != nullptr) {
        to.turning.pairs = from.turning->pairs;
        to.turning.interleaved = from.turning->interleaved;
        to.turning.gain = from.turning->gain;
    }
    return true;
}

inline bool describe(const tile_layout& from, block_place& to) {
    to.block_tokens = from.block_tokens;
    to.kv_heads = from.kv_heads;
    to.block_bytes = from.block_bytes;
    return describe(from.keys, true, to.keys) && describe(from.values, false, to.values);
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
