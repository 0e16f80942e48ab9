// The stored state of a pool: geometry, blocks, sequences, fences. Steps and retention work on it.
#pragma once

#include "base/executor.hpp"
#include "device/cpu_memory.hpp"
#include "device/plugin_device.hpp"
#include "format/encode.hpp"
#include "format/retile.hpp"
#include "memory/blocks.hpp"
#include "model/geometry.hpp"
#include "sequence/sequence.hpp"
#include "sequence/spans.hpp"

namespace kvrt {

struct cache_limits {
    uint32_t max_sequences = 0;
    uint32_t max_tokens_per_sequence = 0;
    uint32_t max_step_sequences = 0;
    uint32_t max_step_tokens = 0;
    uint32_t max_observed_sequences = 0;
    uint64_t pressure_bytes = 0;  ///< pinned ones above which policies run early; 0: never
};

struct cache {
    host_allocator allocator;  ///< first: everything below returns its memory to it
    executor threads;
    cpu_memory memory;     ///< of the arena on the CPU,
    plugin_device device;  ///< or where the arena is instead
    model_geometry model;
    block_store blocks;
    fence_clock fences;
    sequence_table sequences;
    cache_limits limits;
    bool any_window = false;         ///< some lane has a window
    bool any_seals = false;          ///< some lane has a tile-local format
    host_array<recoding> recoded;    ///< by half of lane_geometry::first_counter and KV head
    host_array<uint64_t> saturated;  ///< elements written, by lane_geometry::first_counter
    /// On a device, once a sequence has a policy: what the host knows of the positions of slots
    /// that rounds have placed, which are in the device's memory alone. [sequences][lanes]
    host_array<position_spans> spans;

    /// Are the arena's bytes out of the host's reach?
    bool on_device() const { return device.is_open(); }
};

/// UNSUPPORTED, naming `what`, in a pool whose device cannot do it: nothing is done on the host in
/// its stead.
inline status refuse_on_device(const cache& store, const char* what) {
    if (!store.on_device()) return KV_OK;
    return fail(KV_UNSUPPORTED, "{}: not on KV_DEVICE_CUDA in this version (see kv_cuda.h)", what);
}

/// Where what saturates in a lane is counted, by its KV heads.
inline saturation_counts saturation_of(cache& store, uint32_t lane) {
    const lane_geometry& geometry = store.model.lanes[lane];
    uint64_t* first = store.saturated.data() + geometry.first_counter + geometry.first_head;
    return {first, first + store.model.layers[geometry.layer].kv_heads};
}

/// Where what is coded again in a lane is counted, by its KV heads.
inline recoding* recoded_of(cache& store, uint32_t lane) {
    const lane_geometry& geometry = store.model.lanes[lane];
    return store.recoded.data() + geometry.first_counter / 2 + geometry.first_head;
}

/// Sets how many tokens the sequence takes without asking: none while others read a tail block.
void measure_room(const cache& store, sequence& owner);

/// Blocks and bytes that went back to the allocator.
struct returned_blocks {
    uint64_t blocks = 0;
    uint64_t bytes = 0;
};

/// Drops one reference of a reader whose last step was `fence`, and counts the block if it was the
/// last one.
void drop_block(cache& store, block_id id, uint64_t fence, returned_blocks& returned);

/// The class of a new block at `index` of a lane's table, and the layout of one that is there.
inline uint32_t class_at(const lane_geometry& lane, const lane_state& state, uint32_t index) {
    return index < state.sealed_blocks ? lane.sealed_class_index : lane.class_index;
}

/// Drops the blocks of a lane's table from index `keep` on.
void shrink_table(cache& store, sequence& owner, uint32_t lane, uint32_t keep,
                  returned_blocks& returned);

/// The sequence, of those that may be asked and were not yet, of which most(sequence) is largest,
/// and not 0; null where there is none.
template <class permission, class callable>
sequence* ask_next(cache& store, const permission& may_ask, const callable& most) {
    sequence* chosen = nullptr;
    uint64_t largest = 0;
    for (sequence& owner : store.sequences) {
        if (!owner.alive || owner.asked_under_pressure || !may_ask(owner)) continue;
        const uint64_t here = most(owner);
        if (here <= largest) continue;
        largest = here;
        chosen = &owner;
    }
    if (chosen != nullptr) chosen->asked_under_pressure = true;
    return chosen;
}

/// Drops everything the sequence holds, and closes it.
void release_sequence(cache& store, sequence& target);

/// A child with the parent's accepted tokens; nullptr when max_sequences are alive.
sequence* fork_sequence(cache& store, sequence& parent);

/// Forgets tokens at positions >= tokens_seen. Errors: INVALID, NO_SNAPSHOT; nothing changed then.
status truncate_sequence(cache& store, sequence& target, uint64_t tokens_seen);

/// Blocks [front, front + blocks) of a lane's table that no later query can see; none: 0.
struct window_slide {
    uint32_t front = 0;
    uint32_t blocks = 0;
};
window_slide slide_of(const cache& store, uint32_t lane, uint32_t slots, uint64_t next_position);

/// How many slots and blocks of each kind a lane has then.
void count_slide(const cache& store, const window_slide& slide, lane_state& state);

/// Returns the blocks of window lanes that no later query can see.
void slide_windows(cache& store, sequence& target, returned_blocks& returned);

/// Explicit positions along a table of a lane of which so many blocks are sealed.
lane_positions positions_of_lane(const cache& store, uint32_t lane, uint32_t sealed_blocks);

/// Positions of a lane's retained slots for one KV head.
slot_positions positions_of(const cache& store, const sequence& owner, uint32_t lane,
                            uint32_t kv_head);

/// Are the positions of the lane's explicit slots the device's? Not where a window has placed them.
inline bool device_has_positions(const cache& store, const sequence& owner, uint32_t lane) {
    return store.on_device() && store.model.lanes[lane].evictable &&
           owner.lanes[lane].explicit_slots != 0;
}

/// What the host knows of them.
position_spans& spans_of(cache& store, const sequence& owner, uint32_t lane);
retained_spans retained_of(const cache& store, const sequence& owner, uint32_t lane);

/// Blocks and bytes in the sequence's tables.
returned_blocks table_size(const cache& store, const sequence& owner);

/// Walks tables, references, slabs, positions. INTERNAL says what does not fit. `extra` are
/// references held elsewhere (by open steps), as (class, id) pairs added by the caller.
struct held_block {
    uint32_t class_index;
    block_id id;
};
status check_cache(cache& store, const held_block* extra, uint64_t extra_count);

}  // namespace kvrt
