// Blocked attention: a tile of rows against runs of slots, in any layout.
//
// Keys and values of a run are converted once to f32 on the stack ([dim][slot] and [slot][dim]),
// then multiplied as small matrices in registers: 6 query vectors by 4 vectors of slots (scores),
// or by 4 vectors of dimensions (values).
//
// What a row must not see is never multiplied, since 0 * NaN is NaN: slots that were not written
// are zeroed as they are converted, and a run that holds NaN or infinity where only some rows look
// is added row by row.

#include "attention/kernels.hpp"
#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/blocked.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "attention/slots-inl.hpp"
#include "attention/softmax-inl.hpp"
#include "format/rotation.hpp"
#include "format/rows.hpp"
#include "format/vector-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

constexpr uint32_t narrow_dim = 128;  // up to here a tile and a run are large
constexpr uint32_t max_vectors = 48;
constexpr uint32_t tile_vectors = 6;  // query vectors per register tile

using lanes_tag = hn::CappedTag<float, 16>;
using eights_tag = hn::CappedTag<float, 8>;

// Everything of one piece that lives on the stack; 124 KiB.
struct scratch {
    alignas(64) float queries[max_vectors * narrow_dim];
    alignas(64) float values_out[max_vectors * narrow_dim];
    alignas(64) float keys[narrow_dim * run_slots];      // [dim][run]
    alignas(64) float values[run_slots * narrow_dim];    // [slot][dim]
    alignas(64) float weights[max_vectors * run_slots];  // [vector][run]
    float largest[max_vectors];
    float sum[max_vectors];
};

// c[v][...] = or += a[v][k] * b[k][...] for `vectors` rows of a, `columns` vectors of b.
template <uint32_t vectors, uint32_t columns, class tag>
HWY_INLINE void multiply_tile(tag d, const float* a, uint32_t a_stride, const float* b,
                              uint32_t b_stride, uint32_t depth, bool add, float* c,
                              uint32_t c_stride) {
    const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(d));
    hn::Vec<tag> sums[vectors][columns];
    for (uint32_t v = 0; v < vectors; ++v) {
        for (uint32_t x = 0; x < columns; ++x) {
            sums[v][x] = add ? hn::LoadU(d, c + v * c_stride + x * lanes) : hn::Zero(d);
        }
    }
    for (uint32_t k = 0; k < depth; ++k) {
        hn::Vec<tag> right[columns];
        HWY_UNROLL(4)
        for (uint32_t x = 0; x < columns; ++x) {
            right[x] = hn::LoadU(d, b + k * b_stride + x * lanes);
        }
        HWY_UNROLL(8)
        for (uint32_t v = 0; v < vectors; ++v) {
            const auto left = hn::Set(d, a[v * a_stride + k]);
            HWY_UNROLL(4)
            for (uint32_t x = 0; x < columns; ++x) {
                sums[v][x] = hn::MulAdd(left, right[x], sums[v][x]);
            }
        }
    }
    for (uint32_t v = 0; v < vectors; ++v) {
        for (uint32_t x = 0; x < columns; ++x) {
            hn::StoreU(sums[v][x], d, c + v * c_stride + x * lanes);
        }
    }
}

// The tiles of the next run, prefetched a few lines at a time between the products of this one.
struct tiles_ahead {
    const std::byte* tile[2 * run_slots / slot_group];
    uint32_t bytes[2 * run_slots / slot_group];
    uint32_t count = 0;
    uint32_t at = 0, offset = 0;

    void add(const std::byte* address, uint32_t size) {
        tile[count] = address;
        bytes[count++] = size;
    }
    void advance(uint32_t lines) {
        for (; lines != 0 && at < count; --lines) {
            __builtin_prefetch(tile[at] + offset, 0, 2);
            offset += 64;
            if (offset >= bytes[at]) {
                ++at;
                offset = 0;
            }
        }
    }
};

