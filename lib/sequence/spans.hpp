// What the host knows of where a lane's retained tokens stand, when a device has chosen them: how
// many of which positions are there, not which. Guards are positions, and what they hold always
// stays, so this is mostly exact where it matters; where it is not, it says so.
//
// Only slots that a round has placed are described (the first explicit_slots); those behind them
// are consecutive and end just before next_position.
#pragma once

#include <array>
#include <cstdint>

namespace kvrt {

/// A number of slots, as far as it is known.
struct slot_count {
    uint32_t least = 0;
    uint32_t most = 0;

    bool exact() const { return least == most; }
};

/// Of positions [first, end) so many are retained, in every KV head of the lane.
struct position_span {
    uint32_t first = 0;
    uint32_t end = 0;
    slot_count kept;

    uint32_t width() const { return end - first; }
    bool full() const { return kept.least == width(); }
};

/// Ascending and disjoint, none without tokens for sure; between them nothing is retained.
struct position_spans {
    static constexpr uint32_t capacity = 16;
    std::array<position_span, capacity> span = {};
    uint32_t count = 0;
    /// Lanes with one number that is not 0 retain the same tokens: in all their heads, or `by_head`
    /// in the heads that have one place in their layers.
    uint64_t set = 0;
    bool by_head = false;
};

/// The same, with the consecutive slots behind.
struct retained_spans {
    const position_spans& placed;  ///< of explicit_slots; not looked at where there are none
    uint32_t slots = 0;
    uint32_t explicit_slots = 0;
    uint64_t next_position = 0;

    uint32_t count() const;
    position_span at(uint32_t index) const;
    /// The position of the first slot that no round has placed; next_position if there is none.
    uint64_t tail_first() const { return next_position - (slots - explicit_slots); }
};

/// How many tokens at [first, end) are retained.
slot_count count_between(const retained_spans& retained, uint64_t first, uint64_t end);

/// The first position from which on at most `count` tokens are retained, as far as it is known:
/// what stands there lies in the last `count` slots.
uint64_t newest_from(const retained_spans& retained, uint32_t count);

/// Positions of all slots, ascending: writes up to `capacity` of them. False, and nothing is
/// written, where only the device knows them.
bool list_known_positions(const retained_spans& retained, uint64_t capacity, uint32_t* positions);

/// Whether all heads of two lanes retain the same tokens for sure, or `by_head` those that have one
/// place in their layers; `a` may be `b`.
bool surely_same(const retained_spans& a, const retained_spans& b, bool by_head);

/// [first, end), ascending and disjoint: what guards hold.
struct held_range {
    uint64_t first = 0;
    uint64_t end = 0;
};

/// What is known after a round that leaves `keep` slots: all that is held, and of the others
/// whichever; the newest, if it `keeps_newest`.
position_spans spans_after_round(const retained_spans& before, const held_range* held,
                                 uint32_t held_count, uint32_t keep, bool keeps_newest);

}  // namespace kvrt
