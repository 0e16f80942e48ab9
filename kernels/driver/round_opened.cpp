// Rows of lanes that seal, opened in front of scorers: they read f32 in one layout, whatever the
// blocks are.
#include "driver/rounds.hpp"
#include "driver/verbs.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

/// Plain f32 rows in one piece, of as many channels.
void describe_opened(const operand_place& from, uint32_t offset, uint32_t block_tokens,
                     operand_place& to) {
    to = {};
    to.type = number::f32;
    to.dim = to.words = from.dim;
    to.word_bytes = to.word_stride = sizeof(float);
    to.offset = offset;
    to.slot_stride = from.dim * static_cast<uint32_t>(sizeof(float));
    to.group_stride = slots_of_group * to.slot_stride;
    to.head_stride = block_tokens * to.slot_stride;
}

/// Blocks of as many slots and heads.
block_place opened_place(const block_place& from) {
    block_place made;
    made.block_tokens = from.block_tokens;
    made.kv_heads = from.kv_heads;
    describe_opened(from.keys, 0, from.block_tokens, made.keys);
    const uint32_t keys = made.kv_heads * made.keys.head_stride;
    describe_opened(from.values, keys, from.block_tokens, made.values);
    made.block_bytes = keys + made.kv_heads * made.values.head_stride;
    return made;
}

uint64_t opened_block_bytes(const kvrt_lane& lane) {
    return uint64_t{lane.kv_heads} * lane.block_tokens * (lane.keys.dim + lane.values.dim) *
           sizeof(float);
}

}  // namespace

status round_runner::create_opened(uint64_t bytes) {
    if (opened_size_ != 0) return KV_OK;
    KVRT_TRY(opened_.allocate(*device_, bytes));
    opened_size_ = bytes;
    return KV_OK;
}

uint64_t round_runner::opened_bytes(const kvrt_round_lane& lane) const {
    return ceil_divide(lane.slots, lane.lane->block_tokens) * opened_block_bytes(*lane.lane);
}

opening round_runner::opening_of(const round_share& mine) const {
    opening made;
    made.arena = static_cast<const std::byte*>(mine.lanes->lane->arena);
    made.place = mine.place;
    made.sealed = mine.sealed;
    made.out = reinterpret_cast<std::byte*>(opened_.address());
    made.opened = opened_place(mine.place);
    made.tables = on_device<uint32_t>(0);
    made.count = mine.count;
    return made;
}

uint64_t round_runner::pack_opened(const kvrt_round_lane& lane, uint64_t table, uint32_t& first,
                                   open_lane& opened) {
    const uint32_t blocks = ceil_divide(lane.slots, lane.lane->block_tokens);
    const uint64_t units = opened_block_bytes(*lane.lane) / block_unit_bytes;
    uint64_t at = 0;
    auto* const ids = append<uint32_t>(blocks, at);
    for (uint32_t b = 0; b < blocks; ++b) ids[b] = static_cast<uint32_t>((first + b) * units);
    opened = {table, first, lane.slots, lane.sealed_slots, 0};
    first += blocks;
    return at / sizeof(uint32_t);
}

status round_runner::open_share(stream_handle stream, const round_share& mine, const places& at) {
    const lane_reads reads = round_scores::find(mine.lanes->scores.scorer)->reads;
    const bool keys = reads != lane_reads::nothing;
    const bool values = mine.reserves || reads == lane_reads::keys_and_values;
    open_lanes_parameters call;
    call.what = opening_of(mine);
    call.what.operands =
        (keys ? uint32_t{opened_keys} : 0u) | (values ? uint32_t{opened_values} : 0u);
    call.what.most_slots = mine.most_slots;
    call.lanes = on_device<open_lane>(at.opened);
    return functions_->launch(open_lanes_, open_lanes_blocks(call.what), open_lanes_threads, 0,
                              stream, &call);
}

}  // namespace kvrt::cuda
