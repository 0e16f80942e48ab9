// Attention over one piece of one sequence's context: a block of threads has the query vectors of
// one KV head (heads of one row, or of a few; 16 at most), each of its warps every fourth group of
// 16 slots. A warp is on its own: it has its stages of keys and values on the way by cp.async, and
// its running softmax; at the end the warps' parts are joined, in order.
#pragma once

#include "kernels/attend_tiles.hpp"
#include "kernels/write.hpp"

namespace kvrt::kernels {

inline constexpr float log2_of_e = 1.44269504088896340736f;

/// What shared memory holds, in bytes from its start.
template <class tiles>
struct attend_memory {
    static constexpr uint32_t stages = tiles::channels <= 128 ? 3 : 2;
    static constexpr uint32_t query_row = odd_row(tiles::channels);
    static constexpr uint32_t query_bytes = query_rows * query_row;
    static constexpr uint32_t row_bytes = query_rows * 2 * sizeof(float);  // sums, factors
    static constexpr uint32_t head_bytes = query_bytes + row_bytes;
    static constexpr uint32_t part_bytes =
        query_rows * (tiles::channels + 2) * sizeof(float);  // a warp's softmax, at the end

    static KVRT_BOTH uint32_t stage_bytes(const block_place& place) {
        return tiles::key_bytes(place.keys) + tiles::value_bytes(place.values);
    }
    static KVRT_BOTH uint32_t bytes(const block_place& place) {
        const uint32_t warp = stages * stage_bytes(place);
        return head_bytes + attend_warps * (warp > part_bytes ? warp : part_bytes);
    }
};

/// Bit s of the result: slot first + s is below `limit`.
KVRT_DEVICE uint32_t slots_below(uint32_t limit, uint32_t first) {
    if (limit <= first) return 0;
    return limit - first >= slots_of_group ? 0xffffu : (1u << (limit - first)) - 1;
}

template <class Cx>
KVRT_DEVICE float load_number(const std::byte* address, number type) {
    if (type == number::f32) return load_number<Cx, number::f32>(address);
    if (type == number::f16) return load_number<Cx, number::f16>(address);
    return load_number<Cx, number::bf16>(address);
}

/// A running softmax of vectors lane / 4 and lane / 4 + 8.
template <class tiles>
struct running_softmax {
    float largest[2];   ///< of logits
    float sum[2];       ///< of this lane's slots
    float heaviest[2];  ///< of logits plus log2 of the values' steps; largest, where there are none
    float least[2];     ///< of this lane's slots: weighted least numbers of values
    float out[tiles::channels / 8][4];
};

template <class Cx, class tiles>
struct piece_of_context {
    using memory = attend_memory<tiles>;

    const attend_parameters& call;
    attend_sequence sequence;
    attend_piece piece;
    const uint32_t* table;
    uint32_t kv_head;
    uint32_t first_vector;  ///< of the KV head: row * group + head of the group
    uint32_t vectors;

    KVRT_DEVICE uint32_t row_of(uint32_t vector) const {
        return (first_vector + vector) / call.group();
    }
    KVRT_DEVICE uint32_t head_of(uint32_t vector) const {
        return kv_head * call.group() + (first_vector + vector) % call.group();
    }

    KVRT_DEVICE std::byte* queries() const { return Cx::shared(); }
    KVRT_DEVICE float* query_sums() const {
        return reinterpret_cast<float*>(Cx::shared() + memory::query_bytes);
    }
    KVRT_DEVICE float* query_factors() const { return query_sums() + query_rows; }
    KVRT_DEVICE std::byte* stage(uint32_t index) const {
        return Cx::shared() + memory::head_bytes +
               (Cx::warp() * memory::stages + index) * memory::stage_bytes(call.place);
    }

