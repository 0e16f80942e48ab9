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

}  // namespace

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

/// Calls give(sequence) while the watermark is passed. Each sequence is asked once, so that one
/// that cannot give does not keep the others from it.
template <class callable, class giving>
static void ask_all(cache& store, uint64_t watermark, const callable& most, const giving& give) {
    for (sequence& owner : store.sequences) owner.asked_under_pressure = false;
    const auto is_free = [](const sequence& owner) { return !owner.in_step; };
    while (store.blocks.totals().pinned_bytes > watermark) {
        sequence* chosen = ask_next(store, is_free, most);
        if (chosen == nullptr) return;
        give(*chosen);
        store.blocks.collect(store.fences);
    }
}

void relieve_pressure(cache& store, retention_context& context, uint64_t watermark,
                      pressure_report& report) {
    if (store.any_seals) {
        ask_all(
            store, watermark, [&](const sequence& owner) { return bytes_to_demote(store, owner); },
            [&](sequence& owner) {
                report.demoted.add(seal_blocks(store, owner, seal_reach::all));
                measure_room(store, owner);
            });
    }
    const auto above = [&](const sequence& owner) {
        return owner.has_policy ? tokens_above_budget(store, owner) : 0;
    };
    ask_all(store, watermark, above, [&](sequence& owner) {
        compaction_report round;
        const status verdict = compact_sequence(store, context, owner, owner.policy, round);
        if (verdict < 0 || round.outcome != KV_COMPRESS_DONE) {
            ++owner.rounds_skipped;
            return;
        }
        report.demoted.add(round.demoted);
        ++report.rounds;
        report.returned.blocks += round.returned.blocks;
        report.returned.bytes += round.returned.bytes;
    });
}

}  // namespace kvrt
