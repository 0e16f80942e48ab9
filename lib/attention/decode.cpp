// Decode: one query row against native tiles, read once and where they lie.
//
// A run is up to 64 slots, a span one run, or up to four where AMX multiplies. For each KV head of
// a span: scores of all its query heads, run by run (a register holds 16 slots of one dimension, so
// there are no horizontal sums), the softmax of the span, then the weighted values. Codes are
// taken by decode_keys.cpp, decode_values.cpp and decode_tiles.cpp instead. While a tile
// is used, the tile that comes next for the same place in the span (next head, or the next span's
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
#include <optional>
#include <type_traits>

#include "attention/coded-inl.hpp"
#include "attention/native-inl.hpp"
#include "attention/opened-inl.hpp"
#include "attention/slots-inl.hpp"
#include "attention/softmax-inl.hpp"
#include "base/checked.hpp"
#include "format/rotation.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

// ---- What is read, and with what ----------------------------------------------------------------

#if HWY_TARGET == HWY_AVX3

/// Tile registers set up for a piece, where an operand is multiplied by AMX.
class piece_shapes {
  public:
    explicit piece_shapes(const tile_layout& layout) {
        const bool keys = multiplies_tiles(layout, layout.keys);
        used_ = keys || multiplies_tiles(layout, layout.values);
        if (!used_) return;
        const bool records = keys && !layout.keys.tiled();
        amx_set_shapes(records ? amx_query_shape(coded_operand(layout.keys, 0), 0).key_bytes
                               : amx_row_bytes);
    }
    ~piece_shapes() {
        if (used_) amx_release();
    }
    piece_shapes(const piece_shapes&) = delete;
    piece_shapes& operator=(const piece_shapes&) = delete;

    /// Whether more than a run's weights are worth making at once: sums of values stay in tile
    /// registers meanwhile.
    bool long_spans() const { return used_; }

    /// Called between products.
    void stay_ready() const {
        if (used_) stay_awake();
    }

  private:
    bool used_;
};

#else

struct piece_shapes {
    explicit piece_shapes(const tile_layout&) {}
    bool long_spans() const { return false; }
    void stay_ready() const {}
};

#endif

// Vectors of one lane have no pieces: records are left to the blocked kernel.
constexpr bool has_vectors = HWY_TARGET != HWY_SCALAR;

bool reads(const operand_layout& operand) {
    if (operand.plain()) return true;
    // A run lies in one tile.
    if (operand.tiled() && operand.tile_tokens % run_slots != 0) return false;
    const code_kind kind =
        operand.tiled() ? operand.format->tile.reading.codes : operand.format->reading.codes;
    return has_vectors && kind != code_kind::none && operand.dim % whole_channels(kind) == 0;
}

bool reads_layout(const tile_layout& layout) {
    return layout.order == tile_order::native && reads(layout.keys) && reads(layout.values);
}

// As score_run, of keys of any layout that decode_reads where they are turned by slots: a tile of
// 16 at a time, as floats in the basis the keys were written in.
void score_turned(const run_tiles& tiles, const operand_layout& stored, uint32_t head,
                  const run_turner& turner, uint32_t heads, const float* queries, float* scores) {
    alignas(64) float turned[widest_row * slot_group];
    const uint32_t dim = stored.dim;
    const std::byte* const tile[] = {reinterpret_cast<const std::byte*>(turned)};
    const run_tiles one{tile, nullptr, tile, nullptr, 1};
    for (uint32_t group = 0; group < tiles.groups; ++group) {
        const std::byte* keys = tiles.keys[group];
        const std::byte* ahead = tiles.next_keys[group];
        const uint32_t slot = group * slot_group;
        if (!stored.plain()) {
            open_keys(coded_operand(stored, head), keys, ahead, turned);
            if (stored.rotated) rotate_tile(turned, dim);
            turner.turn<element::f32>(tile[0], slot_group, slot, dim, turned, slot_group, nullptr);
        } else if (stored.type == element::f32) {
            turner.turn<element::f32>(keys, slot_group, slot, dim, turned, slot_group, ahead);
        } else if (stored.type == element::f16) {
            turner.turn<element::f16>(keys, slot_group, slot, dim, turned, slot_group, ahead);
        } else {
            turner.turn<element::bf16>(keys, slot_group, slot, dim, turned, slot_group, ahead);
        }
        score_of(element::f32, heads)(one, queries, dim, scores + slot);
    }
}