    /// Queries into shared memory, each vector divided by a power of 2 near its largest, so that
    /// f16 holds any.
    KVRT_DEVICE void load_queries() const {
        const uint32_t dim = call.place.keys.dim;
        for (uint32_t vector = Cx::warp(); vector < query_rows; vector += attend_warps) {
            std::byte* const to = queries() + vector * memory::query_row;
            for (uint32_t i = Cx::lane(); i < memory::query_row / 4; i += warp_lanes) {
                Cx::store(to + i * 4, 0u);
            }
            Cx::warp_barrier();
            constexpr uint32_t each = most_dim / warp_lanes;
            float query[each];
            float largest = 0.0f;
            KVRT_UNROLL
            for (uint32_t i = 0; i < each; ++i) {
                const uint32_t channel = Cx::lane() + i * warp_lanes;
                query[i] = 0.0f;
                if (channel >= dim || vector >= vectors) continue;
                const int64_t element =
                    int64_t{sequence.first_row + row_of(vector)} * call.queries.row_stride +
                    int64_t{head_of(vector)} * call.queries.head_stride +
                    int64_t{channel} * call.queries.dim_stride;
                query[i] = load_number<Cx>(
                    call.queries.data + element * int64_t{number_bytes(call.query_type)},
                    call.query_type);
                const float magnitude = query[i] < 0.0f ? -query[i] : query[i];
                largest = magnitude > largest ? magnitude : largest;
            }
            KVRT_UNROLL
            for (uint32_t bits = 1; bits < warp_lanes; bits *= 2) {
                const float other = Cx::shuffle_xor(largest, bits);
                largest = other > largest ? other : largest;
            }
            // Of numbers that are 0, subnormal or infinite the exponent is left alone.
            uint32_t exponent = Cx::f32_to_bits(largest) >> 23;
            if (exponent == 0 || exponent >= 254) exponent = 127;
            const float inverse = Cx::bits_to_f32((254 - exponent) << 23);
            float sum = 0.0f;
            KVRT_UNROLL
            for (uint32_t i = 0; i < each; ++i) {
                const uint32_t channel = Cx::lane() + i * warp_lanes;
                if (channel >= dim) continue;
                const uint16_t bits = to_half_width<Cx>(query[i] * inverse, tiles::query_type);
                sum +=
                    tiles::query_type == number::f16 ? Cx::f16_to_f32(bits) : Cx::bf16_to_f32(bits);
                Cx::store(to + tiles::column_of(call.place.keys, channel) * 2, bits);
            }
            KVRT_UNROLL
            for (uint32_t bits = 1; bits < warp_lanes; bits *= 2) {
                sum += Cx::shuffle_xor(sum, bits);
            }
            if (Cx::lane() == 0) {
                query_sums()[vector] = sum;
                query_factors()[vector] = Cx::bits_to_f32(exponent << 23);
            }
        }
    }

    /// Which of 16 slots rows [first, last] see, any of them.
    KVRT_DEVICE uint32_t seen_by(uint32_t group, uint32_t first, uint32_t last) const {
        const uint32_t slot = group * slots_of_group;
        const uint32_t below = slots_below(sequence.slots - (sequence.rows - 1 - last), slot);
        const int32_t from = sequence.window_first + static_cast<int32_t>(first);
        if (!call.window || from <= 0) return below;
        return below & (slots_below(call.window_sinks, slot) |
                        ~slots_below(static_cast<uint32_t>(from), slot));
    }
    KVRT_DEVICE uint32_t seen(uint32_t group) const {
        return seen_by(group, row_of(0), row_of(vectors - 1));
    }
    /// The next group of this warp, from `group` on, of which something is seen.
    KVRT_DEVICE uint32_t next_group(uint32_t group, uint32_t end) const {
        while (group < end && seen(group) == 0) group += attend_warps;
        return group;
    }

    KVRT_DEVICE void fetch(uint32_t group, uint32_t stage_index) const {
        const uint32_t slot = group * slots_of_group;
        const uint32_t tokens = call.place.block_tokens;
        const uint32_t id = Cx::template load_constant<uint32_t>(table + slot / tokens);
        const group_source from{block_at(call.arena, id), slot % tokens, kv_head, seen(group)};
        std::byte* const to = stage(stage_index);
        tiles::fetch_keys(call.place.keys, from, to);
        tiles::fetch_values(call.place.values, from, to + tiles::key_bytes(call.place.keys));
    }

    /// Position of a slot, less that of a row.
    KVRT_DEVICE float relative_position(uint32_t slot, uint32_t row) const {
        const uint32_t behind = sequence.rows - row;  // next_position is, of the row's own
        if (slot >= sequence.explicit_slots) {
            return static_cast<float>(static_cast<int32_t>(slot + behind - sequence.slots));
        }
        const uint32_t tokens = call.place.block_tokens;
        const uint32_t id = Cx::template load_constant<uint32_t>(table + slot / tokens);
        const uint32_t position =
            Cx::template load_constant<uint32_t>(call.positions.of(id, kv_head) + slot % tokens);
        return static_cast<float>(static_cast<int32_t>(position + behind - sequence.next_position));
    }

