// Scores of a layer's lanes: which scorer runs over which slots, cut over heads and stretches of
// slots.
#include <algorithm>

#include "retention/round.hpp"
#include "retention/scores.hpp"

namespace kvrt {

namespace {

/// Slots a unit of scoring work takes; the scores do not depend on it.
constexpr uint32_t slots_per_unit = 2048;

const layer_geometry& layer_of(const round_plan& plan, uint32_t lane) {
    return plan.store.model.layers[plan.store.model.lanes[lane].layer];
}

/// Runs body(layout, lane, head of the lane, first slot, end slot) over all heads and stretches of
/// a layer's chosen lanes.
template <class callable>
void for_each_stretch(const round_plan& plan, const layer_geometry& layer, const callable& body) {
    uint32_t most_slots = 0;
    for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
        if (plan.chosen(lane)) most_slots = std::max(most_slots, plan.owner.lanes[lane].slots);
    }
    const uint32_t stretches = ceil_divide(most_slots, slots_per_unit);
    plan.store.threads.for_each(layer.kv_heads * stretches, [&](uint32_t unit) {
        const head_place place = layer.place_of(unit / stretches);
        const lane_geometry& geometry = plan.store.model.lanes[place.lane];
        const lane_state& state = plan.owner.lanes[place.lane];
        const uint32_t first = unit % stretches * slots_per_unit;
        if (!plan.chosen(place.lane) || first >= state.slots) return;
        const uint32_t sealed = state.sealed_blocks * plan.store.model.block_tokens;
        const uint32_t end = std::min(first + slots_per_unit, state.slots);
        const uint32_t middle = std::clamp(sealed, first, end);
        if (first < middle) body(geometry.sealed_layout, place.lane, place.head, first, middle);
        if (middle < end) body(geometry.layout, place.lane, place.head, middle, end);
    });
}

void score_by_triattention(const round_plan& plan, const layer_geometry& layer) {
    const lane_geometry& first_lane = plan.store.model.lanes[layer.first_lane];
    retention_context& context = plan.context;
    triattention_shape shape;
    shape.key_dim = first_lane.layout.keys.dim;
    shape.group = layer.group();
    shape.offset_max = plan.policy.offset_max != 0 ? plan.policy.offset_max : default_offset_max;
    shape.maximum = (plan.policy.flags & KV_POLICY_OFFSETS_MAX) != 0;

    triattention_phases(shape, layer.rope, plan.owner.next_position, context.phases.data());
    const float* means =
        context.statistics.means.data() + context.statistics.offset[first_lane.layer];
    const uint64_t length = context.statistics.length;
    const uint64_t per_group = uint64_t{shape.group} * layer.rope.bands(shape.key_dim);
    for (uint32_t head = 0; head < layer.kv_heads; ++head) {
        const float* real = means + head * per_group;
        triattention_weights(shape, layer.rope, context.phases.data(),
                             {real, real + length, real + 2 * length},
                             context.weights.data() + head * context.weight_stride);
    }
    for_each_stretch(
        plan, layer,
        [&](const tile_layout& layout, uint32_t lane, uint32_t head, uint32_t first, uint32_t end) {
            const slot_positions positions = positions_of(plan.store, plan.owner, lane, head);
            const uint64_t kv_head = plan.store.model.lanes[lane].first_head + head;
            score_triattention(layout, plan.store.blocks.arena(), plan.owner.lanes[lane].table,
                               first, end, head, shape, layer.rope,
                               context.weights.data() + kv_head * context.weight_stride,
                               lane_scores(plan, lane, head), context.slot_stride, &positions);
        });
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        float* scores = lane_scores(plan, lane, head);
        normalise_and_reduce(scores, context.slot_stride, shape.group,
                             guards_of(plan, lane, head).candidates, scores);
    });
}

void score_by_chance(const round_plan& plan, const layer_geometry& layer) {
    const bool per_layer = plan.selection == KV_SELECT_PER_LAYER_PER_HEAD;
    const bool per_head = plan.selection != KV_SELECT_UNION;
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        const lane_geometry& geometry = plan.store.model.lanes[lane];
        random_key key;
        key.seed = plan.policy.seed;
        key.round = plan.owner.rounds_run;
        key.layer = per_layer ? geometry.layer : 0;
        key.head = per_head ? geometry.first_head + head : 0;
        score_random(key, positions_of(plan.store, plan.owner, lane, head),
                     guards_of(plan, lane, head).candidates, lane_scores(plan, lane, head));
    });
}

}  // namespace

guarded_slots guards_of(const round_plan& plan, uint32_t lane, uint32_t kv_head) {
    guard_rules rules;
    const bool protect = (plan.policy.flags & KV_POLICY_PROTECT_PROMPT) != 0;
    rules.prompt_tokens = protect ? plan.policy.prompt_tokens : 0;
    rules.sinks = plan.policy.sinks;
    rules.recent = plan.policy.recent;
    rules.pinned = plan.owner.pinned;
    rules.pinned_count = plan.owner.pinned_count;
    return apply_guards(rules, positions_of(plan.store, plan.owner, lane, kv_head));
}

float* lane_scores(const round_plan& plan, uint32_t lane, uint32_t kv_head) {
    const uint64_t head_of_layer = plan.store.model.lanes[lane].first_head + kv_head;
    return plan.context.scores.data() +
           head_of_layer * layer_of(plan, lane).group() * plan.context.slot_stride;
}

void score_layer(const round_plan& plan, const layer_geometry& layer) {
    switch (plan.policy.scorer) {
        case KV_SCORER_TRIATTENTION:
            score_by_triattention(plan, layer);
            return;
        case KV_SCORER_RANDOM:
            score_by_chance(plan, layer);
            return;
        case KV_SCORER_KEY_NORM:
            for_each_stretch(plan, layer,
                             [&](const tile_layout& layout, uint32_t lane, uint32_t head,
                                 uint32_t first, uint32_t end) {
                                 const slot_positions positions =
                                     positions_of(plan.store, plan.owner, lane, head);
                                 score_key_norm(layout, plan.store.blocks.arena(),
                                                plan.owner.lanes[lane].table, first, end, head,
                                                lane_scores(plan, lane, head), &positions);
                             });
            return;
        default:
            for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
                score_streaming(guards_of(plan, lane, head).candidates,
                                lane_scores(plan, lane, head));
            });
    }
}

}  // namespace kvrt
