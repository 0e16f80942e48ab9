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
    if (moving == plan.keep(lane)) return plan.store.model.blocks_for(plan.keep(lane));
    return std::min(moving / block_tokens, plan.owner.lanes[lane].sealed_blocks);
}

/// Calls visit(index, sealed, in place) for every block that is made anew.
template <class callable>
void for_each_rebuilt(const round_plan& plan, uint32_t lane, uint32_t first,
                      const callable& visit) {
    const lane_state& state = plan.owner.lanes[lane];
    const uint32_t full = plan.keep(lane) / plan.store.model.block_tokens;
    for (uint32_t i = first; i < plan.store.model.blocks_for(plan.keep(lane)); ++i) {
        const bool sealed = i < full;
        const bool was_sealed = i < state.sealed_blocks;
        visit(i, sealed, sealed == was_sealed && is_private(plan, state.table[i]));
    }
}

void plan_move(const round_plan& plan, uint32_t lane, compaction_report& report) {
    cache& store = plan.store;
    const lane_geometry& geometry = store.model.lanes[lane];
    const lane_state& state = plan.owner.lanes[lane];
    const uint32_t block_tokens = store.model.block_tokens;
    lane_move& move = begin_move(plan, lane);
    move.first_rebuilt = first_rebuilt(plan, lane, first_moving(plan, lane));
    for_each_rebuilt(plan, lane, move.first_rebuilt, [&](uint32_t i, bool sealed, bool in_place) {
        if (in_place) return;
        move.target[i] =
            store.blocks.allocate(sealed ? geometry.sealed_class_index : geometry.class_index);
        ++report.blocks_copied;
    });
    const bool rebuilds = move.first_rebuilt < move.kept_blocks;
    move.sealed_blocks =
        rebuilds ? plan.keep(lane) / block_tokens : std::min(state.sealed_blocks, move.kept_blocks);
    move.opened_end = state.sealed_blocks * block_tokens + state.opened_slots;
}

void move_head(const round_plan& plan, uint32_t lane, uint32_t head, recoding& recoded) {
    cache& store = plan.store;
    const lane_geometry& geometry = store.model.lanes[lane];
    const uint32_t block_tokens = store.model.block_tokens;
    const lane_move& move = move_of(plan, lane);
    const uint32_t* survivors = survivors_of(plan, lane, head);
    for (uint32_t i = move.first_rebuilt; i < move.kept_blocks; ++i) {
        const uint32_t slot = i * block_tokens;
        fill_block(blocks_of(store, plan.owner, lane), store.blocks.arena(), survivors + slot, 0,
                   std::min(block_tokens, plan.keep(lane) - slot), head,
                   i < move.sealed_blocks ? geometry.sealed_layout : geometry.layout,
                   move.target[i], move.opened_end, recoded);
    }
    if (recoded.rows != 0) recoded_of(store, lane)[head].add_shared(recoded);
    move_notes(plan, lane, head, positions_of_lane(store, lane, move.sealed_blocks), move.target);
}

void end_move(const round_plan& plan, uint32_t lane, compaction_report& report) {
    const lane_move& move = move_of(plan, lane);
    lane_state& state = plan.owner.lanes[lane];
    const uint32_t keep = plan.keep(lane);
    // At most so many rows of the last block were coded before; heads differ.
    const uint32_t raw_slots =
        keep - std::min(keep, move.sealed_blocks * plan.store.model.block_tokens);
    const bool rebuilds = move.first_rebuilt < move.kept_blocks;
    state.opened_slots = rebuilds ? raw_slots : std::min(state.opened_slots, raw_slots);
    replace_table(plan, lane, report);
    state.sealed_blocks = move.sealed_blocks;
}

}  // namespace

void bound_fresh_tiles(const round_plan& plan, uint32_t lane, uint64_t* needed) {
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    const uint32_t first = first_rebuilt(plan, lane, first_moving_bound(plan, lane));
    for_each_rebuilt(plan, lane, first, [&](uint32_t, bool sealed, bool in_place) {
        if (!in_place) ++needed[sealed ? geometry.sealed_class_index : geometry.class_index];
    });
    // Where scores may leave less than that, the last block is another one, and may be raw.
    if (allocates_by_scores(plan)) ++needed[geometry.class_index];
}

void compact_tiles(const round_plan& plan, const layer_geometry& layer, compaction_report& report) {
    const auto for_each_lane = [&](const auto& body) {
        for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
            if (plan.chosen(lane)) body(lane);
        }
    };
    for_each_lane([&](uint32_t lane) { plan_move(plan, lane, report); });
    std::fill_n(plan.context.recoded.data(), layer.kv_heads, recoding{});
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        const uint32_t kv_head = plan.store.model.lanes[lane].first_head + head;
        move_head(plan, lane, head, plan.context.recoded[kv_head]);
    });
    for (uint32_t kv_head = 0; kv_head < layer.kv_heads; ++kv_head) {
        report.recoded.add(plan.context.recoded[kv_head]);
    }
    for_each_lane([&](uint32_t lane) { end_move(plan, lane, report); });
}

}  // namespace kvrt