struct decoder {
    const attend_piece& piece;
    const partial_softmax& partial;
    const attend_layer& layer;
    const tile_layout& layout;
    const piece_shapes& shapes;
    uint32_t group;
    uint32_t key_head_bytes, value_head_bytes;
    uint32_t query_bytes;  // of a query head for integer codes
    uint32_t span;         // slots whose weights are made at once

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

    // Tiles of the span at `first`, of slots before `end`, for the piece's first KV head.
    void find_tiles(uint32_t first, uint32_t end, span_tiles& tiles) const {
        tiles.groups = 0;
        for (uint32_t slot = first; slot < std::min(first + span, end); slot += slot_group) {
            const uint32_t g = tiles.groups++;
            const std::byte* block = block_of(slot);
            const uint32_t place = slot % layout.block_tokens;
            tiles.keys[g] = block + codes_at(layout.keys, place, piece.first_head);
            tiles.values[g] = block + codes_at(layout.values, place, piece.first_head);
        }
    }

    // The next head's tiles, and what follows them: the head after it, or the next span's first.
    void next_tiles(uint32_t head, const span_tiles& next_span, span_tiles& tiles) const {
        const bool first_head = head == piece.first_head, last_head = head + 1 == piece.end_head;
        for (uint32_t g = 0; g < tiles.groups; ++g) {
            if (!first_head) {
                tiles.keys[g] += key_head_bytes;
                tiles.values[g] += value_head_bytes;
            }
            if (!last_head) {
                tiles.next_keys[g] = tiles.keys[g] + key_head_bytes;
                tiles.next_values[g] = tiles.values[g] + value_head_bytes;
            } else {
                const span_tiles& after = g < next_span.groups ? next_span : tiles;
                tiles.next_keys[g] = after.keys[g];
                tiles.next_values[g] = after.values[g];
            }
        }
    }

    // Slots [first, end) of a run, whose tiles these are.
    struct run_part {
        uint32_t run, first, end;
        run_tiles tiles;
    };

    // Calls body(part, scores of its run) for slots [first, end) of the span that begins at
    // `begin`.
    template <class callable>
    static void each_run(uint32_t begin, uint32_t first, uint32_t end, const span_tiles& tiles,
                         float* scores, const callable& body) {
        for (uint32_t r = (first - begin) / run_slots; begin + r * run_slots < end; ++r) {
            const uint32_t run = begin + r * run_slots;
            body(run_part{run, std::max(first, run), std::min(end, run + run_slots),
                          tiles.of_run(r)},
                 scores + r * span_stride);
        }
    }

    // From the `done`-th query head of a KV head on.
    const std::byte* coded_queries(uint32_t head, uint32_t done) const {
        return piece.coded_queries + uint64_t{head * group + done} * query_bytes;
    }

    // scores[h][slot - run] of `heads` query heads from the `done`-th of a KV head on.
    void score(const run_part& part, uint32_t head, uint32_t done, uint32_t heads,
               const run_turner* turner, const float* queries, float* scores) const {
        const uint32_t key_dim = layout.keys.dim;
        queries += done * key_dim;
        if (turner != nullptr) {
            score_turned(part.tiles, layout.keys, head, *turner, heads, queries, scores);
        } else if (layout.keys.plain()) {
            score_of(layout.keys.type, heads)(part.tiles, queries, key_dim, scores);
        } else if (layout.keys.tiled()) {
            score_sealed(part.tiles, layout, tile_of(layout.keys, part.run, head),
                         part.run % layout.block_tokens, heads, queries, scores);
        } else {
            score_coded(part.tiles, layout, piece.float_queries[head] != 0, head, heads,
                        coded_queries(head, done), query_bytes, part.first - part.run,
                        part.end - part.run, scores);
        }
    }

    // values[h][channel] += weighted values of slots [first, end) of the span.
    void add_values_of(uint32_t begin, uint32_t first, uint32_t end, uint32_t head, uint32_t heads,
                       const span_tiles& tiles, float* weights, float* values) const {
        if (!layout.values.plain() && !layout.values.tiled()) {
            return add_coded_values(tiles, layout, head, heads, weights, first - begin, end - begin,
                                    values);
        }
        each_run(begin, first, end, tiles, weights, [&](const run_part& part, float* of_run) {
            if (layout.values.plain()) {
                value_of(layout.values.type, heads)(part.tiles, of_run, part.first - part.run,
                                                    part.end - part.run, layout.values.dim, values);
            } else {
                add_sealed_values(part.tiles, layout, tile_of(layout.values, part.run, head),
                                  part.run % layout.block_tokens, heads, of_run,
                                  part.first - part.run, part.end - part.run, values);
            }
        });
    }

