// Blocks of lanes with two layouts: written in one, sealed into the other once they are full
// (tiles) or old (demotion), opened again where a sequence that went back goes on inside one.
#pragma once

#include "format/retile.hpp"
#include "sequence/cache.hpp"

namespace kvrt {

/// The blocks of a lane, for fill_block.
block_run blocks_of(const cache& store, const sequence& owner, uint32_t lane);

/// What sealing is to reach: what is due by the lane's geometry and length alone, whoever else
/// reads it; or, to save memory, all full blocks up to the first that others read, which would stay
/// beside its copy.
enum class seal_reach { due, all };

/// Full blocks of a lane that are not sealed yet and are to be, when `slots` are retained.
uint32_t blocks_to_seal(const cache& store, const lane_state& state, uint32_t lane, uint32_t slots,
                        seal_reach reach = seal_reach::due);

/// Blocks that were sealed, and how many bytes fewer they take. Of tile-local formats nothing is
/// counted: no less is retained.
struct demotion {
    uint64_t blocks = 0;
    uint64_t bytes = 0;

    void add(const demotion& other) {
        blocks += other.blocks;
        bytes += other.bytes;
    }
};

/// A block to seal one of a lane into; no_block if there is none.
block_id allocate_sealed(cache& store, uint32_t lane);

/// Puts `target`, into which the first block of a lane that is not sealed was, in its place. That
/// goes back to the allocator.
void put_sealed(cache& store, sequence& owner, uint32_t lane, block_id target, demotion& demoted);

/// Seals blocks_to_seal of all lanes, as far as there are blocks to seal them into and no reader
/// or writer of the raw ones is left. On a device it does nothing: steps enqueue that.
demotion seal_blocks(cache& store, sequence& owner, seal_reach reach = seal_reach::due);

/// Bytes that sealing all blocks that could be demoted would save.
uint64_t bytes_to_demote(const cache& store, const sequence& owner);

/// Counts what moving rows of a KV head between layouts did to them.
void count_recoding(cache& store, uint32_t lane, uint32_t head, const recoding& recoded);

/// Copies the last block of a lane's table, which is sealed and partly filled, to the raw `target`:
/// on a device its positions, the step enqueues the rest.
void open_tail(cache& store, const sequence& owner, uint32_t lane, block_id target);

/// Copies explicit positions of the first `slots` of a block, for all heads, between blocks that
/// may be of different classes.
void copy_positions(const cache& store, uint32_t lane, const position_store& from, block_id source,
                    const position_store& to, block_id target);

}  // namespace kvrt
