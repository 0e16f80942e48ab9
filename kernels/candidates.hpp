// Which slots may go: guards on positions, for a whole cohort in one launch. After a round on the
// device nobody else knows which positions the slots of a head have.
//
// A warp has one KV head of one lane. Each of its lanes looks up where a guard begins or ends; the
// first then joins what they found, as retention/select.cpp does.
#pragma once

#include "kernels/layout.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t most_pinned = 16;
inline constexpr uint32_t most_ranges = most_pinned + 1;

/// [first, end)
struct slot_range {
    uint32_t first;
    uint32_t end;
};

/// Of one KV head of a lane, as guarded_slots of the library. Candidates are ascending and
/// disjoint, none empty.
struct guarded_slots {
    slot_range range[most_ranges];  ///< candidates: what may go
    uint32_t count;                 ///< of ranges
    uint32_t protected_slots;       ///< all other slots
    uint32_t prompt_slots;          ///< of those: held by the prompt rule
    uint32_t before_recent;         ///< slots before those that are held since they are recent
    uint32_t reserved;              ///< candidates that stay whatever the others score, 0 at first
};

/// Positions [first, first + count); an end beyond 2^64 is cut.
struct position_range {
    uint64_t first;
    uint64_t count;
};

/// One lane of one sequence, and its guards as guard_rules has them.
struct guard_lane {
    uint64_t table;   ///< place in tables
    uint64_t pinned;  ///< place of the first in pinned
    uint64_t next_position;
    uint64_t prompt_tokens;
    uint64_t sinks;
    uint64_t recent;
    uint32_t slots;
    uint32_t explicit_slots;
    uint32_t pinned_count;  ///< at most most_pinned
    uint32_t sealed_slots;  ///< in blocks of a class of their own, the first ones
};

inline constexpr uint32_t guard_threads = 128;
inline constexpr uint32_t most_bounds = 3 + 2 * most_pinned;
inline constexpr uint32_t guard_shared_bytes = guard_threads / warp_lanes * most_bounds * 4;

/// Launch with guard_blocks(count, kv_heads) blocks of guard_threads threads and
/// guard_shared_bytes.
struct guard_parameters {
    position_place positions;
    position_place sealed_positions;  ///< of slots in sealed blocks
    const uint32_t* tables = nullptr;
    const guard_lane* lanes = nullptr;  ///< [count]
    const position_range* pinned = nullptr;
    guarded_slots* guarded = nullptr;  ///< [count][kv_heads]
    uint32_t count = 0;
    uint32_t kv_heads = 0;
};

constexpr uint32_t guard_blocks(uint32_t lanes, uint32_t kv_heads) {
    constexpr uint32_t warps = guard_threads / warp_lanes;
    return (lanes * kv_heads + warps - 1) / warps;
}

/// Positions of a head's slots (sequence/slots.hpp).
template <class Cx>
struct slot_positions {
    const position_place& store;
    const uint32_t* table;
    uint32_t head;
    uint32_t slots;
    uint32_t explicit_slots;
    uint64_t next_position;
    const position_place* sealed = nullptr;  ///< of slots below sealed_slots
    uint32_t sealed_slots = 0;

    KVRT_DEVICE uint64_t at(uint32_t slot) const {
        if (slot >= explicit_slots) return next_position - (slots - slot);
        const uint32_t id = Cx::template load_constant<uint32_t>(table + slot / store.block_tokens);
        const uint32_t* const from =
            slot < sealed_slots ? sealed->of(id, head) : store.of(id, head);
        return Cx::template load_constant<uint32_t>(from + slot % store.block_tokens);
    }
    /// The first slot at `position` or later; `slots` if there is none.
    KVRT_DEVICE uint32_t find(uint64_t position) const {
        uint32_t first = 0, last = slots;
        while (first < last) {
            const uint32_t middle = first + (last - first) / 2;
            if (at(middle) < position) {
                first = middle + 1;
            } else {
                last = middle;
            }
        }
        return first;
    }
};

