#include "step/round_targets.hpp"

#include <algorithm>
#include <limits>

namespace kvrt {

namespace {

/// Slots before this one are held at the front, and stay where they are.
uint32_t first_moving_slot(const round_plan& plan, uint32_t lane) {
    const held_positions held = held_by_guards(plan);
    const uint64_t front = held.count != 0 && held.range[0].first == 0 ? held.range[0].end : 0;
    const slot_count before = count_between(retained_of(plan.store, plan.owner, lane), 0, front);
    return std::min(before.least, plan.keep(lane));
}

/// The most survivors of a KV head that may lie below a slot: not those that are surely behind it.
uint32_t most_survivors_below(const round_plan& plan, uint32_t lane, uint32_t slot) {
    const uint32_t slots = plan.owner.lanes[lane].slots, keep = plan.keep(lane);
    const uint32_t below = std::min(slot, slots);
    const retained_spans retained = retained_of(plan.store, plan.owner, lane);
    const uint64_t from = newest_from(retained, slots - below);
    uint32_t behind = 0, held = 0;
    for (const held_range& range : held_by_guards(plan)) {
        behind += count_between(retained, std::max(range.first, from), range.end).least;
        held += count_between(retained, range.first, range.end).most;
    }
    if (keeps_newest(plan.policy)) {
        behind = std::min(slots - below, behind + (keep - std::min(keep, held)));
    }
    return std::min(below, keep - std::min(keep, behind));
}

}  // namespace

bool keeps_newest(const kv_policy& policy) {
    const bool by_segment = policy.segments != 0 && policy.segment_quota != 0;
    return policy.scorer == KV_SCORER_STREAMING && value_reserve_of(policy) == 0 && !by_segment;
}

bool may_change(const cache& store, const sequence& owner, block_id id) {
    if (store.blocks.references(id) != 1) return false;
    const auto by_host = [&](uint64_t fence) {
        return !store.fences.by_host || fence <= store.fences.host_passed;
    };
    return by_host(owner.last_fence) && by_host(store.blocks.last_reader(id));
}

round_target round_target_of(const round_plan& plan, uint32_t lane) {
    const uint32_t block_tokens = plan.store.model.block_tokens;
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    const lane_state& state = plan.owner.lanes[lane];
    const uint32_t keep = plan.keep(lane), moving = first_moving_slot(plan, lane);
    round_target made;
    made.kept_blocks = plan.store.model.blocks_for(keep);
    made.first = moving / block_tokens;
    if (!geometry.seals) return made;
    const auto raw_slots = [&] { return keep - std::min(keep, made.sealed_blocks * block_tokens); };
    if (moving == keep) {
        made.first = made.kept_blocks;
        made.sealed_blocks = std::min(state.sealed_blocks, made.kept_blocks);
        made.opened_slots = std::min(state.opened_slots, raw_slots());
    } else if (geometry.demotes) {
        const uint32_t sealed_slots = state.sealed_blocks * block_tokens;
        made.sealed_blocks =
            plan.stays_demoted
                ? std::min(state.sealed_blocks, made.kept_blocks)
                : plan.store.model.blocks_for(most_survivors_below(plan, lane, sealed_slots));
        const uint32_t coded = most_survivors_below(plan, lane, sealed_slots + state.opened_slots);
        made.opened_slots = coded - std::min(coded, made.sealed_blocks * block_tokens);
    } else {
        made.first = std::min(made.first, state.sealed_blocks);
        made.sealed_blocks = keep / block_tokens;
        made.opened_slots = raw_slots();
    }
    return made;
}

fresh_blocks count_fresh(const round_plan& plan) {
    fresh_blocks fresh;
    for_each_fresh(plan, [&](uint32_t, uint32_t, uint32_t block_class, bool shared) {
        ++fresh.count;
        ++fresh.needed[block_class];
        fresh.shared = fresh.shared || shared;
    });
    if (fresh.count == 0) return fresh;
    for (uint32_t lane = 0; lane < plan.store.model.lanes.size(); ++lane) {
        if (plan.chosen(lane)) fresh.entries += plan.store.model.blocks_for(plan.keep(lane));
    }
    return fresh;
}

namespace {

/// Rows that were coded before and are coded again: at most, of each operand. How far that moves
/// them the device alone could say.
void note_recoded(const round_plan& plan, uint32_t lane, const round_target& target,
                  compaction_report& report) {
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    const lane_state& state = plan.owner.lanes[lane];
    const uint32_t block_tokens = plan.store.model.block_tokens;
    const auto differs = [](const operand_layout& a, const operand_layout& b) {
        return a.format != b.format ? 1u : 0u;
    };
    const uint32_t made_anew =
        (target.sealed_blocks - std::min(target.sealed_blocks, target.first)) * block_tokens;
    const uint32_t operands =
        geometry.demotes ? differs(geometry.layout.keys, geometry.sealed_layout.keys) +
                               differs(geometry.layout.values, geometry.sealed_layout.values)
                         : (geometry.sealed_layout.keys.tiled() ? 1u : 0u) +
                               (geometry.sealed_layout.values.tiled() ? 1u : 0u);
    const uint32_t coded = geometry.demotes
                               ? state.opened_slots
                               : state.sealed_blocks * block_tokens + state.opened_slots;
    recoding unmeasured;
    unmeasured.rows = uint64_t{std::min(made_anew, coded)} * operands;
    if (unmeasured.rows == 0) return;
    unmeasured.squared_change = std::numeric_limits<double>::quiet_NaN();
    unmeasured.squared_rows = 1.0;
    for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
        count_recoding(plan.store, lane, head, unmeasured);
        report.recoded.add(unmeasured);
    }
}

}  // namespace

void settle_sealed(const round_plan& plan, uint32_t lane, compaction_report& report) {
    lane_state& state = plan.owner.lanes[lane];
    const round_target target = round_target_of(plan, lane);
    note_recoded(plan, lane, target, report);
    replace_table(plan, lane, report);
    state.sealed_blocks = target.sealed_blocks;
    state.opened_slots = target.opened_slots;
}

}  // namespace kvrt
