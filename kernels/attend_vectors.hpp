// Query vectors and what they see. A query vector is a query head of a row; those of a KV head
// stand row by row. A warp takes 16 of them: lanes 4 q to 4 q + 3 have parts of vectors q and q + 8
// ("halves" 0 and 1), and of 16 slots tile * 8 + lane % 4 * 2 + {0, 1} (tiles 0 and 1).
#pragma once

#include "kernels/attend_tiles.hpp"
#include "kernels/turn.hpp"

namespace kvrt::kernels {

inline constexpr float log2_of_e = 1.44269504088896340736f;
inline constexpr float ln_of_2 = 0.693147180559945309417f;

template <class Cx>
KVRT_DEVICE float minus_infinity() {
    return Cx::bits_to_f32(0xff800000u);
}

/// Bit s of the result: slot first + s is below `limit`.
KVRT_DEVICE uint32_t slots_below(uint32_t limit, uint32_t first) {
    if (limit <= first) return 0;
    return limit - first >= slots_of_group ? 0xffffu : (1u << (limit - first)) - 1;
}

/// But for the number of its pieces.
template <class Cx>
KVRT_DEVICE attend_sequence load_sequence(const attend_sequence* listed) {
    const std::byte* const from = reinterpret_cast<const std::byte*>(listed);
    const word4 low = Cx::template load_constant<word4>(from);
    const word4 high = Cx::template load_constant<word4>(from + 16);
    const word4 last = Cx::template load_constant<word4>(from + 32);
    return {low.x,  low.y, low.z,  low.w,  high.x, high.y, static_cast<int32_t>(high.z),
            high.w, 0,     last.y, last.z, last.w};
}

/// Where a row looks: at slots below `limit` that are sinks, or not below `from`.
struct row_view {
    uint32_t from = 0, limit = 0;
};

KVRT_DEVICE row_view view_of_row(const attend_parameters& call, const attend_sequence& sequence,
                                 uint32_t row) {
    const int32_t from = call.window ? sequence.window_first + static_cast<int32_t>(row) : 0;
    return {from < 0 ? 0 : static_cast<uint32_t>(from), sequence.slots - (sequence.rows - 1 - row)};
}

/// Which of the 16 slots from `slot` on are seen from there.
KVRT_DEVICE uint32_t slots_seen(const attend_parameters& call, const row_view& view,
                                uint32_t slot) {
    return slots_below(view.limit, slot) &
           (slots_below(call.window_sinks, slot) | ~slots_below(view.from, slot));
}

/// Position of a slot, less that of a row.
template <class Cx>
KVRT_DEVICE float relative_position(const attend_parameters& call, const attend_sequence& sequence,
                                    uint32_t kv_head, uint32_t slot, uint32_t row) {
    const uint32_t behind = sequence.rows - row;  // next_position is, of the row's own
    if (slot >= sequence.explicit_slots) {
        return static_cast<float>(static_cast<int32_t>(slot + behind - sequence.slots));
    }
    // No round has a lane with a window: what is explicit is in front of it, where it always was.
    if (call.positions.base == nullptr) {
        return static_cast<float>(static_cast<int32_t>(slot + behind - sequence.next_position));
    }
    const uint32_t tokens = call.place.block_tokens;
    const uint32_t id =
        Cx::template load_constant<uint32_t>(call.tables.of(sequence.table) + slot / tokens)
        << call.tables.shift;
    const uint32_t position =
        Cx::template load_constant<uint32_t>(call.positions.of(id, kv_head) + slot % tokens);
    return static_cast<float>(static_cast<int32_t>(position + behind - sequence.next_position));
}

/// Where the 16 slots from `slot` on lie, which are in the block `id`.
KVRT_DEVICE group_source source_of_group(const attend_parameters& call,
                                         const attend_sequence& sequence, uint32_t kv_head,
                                         uint32_t slot, uint32_t id, uint32_t seen) {
    const uint32_t at = slot % call.place.block_tokens;
    group_source made{block_at(call.arena, id), at, kv_head, seen, {}, slot, &call.turning};
    if (call.place.keys.codes != coding::affine4) return made;
    made.positions.implied = sequence.next_position - (sequence.slots - slot);
    if (slot >= sequence.explicit_slots) return made;
    made.positions.stored = call.positions.of(id, kv_head) + at;
    made.positions.stored_slots = sequence.explicit_slots - slot;
    return made;
}

/// Query vectors [first, first + count) of a KV head: vector v is query head v % group of it, of
/// row v / group.
struct query_vectors {
    uint32_t kv_head, group, first, count;

