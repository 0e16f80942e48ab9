// Which lanes a round takes, and how many slots each of them keeps.
#include <algorithm>

#include "retention/rank.hpp"
#include "retention/round.hpp"

namespace kvrt {

namespace {

bool prompt_on_top(const round_plan& plan) {
    return (plan.policy.flags & KV_POLICY_PROMPT_ON_TOP) != 0;
}

/// Every lane keeps what the one does whose guards hold most.
void allocate_uniformly(const round_plan& plan) {
    uint32_t keep = 0;
    const uint32_t lanes = static_cast<uint32_t>(plan.store.model.lanes.size());
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        if (plan.chosen(lane)) keep = std::max(keep, kept_of(plan, lane, plan.policy.budget));
    }
    std::fill_n(plan.context.keep.data(), lanes, keep);
}

void allocate_pyramid_of(const round_plan& plan) {
    const model_geometry& model = plan.store.model;
    pyramid_shape shape;
    shape.layers = 0;
    for (const layer_geometry& layer : model.layers) {
        if (!plan.any_chosen(layer)) continue;
        ++shape.layers;
        shape.slots = std::max(shape.slots, plan.owner.lanes[layer.first_lane].slots);
    }
    if (shape.layers == 0) return;
    shape.budget = std::min(plan.policy.budget, shape.slots);
    shape.window = plan.policy.recent;
    if (plan.policy.steepness != 0) shape.steepness = plan.policy.steepness;
    uint32_t* budgets = plan.context.scratch.budgets.data();
    allocate_pyramid(shape, budgets);
    for (const layer_geometry& layer : model.layers) {
        if (!plan.any_chosen(layer)) continue;
        for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
            if (plan.chosen(lane)) plan.context.keep[lane] = kept_of(plan, lane, *budgets);
        }
        ++budgets;
    }
}

/// Heads of a layer share the sum of their budgets.
void allocate_adaptively(const round_plan& plan, const layer_geometry& layer) {
    head_share* shares = plan.context.scratch.shares.data();
    const double floor_share = plan.policy.floor_share != 0.0f ? plan.policy.floor_share : 0.2;
    uint64_t total = 0;
    for (uint32_t kv_head = 0; kv_head < layer.kv_heads; ++kv_head) {
        const head_place place = layer.place_of(kv_head);
        const guarded_slots guarded = guards_of(plan, place.lane, place.head);
        // Heads that earlier rounds have left with less still bring in their whole budget.
        const uint32_t kept = budget_of(plan, place.lane, plan.policy.budget);
        head_share& share = shares[kv_head];
        share = {};
        share.scores = lane_scores(plan, place.lane, place.head);
        share.candidates = guarded.candidates;
        share.safe =
            std::min({safe_candidates(floor_share, kept, guarded.protected_slots),
                      kept - std::min(kept, guarded.protected_slots), guarded.candidates.slots()});
        total += kept - std::min(kept, guarded.protected_slots);
    }
    allocate_heads(shares, layer.kv_heads, total);
    for (uint32_t kv_head = 0; kv_head < layer.kv_heads; ++kv_head) {
        const head_place place = layer.place_of(kv_head);
        plan.context.keep[place.lane] =
            guards_of(plan, place.lane, place.head).protected_slots + shares[kv_head].kept;
    }
}

/// Do the heads of a layer hold more than the sum of their budgets?
bool exceeds_budgets(const round_plan& plan, const layer_geometry& layer) {
    uint64_t slots = 0, budgets = 0;
    for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
        slots += plan.owner.lanes[lane].slots;
        budgets += budget_of(plan, lane, plan.policy.budget);
    }
    return slots > budgets;
}

/// What reaches the threshold, within the budget; heads that share a lane keep what the one with
/// the most does.
void allocate_by_threshold(const round_plan& plan, const layer_geometry& layer) {
    const auto wanted_by = [&](uint32_t lane, uint32_t head) {
        const guarded_slots guarded = guards_of(plan, lane, head);
        return guarded.protected_slots + count_at_least(lane_scores(plan, lane, head),
                                                        guarded.candidates, plan.policy.threshold);
    };
    for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
        if (!plan.chosen(lane)) continue;
        uint32_t wanted = 0;
        if (plan.selection == KV_SELECT_PER_LAYER) {  // the scores of all are the first head's
            wanted = wanted_by(layer.first_lane, 0);
        } else {
            for (uint32_t head = 0; head < plan.store.model.lanes[lane].kv_heads; ++head) {
                wanted = std::max(wanted, wanted_by(lane, head));
            }
        }
        plan.context.keep[lane] = std::min(wanted, kept_of(plan, lane, plan.policy.budget));
    }
}

}  // namespace

