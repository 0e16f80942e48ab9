// Decode: one query row against native tiles, read once and where they lie.
//
// A run is up to 64 slots. For each KV head of a run: scores of all its query heads (a register
// holds 16 slots of one dimension, so there are no horizontal sums), the softmax of the run, then
// the weighted values. Records are taken by records-inl.hpp and codes-inl.hpp instead, sealed tiles
// by tiles-inl.hpp. While a tile
// is used, the tile that comes next for the same place in the run (next head, or the next run's
// block through the table) is prefetched.

#include "attention/kernels.hpp"
#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/decode.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "attention/codes-inl.hpp"
#include "attention/means-inl.hpp"
#include "attention/records-inl.hpp"
#include "attention/softmax-inl.hpp"
#include "attention/tiles-inl.hpp"
#include "base/checked.hpp"
#include "format/rotation.hpp"
#include "format/vector-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

constexpr uint32_t run_groups = run_slots / slot_group;
constexpr uint32_t line_bytes = 64;
constexpr uint32_t max_together = 8;  // query heads that share a pass over a tile

using slots_tag = hn::CappedTag<float, slot_group>;

// Where the tiles of a run lie, and the ones to prefetch meanwhile.
struct run_tiles {
    const std::byte* keys[run_groups];
    const std::byte* values[run_groups];
    const std::byte* next_keys[run_groups];
    const std::byte* next_values[run_groups];
    uint32_t groups;
};

HWY_INLINE void prefetch_line(const std::byte* address) { __builtin_prefetch(address, 0, 2); }

// scores[g][group * 16 + lane] = q[g] . k, for `heads` query heads.
template <element type, uint32_t heads>
HWY_NOINLINE void score_run(const run_tiles& tiles, const float* queries, uint32_t dim,
                            float* scores) {
    const slots_tag d;
    constexpr uint32_t parts = slot_group / static_cast<uint32_t>(hn::MaxLanes(slots_tag()));
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(slots_tag()));
    // Several sums per head hide the latency of the fused multiply-add.
    constexpr uint32_t chains = parts > 1 ? 1 : (heads <= 2 ? 4 : 2);
    constexpr uint32_t row_bytes = slot_group * element_bytes(type);
    for (uint32_t group = 0; group < tiles.groups; ++group) {
        const std::byte* tile = tiles.keys[group];
        const std::byte* ahead = tiles.next_keys[group];
        for (uint32_t part = 0; part < parts; ++part) {
            hn::Vec<slots_tag> sums[heads][chains];
            for (uint32_t g = 0; g < heads; ++g) {
                for (uint32_t c = 0; c < chains; ++c) sums[g][c] = hn::Zero(d);
            }
            const std::byte* row = tile + part * lanes * element_bytes(type);
            for (uint32_t i = 0; i < dim; i += 4) {
                if (part == 0) {
                    for (uint32_t line = 0; line < 4 * row_bytes; line += line_bytes) {
                        prefetch_line(ahead + i * row_bytes + line);
                    }
                }
                HWY_UNROLL(4)
                for (uint32_t c = 0; c < 4; ++c) {
                    const auto key = load_f32<type>(d, row + (i + c) * row_bytes);
                    HWY_UNROLL(8)
                    for (uint32_t g = 0; g < heads; ++g) {
                        sums[g][c % chains] = hn::MulAdd(key, hn::Set(d, queries[g * dim + i + c]),
                                                         sums[g][c % chains]);
                    }
                }
            }
            for (uint32_t g = 0; g < heads; ++g) {
                for (uint32_t c = 1; c < chains; ++c) sums[g][0] = hn::Add(sums[g][0], sums[g][c]);
                hn::StoreU(sums[g][0], d,
                           scores + g * run_slots + group * slot_group + part * lanes);
            }
        }
    }
}

