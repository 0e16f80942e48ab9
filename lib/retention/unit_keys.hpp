// Scores from the directions of keys: KeyDiff (arXiv 2504.15364) and the redundancy of R-KV (arXiv
// 2505.24133). With u = k / |k| the direction of a key as cached (rotated), and u = 0 for k = 0:
//
//   KeyDiff              -cos(k_j, sum_i u_i)
//   redundancy, linear   (1/n) sum over i != j of u_i u_j = (u_j sum_i u_i - |u_j|^2) / n
//   redundancy, exact    (1/n) sum over i != j of u_i u_j, without the terms of rows i whose latest
//                        i' != i with u_i u_i' > threshold is j: the newest copy is spared
//
// KeyDiff and the linear form are two passes over the same keys: sum_unit_keys, then one of the
// score functions. The exact form is quadratic in the slots, and reads copies of the directions.
#pragma once

#include "retention/stored_rows.hpp"

namespace kvrt {

/// sums[dim] = sum of the directions of slots [first_slot, end_slot), a part of at most
/// slots_per_part. Added in an order that depends on the slots' numbers alone. Parts may be summed
/// by whoever comes first; join_parts then adds them in order. Keys that are not finite are left
/// out.
void sum_unit_keys(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot, double* sums);

/// parts[count][dim] -> total[dim]; total may be the first part.
void join_parts(const double* parts, uint32_t count, uint32_t dim, double* total);

/// scores[slot] = -cos(k, total): the key that points where all others point goes first. A key of 0
/// has the cosine 0, and so has every key where total is 0. [first_slot, end_slot)
void score_keydiff(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                   const double* total, float* scores);

/// redundancy[slot], linear form; `slots` is the n that total was summed over.
void score_linear_redundancy(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                             const double* total, uint32_t slots, float* redundancy);

/// Floats of the copies of `slots` directions, which start on 64 bytes.
uint64_t unit_copy_count(uint32_t slots, uint32_t dim);

/// Copies the directions of slots [first_slot, end_slot) to units, an array for all `slots`.
/// first_slot is a multiple of 16. The copy of the last slot fills its group of 16 with zeroes. A
/// key that is not finite has the direction 0, so that no other is compared with it, and NaN in
/// row_sum, where all others have 0.
void copy_unit_keys(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot, float* units,
                    float* row_sum);

/// What rows [first_row, end_row) see in all others, once all copies are there: row_sum[i] += sum
/// over j != i of u_i u_j; latest[i] = the greatest j != i with u_i u_j > threshold, whose product
/// is latest_cosine[i], or no_slot. Rows do not depend on each other, nor on where they are cut;
/// first_row is a multiple of 16. slots * dim multiply-adds a row.
inline constexpr uint32_t no_slot = 0xffffffffu;
void compare_unit_keys(const float* units, uint32_t slots, uint32_t dim, uint32_t first_row,
                       uint32_t end_row, float threshold, float* row_sum, uint32_t* latest,
                       float* latest_cosine);

/// redundancy[slot] of the exact form from what compare_unit_keys found; may be row_sum. The public
/// R-KV code also drops the term of column 0 in each row that is like no other; this does not.
void join_redundancy(uint32_t slots, const float* row_sum, const uint32_t* latest,
                     const float* latest_cosine, float* redundancy);

}  // namespace kvrt
