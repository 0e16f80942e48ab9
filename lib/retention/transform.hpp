// From one row of scores to another: pooling along slots, softmax over candidates, mixtures.
//
// Functions that take candidates touch those entries only. Sums over candidates are in double, in
// an order that depends on the ranges alone. NaN stays with its slot: those sums leave it out.
#pragma once

#include <cstdint>

#include "sequence/slots.hpp"

namespace kvrt {

inline constexpr uint32_t widest_pool = 127;

/// out[slot] = mean of in[slot - width / 2, slot + width / 2], for slots [0, slots). What lies
/// outside [0, slots) counts as 0 and in the divisor, as in avg_pool1d. `width` is odd, at most
/// widest_pool; 1 copies. `out` may be `in`. NaN spreads over the width.
void pool_mean(const float* in, uint32_t slots, uint32_t width, float* out);

/// The greatest instead of the mean; NaN loses against any number.
void pool_max(const float* in, uint32_t slots, uint32_t width, float* out);

/// out[slot] = mean over h in [0, heads) of the softmax of logits[h * stride + slot] over the
/// candidates. The candidates' entries of logits are overwritten; `out` may be their first row. A
/// logit that is NaN or +infinity gives NaN for its slot and counts for no other.
void softmax_mean(float* logits, uint64_t stride, uint32_t heads, const slot_ranges& candidates,
                  float* out);

/// scores /= their sum over the candidates; nothing where the sum is not positive.
void normalise_to_sum(const slot_ranges& candidates, float* scores);

/// Expected Attention: scores = (scores + epsilon) * norm.
void scale_by_norm(const slot_ranges& candidates, const float* norm, float epsilon, float* scores);

/// R-KV: out = lambda * importance - (1 - lambda) * redundancy, both per slot and summing to about
/// one: redundancy after softmax_mean with one head, importance after pool_max of width 7. (The
/// public code takes the softmax over all slots: pass one range of them all.) `out` may be either.
void mix_redundancy(const slot_ranges& candidates, const float* importance, const float* redundancy,
                    float lambda, float* out);

}  // namespace kvrt
