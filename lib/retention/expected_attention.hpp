// Expected Attention (arXiv 2510.00636): what queries of the next T positions will attend to, when
// queries before rotation are normal with known mean and covariance.
//
//   z(h,j) = mu_h' k_j / sqrt(d) + k_j' S_h k_j / (2 d)     k as cached: rotated, with its factor c
//   mu = c R mean(q), S = c^2 R cov(q) R' with R the mean rotation of positions t0 .. t0 + T - 1
//   score(j) = (mean over h of softmax_j z(h,j) + epsilon) |v_j|
//
// Covariances between bands are left out: a symmetric 2 x 2 block per band remains, of which R' S R
// has a closed form. R shrinks a block between two bands by both bands' mean phases, so with a band
// that turns often in T positions nothing is lost; between slow bands something is. All d x d of
// them would cost a round more than 60 decode passes (docs/decisions.md). Without rotation a band
// is one dimension, R = 1 and c = 1.
// One pass over the keys (score_expected_logits), then softmax_mean and scale_by_norm of
// transform.hpp, with value norms of measures.hpp.
#pragma once

#include "model/rope.hpp"
#include "retention/stored_rows.hpp"
#include "retention/triattention.hpp"

namespace kvrt {

inline constexpr uint32_t default_expected_positions = 512;

/// How covariances turn. `mean_rotation`: R cov R' with the mean R, as kvpress does, which shrinks
/// them. `each_rotation`: the mean over positions of R_t cov R_t'.
enum class covariance_turning { mean_rotation, each_rotation };

struct expected_shape {
    uint32_t key_dim = 0;
    uint32_t group = 1;                               ///< query heads of one KV head
    uint32_t positions = default_expected_positions;  ///< T, at least 1
    covariance_turning turning = covariance_turning::mean_rotation;
};

/// Covariances of the queries of one KV head's group, before rotation, per band [group][bands] as
/// query_means. All null: left out. Bands that are not rotated have `real` alone.
struct query_covariances {
    const float* real = nullptr;       ///< variance of a band's first dimension
    const float* imaginary = nullptr;  ///< of its second
    const float* cross = nullptr;      ///< covariance of the two

    bool given() const { return real != nullptr; }
};

/// Doubles that expected_phases writes: [rotated bands][4].
uint64_t expected_phase_count(const rope_description& rope);

/// Per band the mean over t in [next_position, next_position + T) of exp(i w t), and of exp(2 i w
/// t). Depends on rope, next_position and T only: layers of one rotation share it.
void expected_phases(const expected_shape& shape, const rope_description& rope,
                     uint64_t next_position, double* phases);

/// Floats that expected_weights writes for one KV head.
uint64_t expected_weight_count(const expected_shape& shape, const rope_description& rope,
                               bool with_covariances);

/// Weights of one KV head's query heads, in the order in which the pass reads them. `magnitude` of
/// the means is not read.
void expected_weights(const expected_shape& shape, const rope_description& rope,
                      const double* phases, const query_means& means,
                      const query_covariances& covariances, float* weights);

/// logits[h * stride + slot] = z for h in [0, group), slot in [first_slot, end_slot).
void score_expected_logits(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                           const expected_shape& shape, const rope_description& rope,
                           const float* weights, bool with_covariances, float* logits,
                           uint64_t stride);

}  // namespace kvrt
