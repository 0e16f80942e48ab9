// Statistics of queries before rotation: gathered from the rotated queries that attention sees, and
// their means, which are what TriAttention works with.
//
// Per query head and band f: sums of q_f (complex), of |q_f|, and of the products of its two parts,
// from which come covariances within the band. Sums of a step ("pending") are
// floats in memory of the step, which join the sequence's total, in double, when the step ends; a
// cancelled step just drops them. Precision: a step of 8192 rows loses at most about 1e-5 of its
// largest term; the totals keep 1e-15 per step, so a million tokens one by one are as exact as one.
#pragma once

#include <cstdint>

#include "format/element.hpp"
#include "model/rope.hpp"

namespace kvrt {

/// Sums over [query_heads][bands], in the caller's memory.
template <class number>
struct query_sums {
    number* real = nullptr;
    number* imaginary = nullptr;
    number* magnitude = nullptr;
    number* real_square = nullptr;
    number* imaginary_square = nullptr;
    number* product = nullptr;  ///< of the two
};
inline constexpr uint32_t query_sum_arrays = 6;

/// Those that lie one after the other, `stride` apart.
template <class number>
query_sums<number> query_sums_at(number* first, uint64_t stride) {
    return {first,
            first + stride,
            first + 2 * stride,
            first + 3 * stride,
            first + 4 * stride,
            first + 5 * stride};
}

/// What a round knows of a layer's queries: [query_heads][bands] each. Covariances are of a band's
/// two dimensions; where they are not known, or not asked for, all three are null.
template <class number>
struct query_moments {
    number* mean_real = nullptr;
    number* mean_imaginary = nullptr;
    number* mean_magnitude = nullptr;
    number* variance_real = nullptr;
    number* variance_imaginary = nullptr;
    number* covariance = nullptr;

    bool has_covariances() const { return variance_real != nullptr; }
};

/// Bands of all heads: the length of each array of a layer.
inline uint64_t statistics_length(const rope_description& rope, uint32_t query_heads,
                                  uint32_t key_dim) {
    return uint64_t{query_heads} * rope.bands(key_dim);
}

/// Adds rows [first_row, first_row + rows) of queries [rows, query_heads, key_dim], rotated for
/// positions first_position, first_position + 1, ..., to `pending` for heads
/// [first_head, first_head + heads). Each row is rotated back (angles are reduced in double, so the
/// position may be large) and divided by the attention factor, which dimensions that are not
/// rotated do not have. Rows are added in order: the result does not depend on how the heads are
/// cut. NaN and infinity are added as they are; commit_queries refuses them.
void add_queries(const rope_description& rope, uint32_t key_dim, const tensor_view& queries,
                 uint32_t first_row, uint32_t rows, uint64_t first_position, uint32_t first_head,
                 uint32_t heads, const query_sums<float>& pending);

/// total += pending, and zeroes pending, over `length` bands. Returns false and changes nothing in
/// total when a pending sum is not finite.
bool commit_queries(const query_sums<float>& pending, uint64_t length,
                    const query_sums<double>& total);

/// Sums of `tokens` queries -> means in float, and covariances where they are asked for. tokens >
/// 0. Variances are of all there were (divided by tokens), and never negative.
void query_moments_of(const query_sums<double>& total, uint64_t length, uint64_t tokens,
                      const query_moments<float>& out);

}  // namespace kvrt
