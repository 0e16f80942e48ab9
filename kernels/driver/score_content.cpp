// The launches of scorers that look at what keys and values are (round_scores.hpp).
#include <algorithm>

#include "driver/round_scores.hpp"
#include "kernels/score_directions.hpp"
#include "kernels/score_expected.hpp"
#include "kernels/score_lag.hpp"
#include "kernels/score_sketch.hpp"
#include "kernels/transform.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

/// From a KV head's rows of scores to its first one.
transform_parameters transform_of(const score_call& call) {
    transform_parameters made;
    made.scores = call.scores;
    made.guarded = call.guarded;
    made.heads = call.heads;
    made.stride = call.share.stride;
    made.count = call.share.heads();
    return made;
}

}  // namespace

uint64_t round_scores::direction_scratch(uint32_t dim, uint64_t stride) {
    return uint64_t{2} * dim * direction_parts(static_cast<uint32_t>(stride));
}

status round_scores::score_directions(const score_call& call) {
    const round_share& share = call.share;
    auto parameters = begin_parameters<direction_parameters>(call);
    parameters.lanes = call.lanes_of<score_lane>();
    parameters.sums = reinterpret_cast<double*>(call.scratch);
    parameters.sums_stride = share.scratch / 2;
    parameters.score_stride = share.rows * share.stride;
    parameters.redundancy = call.first().scores.scorer == KV_SCORER_RKV;
    const uint32_t dim = share.read.keys.dim;
    KVRT_TRY(functions_->launch(
        sum_directions_, direction_blocks(share.count, share.kv_heads, share.most_slots),
        direction_threads, direction_shared_bytes(dim), call.stream, &parameters));
    return functions_->launch(score_directions_, call.score_blocks(), score_threads,
                              total_shared_bytes(dim), call.stream, &parameters);
}

status round_scores::score_lag(const score_call& call) {
    const round_share& share = call.share;
    auto parameters = begin_parameters<lag_parameters>(call);
    parameters.lanes = call.lanes_of<score_lane>();
    parameters.deviations = call.scratch;
    parameters.stride = share.stride;
    parameters.sinks = call.first().scores.sinks;
    const uint32_t dim = std::max(share.read.keys.dim, share.read.values.dim);
    const uint32_t blocks =
        lag_blocks(share.count, share.kv_heads, parameters.sinks, share.most_slots);
    if (blocks != 0) {
        KVRT_TRY(functions_->launch(deviations_, blocks, lag_threads, lag_shared_bytes(dim),
                                    call.stream, &parameters));
    }
    return functions_->launch(
        ranks_, rank_blocks(share.count, share.kv_heads, parameters.sinks, share.most_slots),
        lag_threads, rank_shared_bytes, call.stream, &parameters);
}

status round_scores::score_sketch(const score_call& call) {
    const round_share& share = call.share;
    auto parameters = begin_parameters<sketch_parameters>(call);
    parameters.lanes = call.lanes_of<place_lane>();
    parameters.sketches = call.scratch;
    parameters.stride = share.stride;
    KVRT_TRY(functions_->launch(draw_sketches_, share.count, sketch_threads, 0, call.stream,
                                &parameters));
    KVRT_TRY(functions_->launch(score_sketches_, call.score_blocks(), score_threads,
                                sketch_shared_bytes(parameters.dim()), call.stream, &parameters));
    transform_parameters shares = transform_of(call);
    return functions_->launch(share_, shares.count, normalise_threads, 0, call.stream, &shares);
}

status round_scores::score_expected(const score_call& call) {
    const round_share& share = call.share;
    const kvrt_round_scores& scored = call.first().scores;
    auto parameters = begin_parameters<expected_parameters>(call);
    parameters.lanes = call.lanes_of<score_lane>();
    parameters.moments = share.moments;
    parameters.moment_stride = call.round.moment_stride;
    parameters.phases = call.batch_of<double>();
    parameters.norms = call.scratch;
    parameters.stride = share.stride;
    parameters.attention_factor = scored.attention_factor;
    parameters.group = scored.group;
    parameters.rotated = scored.rotated;
    parameters.interleaved = scored.interleaved != 0;
    parameters.spread = scored.spread != 0;
    KVRT_TRY(functions_->launch(expected_, call.score_blocks(), score_threads,
                                expected_shared_bytes(parameters.bands()), call.stream,
                                &parameters));
    transform_parameters softens = transform_of(call);
    softens.norms = call.scratch;
    softens.group = scored.group;
    return functions_->launch(soften_, softens.count, normalise_threads,
                              soften_shared_bytes(softens.group), call.stream, &softens);
}

}  // namespace kvrt::cuda
