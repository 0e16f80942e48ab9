// How passes over stored rows see them, compiled once per instruction set. A unit is the tile of
// one group of 16 slots, dim-major, [dim][16]: read once where it lies, when it lies so; rows are
// turned around on the stack first, those of coded formats decoded. Lanes are slots, so no sum over
// channels runs across a register, and a slot's numbers do not depend on others.

// Per-target include guard.
#if defined(KVRT_RETENTION_VISIT_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_RETENTION_VISIT_INL_HPP
#undef KVRT_RETENTION_VISIT_INL_HPP
#else
#define KVRT_RETENTION_VISIT_INL_HPP
#endif

#include <hwy/highway.h>

#include <type_traits>

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

// Tiles of one head lie apart; so many tiles ahead are on their way into the second-level cache.
constexpr uint32_t tiles_ahead = 4;

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

// `bytes` of a tile that will be read soon, a little at a time.
struct tile_prefetch {
    const std::byte* next = nullptr;
    const std::byte* end = nullptr;

    HWY_INLINE void advance(uint32_t bytes) {
        for (uint32_t done = 0; done < bytes && next < end; done += 64, next += 64) {
            __builtin_prefetch(next, 0, 2);
        }
    }
};

// The tile some tiles further on, if there is one and it lies in one piece.
HWY_INLINE tile_prefetch tile_ahead(const tile_source& source, uint32_t slot, uint32_t end_slot) {
    const operand_layout& operand = source.operand;
    const bool in_one_piece = operand.word_stride != 1 || operand.slot_stride == operand.words;
    const uint64_t later = uint64_t{slot} + tiles_ahead * slot_group;
    tile_prefetch coming;
    if (in_one_piece && later < end_slot) {
        coming.next = source.at(static_cast<uint32_t>(later));
        coming.end = coming.next + operand.dim * slot_group * element_bytes(operand.type);
    }
    return coming;
}

// Plain elements, dim-major or in rows.
template <element type, class tile_kernel>
void visit_plain(const tile_source& source, uint32_t first_slot, uint32_t end_slot,
                 const tile_kernel& kernel) {
    using word = std::conditional_t<type == element::f32, uint32_t, uint16_t>;
    const bool dim_major = source.operand.word_stride != 1;
    const int64_t step = source.operand.slot_stride;
    alignas(64) word tile[widest_row * slot_group];
    const word* rows[slot_group];
    for (uint32_t slot = first_slot; slot < end_slot; slot += slot_group) {
        const uint32_t slots = HWY_MIN(slot_group, end_slot - slot);
        const tile_prefetch coming = tile_ahead(source, slot, end_slot);
        const std::byte* place = source.at(slot);
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
        transpose_rows(row_pointers, dim, tile);
        kernel.template tile<element::f32>(reinterpret_cast<const std::byte*>(tile), slot, slots,
                                           tile_prefetch{});
    }
}

// Calls kernel.tile<type>(tile, first slot, slots, prefetch) for each group of 16 slots in
// [first_slot, end_slot); first_slot is a multiple of 16. Lanes beyond `slots` hold anything.
template <class tile_kernel>
void visit_tiles(operand_role role, const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                 const tile_kernel& kernel) {
    const auto visit = [&](const tile_layout& layout, uint32_t first, uint32_t end) {
        if (first >= end) return;
        const tile_source source{rows, layout, rows.operand(role, layout)};
        if (!source.operand.plain() || source.operand.rotated) {
            return visit_coded(source, first, end, kernel);
        }
        switch (source.operand.type) {
            case element::f32:
                return visit_plain<element::f32>(source, first, end, kernel);
            case element::f16:
                return visit_plain<element::f16>(source, first, end, kernel);
            case element::bf16:
                return visit_plain<element::bf16>(source, first, end, kernel);
        }
    };
    const uint32_t middle = HWY_MIN(HWY_MAX(rows.sealed_slots, first_slot), end_slot);
    if (first_slot < middle) visit(*rows.sealed, first_slot, middle);
    visit(*rows.open, middle, end_slot);
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