// All of c[vectors][width], width a multiple of 8.
template <uint32_t vectors>
HWY_NOINLINE void multiply_rows(const float* a, uint32_t a_stride, const float* b,
                                uint32_t b_stride, uint32_t depth, bool add, float* c,
                                uint32_t c_stride, uint32_t width) {
    const lanes_tag wide;
    const eights_tag narrow;
    const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(wide));
    const uint32_t narrow_lanes = static_cast<uint32_t>(hn::Lanes(narrow));
    // Vectors of sixteen come with 32 registers, shorter ones with 16.
    constexpr uint32_t columns = hn::MaxLanes(lanes_tag()) == 16 ? 4 : (vectors > 3 ? 1 : 4);
    uint32_t x = 0;
    for (; x + columns * lanes <= width; x += columns * lanes) {
        multiply_tile<vectors, columns>(wide, a, a_stride, b + x, b_stride, depth, add, c + x,
                                        c_stride);
    }
    for (; x + lanes <= width; x += lanes) {
        multiply_tile<vectors, 1>(wide, a, a_stride, b + x, b_stride, depth, add, c + x, c_stride);
    }
    for (; x < width; x += narrow_lanes) {
        multiply_tile<vectors, 1>(narrow, a, a_stride, b + x, b_stride, depth, add, c + x,
                                  c_stride);
    }
}

void multiply(const float* a, uint32_t a_stride, uint32_t vectors, const float* b,
              uint32_t b_stride, uint32_t depth, bool add, float* c, uint32_t c_stride,
              uint32_t width, tiles_ahead& ahead) {
    constexpr uint32_t lines_per_panel = 40;
    for (uint32_t v = 0; v < vectors; v += tile_vectors) {
        ahead.advance(lines_per_panel);
        const float* left = a + v * a_stride;
        float* out = c + v * c_stride;
        switch (std::min(tile_vectors, vectors - v)) {
            case 1:
                multiply_rows<1>(left, a_stride, b, b_stride, depth, add, out, c_stride, width);
                break;
            case 2:
                multiply_rows<2>(left, a_stride, b, b_stride, depth, add, out, c_stride, width);
                break;
            case 3:
                multiply_rows<3>(left, a_stride, b, b_stride, depth, add, out, c_stride, width);
                break;
            case 4:
                multiply_rows<4>(left, a_stride, b, b_stride, depth, add, out, c_stride, width);
                break;
            case 5:
                multiply_rows<5>(left, a_stride, b, b_stride, depth, add, out, c_stride, width);
                break;
            default:
                multiply_rows<6>(left, a_stride, b, b_stride, depth, add, out, c_stride, width);
        }
    }
}

// One KV head's keys of slots [first, first + count) as [dim][stride], zero where not written.
template <element type>
void convert_keys(const attend_piece& piece, uint32_t first, uint32_t count, uint32_t stride,
                  uint32_t head, float* out) {
    const tile_layout& layout = *piece.layout;
    const uint32_t dim = layout.keys.dim;
    const lanes_tag d;
    const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(d));
    for (uint32_t at = 0; at < count; at += slot_group) {
        const uint32_t slot = first + at;
        const std::byte* block =
            block_address(piece.call->arena, piece.item->blocks[slot / layout.block_tokens]);
        const uint32_t place = slot % layout.block_tokens;
        const uint32_t here = std::min(slot_group, count - at);
        if (layout.order == tile_order::native) {
            const std::byte* tile = block + layout.keys.at(place, head, 0);
            for (uint32_t i = 0; i < dim; ++i) {
                for (uint32_t lane = 0; lane < slot_group; lane += lanes) {
                    hn::StoreU(
                        load_f32<type>(d, tile + (i * slot_group + lane) * element_bytes(type)), d,
                        out + i * stride + at + lane);
                }
            }
        } else {
            alignas(64) float row[256];
            for (uint32_t lane = 0; lane < here; ++lane) {
                convert_run<type, element::f32>(block + layout.keys.at(place + lane, head, 0),
                                                reinterpret_cast<std::byte*>(row), dim);
                for (uint32_t i = 0; i < dim; ++i) out[i * stride + at + lane] = row[i];
            }
        }
    }
}

