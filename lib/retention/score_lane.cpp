// Scores of one lane: which scorer runs over which slots, cut over heads and stretches of slots.
#include <algorithm>

#include "retention/round.hpp"
#include "retention/scores.hpp"

namespace kvrt {

namespace {

/// Slots a unit of scoring work takes; the scores do not depend on it.
constexpr uint32_t slots_per_unit = 2048;

uint32_t group_of(const round_plan& plan, uint32_t lane) {
    const layer_geometry& layer = plan.store.model.layers[plan.store.model.lanes[lane].layer];
    return layer.query_heads / layer.kv_heads;
}

/// Runs body(layout, kv_head, first slot, end slot) over all heads and stretches of a lane.
template <class callable>
void for_each_stretch(const round_plan& plan, uint32_t lane, const callable& body) {
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    const lane_state& state = plan.owner.lanes[lane];
    const uint32_t sealed =
        std::min(state.sealed_blocks * plan.store.model.block_tokens, state.slots);
    const uint32_t stretches = ceil_divide(state.slots, slots_per_unit);
    plan.store.threads.for_each(geometry.kv_heads * stretches, [&](uint32_t unit) {
        const uint32_t first = unit % stretches * slots_per_unit;
        const uint32_t end = std::min(first + slots_per_unit, state.slots);
        const uint32_t middle = std::clamp(sealed, first, end);
        const uint32_t head = unit / stretches;
        if (first < middle) body(geometry.sealed_layout, head, first, middle);
        if (middle < end) body(geometry.layout, head, middle, end);
    });
}

void score_by_triattention(const round_plan& plan, uint32_t lane) {
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    const layer_geometry& layer = plan.store.model.layers[geometry.layer];
    retention_context& context = plan.context;
    triattention_shape shape;
    shape.key_dim = geometry.layout.keys.dim;
    shape.group = group_of(plan, lane);
    shape.offset_max = plan.policy.offset_max != 0 ? plan.policy.offset_max : default_offset_max;
    shape.maximum = (plan.policy.flags & KV_POLICY_OFFSETS_MAX) != 0;

    triattention_phases(shape, layer.rope, plan.owner.next_position, context.phases.data());
    const float* means = context.statistics.means.data() + context.statistics.offset[lane];
    const uint64_t length = context.statistics.length;
    const uint64_t per_group = uint64_t{shape.group} * layer.rope.bands(shape.key_dim);
    for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
        const float* real = means + head * per_group;
        triattention_weights(shape, layer.rope, context.phases.data(),
                             {real, real + length, real + 2 * length},
                             context.weights.data() + head * context.weight_stride);
    }
    for_each_stretch(
        plan, lane, [&](const tile_layout& layout, uint32_t head, uint32_t first, uint32_t end) {
            const slot_positions positions = positions_of(plan.store, plan.owner, lane, head);
            score_triattention(layout, plan.store.blocks.arena(), plan.owner.lanes[lane].table,
                               first, end, head, shape, layer.rope,
                               context.weights.data() + head * context.weight_stride,
                               lane_scores(plan, lane, head), context.slot_stride, &positions);
        });
    plan.store.threads.for_each(geometry.kv_heads, [&](uint32_t head) {
        float* scores = lane_scores(plan, lane, head);
        normalise_and_reduce(scores, context.slot_stride, shape.group,
                             guards_of(plan, lane, head).candidates, scores);
    });
}

void score_by_chance(const round_plan& plan, uint32_t lane) {
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    const bool per_layer = plan.selection == KV_SELECT_PER_LAYER_PER_HEAD;
    const bool per_head = plan.selection != KV_SELECT_UNION;
    plan.store.threads.for_each(geometry.kv_heads, [&](uint32_t head) {
        random_key key;
        key.seed = plan.policy.seed;
        key.round = plan.owner.rounds_run;
        key.layer = per_layer ? geometry.layer : 0;
        key.head = per_head ? head : 0;
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
    return plan.context.scores.data() +
           uint64_t{kv_head} * group_of(plan, lane) * plan.context.slot_stride;
}

void score_lane(const round_plan& plan, uint32_t lane) {
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    switch (plan.policy.scorer) {
        case KV_SCORER_TRIATTENTION:
            score_by_triattention(plan, lane);
            return;
        case KV_SCORER_RANDOM:
            score_by_chance(plan, lane);
            return;
        case KV_SCORER_KEY_NORM:
            for_each_stretch(
                plan, lane,
                [&](const tile_layout& layout, uint32_t head, uint32_t first, uint32_t end) {
                    const slot_positions positions =
                        positions_of(plan.store, plan.owner, lane, head);
                    score_key_norm(layout, plan.store.blocks.arena(), plan.owner.lanes[lane].table,
                                   first, end, head, lane_scores(plan, lane, head), &positions);
                });
            return;
        default:
            for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
                score_streaming(guards_of(plan, lane, head).candidates,
                                lane_scores(plan, lane, head));
            }
    }
}

}  // namespace kvrt
