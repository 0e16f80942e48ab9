#include "step/device_given.hpp"

#include <algorithm>

#include "step/step.hpp"

namespace kvrt {

namespace {

constexpr uint64_t least_bytes = uint64_t{1} << 16;

/// What a call takes at most: a score of every token, and what kernels are told of lanes.
uint64_t most_bytes_of_call(const cache& store) {
    constexpr uint64_t of_lane = 64;
    const uint64_t blocks = store.model.blocks_for(store.limits.max_tokens_per_sequence);
    uint64_t most = 0;
    for (const layer_geometry& layer : store.model.layers) {
        const uint64_t lanes = layer.end_lane() - layer.first_lane;
        const uint64_t scores = uint64_t{layer.kv_heads} * store.limits.max_tokens_per_sequence;
        most =
            std::max(most, lanes * (of_lane + blocks * sizeof(uint32_t)) + scores * sizeof(float));
    }
    return most;
}

/// A step for what is enqueued now: the last one where that has ended and was the last to begin,
/// since what comes behind it is behind all others; else a new one.
status open_step(step_context& context, void* stream, uint64_t& number) {
    cache& store = *context.store;
    device_given& mine = context.given;
    fence_clock& fences = store.fences;
    const bool none_open = fences.open[0] == 0 && fences.open[1] == 0;
    const bool goes_on =
        stream == nullptr || (fences.last_begun == mine.number && mine.stream == stream);
    if (!none_open || !goes_on || fences.last_begun == 0) ++fences.last_begun;
    number = fences.last_begun;
    if (stream == nullptr) return store.device.open_round(number);
    KVRT_TRY(store.device.begin_step(number, stream));
    mine.number = number;
    mine.stream = stream;
    return KV_OK;
}

}  // namespace

status device_given::prepare(step_context& context) {
    if (prepared) return KV_OK;
    cache& store = *context.store;
    uint32_t most_lanes = 0;
    for (const layer_geometry& layer : store.model.layers) {
        most_lanes = std::max(most_lanes, layer.end_lane() - layer.first_lane);
    }
    if (lanes.size() == 0) KVRT_TRY(lanes.allocate(store.allocator, most_lanes, "scores given"));
    KVRT_TRY(store.device.create_given(std::max(2 * most_bytes_of_call(store), least_bytes)));
    prepared = true;
    return KV_OK;
}

status give_on_device(step_context& context, const sequence& owner, const given_scores& given) {
    cache& store = *context.store;
    const observation_store& observations = context.retention->observations;
    const layer_geometry& layer = store.model.layers[given.layer];
    kvrt_given_scores call = {};
    call.lane = &context.verbs.lanes[layer.first_lane];
    call.lanes = context.given.lanes.data();
    call.on_device = given.on_device ? 1 : 0;
    call.next_position = owner.next_position;
    call.first_position = given.first_position;
    call.tokens = given.tokens;
    call.scores = given.scores;
    call.sums = observations.base;
    call.sums_stride = observations.slot_stride;
    for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
        const lane_state& state = owner.lanes[lane];
        const observed_lane& known = observed_lane_of(observations, owner, lane);
        context.given.lanes[call.count++] = {
            state.table,
            place_of_sums(observations, owner, known.present, lane, 0),
            state.slots,
            state.explicit_slots,
            std::min(known.slots, state.slots),
            0};
    }
    uint64_t number = 0;
    KVRT_TRY(open_step(context, given.stream, number));
    const status verdict = store.device.give_scores(number, call);
    const status ended = store.device.end_step(number);
    return verdict < 0 ? verdict : ended;
}

}  // namespace kvrt
