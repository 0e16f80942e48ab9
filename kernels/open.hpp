// Rows of slots, wherever and however they are stored, to a tensor of f32, f16 or bf16: what export
// and an attention without kernels of its own need, and the first half of coding rows anew (as f32
// in their stored basis, which seal.hpp takes for raw blocks).
//
// A warp has one row of one head.
#pragma once

#include "kernels/decode.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t open_threads = 128;

/// A slot of a sequence; no_sequence: the tensors' row stays as it is.
struct row_source {
    uint32_t sequence;
    uint32_t slot;
    uint32_t position = 0;  ///< of the token; of use to affine4
};

/// Rows [0, rows) of keys, [rows, kv_heads, key dim], and values. Launch with open_blocks(...)
/// blocks of open_threads threads.
struct open_parameters {
    const std::byte* arena = nullptr;
    block_place place;
    block_place sealed;  ///< of the first sealed_blocks[sequence] blocks
    block_tables tables;
    const uint32_t* sealed_blocks = nullptr;  ///< [sequences]; null: no block is sealed
    const row_source* sources = nullptr;      ///< [rows] of head 0
    uint64_t source_stride = 0;               ///< to those of the next head; 0: the same
    uint32_t rows = 0;
    bool stored_basis = false;  ///< rotated rows stay so
    tensor_place keys;
    tensor_place values;
};

constexpr uint32_t open_blocks(uint32_t rows, uint32_t kv_heads) {
    constexpr uint32_t warps = open_threads / warp_lanes;
    return (rows * kv_heads * 2 + warps - 1) / warps;
}

/// The kernel.
template <class Cx, number output>
KVRT_DEVICE void open_rows(const open_parameters& call) {
    const uint32_t heads = call.place.kv_heads;
    const uint32_t unit = Cx::block() * (open_threads / warp_lanes) + Cx::warp();
    const uint32_t row_index = unit / (2 * heads);
    if (row_index >= call.rows) return;
    const bool value = unit / heads % 2 != 0;
    const uint32_t head = unit % heads;
    const row_source& listed = call.sources[row_index + head * call.source_stride];
    const row_source from{Cx::template load_constant<uint32_t>(&listed.sequence),
                          Cx::template load_constant<uint32_t>(&listed.slot),
                          Cx::template load_constant<uint32_t>(&listed.position)};
    if (from.sequence == no_sequence) return;

    const uint32_t index = from.slot / call.place.block_tokens;
    const bool sealed =
        call.sealed_blocks != nullptr &&
        index < Cx::template load_constant<uint32_t>(call.sealed_blocks + from.sequence);
    const block_place& place = sealed ? call.sealed : call.place;
    const operand_place& operand = value ? place.values : place.keys;
    const uint32_t id = Cx::template load_constant<uint32_t>(call.tables.of(from.sequence) + index)
                        << call.tables.shift;
    float row[lane_channels] = {};
    load_row<Cx>(operand, block_at(call.arena, id), from.slot % call.place.block_tokens, head,
                 from.position, row);
    if (operand.rotated && !call.stored_basis) rotate_channels<Cx>(operand.dim, row);

    const tensor_place& tensor = value ? call.values : call.keys;
    const uint32_t first = Cx::lane() * lane_channels;
    if (first >= operand.dim) return;
    const int64_t element = int64_t{row_index} * tensor.row_stride +
                            int64_t{head} * tensor.head_stride + int64_t{first} * tensor.dim_stride;
    constexpr int64_t size = number_bytes(output);
    store_channels<Cx>(output, tensor.data + element * size, tensor.dim_stride * size, row);
}

}  // namespace kvrt::kernels
