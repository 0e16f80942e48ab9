// The launches of scorers that weigh several rows: BLEND's and R-KV's (round_scores.hpp). What they
// make before the last row is at the end of a KV head's scratch, behind the sums of directions.
#include <algorithm>

#include "driver/round_scores.hpp"
#include "kernels/blend.hpp"
#include "kernels/score_directions.hpp"
#include "kernels/score_similar.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

blend_parameters blend_of(const score_call& call) {
    const round_share& share = call.share;
    blend_parameters made;
    made.scores = call.scores;
    made.observed = call.scratch + share.apart_at();
    made.guarded = call.guarded;
    made.heads = call.heads;
    made.parts_stride = share.scratch;
    made.count = share.heads();
    made.prior_share = call.first().scores.prior_share;
    made.redundancy = call.first().scores.redundancy;
    return made;
}

}  // namespace

uint64_t round_scores::blend_scratch(uint32_t dim, uint64_t stride) {
    return direction_scratch(dim, stride) + 2 * stride;
}

uint64_t round_scores::redundancy_scratch(uint32_t dim, uint64_t stride) {
    // Exact redundancy has cosines in front, and newest slots where observed sums are to be.
    return std::max(direction_scratch(dim, stride), stride) + stride;
}

status round_scores::score_blend(const score_call& call) {
    KVRT_TRY(score_directions(call));
    KVRT_TRY(normalise(call, call.unlike, 1));
    KVRT_TRY(score_triattention(call));
    KVRT_TRY(score_observed(call));
    blend_parameters blend = blend_of(call);
    blend.unlike = blend.observed - call.share.stride;
    return functions_->launch(blend_, blend.count, normalise_threads, blend_shared_bytes,
                              call.stream, &blend);
}

status round_scores::score_similar(const score_call& call) {
    const round_share& share = call.share;
    auto parameters = begin_parameters<similarity_parameters>(call);
    parameters.lanes = call.lanes_of<score_lane>();
    parameters.newest = reinterpret_cast<uint32_t*>(call.scratch + share.apart_at());
    parameters.cosines = call.scratch;
    parameters.parts_stride = share.scratch;
    parameters.score_stride = share.stride;
    parameters.similarity = call.first().scores.similarity;
    KVRT_TRY(functions_->launch(compare_keys_,
                                similar_blocks(share.count, share.kv_heads, share.most_slots),
                                similar_threads, similar_shared_bytes, call.stream, &parameters));
    return functions_->launch(spare_newest_, call.score_blocks(), score_threads, 0, call.stream,
                              &parameters);
}

status round_scores::score_redundancy(const score_call& call) {
    const bool exact = call.first().scores.similarity != 0.0f;
    KVRT_TRY(exact ? score_similar(call) : score_directions(call));
    KVRT_TRY(score_observed(call));
    blend_parameters blend = blend_of(call);
    return functions_->launch(mix_, blend.count, normalise_threads, blend_shared_bytes, call.stream,
                              &blend);
}

}  // namespace kvrt::cuda
