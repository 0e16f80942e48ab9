// Slots of a lane and their positions, without sequences or pools: what retention and the checks
// work on.
#pragma once

#include <array>
#include <cstdint>

#include "memory/block_id.hpp"

namespace kvrt {

/// Positions [first, first + count); an end beyond 2^64 is cut.
struct position_range {
    uint64_t first = 0;
    uint64_t count = 0;
};

/// Pinned ranges of a sequence, and one more range than that can stay between them.
inline constexpr uint32_t max_pinned_ranges = 16;
inline constexpr uint32_t max_slot_ranges = max_pinned_ranges + 1;

/// [first, end)
struct slot_range {
    uint32_t first = 0;
    uint32_t end = 0;
};

/// Ascending, disjoint, none empty.
struct slot_ranges {
    std::array<slot_range, max_slot_ranges> range = {};
    uint32_t count = 0;

    const slot_range* begin() const { return range.data(); }
    const slot_range* end() const { return range.data() + count; }

    uint32_t slots() const {
        uint32_t total = 0;
        for (const slot_range& part : *this) total += part.end - part.first;
        return total;
    }
};

/// Positions of one lane's slots for one KV head, strictly ascending. The first explicit_slots are
/// read from the stores, the others are consecutive and end just before next_position.
struct slot_positions {
    lane_positions store;
    const block_id* blocks = nullptr;
    uint32_t kv_head = 0;
    uint32_t slots = 0;
    uint32_t explicit_slots = 0;
    uint64_t next_position = 0;

    uint64_t at(uint32_t slot) const {
        if (slot >= explicit_slots) return next_position - (slots - slot);
        return store.of(blocks, slot, kv_head);
    }

    /// The first slot at `position` or later; `slots` if there is none.
    uint32_t find(uint64_t position) const {
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

}  // namespace kvrt
