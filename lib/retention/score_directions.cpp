// Scores from the directions of keys: KeyDiff, and R-KV, which takes their redundancy from what was
// observed.
#include "retention/scorers.hpp"
#include "retention/scoring.hpp"
#include "retention/transform.hpp"
#include "retention/unit_keys.hpp"

namespace kvrt {

namespace {

/// Sums of the parts of a lane's KV head: [parts][dim]; the first becomes the sum of them all.
double* unit_sums_of(const round_plan& plan, uint32_t lane, uint32_t head) {
    const scoring_scratch& scratch = plan.context.scratch;
    const uint64_t kv_head = plan.store.model.lanes[lane].first_head + head;
    return const_cast<double*>(scratch.unit_sums.data()) + kv_head * scratch.unit_sums_stride;
}

void sum_directions(const round_plan& plan, const layer_geometry& layer) {
    for_each_part(
        plan, layer,
        [&](const stored_rows& rows, uint32_t lane, uint32_t head, uint32_t first, uint32_t end) {
            sum_unit_keys(
                rows, first, end,
                unit_sums_of(plan, lane, head) + uint64_t{first / slots_per_part} * rows.key_dim());
        });
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        double* sums = unit_sums_of(plan, lane, head);
        const uint32_t parts = ceil_divide(plan.owner.lanes[lane].slots, slots_per_part);
        join_parts(sums, parts, plan.store.model.lanes[lane].layout.keys.dim, sums);
    });
}

void measure_linear_redundancy(const round_plan& plan, const layer_geometry& layer) {
    sum_directions(plan, layer);
    for_each_part(
        plan, layer,
        [&](const stored_rows& rows, uint32_t lane, uint32_t head, uint32_t first, uint32_t end) {
            score_linear_redundancy(rows, first, end, unit_sums_of(plan, lane, head),
                                    plan.owner.lanes[lane].slots, measures_of(plan, lane, head));
        });
}

/// Of one head at a time, since each wants a copy of all its directions.
void measure_exact_redundancy(const round_plan& plan, uint32_t lane, uint32_t head) {
    const slot_positions positions = positions_of(plan.store, plan.owner, lane, head);
    const stored_rows rows = rows_of(plan, lane, head, positions);
    const uint32_t slots = plan.owner.lanes[lane].slots;
    scoring_scratch& scratch = plan.context.scratch;
    float* units = scratch.units.data();
    float* row_sum = measures_of(plan, lane, head);
    plan.store.threads.for_each(ceil_divide(slots, slots_per_part), [&](uint32_t part) {
        const uint32_t first = part * slots_per_part;
        copy_unit_keys(rows, first, std::min(first + slots_per_part, slots), units, row_sum);
    });
    constexpr uint32_t rows_per_unit = 64;
    const float similarity = similarity_of(plan.policy);
    plan.store.threads.for_each(ceil_divide(slots, rows_per_unit), [&](uint32_t unit) {
        const uint32_t first = unit * rows_per_unit;
        compare_unit_keys(units, slots, rows.key_dim(), first,
                          std::min(first + rows_per_unit, slots), similarity, row_sum,
                          scratch.latest.data(), scratch.latest_cosine.data());
    });
    join_redundancy(slots, row_sum, scratch.latest.data(), scratch.latest_cosine.data(), row_sum);
}

}  // namespace

void score_by_keydiff(const round_plan& plan, const layer_geometry& layer) {
    sum_directions(plan, layer);
    for_each_part(
        plan, layer,
        [&](const stored_rows& rows, uint32_t lane, uint32_t head, uint32_t first, uint32_t end) {
            score_keydiff(rows, first, end, unit_sums_of(plan, lane, head),
                          lane_scores(plan, lane, head));
        });
}

void score_by_redundancy(const round_plan& plan, const layer_geometry& layer) {
    score_by_observation(plan, layer);
    if ((plan.policy.flags & KV_POLICY_EXACT_REDUNDANCY) != 0) {
        for (uint32_t kv_head = 0; kv_head < layer.kv_heads; ++kv_head) {
            const head_place place = layer.place_of(kv_head);
            if (plan.chosen(place.lane)) measure_exact_redundancy(plan, place.lane, place.head);
        }
    } else {
        measure_linear_redundancy(plan, layer);
    }
    const float weight = redundancy_of(plan.policy);
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        const slot_ranges candidates = guards_of(plan, lane, head).candidates;
        float* scores = lane_scores(plan, lane, head);
        float* redundancy = measures_of(plan, lane, head);
        softmax_mean(redundancy, plan.context.slot_stride, 1, candidates, redundancy);
        normalise_to_sum(candidates, scores);
        mix_redundancy(candidates, scores, redundancy, 1.0f - weight, scores);
    });
}

}  // namespace kvrt