// values[g][...] += weights[g][slot] * v[slot], for slots [first, end) of the run and the
// dimensions [from, from + vectors * lanes) held in registers.
template <element type, uint32_t heads, uint32_t vectors, class tag>
HWY_INLINE void add_columns(tag d, const run_tiles& tiles, const float* weights, uint32_t first,
                            uint32_t end, uint32_t dim, uint32_t from, float* values) {
    const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(d));
    const uint32_t row_bytes = dim * element_bytes(type);
    hn::Vec<tag> sums[heads][vectors];
    for (uint32_t g = 0; g < heads; ++g) {
        for (uint32_t v = 0; v < vectors; ++v) {
            sums[g][v] = hn::LoadU(d, values + g * dim + from + v * lanes);
        }
    }
    for (uint32_t slot = first; slot < end; ++slot) {
        const uint32_t place = slot % slot_group * row_bytes + from * element_bytes(type);
        const std::byte* row = tiles.values[slot / slot_group] + place;
        const std::byte* ahead = tiles.next_values[slot / slot_group] + place;
        hn::Vec<tag> value[vectors];
        HWY_UNROLL(8)
        for (uint32_t v = 0; v < vectors; ++v) {
            value[v] = load_f32<type>(d, row + v * lanes * element_bytes(type));
        }
        for (uint32_t line = 0; line < vectors * lanes * element_bytes(type); line += line_bytes) {
            prefetch_line(ahead + line);
        }
        HWY_UNROLL(8)
        for (uint32_t g = 0; g < heads; ++g) {
            const auto weight = hn::Set(d, weights[g * run_slots + slot]);
            HWY_UNROLL(8)
            for (uint32_t v = 0; v < vectors; ++v) {
                sums[g][v] = hn::MulAdd(value[v], weight, sums[g][v]);
            }
        }
    }
    for (uint32_t g = 0; g < heads; ++g) {
        for (uint32_t v = 0; v < vectors; ++v) {
            hn::StoreU(sums[g][v], d, values + g * dim + from + v * lanes);
        }
    }
}

template <element type, uint32_t heads>
HWY_NOINLINE void add_values(const run_tiles& tiles, const float* weights, uint32_t first,
                             uint32_t end, uint32_t dim, float* values) {
    const slots_tag d;
    const hn::CappedTag<float, 8> narrow;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(slots_tag()));
    constexpr uint32_t narrow_lanes = static_cast<uint32_t>(hn::MaxLanes(narrow));
    constexpr uint32_t registers = lanes == 16 ? 16 : 8;
    constexpr uint32_t vectors = HWY_MAX(1u, HWY_MIN(8u, registers / heads));
    uint32_t from = 0;
    for (; from + vectors * lanes <= dim; from += vectors * lanes) {
        add_columns<type, heads, vectors>(d, tiles, weights, first, end, dim, from, values);
    }
    for (; from + lanes <= dim; from += lanes) {
        add_columns<type, heads, 1>(d, tiles, weights, first, end, dim, from, values);
    }
    for (; from < dim; from += narrow_lanes) {
        add_columns<type, heads, 1>(narrow, tiles, weights, first, end, dim, from, values);
    }
}

using score_function = void (*)(const run_tiles&, const float*, uint32_t, float*);
using value_function = void (*)(const run_tiles&, const float*, uint32_t, uint32_t, uint32_t,
                                float*);

template <element type>
score_function score_of(uint32_t heads) {
    constexpr score_function table[max_together] = {
        score_run<type, 1>, score_run<type, 2>, score_run<type, 3>, score_run<type, 4>,
        score_run<type, 5>, score_run<type, 6>, score_run<type, 7>, score_run<type, 8>};
    return table[heads - 1];
}

template <element type>
value_function value_of(uint32_t heads) {
    constexpr value_function table[max_together] = {
        add_values<type, 1>, add_values<type, 2>, add_values<type, 3>, add_values<type, 4>,
        add_values<type, 5>, add_values<type, 6>, add_values<type, 7>, add_values<type, 8>};
    return table[heads - 1];
}

score_function score_of(element type, uint32_t heads) {
    switch (type) {
        case element::f32:
            return score_of<element::f32>(heads);
        case element::f16:
            return score_of<element::f16>(heads);
        default:
            return score_of<element::bf16>(heads);
    }
}

value_function value_of(element type, uint32_t heads) {
    switch (type) {
        case element::f32:
            return value_of<element::f32>(heads);
        case element::f16:
            return value_of<element::f16>(heads);
        default:
            return value_of<element::bf16>(heads);
    }
}

