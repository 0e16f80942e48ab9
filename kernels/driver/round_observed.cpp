// Rounds of scorers that go by what attention gave each slot: its sums, which neighbours may share.
#include "driver/rounds.hpp"
#include "kernels/pool.hpp"

namespace kvrt::cuda {

using namespace kernels;

void round_runner::pack_observed(const share& mine, places& at) {
    auto* rows = append<pool_row>(mine.heads(), at.observed);
    for (uint32_t i = 0; i < mine.count; ++i) {
        const kvrt_round_lane& lane = mine.lanes[i];
        for (uint32_t h = 0; h < mine.kv_heads; ++h) {
            const uint32_t head = i * mine.kv_heads + h;
            const auto row_of = [&](uint64_t sums) {
                return sums == ~uint64_t{0} ? 0 : sums + h * mine.sums_stride;
            };
            *rows++ = {row_of(lane.sums.present),
                       row_of(lane.sums.before),
                       uint64_t{head} * mine.rows * mine.stride,
                       head,
                       lane.slots,
                       lane.sums.slots,
                       lane.sums.slots_before,
                       0};
        }
    }
}

status round_runner::launch_observed(stream_handle stream, const kvrt_round& round,
                                     const share& mine, const places& at) {
    pool_parameters call;
    call.sums = round.sums;
    call.scores = scores();
    call.guarded = guarded(mine);
    call.rows = on_device<pool_row>(at.observed);
    call.count = mine.heads();
    call.most_slots = mine.most_slots;
    call.width = mine.lanes->scores.pool_width;
    call.greatest = mine.lanes->scores.pool_maximum != 0;
    return functions_->launch(pool_, pool_blocks(call.count, call.most_slots), pool_threads, 0,
                              stream, &call);
}

}  // namespace kvrt::cuda
