#include "step/round_sets.hpp"

#include <algorithm>

#include "step/step.hpp"

namespace kvrt {

namespace {

/// Values of kvrt_round_lane::bundle: those of selections common to layers; then one for each layer
/// whose lanes are of several kinds, by its number.
enum bundle : uint32_t { bundle_of_none, bundle_of_union, bundle_of_heads, bundle_of_first_layer };

/// The first chosen lane that has a head of its layer.
uint32_t first_with_head(const round_plan& plan, uint32_t head) {
    uint32_t lane = 0;
    for (;; ++lane) {
        const lane_geometry& here = plan.store.model.lanes[lane];
        const bool has = head >= here.first_head && head - here.first_head < here.kv_heads;
        if (plan.chosen(lane) && has) return lane;
    }
}

uint32_t first_chosen(const round_plan& plan) {
    const uint8_t* const chosen = plan.context.chosen_lanes.data();
    const uint8_t* const end = chosen + plan.store.model.lanes.size();
    return static_cast<uint32_t>(std::find(chosen, end, 1) - chosen);
}

/// Do all heads of a lane hold what those of another do, that has them or shares its set?
bool holds_the_same(const round_plan& plan, uint32_t lane, uint32_t other, bool by_head) {
    const bool is_one = by_head || plan.store.model.lanes[lane].kv_heads == 1;
    return (lane == other && is_one) ||
           surely_same(retained_of(plan.store, plan.owner, other),
                       retained_of(plan.store, plan.owner, lane), by_head);
}

/// A lane that the round takes, or whose scores join.
status check_lane(const round_plan& plan, uint32_t lane) {
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    bool same = true;
    if (plan.selection == KV_SELECT_PER_LAYER) {
        const uint32_t first = plan.store.model.layers[geometry.layer].first_lane;
        same = plan.chosen(lane) && holds_the_same(plan, lane, first, false);
    } else if (plan.selection == KV_SELECT_UNION) {
        same = holds_the_same(plan, lane, first_chosen(plan), false);
    }
    for (uint32_t h = 0; plan.selection == KV_SELECT_PER_HEAD && h < geometry.kv_heads; ++h) {
        const uint32_t first = first_with_head(plan, geometry.first_head + h);
        same = same && holds_the_same(plan, lane, first, true);
    }
    if (same) return KV_OK;
    return fail(KV_INVALID,
                "policy: heads of layer {}, or of it and others, may retain different tokens: a "
                "selection common to them needs the same in all, so keep to one selection per "
                "sequence",
                geometry.layer);
}

}  // namespace

status check_sets_on_device(const round_plan& plan) {
    if (plan.selection == KV_SELECT_PER_LAYER_PER_HEAD) return KV_OK;
    const model_geometry& model = plan.store.model;
    for (uint32_t lane = 0; lane < model.lanes.size(); ++lane) {
        const bool joins =
            plan.chosen(lane) || (plan.selection == KV_SELECT_PER_LAYER &&
                                  plan.any_chosen(model.layers[model.lanes[lane].layer]));
        if (joins) KVRT_TRY(check_lane(plan, lane));
    }
    return KV_OK;
}

uint32_t bundle_of(const device_rounds& rounds, const round_plan& plan, uint32_t layer) {
    if (plan.selection == KV_SELECT_UNION) return bundle_of_union;
    if (plan.selection == KV_SELECT_PER_HEAD) return bundle_of_heads;
    if (plan.selection != KV_SELECT_PER_LAYER) return bundle_of_none;
    const layer_geometry& geometry = plan.store.model.layers[layer];
    for (uint32_t lane = geometry.first_lane; lane < geometry.end_lane(); ++lane) {
        if (rounds.kind_of[lane] != rounds.kind_of[geometry.first_lane]) {
            return bundle_of_first_layer + layer;
        }
    }
    return bundle_of_none;
}

void bundle_counted(const round_plan& plan, uint32_t layer, kvrt_round_lane& made) {
    made.bundle = bundle_of_first_layer + layer;
    // Of one layer alone, that is a set for each of its heads.
    if (plan.selection == KV_SELECT_PER_LAYER_PER_HEAD) made.selection = KV_SELECT_PER_HEAD;
}

uint32_t order_planned(step_context& context, uint32_t first_round, uint32_t rounds,
                       uint32_t planned) {
    device_rounds& all = context.rounds;
    const model_geometry& model = context.store->model;
    uint32_t* const order = all.order.data();
    uint32_t count = 0;
    for (uint32_t i = 0; i < planned; ++i) {
        const uint32_t round = all.planned_origins[i].round;
        if (round >= first_round && round < first_round + rounds) order[count++] = i;
    }
    // Planned were rounds in their order, and the lanes of each in theirs.
    const auto goes_before = [&](uint32_t a, uint32_t b) {
        const kvrt_round_lane &first = all.planned[a], &second = all.planned[b];
        if (first.bundle != second.bundle) return first.bundle < second.bundle;
        if (first.count != nullptr) return a < b;
        const auto part = [&](uint32_t i) {
            return first.bundle == bundle_of_none ? all.planned[i].kind
                                                  : all.run_of[all.planned_origins[i].lane];
        };
        return part(a) != part(b) ? part(a) < part(b) : a < b;
    };
    std::sort(order, order + count, goes_before);
    uint32_t bundle = bundle_of_none, sets = 0;
    for (uint32_t i = 0; i < count; ++i) {
        kvrt_round_lane& lane = all.lanes[i];
        lane = all.planned[order[i]];
        all.origins[i] = all.planned_origins[order[i]];
        if (lane.bundle == bundle_of_none) continue;
        constexpr uint32_t none = ~uint32_t{0};
        if (lane.bundle != bundle) {
            bundle = lane.bundle;
            sets = 0;
            std::fill(all.first_set.begin(), all.first_set.end(), none);
        }
        const lane_geometry& geometry = model.lanes[all.origins[i].lane];
        const bool by_head = lane.selection == KV_SELECT_PER_HEAD;
        uint32_t& first = all.first_set[all.origins[i].round];
        if (first == none) {
            first = sets;
            sets += by_head ? model.layers[geometry.layer].kv_heads : 1;
        }
        lane.set = first + (by_head ? geometry.first_head : 0);
    }
    return count;
}

}  // namespace kvrt