#if HWY_TARGET == HWY_AVX3
/// Whether the operand's codes are whole numbers, and multiplied as such (codes-inl.hpp).
bool multiplies_codes(const tile_layout& layout, const operand_layout& operand) {
    static const bool has_dot_products = __builtin_cpu_supports("avx512vnni") != 0;
    return has_dot_products && !layout.codes_as_floats && !is_fp8(operand.format->reading.codes);
}
#endif

/// Calls body(kind) with the operand's code_kind as a constant.
template <class callable>
void with_kind(const coded_operand& operand, const callable& body) {
    switch (operand.reading.codes) {
        case code_kind::signed_bytes:
            return body(std::integral_constant<code_kind, code_kind::signed_bytes>());
        case code_kind::nibbles:
            return body(std::integral_constant<code_kind, code_kind::nibbles>());
        case code_kind::e2m1_nibbles:
            return body(std::integral_constant<code_kind, code_kind::e2m1_nibbles>());
        case code_kind::e4m3_bytes:
            return body(std::integral_constant<code_kind, code_kind::e4m3_bytes>());
        case code_kind::e5m2_bytes:
            return body(std::integral_constant<code_kind, code_kind::e5m2_bytes>());
        case code_kind::none:
            return;
    }
}

#if HWY_TARGET != HWY_SCALAR

void score_coded(const run_tiles& tiles, const tile_layout& layout, uint32_t head, uint32_t heads,
                 const std::byte* queries, uint32_t query_bytes, float* scores) {
    const coded_operand keys(layout.keys, head);
    for (uint32_t done = 0; done < heads; done += 4) {
        with_kind(keys, [&](auto kind_constant) {
            constexpr code_kind kind = decltype(kind_constant)::value;
            with_heads(std::min(4u, heads - done), [&](auto count) {
                constexpr uint32_t some = decltype(count)::value;
                const auto run = [&](auto* kernel) {
                    kernel(tiles.keys, tiles.next_keys, tiles.groups, keys,
                           queries + done * query_bytes, query_bytes, scores + done * run_slots);
                };
                if constexpr (is_fp8(kind)) {
                    run(&score_fp8<kind, some>);
                } else {
#if HWY_TARGET == HWY_AVX3
                    if (multiplies_codes(layout, layout.keys)) return run(&score_codes<kind, some>);
#endif
                    run(&score_records<kind, some>);
                }
            });
        });
    }
}

void add_coded_values(const run_tiles& tiles, const tile_layout& layout, uint32_t head,
                      uint32_t heads, const float* weights, uint32_t first, uint32_t end,
                      float* out) {
    const coded_operand values(layout.values, head);
    for (uint32_t done = 0; done < heads; done += 4) {
        with_kind(values, [&](auto kind_constant) {
            constexpr code_kind kind = decltype(kind_constant)::value;
            with_heads(std::min(4u, heads - done), [&](auto count) {
                constexpr uint32_t some = decltype(count)::value;
                const auto run = [&](auto* kernel) {
                    kernel(tiles.values, tiles.next_values, values, weights + done * run_slots,
                           first, end, out + done * values.dim);
                };
#if HWY_TARGET == HWY_AVX3
                if constexpr (!is_fp8(kind)) {
                    if (multiplies_codes(layout, layout.values)) {
                        // Groups of 16 nibbles are halves of a chunk.
                        if constexpr (kind == code_kind::e2m1_nibbles) {
                            if (values.group == 16) return run(&add_code_values<kind, some, 2>);
                        }
                        return run(&add_code_values<kind, some, 1>);
                    }
                }
#endif
                run(&add_record_values<kind, some>);
            });
        });
    }
}

void score_sealed(const run_tiles& tiles, const sealed_tile& from, uint32_t place, uint32_t heads,
                  const float* queries, float* scores) {
    for (uint32_t done = 0; done < heads; done += 4) {
        with_heads(std::min(4u, heads - done), [&](auto count) {
            score_tile<decltype(count)::value>(from, place, tiles.keys, tiles.next_keys,
                                               tiles.groups, queries + done * from.operand.dim,
                                               scores + done * run_slots);
        });
    }
}

