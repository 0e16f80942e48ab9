// The running softmax of a warp's 16 query vectors over groups of 16 slots.
#pragma once

#include "kernels/attend_vectors.hpp"

namespace kvrt::kernels {

/// Logits in units of log(2), from products with the codes of 16 keys; -infinity where a slot is
/// not visible to its vector.
template <class Cx, class tiles>
KVRT_DEVICE void finish_logits(const attend_parameters& call, const attend_sequence& sequence,
                               uint32_t kv_head, uint32_t first_slot, const std::byte* keys,
                               const warp_vectors& vectors, const uint32_t (&visible)[2],
                               float (&scores)[2][4]) {
    KVRT_UNROLL
    for (uint32_t tile = 0; tile < 2; ++tile) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t slot = tile * 8 + Cx::lane() % 4 * 2 + i % 2, half = i / 2;
            float logit = scores[tile][i];
            if constexpr (tiles::coded) {
                logit = tiles::key_product(call.place.keys, keys, kv_head, slot, logit,
                                           vectors.query_sum[half]);
            }
            logit *= vectors.factor[half];
            if (!only_scaled(call)) {
                if (call.softcap != 0.0f) logit = call.softcap * Cx::tanh(logit / call.softcap);
                if (call.alibi_slopes != nullptr && (visible[half] >> slot & 1u) != 0) {
                    logit += vectors.slope[half] * relative_position<Cx>(call, sequence, kv_head,
                                                                         first_slot + slot,
                                                                         vectors.row[half]);
                }
                logit *= log2_of_e;
            }
            scores[tile][i] = logit;
        }
    }
    if ((visible[0] & visible[1]) == 0xffffu) return;
    KVRT_UNROLL
    for (uint32_t tile = 0; tile < 2; ++tile) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const uint32_t slot = tile * 8 + Cx::lane() % 4 * 2 + i % 2;
            if ((visible[i / 2] >> slot & 1u) == 0) scores[tile][i] = minus_infinity<Cx>();
        }
    }
}

/// A running softmax of a lane's two vectors.
template <class tiles>
struct running_softmax {
    float largest[2];   ///< of logits
    float sum[2];       ///< of this lane's slots
    float heaviest[2];  ///< of logits plus log2 of the values' steps; largest, where there are none
    float least[2];     ///< of this lane's slots: weighted least numbers of values
    float out[tiles::channels / 8][4];
};

template <class Cx, class tiles>
KVRT_DEVICE running_softmax<tiles> empty_softmax() {
    running_softmax<tiles> state = {};
    KVRT_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        state.largest[half] = state.heaviest[half] = minus_infinity<Cx>();
    }
    return state;
}

/// The largest of a vector's logits among the four lanes that have it.
template <class Cx>
KVRT_DEVICE float largest_of_row(const float (&scores)[2][4], uint32_t half, float so_far) {
    float largest = so_far;
    KVRT_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
        const float here = scores[i / 2][half * 2 + i % 2];
        largest = here > largest ? here : largest;
    }
    KVRT_UNROLL
    for (uint32_t bits = 1; bits < 4; bits *= 2) {
        const float other = Cx::shuffle_xor(largest, bits);
        largest = other > largest ? other : largest;
    }
    return largest;
}

/// exp2(x - largest), where largest may be -infinity: then there is nothing yet.
template <class Cx>
KVRT_DEVICE float weight_of(float x, float largest) {
    return Cx::exp2(largest == minus_infinity<Cx>() ? x : x - largest);
}

/// Weights times steps of values, relative to the heaviest, from logits that have those steps' log2
/// in them.
template <class Cx, class tiles>
KVRT_DEVICE void weigh_by_steps(const float (&logits)[2][4], float (&weights)[2][4],
                                float (&rescale)[2], running_softmax<tiles>& state) {
    KVRT_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        const float heaviest = largest_of_row<Cx>(logits, half, state.heaviest[half]);
        rescale[half] = weight_of<Cx>(state.heaviest[half], heaviest);
        state.heaviest[half] = heaviest;
        KVRT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            weights[i / 2][half * 2 + i % 2] =
                weight_of<Cx>(logits[i / 2][half * 2 + i % 2], heaviest);
        }
    }
}

/// Takes the logits of a group into the softmax. Leaves weights as the fragments that values are to
/// be multiplied by, and what was summed before relative to the same maximum as they.
template <class Cx, class tiles>
KVRT_DEVICE void weigh_group(const operand_place& values, uint32_t kv_head,
                             const std::byte* value_tile, const uint32_t (&visible)[2],
                             const float (&scores)[2][4], running_softmax<tiles>& state,
                             uint32_t (&packed)[4]) {
    float weights[2][4];
    float rescale[2];
    KVRT_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        const float largest = largest_of_row<Cx>(scores, half, state.largest[half]);
        const float factor = weight_of<Cx>(state.largest[half], largest);
        state.largest[half] = largest;
        state.sum[half] *= factor;
        if constexpr (tiles::has_least) state.least[half] *= factor;
        rescale[half] = factor;
        KVRT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const float weight = weight_of<Cx>(scores[i / 2][half * 2 + i % 2], largest);
            weights[i / 2][half * 2 + i % 2] = weight;
            if constexpr (tiles::coded) state.sum[half] += weight;
        }
    }
    if constexpr (tiles::coded) {
        tiles::weigh_values(values, kv_head, value_tile, visible, scores, weights, rescale, state);
    }
    // Rounded weights are what values are multiplied by, so they are what is summed.
    KVRT_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
        const float low = weights[i / 2][i % 2 * 2], high = weights[i / 2][i % 2 * 2 + 1];
        const uint32_t low_bits = to_half_width<Cx>(low, tiles::weight_type);
        const uint32_t high_bits = to_half_width<Cx>(high, tiles::weight_type);
        packed[i] = low_bits | high_bits << 16;
        if constexpr (!tiles::coded) {
            const uint16_t both[2] = {static_cast<uint16_t>(low_bits),
                                      static_cast<uint16_t>(high_bits)};
            KVRT_UNROLL
            for (uint32_t k = 0; k < 2; ++k) {
                state.sum[i % 2] += tiles::weight_type == number::f16 ? Cx::f16_to_f32(both[k])
                                                                      : Cx::bf16_to_f32(both[k]);
            }
        }
    }
    if (Cx::ballot(rescale[0] != 1.0f || rescale[1] != 1.0f) == 0) return;
    KVRT_UNROLL
    for (uint32_t tile = 0; tile < tiles::channels / 8; ++tile) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) state.out[tile][i] *= rescale[i / 2];
    }
}

