#include "driver/give.hpp"

#include <algorithm>
#include <cstring>

#include "base/checked.hpp"
#include "driver/verbs.hpp"
#include "kernels/give.hpp"

namespace kvrt::cuda {

using namespace kernels;

namespace {

uint32_t blocks_of(const kvrt_given_scores& given, uint32_t lane) {
    return ceil_divide(given.lanes[lane].slots, given.lane->block_tokens);
}

/// Where the parts of a batch begin: lanes, their tables, scores; bytes.
struct batch_parts {
    uint64_t tables = 0, scores = 0, end = 0;
};

batch_parts parts_of(const kvrt_given_scores& given) {
    batch_parts made;
    made.tables = given.count * sizeof(given_lane);
    made.scores = made.tables;
    for (uint32_t i = 0; i < given.count; ++i) {
        made.scores += blocks_of(given, i) * sizeof(uint32_t);
    }
    made.end = made.scores;
    if (given.on_device == 0) {
        made.end += uint64_t{given.count} * given.lane->kv_heads * given.tokens * sizeof(float);
    }
    return made;
}

}  // namespace

status score_giver::create(device_context& device, kernel_functions& functions, uint64_t bytes) {
    KVRT_TRY(functions.state());
    {
        const current_context here(device);
        KVRT_TRY(here.state());
        KVRT_TRY(functions.find(give_));
    }
    return ring_.create(device, round_up(bytes, ring_.alignment), true);
}

status score_giver::run(kernel_functions& functions, stream_handle stream,
                        const kvrt_given_scores& given) {
    const batch_parts parts = parts_of(given);
    if (parts.end > ring_.bytes()) {
        return fail(KV_TOO_LARGE,
                    "scores of {} positions take {} bytes, there is room for {} at once: give them "
                    "in parts",
                    given.tokens, parts.end, ring_.bytes());
    }
    KVRT_TRY(ring_.open(parts.end, parts.end, stream));
    std::byte* const batch = ring_.data();
    given_lane* const lanes = reinterpret_cast<given_lane*>(batch);
    uint32_t* tables = reinterpret_cast<uint32_t*>(batch + parts.tables);
    give_parameters call;
    uint64_t table = 0;
    for (uint32_t i = 0; i < given.count; ++i) {
        const kvrt_given_lane& from = given.lanes[i];
        lanes[i] = {
            table,      from.sums,           uint64_t{i} * given.lane->kv_heads * given.tokens,
            from.slots, from.explicit_slots, from.known,
            0};
        std::copy_n(from.block_table, blocks_of(given, i), tables + table);
        table += blocks_of(given, i);
        call.most_slots = std::max(call.most_slots, from.slots);
    }
    if (given.on_device == 0) {
        std::memcpy(batch + parts.scores, given.scores, parts.end - parts.scores);
    }
    call.positions = positions_of(given.lane->positions);
    call.lanes = reinterpret_cast<const given_lane*>(ring_.on_device(0));
    call.tables = reinterpret_cast<const uint32_t*>(ring_.on_device(parts.tables));
    call.scores = given.on_device != 0
                      ? given.scores
                      : reinterpret_cast<const float*>(ring_.on_device(parts.scores));
    call.sums = given.sums;
    call.sums_stride = given.sums_stride;
    call.next_position = given.next_position;
    call.first_position = given.first_position;
    call.tokens = given.tokens;
    call.count = given.count;
    call.kv_heads = given.lane->kv_heads;
    status verdict = ring_.copy(ring_.on_device(0), 0, parts.end);
    if (verdict == KV_OK) {
        verdict = functions.launch(give_, score_blocks(call.count, call.kv_heads, call.most_slots),
                                   score_threads, 0, stream, &call);
    }
    const status closed = ring_.close(parts.end);
    return verdict == KV_OK ? closed : verdict;
}

}  // namespace kvrt::cuda
