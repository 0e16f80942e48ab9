// Scores of a layer's lanes: which scorer runs over which slots, cut over heads and stretches of
// slots.
#include <algorithm>

#include "retention/measures.hpp"
#include "retention/scorers.hpp"
#include "retention/scoring.hpp"

namespace kvrt {

namespace {

const layer_geometry& layer_of(const round_plan& plan, uint32_t lane) {
    return plan.store.model.layers[plan.store.model.lanes[lane].layer];
}

void score_by_chance(const round_plan& plan, const layer_geometry& layer) {
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        score_random(draw_key(plan, lane, head), positions_of(plan.store, plan.owner, lane, head),
                     guards_of(plan, lane, head).candidates, lane_scores(plan, lane, head));
    });
}

void score_by_key_norm(const round_plan& plan, const layer_geometry& layer) {
    for_each_part(
        plan, layer,
        [&](const stored_rows& rows, uint32_t lane, uint32_t head, uint32_t first, uint32_t end) {
            float* scores = lane_scores(plan, lane, head);
            slot_measures measures;
            measures.key_norm = scores;
            measure_slots(rows, first, end, measures);
            for (uint32_t slot = first; slot < end; ++slot) scores[slot] = -scores[slot];
        });
}

void score_by_recency(const round_plan& plan, const layer_geometry& layer) {
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        score_streaming(guards_of(plan, lane, head).candidates, lane_scores(plan, lane, head));
    });
}

void make_scores(const round_plan& plan, const layer_geometry& layer) {
    switch (plan.policy.scorer) {
        case KV_SCORER_TRIATTENTION:
            return score_by_triattention(plan, layer);
        case KV_SCORER_RANDOM:
            return score_by_chance(plan, layer);
        case KV_SCORER_KEY_NORM:
            return score_by_key_norm(plan, layer);
        case KV_SCORER_BLEND:
            return score_by_blend(plan, layer);
        case KV_SCORER_RKV:
            return score_by_redundancy(plan, layer);
        case KV_SCORER_KEYDIFF:
            return score_by_keydiff(plan, layer);
        case KV_SCORER_LAGKV:
            return score_by_lagkv(plan, layer);
        case KV_SCORER_VASE_SKETCH:
            return score_by_sketch(plan, layer);
        case KV_SCORER_EXPECTED_ATTENTION:
            return score_by_expectation(plan, layer);
        case KV_SCORER_STREAMING:
            return score_by_recency(plan, layer);
        default:
            return score_by_observation(plan, layer);
    }
}

}  // namespace

guard_rules guard_rules_of(const round_plan& plan) {
    guard_rules rules;
    const bool protect = (plan.policy.flags & KV_POLICY_PROTECT_PROMPT) != 0;
    rules.prompt_tokens = protect ? plan.policy.prompt_tokens : 0;
    rules.sinks = plan.policy.sinks;
    rules.recent = plan.recent;
    rules.pinned = plan.owner.pinned;
    rules.pinned_count = plan.owner.pinned_count;
    return rules;
}

held_positions held_by_guards(const round_plan& plan) {
    return held_by(guard_rules_of(plan), plan.owner.next_position);
}

guarded_slots guards_of(const round_plan& plan, uint32_t lane, uint32_t kv_head) {
    return apply_guards(guard_rules_of(plan), positions_of(plan.store, plan.owner, lane, kv_head));
}

float* lane_scores(const round_plan& plan, uint32_t lane, uint32_t kv_head) {
    const uint64_t head_of_layer = plan.store.model.lanes[lane].first_head + kv_head;
    return plan.context.scores.data() +
           head_of_layer * layer_of(plan, lane).group() * plan.context.slot_stride;
}

float* measures_of(const round_plan& plan, uint32_t lane, uint32_t kv_head) {
    const uint64_t head_of_layer = plan.store.model.lanes[lane].first_head + kv_head;
    return plan.context.scratch.measures.data() + head_of_layer * plan.context.slot_stride;
}

stored_rows rows_of(const round_plan& plan, uint32_t lane, uint32_t kv_head,
                    const slot_positions& positions) {
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    const lane_state& state = plan.owner.lanes[lane];
    stored_rows rows;
    rows.open = &geometry.layout;
    rows.sealed = geometry.seals ? &geometry.sealed_layout : nullptr;
    rows.sealed_slots = std::min(state.sealed_blocks * plan.store.model.block_tokens, state.slots);
    rows.arena = plan.store.blocks.arena();
    rows.blocks = state.table;
    rows.kv_head = kv_head;
    rows.positions = &positions;
    return rows;
}

random_key draw_key(const round_plan& plan, uint32_t lane, uint32_t kv_head) {
    const lane_geometry& geometry = plan.store.model.lanes[lane];
    const bool by_layer =
        plan.selection == KV_SELECT_PER_LAYER_PER_HEAD || plan.selection == KV_SELECT_PER_LAYER;
    const bool by_head =
        plan.selection == KV_SELECT_PER_LAYER_PER_HEAD || plan.selection == KV_SELECT_PER_HEAD;
    random_key key;
    key.seed = plan.policy.seed;
    key.round = plan.owner.rounds_run;
    key.layer = by_layer ? geometry.layer : 0;
    key.head = by_head ? geometry.first_head + kv_head : 0;
    return key;
}

uint32_t slots_before_recent(const round_plan& plan, const slot_positions& positions) {
    const uint64_t next = positions.next_position;
    return positions.find(next - std::min<uint64_t>(next, plan.recent));
}

/// Where all heads of a layer share one set, the first one's scores become the sums of all.
static void share_in_layer(const round_plan& plan, const layer_geometry& layer) {
    const slot_ranges candidates = guards_of(plan, layer.first_lane, 0).candidates;
    float* total = lane_scores(plan, layer.first_lane, 0);
    for (uint32_t kv_head = 1; kv_head < layer.kv_heads; ++kv_head) {
        const head_place place = layer.place_of(kv_head);
        add_scores(candidates, lane_scores(plan, place.lane, place.head), total);
    }
}

void score_layer(const round_plan& plan, const layer_geometry& layer) {
    make_scores(plan, layer);
    if (plan.selection == KV_SELECT_PER_LAYER) share_in_layer(plan, layer);
}

}  // namespace kvrt