/// Leaves a group's weights, relative to the largest logit so far, for those who add them up.
template <class Cx, class tiles>
KVRT_DEVICE void keep_group(const kept_weights& kept, const warp_vectors& vectors, uint32_t group,
                            const float (&scores)[2][4], const running_softmax<tiles>& state) {
    KVRT_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        if (vectors.kept[half] == not_kept) continue;
        const uint64_t entry = uint64_t{group} * vectors.kept_step + vectors.kept[half];
        if (Cx::lane() % 4 == 0) Cx::store(kept.largest + entry, state.largest[half]);
        KVRT_UNROLL
        for (uint32_t tile = 0; tile < 2; ++tile) {
            const float* const pair = scores[tile] + half * 2;
            const uint32_t low = Cx::f32_to_f16(weight_of<Cx>(pair[0], state.largest[half]));
            const uint32_t high = Cx::f32_to_f16(weight_of<Cx>(pair[1], state.largest[half]));
            Cx::store(kept.weights + entry * slots_of_group + tile * 8 + Cx::lane() % 4 * 2,
                      low | high << 16);
        }
    }
}

/// Values among which are some that are no numbers, where not all rows look: 0 times those would be
/// none, so row after row is multiplied by what it sees.
template <class Cx, class tiles>
KVRT_DEVICE void add_values_apart(const attend_parameters& call, const attend_sequence& sequence,
                                  uint32_t first_slot, const std::byte* values,
                                  const warp_vectors& vectors, const uint32_t (&weights)[4],
                                  running_softmax<tiles>& state) {
    for (uint32_t row = vectors.first_row; row <= vectors.last_row; ++row) {
        const uint32_t own = (vectors.row[0] == row ? 1u : 0u) | (vectors.row[1] == row ? 2u : 0u);
        uint32_t kept[4];
        KVRT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) kept[i] = (own >> (i % 2) & 1u) != 0 ? weights[i] : 0;
        const uint32_t seen = slots_seen(call, view_of_row(call, sequence, row), first_slot);
        tiles::template multiply_values<true>(call.place.values, values, kept, seen, state.out,
                                              own);
    }
}

/// A warp takes 16 slots, whose keys and then values are in shared memory.
template <class Cx, class tiles, class fragments>
KVRT_DEVICE void take_group(const attend_parameters& call, const attend_sequence& sequence,
                            uint32_t kv_head, uint32_t first_slot, const std::byte* keys,
                            const fragments& queries, const warp_vectors& vectors,
                            running_softmax<tiles>& state) {
    // Mostly all see all. Vectors that there are not may look, too: nobody asks for theirs.
    uint32_t any = 0xffffu, all = 0xffffu, visible[2] = {0xffffu, 0xffffu};
    if (first_slot < vectors.all_from || first_slot + slots_of_group > vectors.all_limit) {
        const row_view early = view_of_row(call, sequence, vectors.first_row);
        const row_view late = view_of_row(call, sequence, vectors.last_row);
        any = slots_seen(call, {early.from, late.limit}, first_slot);
        if (any == 0) return;
        all = slots_seen(call, {vectors.all_from, vectors.all_limit}, first_slot);
        KVRT_UNROLL
        for (uint32_t half = 0; half < 2; ++half) {
            const row_view view = view_of_row(call, sequence, vectors.row[half]);
            visible[half] = slots_seen(call, view, first_slot);
        }
    }
    float scores[2][4] = {};
    tiles::multiply_keys(call.place.keys, keys, queries, scores);
    finish_logits<Cx, tiles>(call, sequence, kv_head, first_slot, keys, vectors, visible, scores);
    const std::byte* const values = keys + tiles::key_bytes(call.place.keys);
    uint32_t weights[4];
    weigh_group<Cx, tiles>(call.place.values, kv_head, values, visible, scores, state, weights);
    if (vectors.kept_step != 0) {
        keep_group<Cx, tiles>(call.kept, vectors, first_slot / slots_of_group, scores, state);
    }
    if (any != all && Cx::ballot(tiles::spoils(call.place.values, values, any)) != 0) {
        return add_values_apart<Cx, tiles>(call, sequence, first_slot, values, vectors, weights,
                                           state);
    }
    tiles::multiply_values(call.place.values, values, weights, any, state.out);
}

}  // namespace kvrt::kernels
