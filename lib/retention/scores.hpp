// Scores per slot of one lane and KV head: the simple scorers, and what turns the scores of query
// heads into one ranking. Higher stays. A score that is NaN ranks behind all others.
//
// Candidates are the slots that may go, as ascending disjoint ranges: what guards leave over. All
// functions touch candidates only; other entries of their outputs keep what they held.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/tile.hpp"
#include "memory/block_id.hpp"
#include "sequence/slots.hpp"

namespace kvrt {

/// scores[h * stride + slot], h in [0, heads) -> out[slot] = max over h of the z-score of h, where
/// z = (s - mean) / max(standard deviation, 1e-6) over the candidates (population, finite scores
/// only). Means and deviations are summed in double, in an order that depends on the ranges alone.
/// Each score is read three times; `out` may be the first row of `scores`.
void normalise_and_reduce(const float* scores, uint64_t stride, uint32_t heads,
                          const slot_ranges& candidates, float* out);

/// PER_HEAD and PER_LAYER selection: total[slot] += part[slot], and +infinity if one of them is.
/// The mean over layers has the order of the sum.
void add_scores(const slot_ranges& candidates, const float* part, float* total);

/// UNION selection: total[slot] = max(total[slot], part[slot]); NaN loses against any number.
void raise_scores(const slot_ranges& candidates, const float* part, float* total);

/// Fills the candidates' entries: 0 before add_scores, -infinity before raise_scores.
void fill_scores(const slot_ranges& candidates, float value, float* scores);

/// What a random score is drawn from, besides the position of its token. Selections that are shared
/// between layers or heads use 0 for what is shared.
struct random_key {
    uint64_t seed = 0;
    uint64_t round = 0;
    uint32_t layer = 0;
    uint32_t head = 0;
};

/// RANDOM: uniform in [0, 1), a pure function of key and position: the same on every machine, for
/// every batch, and for a sequence that moved.
void score_random(const random_key& key, const slot_positions& positions,
                  const slot_ranges& candidates, float* scores);

/// STREAMING: the later the better. The score is the slot itself, since slots are in ascending
/// position; exact up to 2^24 slots.
void score_streaming(const slot_ranges& candidates, float* scores);

}  // namespace kvrt
