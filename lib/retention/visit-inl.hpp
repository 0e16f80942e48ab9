// How passes over stored rows see them, compiled once per instruction set. A unit is the tile of
// one group of 16 slots, dim-major, [dim][16]: read once where it lies, when it lies so; rows are
// turned around on the stack first, those of coded formats decoded. Lanes are slots, so no sum over
// channels runs across a register, and a slot's numbers do not depend on others.
//
// A kernel that takes rows too is given those that lie in rows, or were decoded, as they are, not
// turned around.

// Per-target include guard.
#if defined(KVRT_RETENTION_VISIT_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_RETENTION_VISIT_INL_HPP
#undef KVRT_RETENTION_VISIT_INL_HPP
#else
#define KVRT_RETENTION_VISIT_INL_HPP
#endif

#include <hwy/highway.h>

#include <type_traits>
#include <utility>

#include "format/rotation.hpp"
#include "format/rows.hpp"
#include "format/vector-inl.hpp"
#include "retention/stored_rows.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

using float_tag = hn::CappedTag<float, slot_group>;
using floats = hn::Vec<float_tag>;
constexpr uint32_t vector_slots = static_cast<uint32_t>(hn::MaxLanes(float_tag()));

// Tiles of one head lie apart: those some way ahead are on their way into the second-level cache.
struct read_ahead {
    int64_t distance;     // in slots
    uint32_t first, end;  // they lie in these slots, of one layout
};
constexpr int64_t usual_distance = 4 * slot_group;

// One operand of the slots of one layout.
struct tile_source {
    const stored_rows& rows;
    const tile_layout& layout;
    const operand_layout& operand;

    const std::byte* block(uint32_t slot) const {
        return block_address(rows.arena, rows.blocks[slot / layout.block_tokens]);
    }
    const std::byte* at(uint32_t slot) const {
        return block(slot) + operand.at(slot % layout.block_tokens, rows.kv_head, 0);
    }
    // The row of one slot as it was written, of any format.
    void read(uint32_t slot, float* row) const {
        const uint32_t position =
            operand.format->needs_positions ? static_cast<uint32_t>(rows.positions->at(slot)) : 0;
        read_row(operand, block(slot), slot % layout.block_tokens, rows.kv_head, position, row);
    }
};

// Bytes of a tile that will be read soon, as many as `advance` is told of what is read now, or half
// as many: lines asked for all at once would take the places that other misses need.
struct tile_prefetch {
    const std::byte* next = nullptr;
    const std::byte* end = nullptr;
    bool by_halves = false;
    uint32_t told = 0;

    HWY_INLINE void advance(uint32_t bytes) {
        told += bytes;
        const uint32_t line = by_halves ? 128 : 64;
        for (; told >= line && next < end; told -= line, next += 64) {
            __builtin_prefetch(next, 0, 2);
        }
    }
    /// For two passes over what is read now, one after the other.
    std::pair<tile_prefetch, tile_prefetch> halves() const {
        const std::byte* middle = next + (end - next) / 128 * 64;
        return {{next, middle, true}, {middle, end, true}};
    }
};

// The tile some tiles further on, if there is one and it lies in one piece.
HWY_INLINE tile_prefetch tile_ahead(const tile_source& source, uint32_t slot,
                                    const read_ahead& ahead) {
    const operand_layout& operand = source.operand;
    const bool in_one_piece = operand.word_stride != 1 || operand.slot_stride == operand.words;
    const int64_t later = slot + ahead.distance;
    tile_prefetch coming;
    if (in_one_piece && later >= ahead.first && later < ahead.end) {
        coming.next = source.at(static_cast<uint32_t>(later));
        coming.end = coming.next + operand.dim * slot_group * element_bytes(operand.type);
    }
    return coming;
}

// A group of 16 slots in rows; those beyond its last slot can be read, and hold anything.
template <element type>
struct row_group {
    const std::byte* first;
    uint64_t stride;  // bytes

    // Lanes of channels [channel, ...).
    HWY_INLINE floats load(uint32_t row, uint32_t channel) const {
        return load_f32<type>(float_tag(), first + row * stride + channel * element_bytes(type));
    }
};

// Kernels that take rows have rows<type>(group, first slot, slots, prefetch) beside tile().
template <class tile_kernel>
concept row_kernel = requires {
    tile_kernel::takes_rows;
};
// They take them in pairs of vectors.
constexpr bool takes_rows_of(uint32_t dim) { return dim % (2 * slot_group) == 0; }

