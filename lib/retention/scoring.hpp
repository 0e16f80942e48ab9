// What the scoring of one layer is made of, for score_*.cpp.
#pragma once

#include <algorithm>

#include "retention/lagkv.hpp"
#include "retention/round.hpp"
#include "retention/scores.hpp"
#include "retention/stored_rows.hpp"

namespace kvrt {

/// The rows of a lane's KV head. `positions` outlives them.
stored_rows rows_of(const round_plan& plan, uint32_t lane, uint32_t kv_head,
                    const slot_positions& positions);

/// What a draw depends on: sets that are shared by layers or heads draw the same for all of them.
random_key draw_key(const round_plan& plan, uint32_t lane, uint32_t kv_head);

/// A second row of numbers per KV head of the layer: [slots].
float* measures_of(const round_plan& plan, uint32_t lane, uint32_t kv_head);

/// Slots before the recent window that the policy guards.
uint32_t slots_before_recent(const round_plan& plan, const slot_positions& positions);

/// Runs body(rows, lane, head of the lane, first slot, end slot) over all heads of a layer's chosen
/// lanes, cut into parts of slots_per_part.
template <class callable>
void for_each_part(const round_plan& plan, const layer_geometry& layer, const callable& body) {
    uint32_t most_slots = 0;
    for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
        if (plan.chosen(lane)) most_slots = std::max(most_slots, plan.owner.lanes[lane].slots);
    }
    const uint32_t parts = ceil_divide(most_slots, slots_per_part);
    plan.store.threads.for_each(layer.kv_heads * parts, [&](uint32_t unit) {
        const head_place place = layer.place_of(unit / parts);
        const uint32_t slots = plan.owner.lanes[place.lane].slots;
        const uint32_t first = unit % parts * slots_per_part;
        if (!plan.chosen(place.lane) || first >= slots) return;
        const slot_positions positions =
            positions_of(plan.store, plan.owner, place.lane, place.head);
        body(rows_of(plan, place.lane, place.head, positions), place.lane, place.head, first,
             std::min(first + slots_per_part, slots));
    });
}

/// LagKV's parts, as a policy wants them.
lag_shape lag_shape_of(const kv_policy& policy);
/// What TriAttention of a policy computes for a layer.
triattention_shape shape_of(const cache& store, uint32_t layer, const kv_policy& policy);

/// Each fills the candidates' scores of a layer's chosen lanes.
void score_by_observation(const round_plan& plan, const layer_geometry& layer);
void score_by_redundancy(const round_plan& plan, const layer_geometry& layer);
void score_by_keydiff(const round_plan& plan, const layer_geometry& layer);
void score_by_lagkv(const round_plan& plan, const layer_geometry& layer);
void score_by_sketch(const round_plan& plan, const layer_geometry& layer);
void score_by_triattention(const round_plan& plan, const layer_geometry& layer);
/// How a policy's scores are shared.
struct score_pooling {
    uint32_t width = 1;
    bool maximum = false;
};
score_pooling pooling_of(const kv_policy& policy);
/// Neighbours share their scores, up to the recent window, where what they are compared with ends.
void pool_scores(const round_plan& plan, const slot_positions& positions, float* scores);

void score_by_blend(const round_plan& plan, const layer_geometry& layer);
void score_by_expectation(const round_plan& plan, const layer_geometry& layer);

}  // namespace kvrt