// One KV head's values as [slot][dim]; returns whether all are finite.
template <element type>
bool convert_values(const attend_piece& piece, uint32_t first, uint32_t count, uint32_t head,
                    float* out) {
    const tile_layout& layout = *piece.layout;
    const uint32_t dim = layout.values.dim;
    const eights_tag d;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(eights_tag()));
    // x * 0 is NaN unless x is finite. Two sums, so that the additions wait less for each other.
    auto even = hn::Zero(d), odd = hn::Zero(d);
    for (uint32_t at = 0; at < count; ++at) {
        const uint32_t slot = first + at;
        const std::byte* block =
            block_address(piece.call->arena, piece.item->blocks[slot / layout.block_tokens]);
        float* row = out + at * dim;
        convert_run<type, element::f32>(
            block + layout.values.at(slot % layout.block_tokens, head, 0),
            reinterpret_cast<std::byte*>(row), dim);
        uint32_t i = 0;
        for (; i + 2 * lanes <= dim; i += 2 * lanes) {
            even = hn::MulAdd(hn::LoadU(d, row + i), hn::Zero(d), even);
            odd = hn::MulAdd(hn::LoadU(d, row + i + lanes), hn::Zero(d), odd);
        }
        if (i < dim) even = hn::MulAdd(hn::LoadU(d, row + i), hn::Zero(d), even);
    }
    const auto flaw = hn::Add(even, odd);
    return hn::AllTrue(d, hn::Eq(flaw, flaw));
}

// The rows of up to 16 slots of one group that are stored as records, or in a tile, in the basis
// they are stored in: [count][stride].
void decode_rows(const attend_piece& piece, const operand_layout& operand, uint32_t slot,
                 uint32_t count, uint32_t head, uint32_t stride, float* rows) {
    const uint32_t block_tokens = piece.layout->block_tokens;
    const std::byte* block =
        block_address(piece.call->arena, piece.item->blocks[slot / block_tokens]);
    const uint32_t place = slot % block_tokens;
    if (operand.tiled()) {
        alignas(64) float dense[slot_group * widest_row];
        float* out = stride == operand.dim ? rows : dense;
        operand.open_tile(block, head, place, count, out);
        for (uint32_t s = 0; out == dense && s < count; ++s) {
            std::copy_n(dense + s * operand.dim, operand.dim, rows + s * stride);
        }
        return;
    }
    row_constants constants = operand.constants(head);
    uint32_t positions[slot_group] = {};
    if (operand.format->needs_positions) {
        positions_of_slots(*piece.call, *piece.item, head, slot, count, positions);
    }
    alignas(record_word) std::byte record[most_record_bytes];
    for (uint32_t s = 0; s < count; ++s) {
        gather_record(operand, block, place + s, head, record);
        constants.position = positions[s];
        operand.format->decode(record, operand.dim, constants, rows + s * stride);
    }
}

// The same of keys, in the basis they were written in.
void read_rows(const attend_piece& piece, uint32_t slot, uint32_t count, uint32_t head,
               uint32_t stride, float* rows) {
    const operand_layout& keys = piece.layout->keys;
    if (!keys.plain()) {
        decode_rows(piece, keys, slot, count, head, stride, rows);
        for (uint32_t s = 0; keys.rotated && s < count; ++s) {
            rotate_row(rows + s * stride, keys.dim);
        }
        return;
    }
    const uint32_t block_tokens = piece.layout->block_tokens;
    const std::byte* block =
        block_address(piece.call->arena, piece.item->blocks[slot / block_tokens]);
    for (uint32_t s = 0; s < count; ++s) {
        read_row(keys, block, slot % block_tokens + s, head, 0, rows + s * stride);
    }
}