void add_sealed_values(const run_tiles& tiles, const sealed_tile& from, uint32_t place,
                       uint32_t heads, const float* weights, uint32_t first, uint32_t end,
                       float* out) {
    for (uint32_t done = 0; done < heads; done += 4) {
        with_heads(std::min(4u, heads - done), [&](auto count) {
            add_tile_values<decltype(count)::value>(from, place, tiles.values, tiles.next_values,
                                                    weights + done * run_slots, first, end,
                                                    out + done * from.operand.dim);
        });
    }
}

void encode_query_heads(const tile_layout& layout, uint32_t query_heads, const float* queries,
                        std::byte* out) {
    const coded_operand keys(layout.keys, 0);
    const uint32_t bytes = coded_query_bytes(layout);
    const uint32_t group = query_heads / layout.kv_heads;
    alignas(64) float levelled[widest_row];
    for (uint32_t head = 0; head < query_heads; ++head) {
        const float* query = queries + uint64_t{head} * keys.dim;
        std::byte* target = out + uint64_t{head} * bytes;
        if (layout.keys.format->needs_channels) {
            level_query(query, layout.keys, head / group, target + mean_query_offset(layout.keys),
                        levelled);
            query = levelled;
        }
#if HWY_TARGET == HWY_AVX3
        if (multiplies_codes(layout, layout.keys)) {
            encode_query(query, keys, target);
            continue;
        }
#endif
        prepare_query(query, keys, target);
    }
}

bool reads_codes() { return true; }

#else

void score_coded(const run_tiles&, const tile_layout&, uint32_t, uint32_t, const std::byte*,
                 uint32_t, float*) {}
void add_coded_values(const run_tiles&, const tile_layout&, uint32_t, uint32_t, const float*,
                      uint32_t, uint32_t, float*) {}
void encode_query_heads(const tile_layout&, uint32_t, const float*, std::byte*) {}
struct sealed_tile {
    const operand_layout& operand;
    const std::byte* tile;
};
void score_sealed(const run_tiles&, const sealed_tile&, uint32_t, uint32_t, const float*, float*) {}
void add_sealed_values(const run_tiles&, const sealed_tile&, uint32_t, uint32_t, const float*,
                       uint32_t, uint32_t, float*) {}

// Vectors of one lane have no pieces: records are left to the blocked kernel.
bool reads_codes() { return false; }

#endif

bool reads(const operand_layout& operand) {
    if (operand.plain()) return true;
    if (operand.tiled()) {
        // A run lies in one tile.
        return reads_codes() && operand.tile_tokens % run_slots == 0 &&
               operand.format->tile.reading.codes == code_kind::nibbles;
    }
    return reads_codes() && operand.format->reading.codes != code_kind::none;
}

bool reads_layout(const tile_layout& layout) {
    return layout.order == tile_order::native && reads(layout.keys) && reads(layout.values);
}

struct decoder {
    const attend_piece& piece;
    const partial_softmax& partial;
    const attend_layer& layer;
    const tile_layout& layout;
    uint32_t group;
    uint32_t key_head_bytes, value_head_bytes;
    uint32_t query_bytes;  // of a query head for integer codes

    const std::byte* block_of(uint32_t slot) const {
        return block_address(piece.call->arena, piece.item->blocks[slot / layout.block_tokens]);
    }

    // Rows of a slot that begins a group of 16: elements, records, or codes of a sealed tile.
    static int64_t codes_at(const operand_layout& operand, uint32_t place, uint32_t head) {
        if (!operand.tiled()) return operand.at(place, head, 0);
        return operand.tile_at(head) + int64_t{place} * operand.format->code_bytes(operand.dim);
    }

    // The tile of a KV head in the block of a slot.
    sealed_tile tile_of(const operand_layout& operand, uint32_t slot, uint32_t head) const {
        return {operand, block_of(slot) + operand.tile_at(head)};
    }

