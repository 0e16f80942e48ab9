// Rounds of scorers that go by a number of each slot, which neighbours may share: the sum of what
// attention gave it, or a score of the host's.
#include "driver/rounds.hpp"
#include "kernels/compact.hpp"
#include "kernels/pool.hpp"

namespace kvrt::cuda {

using namespace kernels;

void round_runner::pack_observed(const round_share& mine, places& at) {
    const bool apart = round_scores::find(mine.lanes->scores.scorer)->observes_apart;
    auto* rows = append<pool_row>(mine.heads(), at.observed);
    auto* unlike = append<normalise_head>(apart ? mine.heads() : 0, at.unlike);
    for (uint32_t i = 0; i < mine.count; ++i) {
        const kvrt_round_lane& lane = mine.lanes[i];
        for (uint32_t h = 0; h < mine.kv_heads; ++h) {
            const uint32_t head = i * mine.kv_heads + h;
            const auto row_of = [&](uint64_t sums) {
                return sums == no_sums ? 0 : sums + h * mine.sums_stride;
            };
            uint64_t row = mine.first + uint64_t{head} * mine.rows * mine.stride;
            if (apart) {
                const uint64_t beside = mine.scratch_at + head * mine.scratch + mine.apart_at();
                *unlike++ = {row, beside - mine.stride, head};
                row = beside;
            }
            *rows++ = {row_of(lane.sums.present), row_of(lane.sums.before), row, head, lane.slots,
                       lane.sums.slots,           lane.sums.slots_before,   0};
        }
    }
}

status round_scores::score_observed(const score_call& call) {
    const kvrt_round_scores& scored = call.first().scores;
    pool_parameters parameters;
    parameters.sums = call.round.sums;
    parameters.scores = call.scores;
    parameters.guarded = call.guarded;
    parameters.rows = call.observed;
    parameters.count = call.share.heads();
    parameters.most_slots = call.share.most_slots;
    parameters.width = scored.pool_width;
    parameters.greatest = scored.pool_maximum != 0;
    parameters.unknown = call.first().sums.unknown;
    return functions_->launch(pool_, pool_blocks(parameters.count, parameters.most_slots),
                              pool_threads, 0, call.stream, &parameters);
}

}  // namespace kvrt::cuda
