// Sampling in place of the top: noise that makes the highest scores a draw without replacement.
#pragma once

#include "retention/scores.hpp"

namespace kvrt {

/// scores[slot] = log(max(score, 0)) + Gumbel noise. The k highest of that are k slots drawn one
/// after the other with probabilities proportional to score. The noise is a pure function of key
/// and position. Scores of 0 and below become -infinity, +infinity and NaN stay.
void sample_scores(const random_key& key, const slot_positions& positions,
                   const slot_ranges& candidates, float* scores);

/// 64 bits from a key and a place: the same on every machine. `purpose` keeps draws apart that have
/// key and place in common.
enum class draw_purpose : uint64_t { sketch = 1, sampling = 2 };
uint64_t draw_bits(const random_key& key, draw_purpose purpose, uint64_t place);

}  // namespace kvrt