    // Tiles of the run at `first` for a KV head; what follows is the next head, or the next run.
    void find_tiles(uint32_t first, uint32_t head, run_tiles& tiles) const {
        const bool last_head = head + 1 == piece.end_head;
        tiles.groups = 0;
        for (uint32_t slot = first; slot < std::min(first + run_slots, piece.end_slot);
             slot += slot_group) {
            const uint32_t g = tiles.groups++;
            const std::byte* block = block_of(slot);
            tiles.keys[g] = block + codes_at(layout.keys, slot % layout.block_tokens, head);
            tiles.values[g] = block + codes_at(layout.values, slot % layout.block_tokens, head);
            const uint32_t next_slot = slot + run_slots;
            if (!last_head) {
                tiles.next_keys[g] = tiles.keys[g] + key_head_bytes;
                tiles.next_values[g] = tiles.values[g] + value_head_bytes;
            } else if (next_slot < piece.end_slot) {
                const std::byte* next = block_of(next_slot);
                const uint32_t place = next_slot % layout.block_tokens;
                tiles.next_keys[g] = next + codes_at(layout.keys, place, piece.first_head);
                tiles.next_values[g] = next + codes_at(layout.values, place, piece.first_head);
            } else {
                tiles.next_keys[g] = tiles.keys[g];
                tiles.next_values[g] = tiles.values[g];
            }
        }
    }

    // Slots [first, end) of the run that begins at `run`, for one KV head.
    void take(uint32_t run, uint32_t first, uint32_t end, uint32_t head, const run_tiles& tiles,
              const float* queries) const {
        alignas(64) float scores[max_together * run_slots];
        alignas(64) float positions[run_slots] = {};
        if (layer.alibi_slopes != nullptr) {
            relative_positions(*piece.call, *piece.item, head, first, end - first,
                               piece.item->next_position - 1, positions + (first - run));
        }
        const bool has_means = layout.keys.format->needs_channels;
        uint32_t slot_positions[run_slots];
        if (has_means) {
            positions_of_slots(*piece.call, *piece.item, head, first, end - first, slot_positions);
        }
        const uint32_t key_dim = layout.keys.dim;
        const uint32_t value_dim = layout.values.dim;
        const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(slots_tag()));
        const uint32_t from = (first - run) / lanes * lanes;
        const uint32_t to = round_up(end - run, lanes);
        const bool whole = from == first - run && to == end - run;
        const seen_run seen{{0, first - run}, {0, end - run}};
        for (uint32_t done = 0; done < group; done += max_together) {
            const uint32_t heads = std::min(max_together, group - done);
            const uint32_t query_head = head * group + done;
            float* values = partial.values + uint64_t{query_head} * value_dim;
            if (layout.keys.plain()) {
                score_of(layout.keys.type, heads)(tiles, queries + done * key_dim, key_dim, scores);
            } else if (layout.keys.tiled()) {
                score_sealed(tiles, tile_of(layout.keys, run, head), run % layout.block_tokens,
                             heads, queries + done * key_dim, scores);
            } else {
                const std::byte* coded = piece.coded_queries + uint64_t{query_head} * query_bytes;
                score_coded(tiles, layout, head, heads, coded, query_bytes, scores);
                if (has_means) {
                    score_means(layout.keys, slot_positions, end - first, heads, coded, query_bytes,
                                scores + (first - run));
                }
            }
            for (uint32_t g = 0; g < heads; ++g) {
                soften(layer, query_head + g, positions, seen, whole, from, to,
                       scores + g * run_slots,
                       {partial.largest[query_head + g], partial.sum[query_head + g],
                        values + g * value_dim, value_dim});
            }
            if (layout.values.plain()) {
                value_of(layout.values.type, heads)(tiles, scores, first - run, end - run,
                                                    value_dim, values);
            } else if (layout.values.tiled()) {
                add_sealed_values(tiles, tile_of(layout.values, run, head),
                                  run % layout.block_tokens, heads, scores, first - run, end - run,
                                  values);
            } else {
                add_coded_values(tiles, layout, head, heads, scores, first - run, end - run,
                                 values);
            }
        }
    }
};

