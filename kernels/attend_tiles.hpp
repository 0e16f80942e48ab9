// How 16 slots of keys and of values come into shared memory and are multiplied there, by one warp,
// for each way of storing them. S = Q K^T is 16 query heads by 16 slots, O += P V by the channels
// of values. Fragments are those of mma.m16n8k16; which channel stands at which k or n is each
// storage's own choice, as long as both factors agree.
//
// What was never written, or must not be seen, may hold anything: keys of such slots spoil their
// own columns of S only, which are replaced; values are made 0.
#pragma once

#include "kernels/attend.hpp"

namespace kvrt::kernels {

/// Bytes of a row in shared memory: an odd number of 16 bytes, so that 8 rows fall into all banks.
KVRT_BOTH constexpr uint32_t odd_row(uint32_t channels) { return (channels / 8 | 1u) * 16; }
KVRT_BOTH constexpr uint32_t whole_steps(uint32_t channels) { return (channels + 15) / 16 * 16; }

/// Positions of 16 slots: the first `stored_slots` are stored, the others follow `implied`.
struct group_positions {
    const uint32_t* stored;
    uint32_t stored_slots;
    uint32_t implied;  ///< of the first slot, where all are
};

/// Where 16 slots of one head lie.
struct group_source {
    const std::byte* block;
    uint32_t slot;  ///< the first, in the block
    uint32_t head;
    uint32_t seen;              ///< bit s: slot + s
    group_positions positions;  ///< of keys whose storage needs them
    uint32_t in_context;        ///< the first slot, of the sequence's
    const turning_place* turning;
};

/// Rows of 16-bit elements, one behind the other in shared memory; those of slots that `wanted`
/// does not name become 0, as does what is behind the row up to whole steps.
template <class Cx>
KVRT_DEVICE void fetch_rows(const operand_place& operand, const group_source& from, uint32_t wanted,
                            std::byte* shared) {
    const uint32_t pieces = whole_steps(operand.dim) / 8;
    const uint32_t stride = odd_row(whole_steps(operand.dim));
    for (uint32_t i = Cx::lane(); i < slots_of_group * pieces; i += warp_lanes) {
        const uint32_t slot = i / pieces, piece = i % pieces;
        const bool there = piece * 8 < operand.dim && (wanted >> slot & 1u) != 0;
        const std::byte* const row = from.block + operand.at(from.slot + slot, from.head, 0);
        Cx::copy_async(shared + slot * stride + piece * 16, there ? row + piece * 16 : row,
                       there ? 16 : 0);
    }
}

/// out += weights b; where `apart`, for those of the two vectors of a lane alone that are its own
/// (bits 0 and 1), whatever the sums of others are.
template <class Cx, number type, bool apart>
KVRT_DEVICE void accumulate(float (&out)[4], const uint32_t (&weights)[4], const uint32_t (&b)[2],
                            uint32_t own) {
    if constexpr (!apart) {
        Cx::template multiply<type>(out, weights, b);
        return;
    }
    float sums[4] = {};
    Cx::template multiply<type>(sums, weights, b);
    KVRT_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
        if ((own >> (i / 2) & 1u) != 0) out[i] += sums[i];
    }
}

/// Elements of f16 or bf16; keys as columns of 16 slots, or as rows.
template <class Cx, number type, uint32_t most_channels>
struct half_tiles {
    static constexpr number query_type = type;
    static constexpr number weight_type = type;
    static constexpr bool coded = false;
    static constexpr bool has_least = false;
    static constexpr uint32_t channels = most_channels;
    static constexpr uint32_t stages = channels <= 128 ? 3 : 2;
    static constexpr bool turns = false;  ///< knows attend_parameters::turning

    static KVRT_BOTH uint32_t key_bytes(const operand_place& keys) {
        return keys.by_rows() ? slots_of_group * odd_row(whole_steps(keys.dim))
                              : whole_steps(keys.dim) * 32;
    }
    static KVRT_BOTH uint32_t value_bytes(const operand_place& values) {
        return slots_of_group * odd_row(whole_steps(values.dim));
    }
    static KVRT_DEVICE uint32_t column_of(const operand_place&, uint32_t channel) {
        return channel;
    }
    /// The channel of column `column` of tile `tile` of O.
    static KVRT_DEVICE uint32_t channel_of(const operand_place&, uint32_t tile, uint32_t column) {
        return tile * 8 + column;
    }

    /// A word's 16 slots are 32 bytes, whose halves change places every 4 words: so 8 words of 8
    /// slots fall into all banks.
    static KVRT_DEVICE uint32_t column_at(uint32_t word, uint32_t half) {
        return word * 32 + (half ^ (word / 4 % 2)) * 16;
    }

    static KVRT_DEVICE void fetch_keys(const operand_place& keys, const group_source& from,
                                       std::byte* shared) {
        if (keys.by_rows()) return fetch_rows<Cx>(keys, from, 0xffffu, shared);
        const std::byte* const tile = from.block + keys.at(from.slot, from.head, 0);
        for (uint32_t i = Cx::lane(); i < whole_steps(keys.dim) * 2; i += warp_lanes) {
            const bool there = i / 2 < keys.dim;
            Cx::copy_async(shared + column_at(i / 2, i % 2), there ? tile + i * 16 : tile,
                           there ? 16 : 0);
        }
    }
    static KVRT_DEVICE void fetch_values(const operand_place& values, const group_source& from,
                                         std::byte* shared) {
        fetch_rows<Cx>(values, from, from.seen, shared);
    }