// As convert_keys, from records, or rows that are stored rotated but are wanted as they were.
void decode_keys(const attend_piece& piece, uint32_t first, uint32_t count, uint32_t stride,
                 uint32_t head, float* out) {
    const operand_layout& operand = piece.layout->keys;
    const bool turns = piece.call->layer->slot_turning != nullptr;
    alignas(64) uint32_t rows[slot_group][widest_row];
    alignas(64) uint32_t tile[widest_row * slot_group];
    const uint32_t* row_pointers[slot_group];
    for (uint32_t s = 0; s < slot_group; ++s) row_pointers[s] = rows[s];
    for (uint32_t at = 0; at < count; at += slot_group) {
        const uint32_t here = std::min(slot_group, count - at);
        float* decoded = reinterpret_cast<float*>(rows[0]);
        if (turns) {
            read_rows(piece, first + at, here, head, widest_row, decoded);
        } else {
            decode_rows(piece, operand, first + at, here, head, widest_row, decoded);
        }
        for (uint32_t s = here; s < slot_group; ++s) std::fill_n(rows[s], operand.dim, 0u);
        transpose_rows(row_pointers, operand.dim, tile);
        for (uint32_t i = 0; i < operand.dim; ++i) {
            std::memcpy(out + i * stride + at, tile + i * slot_group, slot_group * sizeof(float));
        }
    }
}

// Turns keys of [dim][stride] by their slots.
void turn_keys(const position_rotation& rotation, uint32_t first, uint32_t count, uint32_t stride,
               uint32_t dim, float* keys) {
    const run_turner turner(rotation, first);
    for (uint32_t at = 0; at < count; at += slot_group) {
        turner.turn<element::f32>(reinterpret_cast<const std::byte*>(keys + at), stride, at, dim,
                                  keys + at, stride, nullptr);
    }
}

// As convert_values, from records.
bool decode_values(const attend_piece& piece, uint32_t first, uint32_t count, uint32_t head,
                   float* out) {
    const operand_layout& operand = piece.layout->values;
    float flaw = 0.0f;
    for (uint32_t at = 0; at < count; at += slot_group) {
        const uint32_t here = std::min(slot_group, count - at);
        float* rows = out + at * operand.dim;
        decode_rows(piece, operand, first + at, here, head, operand.dim, rows);
        for (uint32_t i = 0; i < here * operand.dim; ++i) flaw += rows[i] * 0.0f;
    }
    return flaw == 0.0f;
}

void convert(const attend_piece& piece, uint32_t first, uint32_t count, uint32_t stride,
             uint32_t head, float* keys, float* values, bool& finite) {
    const tile_layout& layout = *piece.layout;
    const position_rotation* turning = piece.call->layer->slot_turning;
    if (!layout.keys.plain() || (turning != nullptr && layout.keys.rotated)) {
        decode_keys(piece, first, count, stride, head, keys);
    } else if (layout.keys.type == element::f32) {
        convert_keys<element::f32>(piece, first, count, stride, head, keys);
    } else if (layout.keys.type == element::f16) {
        convert_keys<element::f16>(piece, first, count, stride, head, keys);
    } else {
        convert_keys<element::bf16>(piece, first, count, stride, head, keys);
    }
    if (turning != nullptr) turn_keys(*turning, first, count, stride, layout.keys.dim, keys);
    if (!layout.values.plain()) {
        finite = decode_values(piece, first, count, head, values);
    } else if (layout.values.type == element::f32) {
        finite = convert_values<element::f32>(piece, first, count, head, values);
    } else if (layout.values.type == element::f16) {
        finite = convert_values<element::f16>(piece, first, count, head, values);
    } else {
        finite = convert_values<element::bf16>(piece, first, count, head, values);
    }
}

bool sees_all(const seen_run& seen, uint32_t slots) {
    return (seen.first[1] == 0 && seen.end[1] == slots) ||
           (seen.first[0] == 0 && seen.end[0] == slots);
}

bool sees_none(const seen_run& seen) {
    return seen.first[0] >= seen.end[0] && seen.first[1] >= seen.end[1];
}

struct blocked_work {
    const attend_piece& piece;
    const attend_layer& layer;
    uint32_t head;
    uint32_t group;
    uint32_t first_query;  // query head of vector 0
    uint32_t rows;
    uint32_t vectors;  // rows * queries per row
    uint32_t per_row;  // query heads per row in this pass
    uint32_t run;      // slots per run
    scratch& memory;

