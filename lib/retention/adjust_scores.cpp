// What a policy does to scores, whoever made them: survivors are drawn instead of ranked, large
// values are held in reserve, and no part of a long prompt goes wholly.
#include "retention/measures.hpp"
#include "retention/rank.hpp"
#include "retention/sampling.hpp"
#include "retention/scorers.hpp"
#include "retention/scoring.hpp"

namespace kvrt {

namespace {

/// Candidates that are kept for their values' range.
uint32_t reserve_of(const round_plan& plan) {
    if (plan.policy.value_reserve != 0) return plan.policy.value_reserve;
    return plan.policy.scorer == KV_SCORER_VASE_ATTENTION ? plan.policy.budget / 4 : 0;
}

}  // namespace

void adjust_scores(const round_plan& plan, const layer_geometry& layer) {
    const bool samples = find_scorer(plan.policy.scorer)->samples_always ||
                         (plan.policy.flags & KV_POLICY_SAMPLE) != 0;
    const uint32_t reserve = reserve_of(plan);
    const bool has_quota = plan.policy.segments != 0 && plan.policy.segment_quota != 0;
    if (reserve != 0) {
        for_each_part(plan, layer,
                      [&](const stored_rows& rows, uint32_t lane, uint32_t head, uint32_t first,
                          uint32_t end) {
                          slot_measures measures;
                          measures.value_range = measures_of(plan, lane, head);
                          measure_slots(rows, first, end, measures);
                      });
    }
    if (!samples && reserve == 0 && !has_quota) return;
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        const slot_positions positions = positions_of(plan.store, plan.owner, lane, head);
        const slot_ranges candidates = guards_of(plan, lane, head).candidates;
        float* scores = lane_scores(plan, lane, head);
        if (samples) sample_scores(draw_key(plan, lane, head), positions, candidates, scores);
        // The best of a segment first: +infinity has no order.
        if (has_quota) {
            const segment_quota quota{
                {0, plan.policy.prompt_tokens}, plan.policy.segments, plan.policy.segment_quota};
            reserve_segments(quota, positions, candidates, scores);
        }
        if (reserve != 0) {
            reserve_largest(measures_of(plan, lane, head), candidates, reserve, scores);
        }
    });
}

}  // namespace kvrt
