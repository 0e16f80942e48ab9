// What rounds did to sequences, and when memory runs short which of them go first.
#include <algorithm>

#include "retention/compact.hpp"

namespace kvrt {

namespace {

/// KV heads of all lanes are counted as saturation counters are, of which each has two, by layer.
uint64_t head_index(const cache& store, uint32_t lane, uint32_t kv_head) {
    const lane_geometry& geometry = store.model.lanes[lane];
    return geometry.first_counter / 2 + geometry.first_head + kv_head;
}

uint64_t tokens_above_budget(const cache& store, const sequence& owner) {
    uint64_t above = 0;
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        const lane_geometry& geometry = store.model.lanes[lane];
        const uint32_t slots = owner.lanes[lane].slots;
        if (!takes_part(store, owner.policy, geometry.layer)) continue;
        if (slots <= owner.policy.budget) continue;
        above += uint64_t{slots - owner.policy.budget} * geometry.kv_heads;
    }
    return above;
}

}  // namespace

status create_history(cache& store, retention_history& history) {
    const uint64_t sequences = store.limits.max_sequences;
    history.head_count = store.model.counters / 2;
    constexpr const char* what = "retention counters";
    KVRT_TRY(history.heads.allocate(store.allocator, sequences * history.head_count, what));
    return history.blocks.allocate(store.allocator, sequences * store.model.lanes.size(), what);
}

head_history& history_of(const cache& store, retention_context& context, const sequence& owner,
                         uint32_t lane, uint32_t kv_head) {
    const uint64_t first = uint64_t{store.sequences.index(owner)} * context.history.head_count;
    return context.history.heads[first + head_index(store, lane, kv_head)];
}

uint64_t& blocks_returned_of(const cache& store, retention_context& context, const sequence& owner,
                             uint32_t lane) {
    const uint64_t first = uint64_t{store.sequences.index(owner)} * store.model.lanes.size();
    return context.history.blocks[first + lane];
}

void reset_history(const cache& store, retention_context& context, const sequence& owner) {
    std::fill_n(&history_of(store, context, owner, 0, 0), context.history.head_count,
                head_history{});
    std::fill_n(&blocks_returned_of(store, context, owner, 0), store.model.lanes.size(),
                uint64_t{0});
}

void copy_history(const cache& store, retention_context& context, const sequence& from,
                  const sequence& to) {
    std::copy_n(&history_of(store, context, from, 0, 0), context.history.head_count,
                &history_of(store, context, to, 0, 0));
    std::copy_n(&blocks_returned_of(store, context, from, 0), store.model.lanes.size(),
                &blocks_returned_of(store, context, to, 0));
}

void relieve_pressure(cache& store, retention_context& context, uint64_t watermark,
                      pressure_report& report) {
    // Each sequence is asked once, so that one that cannot give does not keep the others from it.
    for (sequence& owner : store.sequences) owner.asked_under_pressure = false;
    while (store.blocks.totals().pinned_bytes > watermark) {
        sequence* chosen = nullptr;
        uint64_t most = 0;
        for (sequence& owner : store.sequences) {
            if (!owner.alive || owner.in_step || !owner.has_policy || owner.asked_under_pressure) {
                continue;
            }
            const uint64_t above = tokens_above_budget(store, owner);
            if (above > most) {
                most = above;
                chosen = &owner;
            }
        }
        if (chosen == nullptr) return;
        chosen->asked_under_pressure = true;
        compaction_report round;
        const status verdict = compact_sequence(store, context, *chosen, chosen->policy, round);
        if (verdict < 0 || round.outcome != KV_COMPRESS_DONE) {
            ++chosen->rounds_skipped;
            continue;
        }
        ++report.rounds;
        report.returned.blocks += round.returned.blocks;
        report.returned.bytes += round.returned.bytes;
        store.blocks.collect(store.fences);
    }
}

}  // namespace kvrt
