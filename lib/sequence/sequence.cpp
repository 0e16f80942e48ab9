#include "sequence/sequence.hpp"

#include <atomic>

namespace kvrt {

namespace {

/// Where a pool's generations start: far from those of all others, so that a handle given to the
/// wrong pool meets no sequence there. An odd factor makes every start another one.
uint32_t first_generation() {
    static std::atomic<uint32_t> pools{0};
    return pools.fetch_add(1, std::memory_order_relaxed) * 0x9e3779b1u;
}

}  // namespace

status sequence_table::create(host_allocator& allocator, uint32_t max_sequences,
                              uint32_t lane_count, uint32_t max_blocks) {
    lane_count_ = lane_count;
    max_blocks_ = max_blocks;
    KVRT_TRY(sequences_.allocate(allocator, max_sequences, "sequences (max_sequences)"));
    KVRT_TRY(lanes_.allocate(allocator, uint64_t{max_sequences} * lane_count, "lanes"));
    KVRT_TRY(tables_.allocate(allocator, uint64_t{max_sequences} * lane_count * max_blocks,
                              "block tables (max_sequences, max_tokens_per_sequence)",
                              memory_contents::undefined));
    const uint32_t generation = first_generation();
    for (uint32_t i = 0; i < max_sequences; ++i) {
        sequences_[i].generation = generation;
        sequences_[i].lanes = lanes_.data() + uint64_t{i} * lane_count;
        for (uint32_t lane = 0; lane < lane_count; ++lane) {
            sequences_[i].lanes[lane].table =
                tables_.data() + (uint64_t{i} * lane_count + lane) * max_blocks;
        }
        sequences_[i].next_free = i + 1 < max_sequences ? i + 2 : 0;
    }
    first_free_ = max_sequences != 0 ? 1 : 0;
    return KV_OK;
}

sequence* sequence_table::open() {
    if (first_free_ == 0) return nullptr;
    sequence& target = sequences_[first_free_ - 1];
    first_free_ = target.next_free;
    const uint32_t generation = target.generation + 1;
    lane_state* lanes = target.lanes;
    target = sequence{};
    target.lanes = lanes;
    target.generation = generation == 0 ? 1 : generation;
    target.alive = true;
    for (uint32_t lane = 0; lane < lane_count_; ++lane) {
        block_id* table = lanes[lane].table;
        lanes[lane] = lane_state{};
        lanes[lane].table = table;
    }
    ++alive_;
    return &target;
}

void sequence_table::close(sequence& target) {
    target.alive = false;
    target.next_free = first_free_;
    first_free_ = index(target) + 1;
    --alive_;
}

sequence* sequence_table::find(kv_seq handle) {
    const uint32_t number = static_cast<uint32_t>(handle);
    if (number == 0 || number > sequences_.size()) return nullptr;
    sequence& target = sequences_[number - 1];
    const bool fits = target.alive && !target.release_at_step_end &&
                      target.generation == static_cast<uint32_t>(handle >> 32);
    return fits ? &target : nullptr;
}

bool sequence_table::is_handle(kv_seq handle) const {
    const uint32_t number = static_cast<uint32_t>(handle);
    return number != 0 && number <= sequences_.size() && handle >> 32 != 0;
}

status sequence_table::fail_stale(kv_seq handle) const {
    if (!is_handle(handle)) {
        return fail(KV_INVALID, "seq {:#x} is no handle that kv_seq_create or kv_seq_fork gave",
                    handle);
    }
    return fail(KV_STALE, "seq {:#x} was released, or is one of another pool", handle);
}

kv_seq sequence_table::handle(const sequence& source) const {
    return static_cast<uint64_t>(source.generation) << 32 | (index(source) + 1);
}

}  // namespace kvrt