    /// Logits in units of log(2), from products of codes; -infinity where a slot is not seen.
    KVRT_DEVICE void finish_logits(uint32_t group, const std::byte* keys,
                                   float (&scores)[2][4]) const {
        // Of the two vectors that this lane has logits of; rows that there are not see nothing.
        uint32_t visible[2];
        KVRT_UNROLL
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t vector = Cx::lane() / 4 + half * 8;
            const uint32_t row = row_of(vector);
            visible[half] = vector < vectors ? seen_by(group, row, row) : 0;
        }
        KVRT_UNROLL
        for (uint32_t tile = 0; tile < 2; ++tile) {
            KVRT_UNROLL
            for (uint32_t i = 0; i < 4; ++i) {
                const uint32_t slot = tile * 8 + Cx::lane() % 4 * 2 + i % 2;
                const uint32_t vector = Cx::lane() / 4 + i / 2 * 8;
                const bool counts = (visible[i / 2] >> slot & 1u) != 0;
                float logit = scores[tile][i];
                if constexpr (tiles::coded) {
                    logit = tiles::key_product(call.place.keys, keys, kv_head, slot, logit,
                                               query_sums()[vector]);
                }
                logit *= call.scale * query_factors()[vector];
                if (call.softcap != 0.0f) {
                    logit = call.softcap * Cx::tanh(logit / call.softcap);
                }
                if (call.alibi_slopes != nullptr && counts) {
                    logit +=
                        Cx::template load_constant<float>(call.alibi_slopes + head_of(vector)) *
                        relative_position(group * slots_of_group + slot, row_of(vector));
                }
                scores[tile][i] = counts ? logit * log2_of_e : Cx::bits_to_f32(0xff800000u);
            }
        }
    }

    /// The largest of a vector's logits among the four lanes that have it.
    static KVRT_DEVICE float largest_of_row(const float (&scores)[2][4], uint32_t half,
                                            float so_far) {
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
    static KVRT_DEVICE float weight_of(float x, float largest) {
        return Cx::exp2(largest == Cx::bits_to_f32(0xff800000u) ? x : x - largest);
    }

    KVRT_DEVICE void take_group(uint32_t group, const std::byte* keys,
                                running_softmax<tiles>& state) const {
        float scores[2][4] = {};
        const uint32_t lane = Cx::lane();
        tiles::multiply_keys(call.place.keys, keys,
                             queries() + lane % 16 * memory::query_row + lane / 16 * 16, scores);
        finish_logits(group, keys, scores);
        const std::byte* const values = keys + tiles::key_bytes(call.place.keys);
        const uint32_t visible = seen(group);

        float weights[2][4];
        float rescale[2];
        KVRT_UNROLL
        for (uint32_t half = 0; half < 2; ++half) {
            const float largest = largest_of_row(scores, half, state.largest[half]);
            const float factor = weight_of(state.largest[half], largest);
            state.largest[half] = largest;
            state.sum[half] *= factor;
            state.least[half] *= factor;
            rescale[half] = factor;
            KVRT_UNROLL
            for (uint32_t i = 0; i < 4; ++i) {
                const float weight = weight_of(scores[i / 2][half * 2 + i % 2], largest);
                weights[i / 2][half * 2 + i % 2] = weight;
                if constexpr (tiles::coded) state.sum[half] += weight;
            }
        }
        if constexpr (tiles::coded) {
            tiles::weigh_values(*this, values, visible, scores, weights, rescale, state);
        }
        // Rounded weights are what values are multiplied by, so they are what is summed.
        uint32_t packed[4];
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
                    state.sum[i % 2] += tiles::weight_type == number::f16
                                            ? Cx::f16_to_f32(both[k])
                                            : Cx::bf16_to_f32(both[k]);
                }
            }
        }
        if (Cx::ballot(rescale[0] != 1.0f || rescale[1] != 1.0f) != 0) {
            KVRT_UNROLL
            for (uint32_t tile = 0; tile < tiles::channels / 8; ++tile) {
                KVRT_UNROLL
                for (uint32_t i = 0; i < 4; ++i) state.out[tile][i] *= rescale[i / 2];
            }
        }
        tiles::multiply_values(call.place.values, values, packed, visible, state.out);
    }

    /// The warp's groups, with stages - 1 of them on the way.
    KVRT_DEVICE void take_groups(running_softmax<tiles>& state) const {
        const uint32_t end = (piece.end_slot + slots_of_group - 1) / slots_of_group;
        uint32_t group = next_group(piece.first_slot / slots_of_group + Cx::warp(), end);
        uint32_t coming = group;
        for (uint32_t i = 0; i + 1 < memory::stages; ++i) {
            if (coming < end) {
                fetch(coming, i);
                coming = next_group(coming + attend_warps, end);
            }
            Cx::commit_async();
        }
        uint32_t here = 0;
        while (group < end) {
            Cx::template wait_async<memory::stages - 2>();
            // The group has arrived for all lanes, and all are through with the one before it.
            Cx::warp_barrier();
            if (coming < end) {
                fetch(coming, (here + memory::stages - 1) % memory::stages);
                coming = next_group(coming + attend_warps, end);
            }
            Cx::commit_async();
            take_group(group, stage(here), state);
            here = (here + 1) % memory::stages;
            group = next_group(group + attend_warps, end);
        }
        Cx::template wait_async<0>();
    }

    /// The warps' softmaxes, where the stages were, become the piece's.
    KVRT_DEVICE void join_warps(const running_softmax<tiles>& state) const {
        constexpr uint32_t part = memory::part_bytes / sizeof(float);
        constexpr uint32_t row_floats = tiles::channels + 2;
        float* const parts = reinterpret_cast<float*>(Cx::shared() + memory::head_bytes);
        const uint32_t dim = call.place.values.dim;
        Cx::barrier();
        float* const mine = parts + Cx::warp() * part + Cx::lane() / 4 * row_floats;
        float least[2], steps[2];
        KVRT_UNROLL
        for (uint32_t half = 0; half < 2; ++half) {
            float sum = state.sum[half];
            least[half] = state.least[half];
            KVRT_UNROLL
            for (uint32_t bits = 1; bits < 4; bits *= 2) {
                sum += Cx::shuffle_xor(sum, bits);
                least[half] += Cx::shuffle_xor(least[half], bits);
            }
            // What is weighted by steps is relative to heaviest; nothing, where that is -infinity.
            steps[half] =
                tiles::coded ? Cx::exp2(state.heaviest[half] - state.largest[half]) : 1.0f;
            if (Cx::lane() % 4 != 0) continue;
            mine[half * 8 * row_floats] = state.largest[half];
            mine[half * 8 * row_floats + 1] = sum;
        }
        KVRT_UNROLL
        for (uint32_t tile = 0; tile < tiles::channels / 8; ++tile) {
            KVRT_UNROLL
            for (uint32_t i = 0; i < 2; ++i) {
                const uint32_t channel =
                    tiles::channel_of(call.place.values, tile, Cx::lane() % 4 * 2 + i);
                if (channel >= dim) continue;
                KVRT_UNROLL
                for (uint32_t half = 0; half < 2; ++half) {
                    float out = state.out[tile][half * 2 + i];
                    if constexpr (tiles::coded) {
                        out = out == 0.0f ? least[half] : out * steps[half] + least[half];
                    }
                    mine[half * 8 * row_floats + 2 + channel] = out;
                }
            }
        }
        Cx::barrier();
        const float nothing = Cx::bits_to_f32(0xff800000u);
        for (uint32_t i = Cx::thread(); i < vectors * dim; i += attend_threads) {
            const uint32_t row = i / dim, channel = i % dim;
            float largest = nothing;
            for (uint32_t w = 0; w < attend_warps; ++w) {
                const float here = parts[w * part + row * row_floats];
                largest = here > largest ? here : largest;
            }
            float sum = 0.0f, value = 0.0f;
            for (uint32_t w = 0; w < attend_warps; ++w) {
                const float* const from = parts + w * part + row * row_floats;
                if (from[0] == nothing && from[1] == 0.0f) continue;
                const float factor = weight_of(from[0], largest);
                sum = Cx::multiply_add(factor, from[1], sum);
                value = Cx::multiply_add(factor, from[2 + channel], value);
            }
            const uint64_t at =
                (uint64_t{piece.partial} + row_of(row)) * call.query_heads + head_of(row);
            Cx::store(call.partials.values + at * dim + channel, value);
            if (channel != 0) continue;
            Cx::store(call.partials.largest + at, largest);
            Cx::store(call.partials.sum + at, sum);
        }
    }
};