    seen_run seen_by(uint32_t row, uint32_t first, uint32_t end) const {
        const seen_slots slots = slots_seen(layer, *piece.item, piece.first_row + row, first, end);
        seen_run seen;
        for (uint32_t range = 0; range < 2; ++range) {
            seen.first[range] = slots.first[range] - std::min(first, slots.first[range]);
            seen.end[range] = slots.end[range] - std::min(first, slots.end[range]);
        }
        return seen;
    }

    // Values of a run, one row at a time and only what it sees.
    void add_carefully(uint32_t v, const seen_run& seen, uint32_t slots) const {
        const uint32_t dim = layer.layout.values.dim;
        const eights_tag d;
        float* out = memory.values_out + v * dim;
        for (uint32_t slot = 0; slot < slots; ++slot) {
            if (!seen.sees(slot)) continue;
            const auto weight = hn::Set(d, memory.weights[v * run + slot]);
            for (uint32_t i = 0; i < dim; i += static_cast<uint32_t>(hn::Lanes(d))) {
                hn::StoreU(hn::MulAdd(weight, hn::LoadU(d, memory.values + slot * dim + i),
                                      hn::LoadU(d, out + i)),
                           d, out + i);
            }
        }
    }

    void find_ahead(uint32_t first, tiles_ahead& ahead) const {
        const tile_layout& layout = *piece.layout;
        if (layout.order != tile_order::native) return;
        const uint32_t end = std::min(first + run, piece.end_slot);
        for (uint32_t slot = first; slot < end; slot += slot_group) {
            const std::byte* block =
                block_address(piece.call->arena, piece.item->blocks[slot / layout.block_tokens]);
            const uint32_t place = slot % layout.block_tokens;
            for (const operand_layout* operand : {&layout.keys, &layout.values}) {
                if (operand->tiled()) continue;
                ahead.add(block + operand->at(place, head, 0), slot_group * operand->row_bytes());
            }
        }
    }

    void take_run(uint32_t first, uint32_t end) const {
        tiles_ahead ahead;
        find_ahead(first + run, ahead);
        const uint32_t key_dim = layer.layout.keys.dim;
        const uint32_t value_dim = layer.layout.values.dim;
        const uint32_t slots = end - first;
        const uint32_t padded = (slots + slot_group - 1) / slot_group * slot_group;
        bool finite = true;
        convert(piece, first, slots, run, head, memory.keys, memory.values, finite);
        multiply(memory.queries, key_dim, vectors, memory.keys, run, key_dim, false, memory.weights,
                 run, padded, ahead);
        bool everything = true;
        alignas(64) float positions[run_slots] = {};
        for (uint32_t row = 0; row < rows; ++row) {
            const seen_run seen = seen_by(row, first, end);
            const bool all = sees_all(seen, slots);
            everything = everything && all;
            if (layer.alibi_slopes != nullptr) {
                relative_positions(
                    *piece.call, *piece.item, head, first, slots,
                    piece.item->next_position - piece.item->rows + piece.first_row + row,
                    positions);
            }
            for (uint32_t g = 0; g < per_row; ++g) {
                const uint32_t v = row * per_row + g;
                float* scores = memory.weights + v * run;
                const kept_span keeps{piece.kept,
                                      uint64_t{row} * layer.query_heads + first_query + g, first};
                if (sees_none(seen)) {
                    std::fill_n(scores, padded, 0.0f);
                    if (keeps.kept != nullptr) keeps.set_unseen(0, padded, memory.largest[v]);
                } else {
                    soften(layer, first_query + g, positions, seen, all && slots == padded, 0,
                           padded, scores, run_slots,
                           {memory.largest[v], memory.sum[v], memory.values_out + v * value_dim,
                            value_dim},
                           keeps);
                }
            }
        }
        if (everything || finite) {
            multiply(memory.weights, run, vectors, memory.values, value_dim, slots, true,
                     memory.values_out, value_dim, value_dim, ahead);
            return;
        }
        for (uint32_t row = 0; row < rows; ++row) {
            const seen_run seen = seen_by(row, first, end);
            for (uint32_t g = 0; g < per_row; ++g) add_carefully(row * per_row + g, seen, slots);
        }
    }
};

