// The order of scores, and what stays whatever its score: the largest of a measure, or the best of
// each stretch of positions.
//
// Exact, deterministic, linear, no heap. Among equal scores the lowest slot wins; -0 equals 0; NaN
// ranks behind all numbers.
#pragma once

#include <bit>

#include "sequence/slots.hpp"

namespace kvrt {

/// A key that orders as the score does, with -0 as 0 and NaN, whose key is 0, below everything.
inline uint32_t score_order(float score) {
    const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
    const uint32_t negative = 0u - (bits >> 31);  // signs are as good as random: no branch
    const uint32_t number = score == score ? 0xffffffffu : 0u;
    return (bits ^ (negative | 0x80000000u)) & number;
}

/// The key of the wanted-th highest score, and how many with that very key belong to the wanted.
struct rank_bound {
    uint32_t key = 0xffffffffu;  ///< no score has this key
    uint32_t of_equals = 0;
};

/// The bound of the `wanted` highest candidates; wanted <= candidates.slots(). For 0: a bound that
/// nothing reaches.
rank_bound find_rank(const float* scores, const slot_ranges& candidates, uint32_t wanted);

/// Candidates with score >= least.
uint32_t count_at_least(const float* scores, const slot_ranges& candidates, float least);

/// The `count` candidates with the largest measure get +infinity in scores; all of them, when there
/// are fewer. `measure` may be `scores`.
void reserve_largest(const float* measure, const slot_ranges& candidates, uint32_t count,
                     float* scores);

/// Positions `range`, cut into `segments` stretches of equal length (the ends rounded down).
struct segment_quota {
    position_range range;
    uint32_t segments = 1;
    uint32_t each = 1;  ///< candidates that stay of each segment, if it has so many
};

/// The best candidates of each segment get +infinity. Returns how many did.
uint32_t reserve_segments(const segment_quota& quota, const slot_positions& positions,
                          const slot_ranges& candidates, float* scores);

/// Candidates in slots [first, end).
slot_ranges cut_ranges(const slot_ranges& candidates, uint32_t first, uint32_t end);

}  // namespace kvrt
