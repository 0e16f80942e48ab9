// Compaction of lanes: survivors move to the front, in order; emptied blocks are dropped.
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
    uint32_t first = plan.keep(lane);
    for (uint32_t head = 0; head < plan.store.model.lanes[lane].kv_heads; ++head) {
        const slot_ranges candidates = guards_of(plan, lane, head).candidates;
        if (candidates.count != 0) first = std::min(first, candidates.range[0].first);
    }
    return first;
}

uint32_t first_moving(const round_plan& plan, uint32_t lane) {
    uint32_t first = plan.keep(lane);
    for (uint32_t head = 0; head < plan.store.model.lanes[lane].kv_heads; ++head) {
        first = std::min(first, unmoved(survivors_of(plan, lane, head), plan.keep(lane)));
    }
    return first;
}

void move_notes(const round_plan& plan, uint32_t lane, uint32_t kv_head,
                const lane_positions& store, const block_id* target) {
    // Sources lie at or behind their targets, so ascending order never overwrites what is still to
    // be read.
    const slot_positions from = positions_of(plan.store, plan.owner, lane, kv_head);
    const uint32_t* survivors = survivors_of(plan, lane, kv_head);
    compact_observations(plan.context.observations, plan.owner, lane, kv_head, survivors,
                         plan.keep(lane));
    for (uint32_t slot = 0; slot < plan.keep(lane); ++slot) {
        store.of(target, slot, kv_head) = static_cast<uint32_t>(from.at(survivors[slot]));
    }
}

lane_move& move_of(const round_plan& plan, uint32_t lane) {
    const uint32_t layer = plan.store.model.lanes[lane].layer;
    return plan.context.moves[lane - plan.store.model.layers[layer].first_lane];
}

lane_move& begin_move(const round_plan& plan, uint32_t lane) {
    lane_move& move = move_of(plan, lane);
    const uint64_t place = static_cast<uint64_t>(&move - plan.context.moves.data());
    move = {};
    move.target = plan.context.target_tables.data() + place * plan.store.sequences.max_blocks();
    move.kept_blocks = plan.store.model.blocks_for(plan.keep(lane));
    std::copy_n(plan.owner.lanes[lane].table, move.kept_blocks, move.target);
    return move;
}

void replace_table(const round_plan& plan, uint32_t lane, compaction_report& report) {
    lane_state& state = plan.owner.lanes[lane];
    ++plan.owner.table_changes;
    const lane_move& move = move_of(plan, lane);
    const uint64_t returned_before = report.returned.blocks;
    const auto drop = [&](block_id id) {
        drop_block(plan.store, id, plan.owner.last_fence, report.returned);
    };
    for (uint32_t i = 0; i < move.kept_blocks; ++i) {
        if (move.target[i] != state.table[i]) drop(state.table[i]);
        state.table[i] = move.target[i];
    }
    while (state.blocks > move.kept_blocks) drop(state.table[--state.blocks]);
    blocks_returned_of(plan.store, plan.context, plan.owner, lane) +=
        report.returned.blocks - returned_before;
    end_compaction(plan.context.observations, plan.owner, lane, plan.keep(lane));
    state.slots = plan.keep(lane);
    state.explicit_slots = plan.keep(lane);
}

void bound_fresh_blocks(const round_plan& plan, uint32_t lane, uint64_t* needed) {
    const uint32_t kept_blocks = plan.store.model.blocks_for(plan.keep(lane));
    const uint32_t first = first_moving_bound(plan, lane) / plan.store.model.block_tokens;
    for (uint32_t i = first; i < kept_blocks; ++i) {
        if (is_private(plan, plan.owner.lanes[lane].table[i])) continue;
        ++needed[plan.store.model.lanes[lane].class_index];
    }
}

void compact_lanes(const round_plan& plan, const layer_geometry& layer, compaction_report& report) {
    block_store& blocks = plan.store.blocks;
    for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
        if (!plan.chosen(lane)) continue;
        const lane_move& move = begin_move(plan, lane);
        const uint32_t moving = first_moving(plan, lane);
        if (moving == plan.keep(lane)) continue;
        for (uint32_t i = moving / plan.store.model.block_tokens; i < move.kept_blocks; ++i) {
            if (is_private(plan, move.target[i])) continue;
            move.target[i] = blocks.allocate(plan.store.model.lanes[lane].class_index);
            ++report.blocks_copied;
        }
    }
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        const lane_move& move = move_of(plan, lane);
        move_slots(plan.store.model.lanes[lane].layout, blocks.arena(),
                   {plan.owner.lanes[lane].table, move.target, survivors_of(plan, lane, head),
                    plan.keep(lane), head});
        move_notes(plan, lane, head, positions_of_lane(plan.store, lane, 0), move.target);
    });
    for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
        if (plan.chosen(lane)) replace_table(plan, lane, report);
    }
}

}  // namespace kvrt