void decode_piece(const attend_piece& piece, const partial_softmax& partial) {
    const attend_call& call = *piece.call;
    const attend_layer& layer = *call.layer;
    const tile_layout& layout = *piece.layout;
    const uint32_t group = layer.query_heads / layer.kv_heads;
    const decoder work{piece,
                       partial,
                       layer,
                       layout,
                       group,
                       static_cast<uint32_t>(layout.keys.head_stride) * layout.keys.word_bytes,
                       static_cast<uint32_t>(layout.values.head_stride) * layout.values.word_bytes,
                       coded_query_bytes(layout)};

    const uint32_t first_query = piece.first_head * group;
    const uint32_t end_query = piece.end_head * group;
    for (uint32_t h = first_query; h < end_query; ++h) {
        partial.largest[h] = -std::numeric_limits<float>::infinity();
        partial.sum[h] = 0.0f;
    }
    std::fill(partial.values + uint64_t{first_query} * layout.values.dim,
              partial.values + uint64_t{end_query} * layout.values.dim, 0.0f);

    const seen_slots seen = slots_seen(layer, *piece.item, 0, piece.first_slot, piece.end_slot);
    run_tiles tiles;
    for (uint32_t run = piece.first_slot; run < piece.end_slot; run += run_slots) {
        for (uint32_t range = 0; range < 2; ++range) {
            const uint32_t first = std::max(run, seen.first[range]);
            const uint32_t end = std::min(run + run_slots, seen.end[range]);
            if (first >= end) continue;
            for (uint32_t head = piece.first_head; head < piece.end_head; ++head) {
                work.find_tiles(run, head, tiles);
                work.take(run, first, end, head, tiles,
                          piece.queries + uint64_t{head} * group * layout.keys.dim);
            }
        }
    }
}

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

template <element type>
void load_query_heads(const attend_call& call, uint32_t row, uint32_t first_head, uint32_t heads,
                      float* out) {
    const uint32_t dim = call.layer->layout.keys.dim;
    for (uint32_t h = 0; h < heads; ++h) {
        float* target = out + uint64_t{h} * dim;
        const std::byte* source = call.queries.at(row, first_head + h, 0);
        if (call.queries.dim_stride == 1) {
            convert_run<type, element::f32>(source, reinterpret_cast<std::byte*>(target), dim);
        } else {
            for (uint32_t i = 0; i < dim; ++i) {
                target[i] = load_element(call.queries.at(row, first_head + h, i), type);
            }
        }
        if (call.layer->layout.keys.rotated) rotate_row(target, dim);
        scale_run(target, dim, call.layer->scale);
    }
}

void load_row(const attend_call& call, uint32_t row, uint32_t first_head, uint32_t heads,
              float* out) {
    switch (call.queries.type) {
        case element::f32:
            return load_query_heads<element::f32>(call, row, first_head, heads, out);
        case element::f16:
            return load_query_heads<element::f16>(call, row, first_head, heads, out);
        default:
            return load_query_heads<element::bf16>(call, row, first_head, heads, out);
    }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(decode_piece);
HWY_EXPORT(reads_layout);
HWY_EXPORT(encode_query_heads);
HWY_EXPORT(load_row);
HWY_EXPORT(target_name);

void load_queries(const attend_call& call, uint32_t row, uint32_t first_head, uint32_t heads,
                  float* out) {
    HWY_DYNAMIC_DISPATCH(load_row)(call, row, first_head, heads, out);
}

bool decode_reads(const tile_layout& layout) { return HWY_DYNAMIC_DISPATCH(reads_layout)(layout); }

uint32_t mean_query_offset(const operand_layout& keys) {
    const uint32_t groups = keys.format->groups(keys.dim);
    // Floats and a sum per group (records-inl.hpp), or three digits of a byte per channel, two
    // floats and three sums per group (codes-inl.hpp).
    return round_up(4 * keys.dim + 5 * 4 * groups, 64u);
}

uint32_t coded_query_bytes(const tile_layout& layout) {
    const operand_layout& keys = layout.keys;
    if (keys.plain() || keys.tiled()) return 0;
    const uint32_t bytes = mean_query_offset(keys);
    if (!keys.format->needs_channels) return bytes;
    return bytes + round_up(4 * (2 * round_up(keys.turning->pairs, widest_register) + 1), 64u);
}

void encode_queries(const tile_layout& layout, uint32_t query_heads, const float* queries,
                    std::byte* out) {
    HWY_DYNAMIC_DISPATCH(encode_query_heads)(layout, query_heads, queries, out);
}

void attend_decode(const attend_piece& piece, const partial_softmax& partial) {
    HWY_DYNAMIC_DISPATCH(decode_piece)(piece, partial);
}

const char* attend_target_name() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace kvrt
#endif