// Plain elements, dim-major or in rows.
template <element type, class tile_kernel>
void visit_plain(const tile_source& source, uint32_t first_slot, uint32_t end_slot,
                 const read_ahead& ahead, const tile_kernel& kernel) {
    using word = std::conditional_t<type == element::f32, uint32_t, uint16_t>;
    const bool dim_major = source.operand.word_stride != 1;
    const int64_t step = source.operand.slot_stride;
    alignas(64) word tile[widest_row * slot_group];
    const word* rows[slot_group];
    for (uint32_t slot = first_slot; slot < end_slot; slot += slot_group) {
        const uint32_t slots = HWY_MIN(slot_group, end_slot - slot);
        const tile_prefetch coming = tile_ahead(source, slot, ahead);
        const std::byte* place = source.at(slot);
        if constexpr (row_kernel<tile_kernel>) {
            if (!dim_major && takes_rows_of(source.operand.dim)) {
                kernel.rows(row_group<type>{place, static_cast<uint64_t>(step) * sizeof(word)},
                            slot, slots, coming);
                continue;
            }
        }
        if (!dim_major) {
            // A block holds whole groups of 16 slots: rows beyond the last slot can be read.
            for (uint32_t s = 0; s < slot_group; ++s) {
                rows[s] = reinterpret_cast<const word*>(place) + s * step;
            }
            transpose_rows(rows, source.operand.dim, tile);
            place = reinterpret_cast<const std::byte*>(tile);
        }
        kernel.template tile<type>(place, slot, slots, coming);
    }
}

// Tiles of f32, of rows made from records or from tiles of a tile-local format.
template <class tile_kernel>
void visit_coded(const tile_source& source, uint32_t first_slot, uint32_t end_slot,
                 const tile_kernel& kernel) {
    const uint32_t dim = source.operand.dim;
    alignas(64) float rows[slot_group * widest_row] = {};
    alignas(64) uint32_t tile[widest_row * slot_group];
    const uint32_t* row_pointers[slot_group];
    for (uint32_t s = 0; s < slot_group; ++s) {
        row_pointers[s] = reinterpret_cast<const uint32_t*>(rows) + s * dim;
    }
    for (uint32_t slot = first_slot; slot < end_slot; slot += slot_group) {
        const uint32_t slots = HWY_MIN(slot_group, end_slot - slot);
        if (source.operand.tiled()) {
            source.operand.open_tile(source.block(slot), source.rows.kv_head,
                                     slot % source.layout.block_tokens, slots, rows);
            for (uint32_t s = 0; source.operand.rotated && s < slots; ++s) {
                rotate_row(rows + s * dim, dim);
            }
        } else {
            for (uint32_t s = 0; s < slots; ++s) source.read(slot + s, rows + s * dim);
        }
        if constexpr (row_kernel<tile_kernel>) {
            if (takes_rows_of(dim)) {
                kernel.rows(row_group<element::f32>{reinterpret_cast<const std::byte*>(rows),
                                                    dim * sizeof(float)},
                            slot, slots, tile_prefetch{});
                continue;
            }
        }
        transpose_rows(row_pointers, dim, tile);
        kernel.template tile<element::f32>(reinterpret_cast<const std::byte*>(tile), slot, slots,
                                           tile_prefetch{});
    }
}

// Calls kernel.tile<type>(tile, first slot, slots, prefetch) for each group of 16 slots in
// [first_slot, end_slot); first_slot is a multiple of 16. Lanes beyond `slots` hold anything.
// Who goes backwards says so by a negative distance to what is read ahead.
template <class tile_kernel>
void visit_tiles(operand_role role, const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                 const tile_kernel& kernel, int64_t distance = usual_distance) {
    const auto visit = [&](const tile_layout& layout, uint32_t first, uint32_t end,
                           uint32_t first_of_layout) {
        if (first >= end) return;
        const tile_source source{rows, layout, rows.operand(role, layout)};
        const read_ahead ahead{distance, first_of_layout, end};
        if (!source.operand.plain() || source.operand.rotated) {
            return visit_coded(source, first, end, kernel);
        }
        switch (source.operand.type) {
            case element::f32:
                return visit_plain<element::f32>(source, first, end, ahead, kernel);
            case element::f16:
                return visit_plain<element::f16>(source, first, end, ahead, kernel);
            case element::bf16:
                return visit_plain<element::bf16>(source, first, end, ahead, kernel);
        }
    };
    const uint32_t middle = HWY_MIN(HWY_MAX(rows.sealed_slots, first_slot), end_slot);
    if (first_slot < middle) visit(*rows.sealed, first_slot, middle, 0);
    visit(*rows.open, middle, end_slot, rows.sealed_slots);
}

// Lanes [first, first + vector_slots) of one dimension of a tile.
template <element type>
HWY_INLINE floats load_lanes(const std::byte* tile, uint32_t dimension, uint32_t first) {
    return load_f32<type>(float_tag(),
                          tile + (dimension * slot_group + first) * element_bytes(type));
}

// Of a vector that stands for slots [first, ...) of a tile, stores those below `slots`.
HWY_INLINE void store_lanes(floats value, uint32_t first, uint32_t slots, float* out) {
    const float_tag d;
    if (first + vector_slots <= slots) {
        hn::StoreU(value, d, out + first);
        return;
    }
    alignas(64) float lanes[vector_slots];
    hn::Store(value, d, lanes);
    for (uint32_t i = 0; first + i < slots; ++i) out[first + i] = lanes[i];
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