/// The kernel. Launch with attend_blocks(...) blocks of attend_threads threads and
/// attend_memory<tiles>::bytes(...) of shared memory.
template <class Cx, class tiles>
KVRT_DEVICE void attend_pieces(const attend_parameters& call) {
    const uint32_t tile = Cx::block() % call.vector_tiles();
    const uint32_t kv_head = Cx::block() / call.vector_tiles() % call.place.kv_heads;
    const uint32_t index = Cx::block() / call.vector_tiles() / call.place.kv_heads;
    const word4 piece = Cx::template load_constant<word4>(call.pieces + index);
    if (piece.x == no_sequence) return;
    const std::byte* const listed = reinterpret_cast<const std::byte*>(call.sequences + piece.x);
    const word4 low = Cx::template load_constant<word4>(listed);
    const word4 high = Cx::template load_constant<word4>(listed + 16);
    const uint32_t all_vectors = low.z * call.group(), first_vector = tile * query_rows;
    if (first_vector >= all_vectors) return;
    const uint32_t vectors = all_vectors - first_vector;
    const piece_of_context<Cx, tiles> work{
        call,
        {low.x, low.y, low.z, low.w, high.x, high.y, static_cast<int32_t>(high.z), high.w, 0, {}},
        {piece.x, piece.y, piece.z, piece.w},
        call.tables.of(low.x),
        kv_head,
        first_vector,
        vectors < query_rows ? vectors : query_rows};
    running_softmax<tiles> state = {};
    KVRT_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        state.largest[half] = state.heaviest[half] = Cx::bits_to_f32(0xff800000u);
    }
    work.load_queries();
    Cx::barrier();
    work.take_groups(state);
    work.join_warps(state);
}

}  // namespace kvrt::kernels
