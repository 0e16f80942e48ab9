// VaSE-DKV (arXiv 2606.03928): how large keys and values are in a few random directions, drawn anew
// each round. score = |k G|^2 |v G|^2, G normal numbers / sqrt(20).
#pragma once

#include "retention/scores.hpp"
#include "retention/stored_rows.hpp"

namespace kvrt {

inline constexpr uint32_t sketch_directions = 20;

/// Floats of G for rows of that many channels.
inline uint64_t sketch_count(uint32_t dim) { return uint64_t{dim} * sketch_directions; }

/// G [dim][sketch_directions], a pure function of key and element, of 8 significant bits: G for
/// fewer channels is the front of G for more. With keys and values of one dimension, one G serves
/// both.
void draw_sketch(const random_key& key, uint32_t dim, float* sketch);

/// scores[slot] = |k G|^2 |v G|^2 for [first_slot, end_slot). `sketch` is of the greater of the two
/// dimensions. 40 multiply-adds a channel pair, by matrix units where there are. Its sum over slots
/// is left to normalise_to_sum (transform.hpp); it changes no order.
void score_sketch(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                  const float* sketch, float* scores);

}  // namespace kvrt
