// Compaction of a lane with two layouts. Of a tile-local format, survivors of a full block become
// one tile, those of the last block lie raw until it is full again, and each row that moves is
// decoded and coded once. Of demoted rows, each block of survivors up to the last that was demoted
// is a demoted one, so that none is decoded.
//
// In place is safe: block i takes rows from blocks >= i only, and all of them before it is written,
// or row by row in ascending order; what blocks after i still need lies behind block i. Positions
// go the same way.
#include <algorithm>

#include "retention/round.hpp"
#include "sequence/seal.hpp"

namespace kvrt {

namespace {

/// The first block that is made anew: the first that changes, but of tiles also the first that is
/// full and not sealed, so that no sealed one comes behind it. Blocks that are kept if there is
/// none.
uint32_t first_rebuilt(const round_plan& plan, uint32_t lane, uint32_t moving) {
    const uint32_t block_tokens = plan.store.model.block_tokens;
    if (moving == plan.keep(lane)) return plan.store.model.blocks_for(plan.keep(lane));
    if (plan.store.model.lanes[lane].demotes) return moving / block_tokens;
    return std::min(moving / block_tokens, plan.owner.lanes[lane].sealed_blocks);
}

/// The most survivors of a KV head that lie below a slot.
uint32_t most_survivors_below(const round_plan& plan, uint32_t lane, uint32_t slot) {
    uint32_t most = 0;
    for (uint32_t head = 0; head < plan.store.model.lanes[lane].kv_heads; ++head) {
        const uint32_t* survivors = survivors_of(plan, lane, head);
        const uint32_t* end = survivors + plan.keep(lane);
        most = std::max(most,
                        static_cast<uint32_t>(std::lower_bound(survivors, end, slot) - survivors));
    }
    return most;
}

/// Sealed blocks of the table to be, when those from first_rebuilt on are made anew.
uint32_t sealed_afterwards(const round_plan& plan, uint32_t lane) {
    const model_geometry& model = plan.store.model;
    const lane_state& state = plan.owner.lanes[lane];
    const uint32_t kept_blocks = model.blocks_for(plan.keep(lane));
    if (!model.lanes[lane].demotes) return plan.keep(lane) / model.block_tokens;
    if (plan.stays_demoted) return std::min(state.sealed_blocks, kept_blocks);
    return model.blocks_for(
        most_survivors_below(plan, lane, state.sealed_blocks * model.block_tokens));
}

/// Calls visit(index, sealed, in place) for every block that is made anew.
template <class callable>
void for_each_rebuilt(const round_plan& plan, uint32_t lane, uint32_t first, uint32_t sealed_blocks,
                      const callable& visit) {
    const lane_state& state = plan.owner.lanes[lane];
    for (uint32_t i = first; i < plan.store.model.blocks_for(plan.keep(lane)); ++i) {
        const bool sealed = i < sealed_blocks;
        const bool was_sealed = i < state.sealed_blocks;
        visit(i, sealed, sealed == was_sealed && is_private(plan, state.table[i]));
    }
}

void plan_move(const round_plan& plan, uint32_t lane, compaction_report& report) {
    cache& store = plan.store;
    const lane_geometry& geometry = store.model.lanes[lane];
    const lane_state& state = plan.owner.lanes[lane];
    lane_move& move = begin_move(plan, lane);
    move.first_rebuilt = first_rebuilt(plan, lane, first_moving(plan, lane));
    const bool rebuilds = move.first_rebuilt < move.kept_blocks;
    move.sealed_blocks =
        rebuilds ? sealed_afterwards(plan, lane) : std::min(state.sealed_blocks, move.kept_blocks);
    for_each_rebuilt(plan, lane, move.first_rebuilt, move.sealed_blocks,
                     [&](uint32_t i, bool sealed, bool in_place) {
                         if (in_place) return;
                         move.target[i] = store.blocks.allocate(sealed ? geometry.sealed_class_index
                                                                       : geometry.class_index);
                         ++report.blocks_copied;
                     });
    move.opened_end = state.sealed_blocks * store.model.block_tokens + state.opened_slots;
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
    count_recoding(store, lane, head, recoded);
    move_notes(plan, lane, head, positions_of_lane(store, lane, move.sealed_blocks), move.target);
}

/// How many leading slots behind the sealed blocks may hold rows that were coded before; heads
/// differ.
uint32_t opened_afterwards(const round_plan& plan, uint32_t lane, const lane_move& move) {
    const lane_state& state = plan.owner.lanes[lane];
    const uint32_t sealed_slots = move.sealed_blocks * plan.store.model.block_tokens;
    const uint32_t raw_slots = plan.keep(lane) - std::min(plan.keep(lane), sealed_slots);
    if (move.first_rebuilt >= move.kept_blocks) return std::min(state.opened_slots, raw_slots);
    if (!plan.store.model.lanes[lane].demotes) return raw_slots;
    const uint32_t coded = most_survivors_below(plan, lane, move.opened_end);
    return coded - std::min(coded, sealed_slots);
}

void end_move(const round_plan& plan, uint32_t lane, compaction_report& report) {
    const lane_move& move = move_of(plan, lane);
    lane_state& state = plan.owner.lanes[lane];
    state.opened_slots = opened_afterwards(plan, lane, move);
    replace_table(plan, lane, report);
    state.sealed_blocks = move.sealed_blocks;
}

}  // namespace

void bound_fresh_tiles(const round_plan& plan, uint32_t lane, uint64_t* needed) {
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    const lane_state& state = plan.owner.lanes[lane];
    const uint32_t kept_blocks = plan.store.model.blocks_for(plan.keep(lane));
    const uint32_t first = first_rebuilt(plan, lane, first_moving_bound(plan, lane));
    const uint32_t sealed_blocks = geometry.demotes
                                       ? std::min(state.sealed_blocks, kept_blocks)
                                       : plan.keep(lane) / geometry.layout.block_tokens;
    for_each_rebuilt(plan, lane, first, sealed_blocks, [&](uint32_t, bool sealed, bool in_place) {
        if (!in_place) ++needed[sealed ? geometry.sealed_class_index : geometry.class_index];
    });
    if (geometry.demotes) {
        // How many of those that were demoted will hold others, scores say.
        if (!plan.stays_demoted && first < sealed_blocks) {
            needed[geometry.class_index] += sealed_blocks - first;
        }
        return;
    }
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
