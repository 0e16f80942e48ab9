// What a policy does to scores, whoever made them: survivors are drawn instead of ranked, large
// values are held in reserve, and no part of a long prompt goes wholly.
#include "retention/measures.hpp"
#include "retention/rank.hpp"
#include "retention/sampling.hpp"
#include "retention/scorers.hpp"
#include "retention/scoring.hpp"

namespace kvrt {

namespace {

uint32_t reserve_of(const round_plan& plan) { return value_reserve_of(plan.policy); }

bool has_quota(const round_plan& plan) {
    return plan.policy.segments != 0 && plan.policy.segment_quota != 0;
}

void measure_ranges(const round_plan& plan, const layer_geometry& layer) {
    for_each_part(
        plan, layer,
        [&](const stored_rows& rows, uint32_t lane, uint32_t head, uint32_t first, uint32_t end) {
            slot_measures measures;
            measures.value_range = measures_of(plan, lane, head);
            measure_slots(rows, first, end, measures);
        });
}

/// Adjusts a set's scores. Of what is held whatever its score there is no more than there are
/// places, since +infinity has no order.
void adjust_set(const round_plan& plan, const head_place& place, const float* ranges,
                float* scores) {
    const slot_positions positions = positions_of(plan.store, plan.owner, place.lane, place.head);
    const slot_ranges candidates = guards_of(plan, place.lane, place.head).candidates;
    if (draws_survivors(plan.policy)) {
        sample_scores(draw_key(plan, place.lane, place.head), positions, candidates, scores);
    }
    uint32_t places = places_of(plan, place.lane, place.head);
    if (has_quota(plan)) {  // the best of a segment, so before others are held
        const segment_quota quota{
            {0, plan.policy.prompt_tokens},
            plan.policy.segments,
            std::min(plan.policy.segment_quota, places / plan.policy.segments)};
        places -= std::min(places, reserve_segments(quota, positions, candidates, scores));
    }
    if (reserve_of(plan) != 0) {
        reserve_largest(ranges, candidates, std::min(reserve_of(plan), places), scores);
    }
}

bool adjusts(const round_plan& plan) {
    return draws_survivors(plan.policy) || reserve_of(plan) != 0 || has_quota(plan);
}

float* ranges_of(const round_plan& plan, uint32_t set) {
    return plan.context.scratch.ranges.data() + set * plan.context.slot_stride;
}

}  // namespace

uint32_t value_reserve_of(const kv_policy& policy) {
    if (policy.value_reserve != 0) return policy.value_reserve;
    return policy.scorer == KV_SCORER_VASE_ATTENTION ? policy.budget / 4 : 0;
}

void adjust_scores(const round_plan& plan, const layer_geometry& layer) {
    if (!adjusts(plan)) return;
    if (reserve_of(plan) != 0) measure_ranges(plan, layer);
    if (plan.selection != KV_SELECT_PER_LAYER) {
        for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
            adjust_set(plan, {lane, head}, measures_of(plan, lane, head),
                       lane_scores(plan, lane, head));
        });
        return;
    }
    float* ranges = measures_of(plan, layer.first_lane, 0);
    for (uint32_t kv_head = 1; reserve_of(plan) != 0 && kv_head < layer.kv_heads; ++kv_head) {
        const head_place place = layer.place_of(kv_head);
        raise_scores(guards_of(plan, place.lane, place.head).candidates,
                     measures_of(plan, place.lane, place.head), ranges);
    }
    adjust_set(plan, {layer.first_lane, 0}, ranges, lane_scores(plan, layer.first_lane, 0));
}

void note_ranges(const round_plan& plan, const layer_geometry& layer) {
    if (reserve_of(plan) == 0) return;
    measure_ranges(plan, layer);
    for (uint32_t kv_head = 0; kv_head < layer.kv_heads; ++kv_head) {
        const head_place place = layer.place_of(kv_head);
        if (!plan.chosen(place.lane)) continue;
        raise_scores(guards_of(plan, place.lane, place.head).candidates,
                     measures_of(plan, place.lane, place.head),
                     ranges_of(plan, set_of(plan, place.lane, place.head)));
    }
}

void begin_ranges(const round_plan& plan, const head_place& place) {
    fill_scores(guards_of(plan, place.lane, place.head).candidates, 0.0f,
                ranges_of(plan, set_of(plan, place.lane, place.head)));
}

void adjust_totals(const round_plan& plan, const head_place& place) {
    if (!adjusts(plan)) return;
    const uint32_t set = set_of(plan, place.lane, place.head);
    adjust_set(plan, place, ranges_of(plan, set), totals_of(plan, set));
}

}  // namespace kvrt
