// Scores from what queries are expected to look like: TriAttention, alone and beside what was
// observed.
#include <cmath>

#include "retention/scorers.hpp"
#include "retention/scoring.hpp"

namespace kvrt {

triattention_shape shape_of(const cache& store, uint32_t layer, const kv_policy& policy) {
    const layer_geometry& geometry = store.model.layers[layer];
    triattention_shape shape;
    shape.key_dim = store.model.lanes[geometry.first_lane].layout.keys.dim;
    shape.group = geometry.group();
    shape.offset_max = policy.offset_max != 0 ? policy.offset_max : default_offset_max;
    shape.maximum = (policy.flags & KV_POLICY_OFFSETS_MAX) != 0;
    return shape;
}

void score_by_triattention(const round_plan& plan, const layer_geometry& layer) {
    const lane_geometry& first_lane = plan.store.model.lanes[layer.first_lane];
    retention_context& context = plan.context;
    const triattention_shape shape = shape_of(plan.store, first_lane.layer, plan.policy);
    triattention_phases(shape, layer.rope, plan.owner.next_position, context.phases.data());
    const query_moments<float> moments =
        moments_at(context.statistics, context.statistics.present, first_lane.layer, false);
    const uint64_t per_group = uint64_t{shape.group} * layer.rope.bands(shape.key_dim);
    for (uint32_t head = 0; head < layer.kv_heads; ++head) {
        const uint64_t at = head * per_group;
        triattention_weights(
            shape, layer.rope, context.phases.data(),
            {moments.mean_real + at, moments.mean_imaginary + at, moments.mean_magnitude + at},
            context.weights.data() + head * context.weight_stride);
    }
    for_each_part(
        plan, layer,
        [&](const stored_rows& rows, uint32_t lane, uint32_t head, uint32_t first, uint32_t end) {
            const uint64_t kv_head = plan.store.model.lanes[lane].first_head + head;
            score_triattention(rows, first, end, shape, layer.rope,
                               context.weights.data() + kv_head * context.weight_stride,
                               lane_scores(plan, lane, head), context.slot_stride);
        });
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        float* scores = lane_scores(plan, lane, head);
        normalise_and_reduce(scores, context.slot_stride, shape.group,
                             guards_of(plan, lane, head).candidates, scores);
    });
}

namespace {

/// Attention falls off by powers of ten from token to token: its logarithm is what has a spread
/// that can be compared. Tokens far below the mean are as good as unseen.
void take_logarithms(const slot_ranges& candidates, float* sums) {
    constexpr float least_share = 0x1p-10f;
    double total = 0.0;
    for (const slot_range& range : candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) total += double{sums[slot]};
    }
    if (!(total > 0.0)) return;
    const float mean = static_cast<float>(total / candidates.slots());
    for (const slot_range& range : candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) {
            sums[slot] = std::log(sums[slot] / mean + least_share);
        }
    }
}

}  // namespace

void score_by_blend(const round_plan& plan, const layer_geometry& layer) {
    const auto unlike_of = [&](uint32_t lane, uint32_t head) {
        const uint64_t kv_head = plan.store.model.lanes[lane].first_head + head;
        return plan.context.scratch.unlike.data() + kv_head * plan.context.slot_stride;
    };
    const auto standardise = [&](const slot_ranges& candidates, const float* from, float* to) {
        normalise_and_reduce(from, plan.context.slot_stride, 1, candidates, to);
    };
    score_by_keydiff(plan, layer);
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        standardise(guards_of(plan, lane, head).candidates, lane_scores(plan, lane, head),
                    unlike_of(lane, head));
    });
    score_by_triattention(plan, layer);
    const float prior = prior_share_of(plan.policy);
    const float unlike = redundancy_of(plan.policy);
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        const slot_ranges candidates = guards_of(plan, lane, head).candidates;
        float* scores = lane_scores(plan, lane, head);
        float* observed = measures_of(plan, lane, head);
        const float* other = unlike_of(lane, head);
        const slot_positions positions = positions_of(plan.store, plan.owner, lane, head);
        read_observations(plan.context.observations, plan.owner, lane, head, positions.slots,
                          observed);
        pool_scores(plan, positions, observed);
        take_logarithms(candidates, observed);
        // TriAttention's row is the greatest of several z-scores: all are brought to one spread.
        standardise(candidates, observed, observed);
        standardise(candidates, scores, scores);
        for (const slot_range& range : candidates) {
            for (uint32_t slot = range.first; slot < range.end; ++slot) {
                const float asked = prior * scores[slot] + (1.0f - prior) * observed[slot];
                scores[slot] = (1.0f - unlike) * asked + unlike * other[slot];
            }
        }
    });
}

}  // namespace kvrt
