// Scores from what attention gave each token, or the host said.
#include "retention/scoring.hpp"
#include "retention/transform.hpp"

namespace kvrt {

score_pooling pooling_of(const kv_policy& policy) {
    const scorer_description& scorer = *find_scorer(policy.scorer);
    const bool own = policy.pool_width == 0;
    return {own ? scorer.pool_width : policy.pool_width,
            (policy.flags & KV_POLICY_POOL_MAX) != 0 || (own && scorer.pools_maximum)};
}

void pool_scores(const round_plan& plan, const slot_positions& positions, float* scores) {
    const score_pooling pooling = pooling_of(plan.policy);
    if (pooling.width == 1) return;
    const uint32_t end = slots_before_recent(plan, positions);
    if (pooling.maximum) {
        pool_max(scores, end, pooling.width, scores);
    } else {
        pool_mean(scores, end, pooling.width, scores);
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
