// Compaction of one lane: survivors move to the front, in order; emptied blocks are dropped.
#include <algorithm>

#include "format/move.hpp"
#include "retention/round.hpp"

namespace kvrt {

namespace {

/// May this block's bytes change? Not while others read it, and not before the fences of the last
/// steps that read it: this sequence's, and those of sequences that have let go of it.
bool is_private(const round_plan& plan, uint32_t lane, block_id id) {
    const block_store& blocks = plan.store.blocks;
    const uint32_t class_index = plan.store.model.lanes[lane].class_index;
    return blocks.references(class_index, id) == 1 &&
           plan.store.fences.passed(plan.owner.last_fence) &&
           plan.store.fences.passed(blocks.last_reader(class_index, id));
}

/// Length of the leading run of survivors that stay where they are.
uint32_t unmoved(const uint32_t* survivors, uint32_t count) {
    uint32_t low = 0;
    uint32_t high = count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (survivors[middle] == middle) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/// Survivors' positions go with them. Sources lie at or behind their targets, so ascending order
/// never overwrites what is still to be read.
void move_positions(const round_plan& plan, uint32_t lane, const uint32_t* survivors,
                    uint32_t kv_head) {
    const slot_positions from = positions_of(plan.store, plan.owner, lane, kv_head);
    const uint32_t block_tokens = plan.store.model.block_tokens;
    for (uint32_t slot = 0; slot < plan.keep; ++slot) {
        const uint32_t position = static_cast<uint32_t>(from.at(survivors[slot]));
        from.store.of(plan.context.target_table[slot / block_tokens],
                      kv_head)[slot % block_tokens] = position;
    }
}

}  // namespace

uint32_t fresh_blocks_bound(const round_plan& plan, uint32_t lane) {
    const lane_state& state = plan.owner.lanes[lane];
    // What guards hold at the front does not move, whatever the scores.
    uint32_t first_moving = plan.keep;
    for (uint32_t head = 0; head < plan.store.model.lanes[lane].kv_heads; ++head) {
        const slot_ranges candidates = guards_of(plan, lane, head).candidates;
        if (candidates.count != 0) first_moving = std::min(first_moving, candidates.range[0].first);
    }
    uint32_t fresh = 0;
    const uint32_t kept_blocks = plan.store.model.blocks_for(plan.keep);
    for (uint32_t i = first_moving / plan.store.model.block_tokens; i < kept_blocks; ++i) {
        if (!is_private(plan, lane, state.table[i])) ++fresh;
    }
    return fresh;
}

void compact_lane(const round_plan& plan, uint32_t lane, bool common, compaction_report& report) {
    block_store& blocks = plan.store.blocks;
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    const uint32_t block_tokens = plan.store.model.block_tokens;
    lane_state& state = plan.owner.lanes[lane];
    const auto survivors = [&](uint32_t head) {
        return plan.context.survivors.data() + (common ? 0 : head) * plan.context.slot_stride;
    };

    uint32_t first_moving = plan.keep;
    for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
        first_moving = std::min(first_moving, unmoved(survivors(head), plan.keep));
    }
    const uint32_t kept_blocks = plan.store.model.blocks_for(plan.keep);
    block_id* target = plan.context.target_table.data();
    std::copy_n(state.table, kept_blocks, target);
    if (first_moving < plan.keep) {
        for (uint32_t i = first_moving / block_tokens; i < kept_blocks; ++i) {
            if (is_private(plan, lane, state.table[i])) continue;
            target[i] = blocks.allocate(geometry.class_index);
            ++report.blocks_copied;
        }
    }
    plan.store.threads.for_each(geometry.kv_heads, [&](uint32_t head) {
        move_slots(geometry.layout, blocks.arena(),
                   {state.table, target, survivors(head), plan.keep, head});
        move_positions(plan, lane, survivors(head), head);
    });

    const auto drop = [&](block_id id) {
        drop_block(plan.store, lane, id, plan.owner.last_fence, report.returned);
    };
    for (uint32_t i = 0; i < kept_blocks; ++i) {
        if (target[i] != state.table[i]) drop(state.table[i]);
        state.table[i] = target[i];
    }
    while (state.blocks > kept_blocks) drop(state.table[--state.blocks]);
    state.slots = plan.keep;
    state.explicit_slots = plan.keep;
    ++report.layers;
}

}  // namespace kvrt
