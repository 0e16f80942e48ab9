// TriAttention's scores (score.hpp) as products of matrices, for a library that multiplies them:
// what is in front of a product, and behind it. Of some KV heads of a cohort's lanes, and of a tile
// of slots of each,
//
//   keys      [head][inner][tile]      a slot's channels as they are stored, then its bands'
//                                      magnitudes: inner = dim + bands
//   weights   [head][columns][inner]   of each offset that counts and each query head of the group,
//                                      offsets outside
//   products  [head][columns][tile]    the sums over inner, which the library makes
//
// all f32. A score is the greatest product of its query head: magnitudes have the same weights at
// all offsets. Slots behind a lane's last one are not gathered, and nobody asks for their products.
#pragma once

#include "kernels/score.hpp"

namespace kvrt::kernels {

/// Launch each with threads of score_threads: weigh_heads with `heads` blocks, the others with
/// product_blocks(heads, tile).
struct product_parameters {
    triattention_parameters score;
    float* keys = nullptr;
    float* weights = nullptr;
    float* products = nullptr;
    uint32_t first_head = 0;  ///< of the cohort's: lane * kv_heads + head
    uint32_t heads = 0;
    uint32_t first_slot = 0;
    uint32_t tile = 0;  ///< slots; a multiple of score_threads

    KVRT_BOTH uint32_t inner() const { return score.place.keys.dim + score.bands(); }
    KVRT_BOTH uint32_t columns() const { return score.variants * score.group; }
};

constexpr uint32_t product_blocks(uint32_t heads, uint32_t tile) {
    return heads * (tile / score_threads);
}

/// Where a band's first or second dimension is in a row.
KVRT_BOTH uint32_t channel_of(const triattention_parameters& call, uint32_t band, uint32_t second) {
    if (band >= call.rotated) return call.rotated + band;
    return call.interleaved ? 2 * band + second : band + second * call.rotated;
}

/// The lane and head of one of the heads, of 0 slots where the cohort has no such lane.
struct product_head {
    uint32_t head = 0;
    uint32_t slots = 0;
    const score_lane* lane = nullptr;
};
template <class Cx>
KVRT_DEVICE product_head head_of_product(const product_parameters& call, uint32_t index) {
    const uint32_t kv_heads = call.score.place.kv_heads;
    const uint32_t lane = (call.first_head + index) / kv_heads;
    product_head found;
    if (index >= call.heads || lane >= call.score.count) return found;
    found.head = (call.first_head + index) % kv_heads;
    found.lane = call.score.lanes + lane;
    found.slots = Cx::template load_constant<uint32_t>(&found.lane->slots);
    return found;
}

/// A thread has a slot, so that neighbours write side by side.
template <class Cx, coding codes, number type>
KVRT_DEVICE void gather_keys(const product_parameters& call) {
    const uint32_t parts = call.tile / score_threads;
    const uint32_t index = Cx::block() / parts;
    const uint32_t place = Cx::block() % parts * score_threads + Cx::thread();
    const product_head found = head_of_product<Cx>(call, index);
    const uint32_t slot = call.first_slot + place;
    if (slot >= found.slots) return;
    const triattention_parameters& score = call.score;
    const uint32_t* const table =
        score.tables + Cx::template load_constant<uint64_t>(&found.lane->table);
    const uint32_t tokens = score.place.block_tokens;
    const row_reader<Cx, codes, type> row(score.place.keys,
                                          block_of_slot<Cx>(score.arena, table, slot, tokens),
                                          slot % tokens, found.head);
    const uint64_t tile = call.tile;
    float* const keys = call.keys + index * call.inner() * tile + place;
    float* const magnitudes = keys + score.place.keys.dim * tile;
    visit_bands(score, row, [&](uint32_t band, float a, float b, auto turns) {
        constexpr bool rotated = decltype(turns)::value;
        Cx::store(keys + channel_of(score, band, 0) * tile, a);
        if (rotated) Cx::store(keys + channel_of(score, band, 1) * tile, b);
        Cx::store(magnitudes + band * tile, magnitude_of<Cx, rotated>(a, b));
    });
}

/// A block has a KV head.
template <class Cx>
KVRT_DEVICE void weigh_heads(const product_parameters& call) {
    const uint32_t index = Cx::block();
    const product_head found = head_of_product<Cx>(call, index);
    if (found.slots == 0) return;
    const triattention_parameters& score = call.score;
    const uint32_t bands = score.bands(), inner = call.inner();
    const uint64_t phases = Cx::template load_constant<uint64_t>(&found.lane->phases);
    const uint64_t means = Cx::template load_constant<uint64_t>(&found.lane->means) +
                           uint64_t{found.head} * score.group * bands;
    float* const weights = call.weights + uint64_t{index} * call.columns() * inner;
    for (uint32_t i = Cx::thread(); i < call.columns() * bands; i += score_threads) {
        const uint32_t column = i / bands, band = i % bands;
        const uint32_t variant = column / score.group, head = column % score.group;
        const band_weight made =
            weight_of_band<Cx>(score, means + uint64_t{head} * bands, phases, variant, band);
        float* const row = weights + uint64_t{column} * inner;
        Cx::store(row + channel_of(score, band, 0), made.real);
        if (band < score.rotated) Cx::store(row + channel_of(score, band, 1), made.imaginary);
        Cx::store(row + score.place.keys.dim + band, made.norm);
    }
}

/// Scores of products, to where score_keys has them.
template <class Cx>
KVRT_DEVICE void take_greatest(const product_parameters& call) {
    const uint32_t parts = call.tile / score_threads;
    const uint32_t index = Cx::block() / parts;
    const uint32_t place = Cx::block() % parts * score_threads + Cx::thread();
    const product_head found = head_of_product<Cx>(call, index);
    const uint32_t slot = call.first_slot + place;
    if (slot >= found.slots) return;
    const triattention_parameters& score = call.score;
    const uint64_t tile = call.tile;
    const float* const products = call.products + index * call.columns() * tile + place;
    float* const scores = score.scores + Cx::template load_constant<uint64_t>(&found.lane->scores) +
                          uint64_t{found.head} * score.group * score.score_stride + slot;
    for (uint32_t head = 0; head < score.group; ++head) {
        float best = Cx::template load<float>(products + head * tile);
        for (uint32_t variant = 1; variant < score.variants; ++variant) {
            const uint32_t column = variant * score.group + head;
            const float next = Cx::template load<float>(products + column * tile);
            if (best < next) best = next;
        }
        Cx::store(scores + head * score.score_stride, best);
    }
}

}  // namespace kvrt::kernels
