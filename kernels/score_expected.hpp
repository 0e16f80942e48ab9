// Expected Attention (retention/expected_attention.hpp says what it is), for a whole cohort: what
// queries to come are expected to give each key, before the softmax over slots, and the norms of
// values. Scores have the bits of the CPU's where that fuses multiplication and addition.
#pragma once

#include <cmath>

#include "kernels/content.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t expected_heads = 4;    ///< query heads in one pass over the keys
inline constexpr uint32_t expected_weights = 5;  ///< of a, b, a a, b b, a b of a band

/// Query head g of KV head h of lane i has row h * group + g of its scores, which are logits, rows
/// `stride` apart, from lane.scores on; KV head h has row i * kv_heads + h of the norms.
///
/// Launch with score_blocks(...) blocks of score_threads threads and expected_shared_bytes(bands).
struct expected_parameters {
    const std::byte* arena = nullptr;
    block_place place;
    const score_lane* lanes = nullptr;  ///< [count]
    const uint32_t* tables = nullptr;
    /// [query heads of a lane][bands], of query_moments; `moment_stride` from array to array.
    const float* moments = nullptr;
    uint64_t moment_stride = 0;
    const double* phases = nullptr;  ///< what expected_phases wrote, per sequence and rotation
    float* scores = nullptr;         ///< logits
    float* norms = nullptr;
    uint64_t stride = 0;
    double attention_factor = 1.0;
    uint32_t count = 0;
    uint32_t most_slots = 0;  ///< of a lane
    uint32_t group = 1;       ///< query heads of a KV head
    uint32_t rotated = 0;     ///< bands
    bool interleaved = false;
    bool spread = false;  ///< there are covariances

    KVRT_BOTH uint32_t bands() const { return place.keys.dim - rotated; }
};
KVRT_BOTH constexpr uint32_t expected_shared_bytes(uint32_t bands) {
    return bands * expected_heads * expected_weights * static_cast<uint32_t>(sizeof(float));
}

/// Weights in shared memory, by band: [expected_weights][expected_heads], 0 for heads beyond the
/// group, and of covariances where there are none.
template <class Cx>
KVRT_DEVICE float* expected_band(uint32_t band) {
    return reinterpret_cast<float*>(Cx::shared()) + band * expected_heads * expected_weights;
}

/// Those of one band and query head, in double, as expected_weights of the CPU makes them.
/// `moments`: of the head and band.
template <class Cx>
KVRT_DEVICE void weigh_band(const expected_parameters& call, const float* moments,
                            const double* phases, uint32_t band,
                            float (&weights)[expected_weights]) {
    const auto moment = [&](uint32_t array) {
        return double{Cx::template load_constant<float>(moments + array * call.moment_stride)};
    };
    const double dim = static_cast<double>(call.place.keys.dim);
    const double dot_scale = 1.0 / Cx::square_root(dim), square_scale = 0.5 / dim;
    if (band >= call.rotated) {
        weights[0] = static_cast<float>(dot_scale * moment(0));
        if (call.spread) weights[2] = static_cast<float>(square_scale * moment(3));
        return;
    }
    const double c = Cx::template load_constant<double>(phases + 4 * uint64_t{band});
    const double s = Cx::template load_constant<double>(phases + 4 * uint64_t{band} + 1);
    const double factor = call.attention_factor;
    const double real = factor * moment(0), imaginary = factor * moment(1);
    weights[0] = static_cast<float>(dot_scale * (real * c - imaginary * s));
    weights[1] = static_cast<float>(dot_scale * (real * s + imaginary * c));
    if (!call.spread) return;
    // A turn leaves half the trace alone, and turns what remains by twice its angle.
    const double first = moment(3), second = moment(4), both = moment(5);
    const double round = (first + second) / 2.0 * (c * c + s * s);
    const double half = (first - second) / 2.0;
    const double c2 = c * c - s * s, s2 = c * s + s * c;
    const double skew_real = half * c2 - both * s2, skew_imaginary = half * s2 + both * c2;
    const double scale = square_scale * factor * factor;
    weights[2] = static_cast<float>(scale * (round + skew_real));
    weights[3] = static_cast<float>(scale * (round - skew_real));
    weights[4] = static_cast<float>(scale * 2.0 * skew_imaginary);
}

template <class Cx>
KVRT_DEVICE void weigh_bands(const expected_parameters& call, uint64_t means, uint64_t phases,
                             uint32_t first_head) {
    const uint32_t bands = call.bands();
    for (uint32_t i = Cx::thread(); i < bands * expected_heads; i += score_threads) {
        const uint32_t band = i / expected_heads, h = i % expected_heads;
        float weights[expected_weights] = {};
        if (first_head + h < call.group) {
            weigh_band<Cx>(call, call.moments + means + uint64_t{first_head + h} * bands + band,
                           call.phases + phases, band, weights);
        }
        KVRT_UNROLL
        for (uint32_t w = 0; w < expected_weights; ++w) {
            Cx::store(expected_band<Cx>(band) + w * expected_heads + h, weights[w]);
        }
    }
}