    // Slots [first, end) of the span that begins at `begin`, for one KV head. `turner` is null
    // where keys are attended as they are stored.
    void take(uint32_t begin, uint32_t first, uint32_t end, uint32_t head, const span_tiles& tiles,
              const run_turner* turner, const float* queries) const {
        alignas(64) float scores[span_runs * span_stride];
        alignas(64) float positions[span_slots] = {};
        if (layer.alibi_slopes != nullptr) {
            relative_positions(*piece.call, *piece.item, head, first, end - first,
                               piece.item->next_position - 1, positions + (first - begin));
        }
        uint32_t slot_positions[span_slots];
        if (layout.keys.format->needs_channels) {
            positions_of_slots(*piece.call, *piece.item, head, first, end - first, slot_positions);
        }
        const uint32_t value_dim = layout.values.dim;
        const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(slots_tag()));
        const uint32_t from = (first - begin) / lanes * lanes;
        const uint32_t to = round_up(end - begin, lanes);
        const bool whole = from == first - begin && to == end - begin;
        const seen_run seen{{0, first - begin}, {0, end - begin}};
        for (uint32_t done = 0; done < group; done += max_together) {
            const uint32_t heads = std::min(max_together, group - done);
            const uint32_t query_head = head * group + done;
            float* values = partial.values + uint64_t{query_head} * value_dim;
            each_run(begin, first, end, tiles, scores, [&](const run_part& part, float* of_run) {
                score(part, head, done, heads, turner, queries, of_run);
            });
            if (layout.keys.format->needs_channels) {
                const std::byte* coded = coded_queries(head, done);
                each_run(begin, first, end, tiles, scores,
                         [&](const run_part& part, float* of_run) {
                             score_means(layout, slot_positions + (part.first - first),
                                         part.end - part.first, heads, coded, query_bytes,
                                         of_run + (part.first - part.run));
                         });
            }
            for (uint32_t g = 0; g < heads; ++g) {
                shapes.stay_ready();
                const uint32_t vector = query_head + g;
                soften(layer, vector, positions, seen, whole, from, to, scores + g * run_slots,
                       span_stride,
                       {partial.largest[vector], partial.sum[vector], values + g * value_dim,
                        value_dim},
                       {piece.kept, vector, begin});
            }
            add_values_of(begin, first, end, head, heads, tiles, scores, values);
        }
    }
};

void decode_piece(const attend_piece& piece, const partial_softmax& partial) {
    const attend_call& call = *piece.call;
    const attend_layer& layer = *call.layer;
    const tile_layout& layout = *piece.layout;
    const uint32_t group = layer.query_heads / layer.kv_heads;
    const piece_shapes shapes(layout);
    const decoder work{
        piece,
        partial,
        layer,
        layout,
        shapes,
        group,
        static_cast<uint32_t>(layout.keys.head_stride) * layout.keys.word_bytes,
        static_cast<uint32_t>(layout.values.head_stride) * layout.values.word_bytes,
        coded_query_bytes(layout),
        shapes.long_spans() && layer.slot_turning == nullptr ? span_slots : run_slots};

    const uint32_t first_query = piece.first_head * group;
    const uint32_t end_query = piece.end_head * group;
    for (uint32_t h = first_query; h < end_query; ++h) {
        partial.largest[h] = -std::numeric_limits<float>::infinity();
        partial.sum[h] = 0.0f;
    }
    std::fill(partial.values + uint64_t{first_query} * layout.values.dim,
              partial.values + uint64_t{end_query} * layout.values.dim, 0.0f);

    const seen_slots seen = slots_seen(layer, *piece.item, 0, piece.first_slot, piece.end_slot);
    span_tiles tiles{}, next_span{};
    std::optional<run_turner> turner;
    for (uint32_t begin = piece.first_slot; begin < piece.end_slot; begin += work.span) {
        for (uint32_t range = 0; range < 2; ++range) {
            const uint32_t first = std::max(begin, seen.first[range]);
            const uint32_t end = std::min(begin + work.span, seen.end[range]);
            if (first >= end) continue;
            work.find_tiles(begin, piece.end_slot, tiles);
            work.find_tiles(begin + work.span, piece.item->slots, next_span);
            if (layer.slot_turning != nullptr) turner.emplace(*layer.slot_turning, begin);
            for (uint32_t head = piece.first_head; head < piece.end_head; ++head) {
                work.next_tiles(head, next_span, tiles);
                work.take(begin, first, end, head, tiles, turner ? &*turner : nullptr,
                          piece.queries + uint64_t{head} * group * layout.keys.dim);
            }
        }
    }
}

