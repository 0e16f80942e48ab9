// Moving rows of one KV head into a block of another layout, or into another tile: what sealing,
// opening and compacting the blocks of lanes with two layouts have in common.
//
// A row whose operand is stored alike where it was and where it goes moves word by word. Any other
// is decoded and coded, once per move.
#pragma once

#include "format/tile.hpp"
#include "memory/block_id.hpp"

namespace kvrt {

/// Rows that were coded before and are coded again, and how far that moved them: a part of what is
/// reported, squares summed over their elements.
struct recoding {
    uint64_t rows = 0;
    double squared_change = 0.0;
    double squared_rows = 0.0;
    /// Elements of rows that were coded for the first time and saturated.
    uint64_t saturated_keys = 0, saturated_values = 0;

    void add(const recoding& other) {
        rows += other.rows;
        squared_change += other.squared_change;
        squared_rows += other.squared_rows;
        saturated_keys += other.saturated_keys;
        saturated_values += other.saturated_values;
    }
    /// The same for totals that other threads add to, or read by load.
    void add_shared(const recoding& other);
    recoding load_shared() const;
    /// Root mean square of the change, relative to the rows' own.
    double relative_change() const;
};

/// The blocks of a lane: the first sealed_blocks have one layout, the others another.
struct block_run {
    const tile_layout* layout = nullptr;
    const tile_layout* sealed_layout = nullptr;
    const block_id* blocks = nullptr;
    uint32_t sealed_blocks = 0;

    const tile_layout& layout_of(uint32_t slot) const {
        return slot / layout->block_tokens < sealed_blocks ? *sealed_layout : *layout;
    }
};

/// Fills slots [0, count) of the block `target`, which has the layout `to`, for one KV head: slot i
/// is a copy of slots[i] of the run, or of first_slot + i where slots is null. Tiles take whole
/// blocks only. Rows in slots below opened_end of the run were coded before; what coding them again
/// does to them is added to `recoded`. The target may be the block of slots[0],
/// if no slot that is still needed afterwards lies in it.
void fill_block(const block_run& from, std::byte* arena, const uint32_t* slots, uint32_t first_slot,
                uint32_t count, uint32_t kv_head, const tile_layout& to, block_id target,
                uint32_t opened_end, recoding& recoded);

}  // namespace kvrt
