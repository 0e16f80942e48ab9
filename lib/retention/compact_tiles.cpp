// Compaction of a lane with a tile-local format. Survivors of a full block become one tile, those
// of the last block lie raw until it is full again. Each row that moves is decoded and coded once.
//
// In place is safe: block i takes rows from blocks >= i only, and all of them before it is written;
// what blocks after i still need lies behind block i. Positions go the same way.
#include <algorithm>

#include "retention/round.hpp"
#include "sequence/seal.hpp"

namespace kvrt {

namespace {

/// The first block that is made anew: the first that changes, but also the first that is full and
/// not sealed, so that no sealed one comes behind it. Blocks that are kept if there is none.
uint32_t first_rebuilt(const round_plan& plan, uint32_t lane, uint32_t moving) {
    const uint32_t block_tokens = plan.store.model.block_tokens;
    if (moving == plan.keep) return plan.store.model.blocks_for(plan.keep);
    return std::min(moving / block_tokens, plan.owner.lanes[lane].sealed_blocks);
}

/// Calls visit(index, sealed, in place) for every block that is made anew.
template <class callable>
void for_each_rebuilt(const round_plan& plan, uint32_t lane, uint32_t first,
                      const callable& visit) {
    const lane_state& state = plan.owner.lanes[lane];
    const uint32_t full = plan.keep / plan.store.model.block_tokens;
    for (uint32_t i = first; i < plan.store.model.blocks_for(plan.keep); ++i) {
        const bool sealed = i < full;
        const bool was_sealed = i < state.sealed_blocks;
        visit(i, sealed, sealed == was_sealed && is_private(plan, state.table[i]));
    }
}

}  // namespace

void bound_fresh_tiles(const round_plan& plan, uint32_t lane, uint64_t* needed) {
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    const uint32_t first = first_rebuilt(plan, lane, first_moving_bound(plan, lane));
    for_each_rebuilt(plan, lane, first, [&](uint32_t, bool sealed, bool in_place) {
        if (!in_place) ++needed[sealed ? geometry.sealed_class_index : geometry.class_index];
    });
}

void compact_tiles(const round_plan& plan, uint32_t lane, bool common, compaction_report& report) {
    cache& store = plan.store;
    const lane_geometry& geometry = store.model.lanes[lane];
    const uint32_t block_tokens = store.model.block_tokens;
    lane_state& state = plan.owner.lanes[lane];
    const uint32_t first = first_rebuilt(plan, lane, first_moving(plan, lane, common));
    const uint32_t kept_blocks = store.model.blocks_for(plan.keep);
    const uint32_t full = plan.keep / block_tokens;
    block_id* target = plan.context.target_table.data();
    std::copy_n(state.table, kept_blocks, target);
    for_each_rebuilt(plan, lane, first, [&](uint32_t i, bool sealed, bool in_place) {
        if (in_place) return;
        target[i] =
            store.blocks.allocate(sealed ? geometry.sealed_class_index : geometry.class_index);
        ++report.blocks_copied;
    });
    const bool rebuilds = first < kept_blocks;
    const uint32_t sealed_blocks = rebuilds ? full : std::min(state.sealed_blocks, kept_blocks);
    const uint32_t opened_end = state.sealed_blocks * block_tokens + state.opened_slots;
    const block_run from = blocks_of(store, plan.owner, lane);
    const lane_positions positions = positions_of_lane(store, lane, sealed_blocks);
    store.threads.for_each(geometry.kv_heads, [&](uint32_t head) {
        const uint32_t* survivors = survivors_of(plan, head, common);
        recoding recoded;
        for (uint32_t i = first; i < kept_blocks; ++i) {
            const uint32_t slot = i * block_tokens;
            fill_block(from, store.blocks.arena(), survivors + slot, 0,
                       std::min(block_tokens, plan.keep - slot), head,
                       i < sealed_blocks ? geometry.sealed_layout : geometry.layout, target[i],
                       opened_end, recoded);
        }
        if (recoded.rows != 0) recoded_of(store, lane)[head].add_shared(recoded);
        move_positions(plan, lane, survivors, head, positions, target);
        plan.context.recoded[head] = recoded;
    });
    for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
        report.recoded.add(plan.context.recoded[head]);
    }
    // At most so many rows of the last block were coded before; heads differ.
    const uint32_t raw_slots = plan.keep - std::min(plan.keep, sealed_blocks * block_tokens);
    state.opened_slots = rebuilds ? raw_slots : std::min(state.opened_slots, raw_slots);
    replace_table(plan, lane, target, report);
    state.sealed_blocks = sealed_blocks;
}

}  // namespace kvrt