const char* target_name() { return hwy::TargetName(HWY_TARGET); }

template <element type>
void load_query_heads(const attend_call& call, const attend_item& item, uint32_t item_row,
                      uint32_t first_head, uint32_t heads, float* out) {
    const attend_layer& layer = *call.layer;
    const uint32_t dim = layer.layout.keys.dim;
    const uint32_t row = item.first_row + item_row;
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
        if (layer.slot_turning != nullptr) {
            turn_row(*layer.slot_turning, item.slots - item.rows + item_row, target);
        } else if (layer.layout.keys.rotated) {
            rotate_row(target, dim);
        }
        scale_run(target, dim, layer.scale);
    }
}

void load_row(const attend_call& call, const attend_item& item, uint32_t row, uint32_t first_head,
              uint32_t heads, float* out) {
    switch (call.queries.type) {
        case element::f32:
            return load_query_heads<element::f32>(call, item, row, first_head, heads, out);
        case element::f16:
            return load_query_heads<element::f16>(call, item, row, first_head, heads, out);
        default:
            return load_query_heads<element::bf16>(call, item, row, first_head, heads, out);
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

void load_queries(const attend_call& call, const attend_item& item, uint32_t row,
                  uint32_t first_head, uint32_t heads, float* out) {
    HWY_DYNAMIC_DISPATCH(load_row)(call, item, row, first_head, heads, out);
}

bool decode_reads(const tile_layout& layout) { return HWY_DYNAMIC_DISPATCH(reads_layout)(layout); }

bool decode_reads(const attend_layer& layer, const tile_layout& layout) {
    if (!decode_reads(layout)) return false;
    if (layer.slot_turning == nullptr) return true;
    const operand_layout& keys = layout.keys;
    if (keys.plain()) return !keys.rotated;
    switch (keys.tiled() || keys.format->needs_channels ? code_kind::none
                                                        : keys.format->reading.codes) {
        case code_kind::signed_bytes:
        case code_kind::e4m3_bytes:
        case code_kind::e5m2_bytes:
        case code_kind::nibbles:
        case code_kind::e2m1_nibbles:
        case code_kind::normal_nibbles:
            return true;
        default:
            return false;
    }
}

/// Of a query head's products with the mean of keys.
static uint32_t mean_query_bytes(const operand_layout& keys) {
    if (!keys.format->needs_channels) return 0;
    return round_up(4 * (2 * round_up(keys.turning->pairs, widest_register) + 1), 64u);
}

uint32_t coded_query_bytes(const tile_layout& layout) {
    const operand_layout& keys = layout.keys;
    if (keys.plain() || keys.tiled()) return 0;
    const code_kind codes = keys.format->reading.codes;
    if (codes == code_kind::e4m3_bytes || codes == code_kind::e5m2_bytes) {
        // Three rows of bf16 and a unit (amx_fp8-inl.hpp), or floats and a sum.
        return 3 * (round_up(2 * keys.dim, 64u) + 64);
    }
    // Three rows of digits of a byte per channel, and two numbers of each group in their tails
    // (amx-inl.hpp), are more than floats and a sum per group (records-inl.hpp), or the same
    // digits, two floats and three sums per group (codes-inl.hpp).
    const uint32_t rows = 3 * (round_up(keys.dim, 64u) + 128 + mean_query_bytes(keys));
    // Twice where steps are powers of two (amx_folded-inl.hpp).
    return keys.format->reading.groups == group_kind::e8m0_step ? 2 * rows : rows;
}

uint32_t mean_query_offset(const tile_layout& layout) {
    return coded_query_bytes(layout) - mean_query_bytes(layout.keys);
}

void encode_queries(const tile_layout& layout, uint32_t query_heads, const float* queries,
                    std::byte* out, uint8_t* as_floats) {
    HWY_DYNAMIC_DISPATCH(encode_query_heads)(layout, query_heads, queries, out, as_floats);
}

void attend_decode(const attend_piece& piece, const partial_softmax& partial) {
    HWY_DYNAMIC_DISPATCH(decode_piece)(piece, partial);
}

const char* attend_target_name() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

}  // namespace kvrt
#endif
