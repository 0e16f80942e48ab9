// Rows of keys and values from the caller's tensors into blocks, quantised on the way (encode.hpp).
// A warp has one row of one head.
#pragma once

#include "kernels/encode.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t write_threads = 128;
inline constexpr uint32_t write_shared_bytes = write_threads / warp_lanes * warp_record_bytes;

/// Where row r of the tensors goes: a slot of a sequence; no_sequence: nowhere.
struct row_target {
    uint32_t sequence;
    uint32_t slot;
    uint32_t position = 0;  ///< of the token; of use to affine4
};

/// Rows [0, rows) of keys, [rows, kv_heads, key dim], and values. Launch with write_blocks(...)
/// blocks of write_threads threads and write_shared_bytes. Operands are no tiles.
struct write_parameters {
    std::byte* arena = nullptr;
    block_place place;
    block_tables tables;
    const row_target* targets = nullptr;  ///< [rows]
    uint32_t rows = 0;
    tensor_place keys;
    tensor_place values;
    uint64_t* saturated_keys = nullptr;  ///< [kv_heads], added to; null: nobody counts
    uint64_t* saturated_values = nullptr;
};

constexpr uint32_t write_blocks(uint32_t rows, uint32_t kv_heads) {
    constexpr uint32_t warps = write_threads / warp_lanes;
    return (rows * kv_heads * 2 + warps - 1) / warps;
}

/// The kernel; `elaborate` where is_elaborate(place.keys.codes), and slower elsewhere.
template <class Cx, number input, bool elaborate>
KVRT_DEVICE void write_rows(const write_parameters& call) {
    const uint32_t heads = call.place.kv_heads;
    const uint32_t unit = Cx::block() * (write_threads / warp_lanes) + Cx::warp();
    const uint32_t row_index = unit / (2 * heads);
    if (row_index >= call.rows) return;
    const bool value = unit / heads % 2 != 0;
    const uint32_t head = unit % heads;
    const row_target& listed = call.targets[row_index];
    const row_target to{Cx::template load_constant<uint32_t>(&listed.sequence),
                        Cx::template load_constant<uint32_t>(&listed.slot),
                        Cx::template load_constant<uint32_t>(&listed.position)};
    if (to.sequence == no_sequence) return;

    const operand_place& operand = value ? call.place.values : call.place.keys;
    const tensor_place& tensor = value ? call.values : call.keys;
    float row[lane_channels] = {};
    const uint32_t first = Cx::lane() * lane_channels;
    if (first < operand.dim) {
        const int64_t element = int64_t{row_index} * tensor.row_stride +
                                int64_t{head} * tensor.head_stride +
                                int64_t{first} * tensor.dim_stride;
        load_channels<Cx, input>(tensor.data + element * int64_t{number_bytes(input)},
                                 tensor.dim_stride, row);
    }
    if (operand.rotated) rotate_channels<Cx>(operand.dim, row);
    const uint32_t* const table = call.tables.of(to.sequence);
    const uint32_t id =
        Cx::template load_constant<uint32_t>(table + to.slot / call.place.block_tokens)
        << call.tables.shift;
    std::byte* const target =
        block_at(call.arena, id) + operand.at(to.slot % call.place.block_tokens, head, 0);
    const uint32_t saturated = store_row<Cx, elaborate>(
        operand, head, to.position, row, target, Cx::shared() + Cx::warp() * warp_record_bytes);
    uint64_t* const counts = value ? call.saturated_values : call.saturated_keys;
    if (counts == nullptr) return;
    const uint32_t all = Cx::reduce_add(saturated);
    if (all != 0 && Cx::lane() == 0) Cx::atomic_add(counts + head, uint64_t{all});
}

}  // namespace kvrt::kernels