    KVRT_DEVICE uint32_t row_of(uint32_t vector) const { return (first + vector) / group; }
    KVRT_DEVICE uint32_t head_of(uint32_t vector) const {
        return kv_head * group + (first + vector) % group;
    }
};

/// Where any of their rows looks.
KVRT_DEVICE row_view view_of_rows(const attend_parameters& call, const attend_sequence& sequence,
                                  const query_vectors& vectors) {
    return {view_of_row(call, sequence, vectors.row_of(0)).from,
            view_of_row(call, sequence, vectors.row_of(vectors.count - 1)).limit};
}

/// A power of 2 near a magnitude, and its inverse; 1 for numbers that are 0, subnormal or infinite.
struct power_of_two {
    float power, inverse;
};
template <class Cx>
KVRT_DEVICE power_of_two power_near(float magnitude) {
    uint32_t exponent = Cx::f32_to_bits(magnitude) >> 23;
    if (exponent == 0 || exponent >= 254) exponent = 127;
    return {Cx::bits_to_f32(exponent << 23), Cx::bits_to_f32((254 - exponent) << 23)};
}

/// One warp brings a query vector of a sequence, in the basis of the keys, into a row of
/// odd_row(tiles::channels) bytes in shared memory, divided by `factor`, a power of 2 near its
/// largest, so that f16 holds any. `sum` is that of what is stored there. Zeros, where there is no
/// such vector.
template <class Cx, class tiles>
KVRT_DEVICE void load_query(const attend_parameters& call, const attend_sequence& sequence,
                            const query_vectors& vectors, uint32_t vector, std::byte* to,
                            float& sum, float& factor) {
    const uint32_t row = sequence.first_row + vectors.row_of(vector);
    const uint32_t head = vectors.head_of(vector);
    const uint32_t dim = call.place.keys.dim, first = Cx::lane() * lane_channels;
    for (uint32_t i = Cx::lane(); i < odd_row(tiles::channels) / 4; i += warp_lanes) {
        Cx::store(to + i * 4, 0u);
    }
    Cx::warp_barrier();
    float query[lane_channels] = {};
    if (first < dim && vector < vectors.count) {
        const int64_t element = int64_t{row} * call.queries.row_stride +
                                int64_t{head} * call.queries.head_stride +
                                int64_t{first} * call.queries.dim_stride;
        load_channels<Cx>(call.query_type,
                          call.queries.data + element * int64_t{number_bytes(call.query_type)},
                          call.queries.dim_stride, query);
    }
    if constexpr (tiles::turns) {
        if (call.turning.pairs != 0) {
            const uint32_t slot = sequence.slots - sequence.rows + vectors.row_of(vector);
            turn_channels<Cx>(call.turning, slot, first, query);
        }
    }
    // Keys that are turned are brought back from their basis before.
    if (call.place.keys.rotated && call.turning.pairs == 0) rotate_channels<Cx>(dim, query);
    float largest = 0.0f;
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        const float magnitude = magnitude_of<Cx>(query[i]);
        largest = magnitude > largest ? magnitude : largest;
    }
    KVRT_UNROLL
    for (uint32_t bits = 1; bits < warp_lanes; bits *= 2) {
        const float other = Cx::shuffle_xor(largest, bits);
        largest = other > largest ? other : largest;
    }
    const power_of_two power = power_near<Cx>(largest);
    sum = 0.0f;
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        if (first >= dim) continue;
        const uint16_t bits = to_half_width<Cx>(query[i] * power.inverse, tiles::query_type);
        sum += tiles::query_type == number::f16 ? Cx::f16_to_f32(bits) : Cx::bf16_to_f32(bits);
        Cx::store(to + tiles::column_of(call.place.keys, first + i) * 2, bits);
    }
    KVRT_UNROLL
    for (uint32_t bits = 1; bits < warp_lanes; bits *= 2) sum += Cx::shuffle_xor(sum, bits);
    factor = power.power;
}

/// Fragments of queries, read from shared memory for every product. `row` is this lane's.
template <class Cx>
struct shared_fragments {
    const std::byte* row;

    KVRT_DEVICE shared_fragments(const std::byte* first_row, uint32_t row_bytes)
        : row(first_row + Cx::lane() % 16 * row_bytes + Cx::lane() / 16 * 16) {}
    KVRT_DEVICE void of_step(uint32_t step, uint32_t (&a)[4]) const {
        Cx::load_matrices(a, row + step * 32);
    }
};

/// What a warp knows of its 16 vectors, of those from `first` on among some.
struct warp_vectors {
    // Of the lane's two. What there is not looks where the last row does.
    float factor[2];     ///< of products; where nothing else is done to them, log2_of_e is in it
    float query_sum[2];  ///< load_query
    float slope[2];
    uint32_t row[2];
    // Of all: their rows, and the slots between which all of these look.
    uint32_t first_row, last_row;
    uint32_t all_from, all_limit;
    // Entries of kept weights: those of a group, 0 where nothing is kept, and the lane's two of the
    // first group, or not_kept.
    uint32_t kept_step, kept[2];
};
inline constexpr uint32_t not_kept = 0xffffffffu;

KVRT_BOTH bool only_scaled(const attend_parameters& call) {
    return call.softcap == 0.0f && call.alibi_slopes == nullptr;
}

/// `sums` and `factors` are those of load_query, of all vectors.
template <class Cx>
KVRT_DEVICE warp_vectors vectors_of_warp(const attend_parameters& call,
                                         const attend_sequence& sequence,
                                         const query_vectors& vectors, uint32_t first,
                                         const float* sums, const float* factors) {
    warp_vectors made;
    const uint32_t left = vectors.count - first;
    made.first_row = vectors.row_of(first);
    made.last_row = vectors.row_of(first + (left < 16 ? left : 16) - 1);
    made.all_from = view_of_row(call, sequence, made.last_row).from;
    made.all_limit = view_of_row(call, sequence, made.first_row).limit;
    made.kept_step = call.kept.weights == nullptr ? 0 : sequence.kept_rows * call.query_heads;
    KVRT_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        const uint32_t v = first + Cx::lane() / 4 + half * 8;
        const bool there = v < vectors.count;
        made.factor[half] = call.scale * factors[v] * (only_scaled(call) ? log2_of_e : 1.0f);
        made.query_sum[half] = sums[v];
        made.slope[half] =
            call.alibi_slopes != nullptr && there
                ? Cx::template load_constant<float>(call.alibi_slopes + vectors.head_of(v))
                : 0.0f;
        made.row[half] = there ? vectors.row_of(v) : made.last_row;
        const uint32_t first_kept = sequence.rows - sequence.kept_rows;
        const bool keeps = there && made.row[half] >= first_kept;
        made.kept[half] = keeps ? (sequence.kept + made.row[half] - first_kept) * call.query_heads +
                                      vectors.head_of(v)
                                : not_kept;
    }
    return made;
}

}  // namespace kvrt::kernels