/// Bound `index` of a lane's guards: ends of prompt and sinks, where the recent begin, then begin
/// and end of each pinned range.
template <class Cx>
KVRT_DEVICE uint64_t bound_of(const guard_parameters& call, const guard_lane& lane,
                              uint32_t index) {
    if (index == 0) return Cx::template load_constant<uint64_t>(&lane.prompt_tokens);
    if (index == 1) return Cx::template load_constant<uint64_t>(&lane.sinks);
    if (index == 2) {
        const uint64_t next = Cx::template load_constant<uint64_t>(&lane.next_position);
        const uint64_t recent = Cx::template load_constant<uint64_t>(&lane.recent);
        return recent < next ? next - recent : 0;
    }
    const position_range* const range =
        call.pinned + Cx::template load_constant<uint64_t>(&lane.pinned) + (index - 3) / 2;
    const uint64_t first = Cx::template load_constant<uint64_t>(&range->first);
    if (index % 2 != 0) return first;
    const uint64_t count = Cx::template load_constant<uint64_t>(&range->count);
    return count < ~first ? first + count : ~uint64_t{0};
}

/// Candidates between the slots that guards hold: found[0..2] as above, then pinned slots in any
/// order, which are sorted here.
template <class Cx>
KVRT_DEVICE void join_guards(uint32_t* found, uint32_t pinned, uint32_t slots, guarded_slots* out) {
    const auto at = [&](uint32_t i) { return Cx::template load<uint32_t>(found + i); };
    uint32_t* const ranges = found + 3;
    for (uint32_t i = 1; i < pinned; ++i) {
        const word2 range = {at(3 + 2 * i), at(4 + 2 * i)};
        uint32_t place = i;
        for (; place > 0 && at(3 + 2 * (place - 1)) > range.x; --place) {
            Cx::store(ranges + 2 * place, at(1 + 2 * place));
            Cx::store(ranges + 2 * place + 1, at(2 + 2 * place));
        }
        Cx::store(ranges + 2 * place, range.x);
        Cx::store(ranges + 2 * place + 1, range.y);
    }
    const uint32_t prompt = at(0), sinks = at(1), tail = at(2);
    uint32_t next = prompt > sinks ? prompt : sinks;
    uint32_t count = 0, candidates = 0;
    for (uint32_t i = 0; i <= pinned; ++i) {
        const uint32_t begin = i < pinned ? at(3 + 2 * i) : tail;
        const uint32_t end = begin < tail ? begin : tail;
        if (next < end) {
            Cx::store(&out->range[count].first, next);
            Cx::store(&out->range[count].end, end);
            ++count;
            candidates += end - next;
        }
        if (i == pinned) break;
        const uint32_t behind = at(4 + 2 * i);
        next = behind > next ? behind : next;
    }
    Cx::store(&out->count, count);
    Cx::store(&out->protected_slots, slots - candidates);
    Cx::store(&out->prompt_slots, prompt);
    Cx::store(&out->before_recent, tail);
    Cx::store(&out->reserved, 0u);
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void find_candidates(const guard_parameters& call) {
    const uint32_t unit = Cx::block() * (guard_threads / warp_lanes) + Cx::warp();
    const uint32_t index = unit / call.kv_heads;
    if (index >= call.count) return;
    const guard_lane& lane = call.lanes[index];
    const slot_positions<Cx> positions{
        call.positions,
        call.tables + Cx::template load_constant<uint64_t>(&lane.table),
        unit % call.kv_heads,
        Cx::template load_constant<uint32_t>(&lane.slots),
        Cx::template load_constant<uint32_t>(&lane.explicit_slots),
        Cx::template load_constant<uint64_t>(&lane.next_position),
        &call.sealed_positions,
        Cx::template load_constant<uint32_t>(&lane.sealed_slots)};
    const uint32_t pinned = Cx::template load_constant<uint32_t>(&lane.pinned_count);
    uint32_t* const found = reinterpret_cast<uint32_t*>(Cx::shared()) + Cx::warp() * most_bounds;
    for (uint32_t i = Cx::lane(); i < 3 + 2 * pinned; i += warp_lanes) {
        Cx::store(found + i, positions.find(bound_of<Cx>(call, lane, i)));
    }
    Cx::warp_barrier();
    if (Cx::lane() == 0) join_guards<Cx>(found, pinned, positions.slots, call.guarded + unit);
}

}  // namespace kvrt::kernels
