// LagKV (arXiv 2504.04704, as kvpress has it): slots after the sinks in parts of `lag`; a part is
// measured by the channels' ranges in the part that follows it.
//
//   for keys, and for values: x' = (x - least) / (greatest - least) per channel, with the extremes
//   of the next part; deviation of x' over the channels (divided by channels - 1); softmax of the
//   deviations over the part's slots
//   score = (slots of the part whose mean of the two is lower) / lag
//
// The last part and what is left over after it are above all others, the newer the higher: a budget
// that cannot hold them all leaves the older ones. kvpress gives them all 1, and a sort decides.
//   score = 1 + (slot - first) / (slots - first), of which `first` is the last part's;  sinks: 2
// Sequences of fewer than sinks + 2 lag slots are scored by recency: (slot - sinks) / (slots -
// sinks).
// Of slots of a part that are equal the lower one ranks higher. A channel that does not vary in the
// next part counts as the middle of a range. A slot with NaN ranks lowest in its part, and has no
// part in the extremes of the channels where it is.
#pragma once

#include "retention/stored_rows.hpp"

namespace kvrt {

struct lag_shape {
    uint32_t lag = 128;  ///< at least 1
    uint32_t sinks = 4;
};

/// Parts that have a part after them; 0 when the sequence is too short.
uint32_t lag_parts(const lag_shape& shape, uint32_t slots);

/// Bytes that a call of score_lag_parts works in, on 8-byte boundaries.
uint64_t lag_scratch_bytes(const lag_shape& shape);

/// scores of parts [first_part, end_part) of lag_parts(). Parts do not depend on each other. From
/// the last to the first, so that each row is read once: what a part is measured by is known by
/// then. The part behind the last one is read besides.
void score_lag_parts(const stored_rows& rows, const lag_shape& shape, uint32_t first_part,
                     uint32_t end_part, void* scratch, float* scores);

/// scores of all other slots of [0, slots). Reads no rows.
void score_lag_kept(const lag_shape& shape, uint32_t slots, float* scores);

}  // namespace kvrt
