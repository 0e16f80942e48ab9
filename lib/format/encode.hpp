// Writes rows of keys and values from the caller's tensors into the slots of blocks.
#pragma once

#include "base/executor.hpp"
#include "format/tile.hpp"
#include "memory/block_id.hpp"

namespace kvrt {

/// Rows [first_row, first_row + rows) of the tensors go to slots [first_slot, ...) of the lane.
struct write_item {
    const block_id* blocks = nullptr;
    uint32_t first_slot = 0;
    uint32_t first_row = 0;
    uint32_t rows = 0;
    uint32_t first_position = 0;  ///< of first_row; the others follow
};

/// How many elements saturated, by KV head; null where nobody counts.
struct saturation_counts {
    uint64_t* keys = nullptr;  ///< [kv_heads]
    uint64_t* values = nullptr;
};

/// Rows for one lane: keys are [rows, kv_heads, key_dim], values [rows, kv_heads, value_dim].
struct write_call {
    const tile_layout* layout = nullptr;
    const write_item* items = nullptr;
    uint32_t item_count = 0;
    tensor_view keys;
    tensor_view values;
    saturation_counts saturated;
};

/// Each element is rounded once: to nearest even in plain formats, as its format says in others.
/// Only the named slots change. Several calls run as one: lanes of a layer, whose layouts differ in
/// their constants alone, and whose items have the same rows. Allocates nothing.
void write_rows(const write_call* calls, uint32_t call_count, std::byte* arena, executor& threads);
inline void write_rows(const tile_layout& layout, std::byte* arena, const write_item* items,
                       uint32_t item_count, const tensor_view& keys, const tensor_view& values,
                       const saturation_counts& saturated, executor& threads) {
    const write_call call{&layout, items, item_count, keys, values, saturated};
    write_rows(&call, 1, arena, threads);
}

}  // namespace kvrt
