// Blocks of tile-local formats: written raw, sealed into tiles once they are full, opened again
// where a sequence that went back goes on inside one.
#pragma once

#include "format/retile.hpp"
#include "sequence/cache.hpp"

namespace kvrt {

/// The blocks of a lane, for fill_block.
block_run blocks_of(const cache& store, const sequence& owner, uint32_t lane);

/// Full blocks of a lane that are not sealed yet, when `slots` are retained.
inline uint32_t blocks_to_seal(const cache& store, const lane_state& state, uint32_t lane,
                               uint32_t slots) {
    if (!store.model.lanes[lane].seals) return 0;
    const uint32_t full = slots / store.model.block_tokens;
    // A partly filled sealed block is opened before anything is appended.
    const uint32_t sealed = std::min(state.sealed_blocks, state.slots / store.model.block_tokens);
    return full - std::min(full, sealed);
}

/// Seals the full blocks of all lanes, as far as there are blocks to seal them into and no reader
/// or writer of the raw ones is left. Those blocks go back to the allocator.
void seal_full_blocks(cache& store, sequence& owner);

/// Copies the last block of a lane's table, which is sealed and partly filled, to the raw `target`.
void open_tail(cache& store, const sequence& owner, uint32_t lane, block_id target);

/// Copies explicit positions of the first `slots` of a block, for all heads, between blocks that
/// may be of different classes.
void copy_positions(const cache& store, uint32_t lane, const position_store& from, block_id source,
                    const position_store& to, block_id target);

}  // namespace kvrt