    /// queries.of_step(step, a) gives the fragments of 16 columns.
    template <class fragments>
    static KVRT_DEVICE void multiply_keys(const operand_place& keys, const std::byte* shared,
                                          const fragments& queries, float (&scores)[2][4]) {
        if (keys.by_rows()) return multiply_key_rows(keys, shared, queries, scores);
        if (whole_steps(keys.dim) == most_channels) {
            return multiply_steps<false, true>(keys, shared, queries, scores);
        }
        multiply_steps<false, false>(keys, shared, queries, scores);
    }
    /// Of keys that lie in shared memory as rows. `early`: loads may come early, which takes
    /// registers.
    template <bool early = true, class fragments>
    static KVRT_DEVICE void multiply_key_rows(const operand_place& keys, const std::byte* shared,
                                              const fragments& queries, float (&scores)[2][4]) {
        if (early && whole_steps(keys.dim) == most_channels) {
            return multiply_steps<true, true>(keys, shared, queries, scores);
        }
        multiply_steps<true, false>(keys, shared, queries, scores);
    }

    /// Whether a lane finds a value that is no number, which times a weight of 0 is none either.
    static KVRT_DEVICE bool spoils(const operand_place& values, const std::byte* shared, uint32_t) {
        const uint32_t words = values.dim / 2, infinite = type == number::f16 ? 0x7c00u : 0x7f80u;
        bool found = false;
        for (uint32_t i = Cx::lane(); i < slots_of_group * words; i += warp_lanes) {
            const uint32_t pair = Cx::template load<uint32_t>(
                shared + i / words * odd_row(whole_steps(values.dim)) + i % words * 4);
            found = found || (pair & infinite) == infinite || (pair >> 16 & infinite) == infinite;
        }
        return found;
    }

    /// `apart`: visible slots alone, for the lane's own vectors alone (accumulate).
    template <bool apart = false, bool early = true>
    static KVRT_DEVICE void multiply_values(const operand_place& values, const std::byte* shared,
                                            const uint32_t (&weights)[4], uint32_t visible,
                                            float (&out)[most_channels / 8][4], uint32_t own = 3) {
        if (early && !apart && whole_steps(values.dim) == most_channels) {
            return weigh_steps<true, false>(values, shared, weights, visible, out, own);
        }
        weigh_steps<false, apart>(values, shared, weights, visible, out, own);
    }

  private:
    // `whole`: all steps are taken, and no branch keeps a step's load from coming early.
    template <bool by_rows, bool whole, class fragments>
    static KVRT_DEVICE void multiply_steps(const operand_place& keys, const std::byte* shared,
                                           const fragments& queries, float (&scores)[2][4]) {
        const uint32_t matrix = Cx::lane() / 8, row = Cx::lane() % 8;
        const uint32_t channels_there = whole ? most_channels : whole_steps(keys.dim);
        const uint32_t row_at = (matrix / 2 * 8 + row) * odd_row(channels_there) + matrix % 2 * 16;
        KVRT_UNROLL
        for (uint32_t step = 0; step < most_channels / 16; ++step) {
            if (!whole && step * 16 >= channels_there) break;
            uint32_t a[4], b[4];
            queries.of_step(step, a);
            if constexpr (by_rows) {
                Cx::load_matrices(b, shared + row_at + step * 32);
            } else {
                Cx::load_matrices_transposed(
                    b, shared + column_at(step * 16 + matrix % 2 * 8 + row, matrix / 2));
            }
            const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
            Cx::template multiply<type>(scores[0], a, first);
            Cx::template multiply<type>(scores[1], a, second);
        }
    }

    template <bool whole, bool apart>
    static KVRT_DEVICE void weigh_steps(const operand_place& values, const std::byte* shared,
                                        const uint32_t (&weights)[4], uint32_t visible,
                                        float (&out)[most_channels / 8][4], uint32_t own) {
        const uint32_t matrix = Cx::lane() / 8, row = Cx::lane() % 8;
        const uint32_t channels_there = whole ? most_channels : whole_steps(values.dim);
        const std::byte* const from =
            shared + (matrix % 2 * 8 + row) * odd_row(channels_there) + matrix / 2 * 16;
        uint32_t masks[2];
        KVRT_UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t pair = visible >> (i * 8 + Cx::lane() % 4 * 2);
            masks[i] = (pair & 1u) * 0xffffu + (pair >> 1 & 1u) * 0xffff0000u;
        }
        KVRT_UNROLL
        for (uint32_t step = 0; step < most_channels / 16; ++step) {
            if (!whole && step * 16 >= channels_there) break;
            uint32_t b[4];
            Cx::load_matrices_transposed(b, from + step * 32);
            KVRT_UNROLL
            for (uint32_t i = 0; i < 4 && apart; ++i) b[i] &= masks[i % 2];
            const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
            accumulate<Cx, type, apart>(out[2 * step], weights, first, own);
            accumulate<Cx, type, apart>(out[2 * step + 1], weights, second, own);
        }
    }
};

}  // namespace kvrt::kernels
