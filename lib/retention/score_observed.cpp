// Scores from what attention gave each token, or the host said.
#include "retention/scoring.hpp"
#include "retention/transform.hpp"

namespace kvrt {

namespace {

uint32_t pool_width_of(const round_plan& plan) {
    return plan.policy.pool_width != 0 ? plan.policy.pool_width
                                       : find_scorer(plan.policy.scorer)->pool_width;
}

}  // namespace

void pool_scores(const round_plan& plan, const slot_positions& positions, float* scores) {
    const uint32_t width = pool_width_of(plan);
    if (width == 1) return;
    const uint32_t end = slots_before_recent(plan, positions);
    const bool maximum =
        (plan.policy.flags & KV_POLICY_POOL_MAX) != 0 ||
        (plan.policy.pool_width == 0 && find_scorer(plan.policy.scorer)->pools_maximum);
    if (maximum) {
        pool_max(scores, end, width, scores);
    } else {
        pool_mean(scores, end, width, scores);
    }
}

void score_by_observation(const round_plan& plan, const layer_geometry& layer) {
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        const slot_positions positions = positions_of(plan.store, plan.owner, lane, head);
        float* scores = lane_scores(plan, lane, head);
        read_observations(plan.context.observations, plan.owner, lane, head, positions.slots,
                          scores);
        pool_scores(plan, positions, scores);
    });
}

}  // namespace kvrt
