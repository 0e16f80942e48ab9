#include "step/counted_rounds.hpp"

#include <algorithm>
#include <cstring>

namespace kvrt {

status counted_rounds::prepare(cache& store, uint32_t* memory) {
    if (prepared()) return KV_OK;
    KVRT_TRY(
        counts.allocate(store.allocator, store.limits.max_sequences, "rounds that are counted"));
    words = memory;
    return KV_OK;
}

uint32_t* counted_rounds::words_of(const cache& store, const sequence& owner) const {
    return words + store.sequences.index(owner) * store.model.lanes.size();
}

const counted_rounds::count* counted_rounds::find(const cache& store, const sequence& owner) const {
    if (!prepared()) return nullptr;
    const count& known = counts[store.sequences.index(owner)];
    const bool same = known.holds && known.generation == owner.generation &&
                      known.compactions == owner.compactions;
    return same ? &known : nullptr;
}

void counted_rounds::begin(const cache& store, const sequence& owner, const kv_policy& policy,
                           uint64_t step) {
    counts[store.sequences.index(owner)] = {step, true, owner.generation, owner.compactions,
                                            policy};
}

static bool is_same(const kv_policy& a, const kv_policy& b) {
    return std::memcmp(&a, &b, sizeof(kv_policy)) == 0;
}

/// The device may still write the words.
void counted_rounds::forget(const cache& store, const sequence& owner) {
    if (prepared()) counts[store.sequences.index(owner)].holds = false;
}

void counted_rounds::forget_others(const cache& store, const sequence& owner,
                                   const kv_policy* policy) {
    const count* const known = find(store, owner);
    if (known != nullptr && (policy == nullptr || !is_same(known->policy, *policy))) {
        forget(store, owner);
    }
}

count_state find_count(const round_plan& plan, const counted_rounds& rounds) {
    const uint64_t step = rounds.counts[plan.store.sequences.index(plan.owner)].step;
    if (step != 0 && !plan.store.device.passed(step)) return count_state::on_its_way;
    const counted_rounds::count* const known = rounds.find(plan.store, plan.owner);
    const bool here = known != nullptr && is_same(known->policy, plan.policy);
    return here ? count_state::here : count_state::none;
}

bool apply_count(const round_plan& plan, const counted_rounds& rounds) {
    const uint32_t* const words = rounds.words_of(plan.store, plan.owner);
    bool any = false;
    for (uint32_t lane = 0; lane < plan.store.model.lanes.size(); ++lane) {
        if (!plan.chosen(lane)) continue;
        const uint32_t slots = plan.owner.lanes[lane].slots;
        // Guards may have come to hold more since.
        const uint32_t held =
            static_cast<uint32_t>(std::min<uint64_t>(budget_on_device(plan, lane, 0).most, slots));
        plan.context.keep[lane] = std::clamp(words[lane], held, slots);
        if (plan.keep(lane) == slots) plan.context.chosen_lanes[lane] = 0;
        any = any || plan.chosen(lane);
    }
    return any;
}

const kv_policy* policy_to_move(const cache& store, const counted_rounds& rounds,
                                const sequence& owner) {
    const counted_rounds::count* const known = rounds.find(store, owner);
    return known != nullptr && store.device.passed(known->step) ? &known->policy : nullptr;
}

void plan_count(const round_plan& plan, uint32_t lane, const counted_rounds& rounds,
                kvrt_round_lane& made) {
    const layer_geometry& layer = plan.store.model.layers[plan.store.model.lanes[lane].layer];
    const double floor_share = plan.policy.floor_share != 0.0f ? plan.policy.floor_share : 0.2;
    made.count = rounds.words_of(plan.store, plan.owner) + lane;
    made.keep = kept_of(plan, lane, plan.policy.budget);
    made.budget = budget_of(plan, lane, plan.policy.budget);
    made.floor = safe_candidates(floor_share, made.budget, 0);
    made.threshold = plan.policy.threshold;
    for (uint32_t other = layer.first_lane; other < layer.end_lane(); ++other) {
        if (plan.chosen(other)) continue;
        made.absent_budget += budget_of(plan, other, plan.policy.budget);
    }
}

}  // namespace kvrt
