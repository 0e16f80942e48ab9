// Moves slots of a lane without changing a byte of what they hold.
#pragma once

#include "format/tile.hpp"
#include "memory/block_id.hpp"

namespace kvrt {

/// One KV head's survivors: slot survivors[i] of `source` becomes slot i of `target`.
/// survivors ascends. source and target may be the same table (survivors[i] >= i makes that safe)
/// or share leading blocks; a slot that would move onto itself is not touched.
struct move_list {
    const block_id* source = nullptr;
    const block_id* target = nullptr;
    const uint32_t* survivors = nullptr;
    uint32_t count = 0;
    uint32_t kv_head = 0;
};

void move_slots(const tile_layout& layout, std::byte* arena, const move_list& moves);

/// Copies slots [0, slots) of a block for all heads to another block of the same layout.
void copy_block_slots(const tile_layout& layout, std::byte* arena, block_id source, block_id target,
                      uint32_t slots);

}  // namespace kvrt