/// Sums of a slot, per query head.
template <class Cx>
struct expected_sums {
    float of_head[expected_heads] = {};

    KVRT_DEVICE void add(float x, const float* weights) {
        const word4 four = Cx::template load<word4>(weights);
        of_head[0] = Cx::multiply_add(Cx::bits_to_f32(four.x), x, of_head[0]);
        of_head[1] = Cx::multiply_add(Cx::bits_to_f32(four.y), x, of_head[1]);
        of_head[2] = Cx::multiply_add(Cx::bits_to_f32(four.z), x, of_head[2]);
        of_head[3] = Cx::multiply_add(Cx::bits_to_f32(four.w), x, of_head[3]);
    }
    KVRT_DEVICE void add_band(float a, float b, uint32_t band, bool rotated, bool spread) {
        const float* const weights = expected_band<Cx>(band);
        add(a, weights);
        if (rotated) add(b, weights + expected_heads);
        if (!spread) return;
        add(a * a, weights + 2 * expected_heads);
        if (!rotated) return;
        add(b * b, weights + 3 * expected_heads);
        add(a * b, weights + 4 * expected_heads);
    }
};

/// Bands [band, band + count) of a row, of at most 8.
template <class Cx>
KVRT_DEVICE void sum_expected(const expected_parameters& call, const opened_row<Cx>& row,
                              uint32_t band, uint32_t count, expected_sums<Cx>& sums) {
    const bool rotated = band < call.rotated;
    float a[lane_channels], b[lane_channels] = {};
    KVRT_ROLLED
    for (uint32_t which = 0; which < (rotated ? 2u : 1u); ++which) {
        const uint32_t first = !rotated           ? call.rotated + band
                               : call.interleaved ? 2 * band + which * lane_channels
                                                  : band + which * call.rotated;
        float x[lane_channels];
        row.read_from(first, x);
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            a[i] = which == 0 ? x[i] : a[i];
            b[i] = which != 0 ? x[i] : b[i];
        }
    }
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        if (i >= count) continue;
        // Of interleaved ones the eight bands lie in sixteen channels: first in a, then in b.
        constexpr uint32_t half = lane_channels / 2;
        const float even = i < half ? a[2 * (i % half)] : b[2 * (i % half)];
        const float odd = i < half ? a[2 * (i % half) + 1] : b[2 * (i % half) + 1];
        const bool pairs = rotated && call.interleaved;
        sums.add_band(pairs ? even : a[i], pairs ? odd : b[i], band + i, rotated, call.spread);
    }
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void score_expected(const expected_parameters& call) {
    const uint32_t kv_heads = call.place.kv_heads, bands = call.bands();
    const score_share share =
        share_of_stretch<Cx>(call.lanes, call.count, kv_heads, call.most_slots);
    if (share.end == 0) return;
    const score_lane& lane = call.lanes[share.index];
    const uint32_t* const table = call.tables + Cx::template load_constant<uint64_t>(&lane.table);
    const uint64_t phases = Cx::template load_constant<uint64_t>(&lane.phases);
    const uint64_t means = Cx::template load_constant<uint64_t>(&lane.means) +
                           uint64_t{share.head} * call.group * bands;
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&lane.scores) +
                          uint64_t{share.head} * call.group * call.stride;
    for (uint32_t first_head = 0; first_head < call.group; first_head += expected_heads) {
        Cx::barrier();  // nobody reads the weights before any more
        weigh_bands<Cx>(call, means, phases, first_head);
        Cx::barrier();
        for (uint32_t slot = share.first + Cx::thread(); slot < share.end; slot += score_threads) {
            const opened_row<Cx> row(call.place, call.place.keys, call.arena, table, slot,
                                     share.head);
            expected_sums<Cx> sums;
            KVRT_ROLLED
            for (uint32_t band = 0; band < bands;) {
                const uint32_t end = band < call.rotated ? call.rotated : bands;
                const uint32_t count = end - band < lane_channels ? end - band : lane_channels;
                sum_expected<Cx>(call, row, band, count, sums);
                band += count;
            }
            KVRT_UNROLL
            for (uint32_t h = 0; h < expected_heads; ++h) {
                if (first_head + h >= call.group) continue;
                Cx::store(scores + (first_head + h) * call.stride + slot, sums.of_head[h]);
            }
        }
    }
    float* const norms = call.norms + (uint64_t{share.index} * kv_heads + share.head) * call.stride;
    for (uint32_t slot = share.first + Cx::thread(); slot < share.end; slot += score_threads) {
        const opened_row<Cx> row(call.place, call.place.values, call.arena, table, slot,
                                 share.head);
        Cx::store(norms + slot, std::sqrt(square_of_row<Cx>(row)));
    }
}

}  // namespace kvrt::kernels
