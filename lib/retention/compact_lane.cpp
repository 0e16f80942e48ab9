// Compaction of one lane: survivors move to the front, in order; emptied blocks are dropped.
#include <algorithm>

#include "format/move.hpp"
#include "retention/round.hpp"

namespace kvrt {

namespace {

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

}  // namespace

bool is_private(const round_plan& plan, block_id id) {
    const block_store& blocks = plan.store.blocks;
    return blocks.references(id) == 1 && plan.store.fences.passed(plan.owner.last_fence) &&
           plan.store.fences.passed(blocks.last_reader(id));
}

uint32_t first_moving_bound(const round_plan& plan, uint32_t lane) {
    uint32_t first = plan.keep;
    for (uint32_t head = 0; head < plan.store.model.lanes[lane].kv_heads; ++head) {
        const slot_ranges candidates = guards_of(plan, lane, head).candidates;
        if (candidates.count != 0) first = std::min(first, candidates.range[0].first);
    }
    return first;
}

uint32_t first_moving(const round_plan& plan, uint32_t lane, bool common) {
    uint32_t first = plan.keep;
    for (uint32_t head = 0; head < plan.store.model.lanes[lane].kv_heads; ++head) {
        first = std::min(first, unmoved(survivors_of(plan, head, common), plan.keep));
    }
    return first;
}

void move_positions(const round_plan& plan, uint32_t lane, const uint32_t* survivors,
                    uint32_t kv_head, const lane_positions& store, const block_id* target) {
    // Sources lie at or behind their targets, so ascending order never overwrites what is still to
    // be read.
    const slot_positions from = positions_of(plan.store, plan.owner, lane, kv_head);
    for (uint32_t slot = 0; slot < plan.keep; ++slot) {
        store.of(target, slot, kv_head) = static_cast<uint32_t>(from.at(survivors[slot]));
    }
}

void replace_table(const round_plan& plan, uint32_t lane, const block_id* target,
                   compaction_report& report) {
    lane_state& state = plan.owner.lanes[lane];
    const uint32_t kept_blocks = plan.store.model.blocks_for(plan.keep);
    const auto drop = [&](block_id id) {
        drop_block(plan.store, id, plan.owner.last_fence, report.returned);
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

void bound_fresh_blocks(const round_plan& plan, uint32_t lane, uint64_t* needed) {
    const uint32_t kept_blocks = plan.store.model.blocks_for(plan.keep);
    const uint32_t first = first_moving_bound(plan, lane) / plan.store.model.block_tokens;
    for (uint32_t i = first; i < kept_blocks; ++i) {
        if (is_private(plan, plan.owner.lanes[lane].table[i])) continue;
        ++needed[plan.store.model.lanes[lane].class_index];
    }
}

void compact_lane(const round_plan& plan, uint32_t lane, bool common, compaction_report& report) {
    block_store& blocks = plan.store.blocks;
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    const lane_state& state = plan.owner.lanes[lane];
    const uint32_t moving = first_moving(plan, lane, common);
    const uint32_t kept_blocks = plan.store.model.blocks_for(plan.keep);
    block_id* target = plan.context.target_table.data();
    std::copy_n(state.table, kept_blocks, target);
    if (moving < plan.keep) {
        for (uint32_t i = moving / plan.store.model.block_tokens; i < kept_blocks; ++i) {
            if (is_private(plan, state.table[i])) continue;
            target[i] = blocks.allocate(geometry.class_index);
            ++report.blocks_copied;
        }
    }
    const lane_positions positions = positions_of_lane(plan.store, lane, 0);
    plan.store.threads.for_each(geometry.kv_heads, [&](uint32_t head) {
        const uint32_t* survivors = survivors_of(plan, head, common);
        move_slots(geometry.layout, blocks.arena(),
                   {state.table, target, survivors, plan.keep, head});
        move_positions(plan, lane, survivors, head, positions, target);
    });
    replace_table(plan, lane, target, report);
}

}  // namespace kvrt
