#include "sequence/seal.hpp"

#include <algorithm>

namespace kvrt {

block_run blocks_of(const cache& store, const sequence& owner, uint32_t lane) {
    const lane_geometry& geometry = store.model.lanes[lane];
    return {&geometry.layout, &geometry.sealed_layout, owner.lanes[lane].table,
            owner.lanes[lane].sealed_blocks};
}

void copy_positions(const cache& store, uint32_t lane, const position_store& from, block_id source,
                    const position_store& to, block_id target) {
    std::copy_n(from.of(source, 0), store.model.lanes[lane].kv_heads * store.model.block_tokens,
                to.of(target, 0));
}

namespace {

void fill_all_heads(cache& store, const block_run& from, uint32_t lane, uint32_t first_slot,
                    uint32_t count, const tile_layout& to, block_id target, uint32_t opened_end) {
    store.threads.for_each(store.model.lanes[lane].kv_heads, [&](uint32_t head) {
        recoding recoded;
        fill_block(from, store.blocks.arena(), nullptr, first_slot, count, head, to, target,
                   opened_end, recoded);
        if (recoded.rows != 0) recoded_of(store, lane)[head].add_shared(recoded);
    });
}

void seal_lane(cache& store, sequence& owner, uint32_t lane) {
    const lane_geometry& geometry = store.model.lanes[lane];
    const uint32_t block_tokens = store.model.block_tokens;
    lane_state& state = owner.lanes[lane];
    returned_blocks raw;  // no less is retained: nobody is told
    for (uint32_t pending = blocks_to_seal(store, state, lane, state.slots); pending != 0;
         --pending) {
        uint64_t needed[max_block_classes] = {};
        needed[geometry.sealed_class_index] = 1;
        if (!store.blocks.can_allocate(needed, false)) return;
        const block_id target = store.blocks.allocate(geometry.sealed_class_index);
        if (target == no_block) return;
        const uint32_t index = state.sealed_blocks;
        const block_id source = state.table[index];
        fill_all_heads(store, blocks_of(store, owner, lane), lane, index * block_tokens,
                       block_tokens, geometry.sealed_layout, target,
                       index * block_tokens + state.opened_slots);
        const lane_positions positions = positions_of_lane(store, lane, index);
        copy_positions(store, lane, positions.open, source, positions.sealed, target);
        state.table[index] = target;
        ++state.sealed_blocks;
        state.opened_slots = 0;
        drop_block(store, source, owner.last_fence, raw);
    }
}

}  // namespace

void seal_full_blocks(cache& store, sequence& owner) {
    if (!store.any_seals || !store.fences.passed(owner.last_fence)) return;
    for (uint32_t lane = 0; lane < store.sequences.lane_count(); ++lane) {
        if (store.model.lanes[lane].seals) seal_lane(store, owner, lane);
    }
}

void open_tail(cache& store, const sequence& owner, uint32_t lane, block_id target) {
    const lane_geometry& geometry = store.model.lanes[lane];
    const lane_state& state = owner.lanes[lane];
    const uint32_t index = state.blocks - 1;
    const uint32_t first_slot = index * store.model.block_tokens;
    fill_all_heads(store, blocks_of(store, owner, lane), lane, first_slot, state.slots - first_slot,
                   geometry.layout, target, 0);
    const lane_positions positions = positions_of_lane(store, lane, 0);
    copy_positions(store, lane, positions.sealed, state.table[index], positions.open, target);
}

}  // namespace kvrt
