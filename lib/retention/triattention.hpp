// TriAttention: how much future queries of a head will attend to a cached key, from the mean of its
// queries before rotation.
//
// For query head h, future offsets D = {1, 2, 4, ..., offset_max} and t0 the next position:
//     M_f    = mean over d in D of exp(i w_f (t0 + d))             per band, shared by all heads
//     W_hf   = mean(q_hf) M_f
//     S(h,j) = c [ sum_f Re(W_hf conj(k_jf)) + sum_f (mean|q_hf| - |mean q_hf|) |k_jf| ]
// with k the key as cached (rotated, holding one factor c = attention_factor). The first sum is one
// real dot product with the key, so scoring needs neither positions nor the inverse rotation, and
// reads each key once for all query heads of its group.
//
// A band without rotation has w = 0, so M = 1, and c = 1, since the factor is on what is rotated.
// For `max` over D there is one M, W and dot product for each offset ("variant"); the second sum is
// the same for all.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "model/rope.hpp"
#include "retention/stored_rows.hpp"

namespace kvrt {

inline constexpr uint32_t default_offset_max = 65536;

struct triattention_shape {
    uint32_t key_dim = 0;
    uint32_t group = 1;                        ///< query heads of one KV head
    uint32_t offset_max = default_offset_max;  ///< a power of two
    bool maximum = false;                      ///< max over offsets instead of mean

    uint32_t offsets() const { return static_cast<uint32_t>(std::bit_width(offset_max)); }
    uint32_t variants() const { return maximum ? offsets() : 1; }
};

/// Doubles that triattention_phases writes: [variants][rotated bands][real, imaginary].
uint64_t triattention_phase_count(const triattention_shape& shape, const rope_description& rope);

/// M (or each exp(i w (t0 + d)) for `maximum`), in double. Depends on rope, t0 and offset_max only:
/// layers of one rotation share it. Cost: two sines per band.
void triattention_phases(const triattention_shape& shape, const rope_description& rope,
                         uint64_t next_position, double* phases);

/// Means of the queries of one KV head's group: each [group][bands], dense, the layout of
/// kv_query_statistics from row kv_head * group on.
struct query_means {
    const float* real = nullptr;
    const float* imaginary = nullptr;
    const float* magnitude = nullptr;
};

/// Floats that triattention_weights writes for one KV head.
uint64_t triattention_weight_count(const triattention_shape& shape, const rope_description& rope);

/// Weights of one KV head's query heads, in the order in which the scoring kernel reads them. Not
/// negative where the magnitudes are concerned: mean|q| - |mean q| is clamped at 0.
void triattention_weights(const triattention_shape& shape, const rope_description& rope,
                          const double* phases, const query_means& means, float* weights);

/// scores[h * score_stride + slot] for h in [0, group), slot in [first_slot, end_slot), from the
/// keys of one KV head where they lie. first_slot is a multiple of 16, so that callers can cut long
/// sequences; the bits do not depend on the cut. score_stride >= end_slot. SIMD on the best
/// instruction set of this processor.
void score_triattention(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                        const triattention_shape& shape, const rope_description& rope,
                        const float* weights, float* scores, uint64_t score_stride);

}  // namespace kvrt