slot_count budget_on_device(const round_plan& plan, uint32_t lane, uint32_t budget) {
    const held_positions held = held_by_guards(plan);
    const retained_spans retained = retained_of(plan.store, plan.owner, lane);
    slot_count guarded, prompt;
    for (const held_range& range : held) {
        const slot_count here = count_between(retained, range.first, range.end);
        guarded.least += here.least;
        guarded.most += here.most;
    }
    if (prompt_on_top(plan))
        prompt = count_between(retained, 0, guard_rules_of(plan).prompt_tokens);
    return {std::max(budget + prompt.least, guarded.least),
            std::max(budget + prompt.most, guarded.most)};
}

uint32_t budget_of(const round_plan& plan, uint32_t lane, uint32_t budget) {
    constexpr uint32_t endless = 0xffffffffu;
    if (plan.store.on_device()) return budget_on_device(plan, lane, budget).least;
    uint32_t keep = 0;
    for (uint32_t head = 0; head < plan.store.model.lanes[lane].kv_heads; ++head) {
        keep = std::max(keep, retained_after_round(endless, budget, prompt_on_top(plan),
                                                   guards_of(plan, lane, head)));
    }
    return keep;
}

uint32_t kept_of(const round_plan& plan, uint32_t lane, uint32_t budget) {
    return std::min(plan.owner.lanes[lane].slots, budget_of(plan, lane, budget));
}

uint32_t places_of(const round_plan& plan, uint32_t lane, uint32_t kv_head) {
    const uint32_t keep =
        allocates_by_scores(plan) ? kept_of(plan, lane, plan.policy.budget) : plan.keep(lane);
    return keep - std::min(keep, guards_of(plan, lane, kv_head).protected_slots);
}

bool allocates_by_scores(const round_plan& plan) {
    return plan.policy.allocator == KV_ALLOCATE_ADAPTIVE ||
           plan.policy.allocator == KV_ALLOCATE_THRESHOLD;
}

bool choose_lanes(round_plan& plan) {
    const model_geometry& model = plan.store.model;
    const uint32_t lanes = static_cast<uint32_t>(model.lanes.size());
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        const lane_geometry& geometry = model.lanes[lane];
        const bool skipped = geometry.layer < plan.policy.skip_layers;
        const bool chosen = geometry.evictable && !skipped && plan.owner.lanes[lane].slots != 0;
        plan.context.chosen_lanes[lane] = chosen ? 1 : 0;
    }
    if (plan.policy.allocator == KV_ALLOCATE_PYRAMID) {
        allocate_pyramid_of(plan);
    } else {
        allocate_uniformly(plan);
    }
    // A threshold may be reached by none of a lane's tokens, however few it has.
    const bool any_number = plan.policy.allocator == KV_ALLOCATE_THRESHOLD;
    bool any = false;
    for (const layer_geometry& layer : model.layers) {
        if (!plan.any_chosen(layer)) continue;
        const bool competes = plan.policy.allocator == KV_ALLOCATE_ADAPTIVE;
        const bool together = competes && exceeds_budgets(plan, layer);
        for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
            const uint32_t present = plan.owner.lanes[lane].slots;
            const bool alone = !competes && present > plan.keep(lane);
            const bool removes = any_number || together || alone;
            if (allocates_by_scores(plan)) plan.context.keep[lane] = present;
            if (!removes) plan.context.chosen_lanes[lane] = 0;
            any = any || plan.chosen(lane);
        }
    }
    return any;
}

void allocate_layer(const round_plan& plan, const layer_geometry& layer) {
    if (plan.policy.allocator == KV_ALLOCATE_ADAPTIVE) {
        allocate_adaptively(plan, layer);
    } else {
        allocate_by_threshold(plan, layer);
    }
    for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
        if (plan.keep(lane) == plan.owner.lanes[lane].slots) plan.context.chosen_lanes[lane] = 0;
    }
}

}  // namespace kvrt