uint32_t vectors_at_once(const attend_layer& layer) {
    const uint32_t widest = std::max(layer.layout.keys.dim, layer.layout.values.dim);
    return widest <= narrow_dim ? max_vectors : max_vectors / 2;
}

// One pass: some query heads of the KV head, so that even a group larger than a tile fits.
void take_heads(const attend_piece& piece, const partial_softmax& partial, uint32_t first_query,
                uint32_t per_row, scratch& memory) {
    const attend_layer& layer = *piece.call->layer;
    const uint32_t rows = piece.end_row - piece.first_row;
    const uint32_t value_dim = layer.layout.values.dim;
    const uint32_t widest = std::max(layer.layout.keys.dim, value_dim);
    const blocked_work work{piece,
                            layer,
                            piece.first_head,
                            layer.query_heads / layer.kv_heads,
                            first_query,
                            rows,
                            rows * per_row,
                            per_row,
                            widest <= narrow_dim ? run_slots : run_slots / 2,
                            memory};
    for (uint32_t row = 0; row < rows; ++row) {
        load_queries(*piece.call, *piece.item, piece.first_row + row, first_query, per_row,
                     memory.queries + row * per_row * layer.layout.keys.dim);
    }
    std::fill_n(memory.values_out, work.vectors * value_dim, 0.0f);
    std::fill_n(memory.largest, work.vectors, -std::numeric_limits<float>::infinity());
    std::fill_n(memory.sum, work.vectors, 0.0f);

    // The first row's window reaches back furthest, the last row sees furthest.
    const seen_slots early =
        slots_seen(layer, *piece.item, piece.first_row, piece.first_slot, piece.end_slot);
    const seen_slots late =
        slots_seen(layer, *piece.item, piece.end_row - 1, piece.first_slot, piece.end_slot);
    for (uint32_t first = piece.first_slot; first < piece.end_slot; first += work.run) {
        const uint32_t end = std::min(first + work.run, piece.end_slot);
        const bool in_sinks = first < late.end[0];
        const bool in_window = end > early.first[1] && first < late.end[1];
        if (in_sinks || in_window) work.take_run(first, std::min(end, piece.item->slots));
    }
    for (uint32_t row = 0; row < rows; ++row) {
        for (uint32_t g = 0; g < per_row; ++g) {
            const uint32_t v = row * per_row + g;
            const uint64_t target = uint64_t{row} * layer.query_heads + first_query + g;
            partial.largest[target] = memory.largest[v];
            partial.sum[target] = memory.sum[v];
            std::copy_n(memory.values_out + v * value_dim, value_dim,
                        partial.values + target * value_dim);
        }
    }
}

void blocked_piece(const attend_piece& piece, const partial_softmax& partial) {
    const attend_layer& layer = *piece.call->layer;
    const uint32_t group = layer.query_heads / layer.kv_heads;
    const uint32_t rows = piece.end_row - piece.first_row;
    const uint32_t at_once = std::max(1u, std::min(group, vectors_at_once(layer) / rows));
    scratch memory;
    for (uint32_t g = 0; g < group; g += at_once) {
        take_heads(piece, partial, piece.first_head * group + g, std::min(at_once, group - g),
                   memory);
    }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(blocked_piece);

void attend_blocked(const attend_piece& piece, const partial_softmax& partial) {
    HWY_DYNAMIC_DISPATCH(blocked_piece)(piece, partial);
}

uint32_t blocked_vectors(const attend_layer& layer) {
    const uint32_t widest = layer.layout.keys.dim > layer.layout.values.dim
                                ? layer.layout.keys.dim
                                : layer.layout.values.dim;
    return widest <= 128 ? 48 : 24;
}

}  // namespace kvrt
#endif
