// Scores from what keys and values are: LagKV, VaSE's sketch, Expected Attention.
#include "retention/expected_attention.hpp"
#include "retention/measures.hpp"
#include "retention/scoring.hpp"
#include "retention/sketch.hpp"
#include "retention/transform.hpp"

namespace kvrt {

lag_shape lag_shape_of(const kv_policy& policy) {
    lag_shape shape;
    if (policy.sinks != 0) shape.sinks = policy.sinks;
    return shape;
}

void score_by_lagkv(const round_plan& plan, const layer_geometry& layer) {
    const lag_shape shape = lag_shape_of(plan.policy);
    scoring_scratch& scratch = plan.context.scratch;
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        const slot_positions positions = positions_of(plan.store, plan.owner, lane, head);
        const uint64_t kv_head = plan.store.model.lanes[lane].first_head + head;
        float* scores = lane_scores(plan, lane, head);
        score_lag_parts(rows_of(plan, lane, head, positions), shape, 0,
                        lag_parts(shape, positions.slots),
                        scratch.lag.data() + kv_head * scratch.lag_stride, scores);
        score_lag_kept(shape, positions.slots, scores);
    });
}

void score_by_sketch(const round_plan& plan, const layer_geometry& layer) {
    const tile_layout& layout = plan.store.model.lanes[layer.first_lane].layout;
    float* sketch = plan.context.scratch.sketch.data();
    random_key key = draw_key(plan, layer.first_lane, 0);
    key.head = 0;
    draw_sketch(key, std::max(layout.keys.dim, layout.values.dim), sketch);
    for_each_part(
        plan, layer,
        [&](const stored_rows& rows, uint32_t lane, uint32_t head, uint32_t first, uint32_t end) {
            score_sketch(rows, first, end, sketch, lane_scores(plan, lane, head));
        });
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        normalise_to_sum(guards_of(plan, lane, head).candidates, lane_scores(plan, lane, head));
    });
}

void score_by_expectation(const round_plan& plan, const layer_geometry& layer) {
    const lane_geometry& first_lane = plan.store.model.lanes[layer.first_lane];
    retention_context& context = plan.context;
    expected_shape shape;
    shape.key_dim = first_lane.layout.keys.dim;
    shape.group = layer.group();
    expected_phases(shape, layer.rope, plan.owner.next_position, context.phases.data());
    statistics_store& statistics = context.statistics;
    const bool spread = statistics.present_spread[first_lane.layer] != 0;
    const query_moments<float> moments =
        moments_at(statistics, statistics.present, first_lane.layer, spread);
    const uint64_t per_group = uint64_t{shape.group} * layer.rope.bands(shape.key_dim);
    for (uint32_t head = 0; head < layer.kv_heads; ++head) {
        const uint64_t at = head * per_group;
        query_covariances covariances;
        if (spread) {
            covariances = {moments.variance_real + at, moments.variance_imaginary + at,
                           moments.covariance + at};
        }
        expected_weights(
            shape, layer.rope, context.phases.data(),
            {moments.mean_real + at, moments.mean_imaginary + at, moments.mean_magnitude + at},
            covariances, context.weights.data() + head * context.weight_stride);
    }
    for_each_part(
        plan, layer,
        [&](const stored_rows& rows, uint32_t lane, uint32_t head, uint32_t first, uint32_t end) {
            const uint64_t kv_head = plan.store.model.lanes[lane].first_head + head;
            score_expected_logits(rows, first, end, shape, layer.rope,
                                  context.weights.data() + kv_head * context.weight_stride, spread,
                                  lane_scores(plan, lane, head), context.slot_stride);
            slot_measures measures;
            measures.value_norm = measures_of(plan, lane, head);
            measure_slots(rows, first, end, measures);
        });
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        const slot_ranges candidates = guards_of(plan, lane, head).candidates;
        float* scores = lane_scores(plan, lane, head);
        softmax_mean(scores, context.slot_stride, shape.group, candidates, scores);
        scale_by_norm(candidates, measures_of(plan, lane, head), 0.0f, scores);
    });
}

}  // namespace kvrt
