// No part of a long prompt goes wholly: of each of a set's segments, which are positions, the best
// candidates stay whatever the others score (retention/rank.hpp, reserve_segments).
//
// A block of threads has one segment of one set. Segments have slots of their own, so blocks do not
// meet but in the number of what they reserve.
#pragma once

#include "kernels/select.hpp"

namespace kvrt::kernels {

/// A set's row, and where its slots stand in the text.
struct quota_set {
    position_place positions;
    uint64_t table;    ///< place in tables
    uint64_t scores;   ///< place of slot 0's
    uint64_t guarded;  ///< place of its candidates
    uint64_t next_position;
    uint64_t tokens;  ///< positions below are cut into segments, of lengths rounded down at the end
    uint32_t head;    ///< whose positions they are
    uint32_t slots;
    uint32_t explicit_slots;
    uint32_t keep;      ///< how many stay in all
    uint32_t segments;  ///< at least 1
    uint32_t each;      ///< of a segment; fewer where all segments together have no places for it
    uint32_t sealed_slots = 0, unused = 0;
    position_place sealed_positions;  ///< of the first sealed_slots
};

struct quota_shared {
    select_shared select;
    slot_range segment;
};
inline constexpr uint32_t quota_shared_bytes = sizeof(quota_shared);

/// Launch with quota_blocks(count, most_segments) blocks of select_threads threads and
/// quota_shared_bytes. Adds to guarded_slots::reserved.
struct quota_parameters {
    float* scores = nullptr;
    guarded_slots* guarded = nullptr;
    const uint32_t* tables = nullptr;
    const quota_set* sets = nullptr;  ///< [count]
    uint32_t count = 0;
    uint32_t most_segments = 0;
};
constexpr uint32_t quota_blocks(uint32_t sets, uint32_t most_segments) {
    return sets * most_segments;
}

template <class Cx>
KVRT_DEVICE position_place fetch_positions(const position_place& from) {
    position_place made;
    made.base = reinterpret_cast<uint32_t*>(Cx::template load_constant<uint64_t>(&from.base));
    made.reciprocal = Cx::template load_constant<uint64_t>(&from.reciprocal);
    made.units_per_slab = Cx::template load_constant<uint32_t>(&from.units_per_slab);
    made.blocks_per_slab = Cx::template load_constant<uint32_t>(&from.blocks_per_slab);
    made.block_stride = Cx::template load_constant<uint32_t>(&from.block_stride);
    made.block_tokens = Cx::template load_constant<uint32_t>(&from.block_tokens);
    return made;
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void reserve_segments(const quota_parameters& call) {
    const quota_set& set = call.sets[Cx::block() / call.most_segments];
    const uint32_t segment = Cx::block() % call.most_segments;
    const uint32_t segments = Cx::template load_constant<uint32_t>(&set.segments);
    if (segment >= segments) return;
    quota_shared* const shared = reinterpret_cast<quota_shared*>(Cx::shared());
    if (Cx::thread() < 2) {
        const position_place store = fetch_positions<Cx>(set.positions);
        const position_place sealed = fetch_positions<Cx>(set.sealed_positions);
        const slot_positions<Cx> positions{
            store,
            call.tables + Cx::template load_constant<uint64_t>(&set.table),
            Cx::template load_constant<uint32_t>(&set.head),
            Cx::template load_constant<uint32_t>(&set.slots),
            Cx::template load_constant<uint32_t>(&set.explicit_slots),
            Cx::template load_constant<uint64_t>(&set.next_position),
            &sealed,
            Cx::template load_constant<uint32_t>(&set.sealed_slots)};
        const uint64_t tokens = Cx::template load_constant<uint64_t>(&set.tokens);
        const uint64_t index = uint64_t{segment} + Cx::thread();
        const uint64_t bound = tokens / segments * index + tokens % segments * index / segments;
        Cx::store(Cx::thread() == 0 ? &shared->segment.first : &shared->segment.end,
                  positions.find(bound));
    }
    Cx::barrier();
    guarded_slots* const guarded =
        call.guarded + Cx::template load_constant<uint64_t>(&set.guarded);
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&set.scores);
    ranked_slots<Cx> ranked(scores,
                            {Cx::template load<uint32_t>(&shared->segment.first),
                             Cx::template load<uint32_t>(&shared->segment.end)},
                            guarded);
    Cx::barrier();
    ranked.count_candidates();
    const uint32_t keep = Cx::template load_constant<uint32_t>(&set.keep);
    const uint32_t held = Cx::template load_constant<uint32_t>(&guarded->protected_slots);
    uint32_t count = (keep > held ? keep - held : 0) / segments;
    const uint32_t each = Cx::template load_constant<uint32_t>(&set.each);
    count = each < count ? each : count;
    count = ranked.candidates < count ? ranked.candidates : count;
    if (count == 0) return;
    const auto bound = ranked.find_rank(count);
    ranked.for_each_taken(bound, false, [&](uint32_t, uint32_t slot) {
        Cx::store(scores + slot, Cx::bits_to_f32(0x7f800000u));
    });
    if (Cx::thread() == 0) Cx::atomic_add(&guarded->reserved, count);
}

}  // namespace kvrt::kernels
