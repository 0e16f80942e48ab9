// Blocks into blocks of another layout, a list of them in one launch: full ones into tiles of
// tile-local formats, or demoted to smaller rows; and leading slots of either back to rows as they
// are written, each decoded and coded once. Where both layouts store an operand alike, its words
// are copied. Bytes are those of lib/format/retile.cpp.
//
// Rows come in the basis that they go in; those that go into tiles are plain. Rows of other tiles
// and records are brought there by open.hpp first, as f32 in a piece of memory that is described
// as blocks.
//
// A block of threads has one operand of one head of one block.
#pragma once

#include "kernels/decode.hpp"
#include "kernels/encode.hpp"
#include "kernels/seal_kivi.hpp"
#include "kernels/seal_kvarn.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t seal_threads = 128;
inline constexpr uint32_t seal_shared_bytes = sizeof(kvarn_tile) > sizeof(kivi_groups)
                                                  ? sizeof(kvarn_tile)
                                                  : sizeof(kivi_groups);
static_assert(seal_threads / warp_lanes * warp_record_bytes <= seal_shared_bytes);
static_assert(seal_shared_bytes <= 48 << 10);

/// Block ids, and how many leading slots: all of a block into tiles, whose rows those before
/// `coded` were coded before, so that what of them saturates is not counted again. Sources and
/// targets of a launch are apart.
struct seal_item {
    uint32_t source;
    uint32_t target;
    uint32_t slots;
    uint32_t coded = 0;
};

/// Launch with seal_blocks(...) blocks of seal_threads threads and seal_shared_bytes.
struct seal_parameters {
    const std::byte* source_arena = nullptr;  ///< usually the arena
    std::byte* arena = nullptr;
    block_place from;
    block_place to;
    position_place from_positions;  ///< explicit positions go along where both have a base
    position_place to_positions;
    const seal_item* items = nullptr;  ///< [count]
    uint32_t count = 0;
    uint64_t* saturated_keys = nullptr;  ///< [kv_heads], added to by rows; null: nobody counts
    uint64_t* saturated_values = nullptr;
};

constexpr uint32_t seal_blocks(uint32_t count, uint32_t kv_heads) { return count * kv_heads * 2; }

/// Words of rows that are stored alike, slots or words of neighbouring threads side by side.
template <class Cx>
KVRT_DEVICE void copy_words(const operand_place& from, const operand_place& to, uint32_t slots,
                            uint32_t head, const std::byte* source, std::byte* target) {
    for (uint32_t i = Cx::thread(); i < slots * to.words; i += Cx::threads()) {
        const uint32_t slot = to.by_rows() ? i / to.words : i % slots;
        const uint32_t word = to.by_rows() ? i % to.words : i / slots;
        const std::byte* const at = source + from.at(slot, head, word);
        std::byte* const out = target + to.at(slot, head, word);
        if (to.word_bytes == 4) {
            Cx::store(out, Cx::template load_constant<uint32_t>(at));
        } else {
            Cx::store(out, Cx::template load_constant<uint16_t>(at));
        }
    }
}

/// A warp has a row. Returns how many of this lane's channels saturated.
template <class Cx>
KVRT_DEVICE uint32_t recode_rows(const operand_place& from, const operand_place& to,
                                 const seal_item& item, uint32_t head, const std::byte* source,
                                 std::byte* target) {
    std::byte* const record = Cx::shared() + Cx::warp() * warp_record_bytes;
    uint32_t saturated = 0;
    for (uint32_t slot = Cx::warp(); slot < item.slots; slot += seal_threads / warp_lanes) {
        float row[lane_channels] = {};
        load_row<Cx>(from, source, slot, head, 0, row);
        const uint32_t beyond =
            store_row<Cx, true>(to, head, 0, row, target + to.at(slot, head, 0), record);
        if (slot >= item.coded) saturated += beyond;
        Cx::warp_barrier();  // the record is used again
    }
    return saturated;
}

template <class Cx>
KVRT_DEVICE void seal_tile(const operand_place& from, const operand_place& to, uint32_t head,
                           const std::byte* source, std::byte* block) {
    const raw_rows rows{from, source, head};
    const tile_shape shape = shape_of_tile(to);
    std::byte* const tile = block + to.offset + head * to.head_stride;
    if (shape.kivi()) {
        seal_kivi<Cx>(rows, shape, tile, *reinterpret_cast<kivi_groups*>(Cx::shared()));
    } else {
        seal_kvarn<Cx>(rows, shape, tile, *reinterpret_cast<kvarn_tile*>(Cx::shared()));
    }
}

template <class Cx>
KVRT_DEVICE void copy_head_positions(const seal_parameters& call, const seal_item& item,
                                     uint32_t head) {
    const uint32_t* const from = call.from_positions.of(item.source, head);
    uint32_t* const to = call.to_positions.of(item.target, head);
    for (uint32_t slot = Cx::thread(); slot < call.to.block_tokens; slot += Cx::threads()) {
        Cx::store(to + slot, Cx::template load_constant<uint32_t>(from + slot));
    }
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void seal_listed_blocks(const seal_parameters& call) {
    const uint32_t heads = call.to.kv_heads;
    const bool value = Cx::block() % 2 != 0;
    const uint32_t head = Cx::block() / 2 % heads;
    const uint32_t index = Cx::block() / 2 / heads;
    if (index >= call.count) return;
    const seal_item& listed = call.items[index];
    const seal_item item{Cx::template load_constant<uint32_t>(&listed.source),
                         Cx::template load_constant<uint32_t>(&listed.target),
                         Cx::template load_constant<uint32_t>(&listed.slots),
                         Cx::template load_constant<uint32_t>(&listed.coded)};
    const operand_place& from = value ? call.from.values : call.from.keys;
    const operand_place& to = value ? call.to.values : call.to.keys;
    const std::byte* const source = block_at(call.source_arena, item.source);
    std::byte* const target = block_at(call.arena, item.target);
    const bool positions = call.from_positions.base != nullptr && call.to_positions.base != nullptr;
    if (positions && !value) copy_head_positions<Cx>(call, item, head);

    if (is_tile(to.codes)) return seal_tile<Cx>(from, to, head, source, target);
    if (from.codes == to.codes && (from.codes != coding::plain || from.type == to.type)) {
        return copy_words<Cx>(from, to, item.slots, head, source, target);
    }
    const uint32_t saturated = recode_rows<Cx>(from, to, item, head, source, target);
    uint64_t* const counts = value ? call.saturated_values : call.saturated_keys;
    if (counts == nullptr) return;
    const uint32_t all = Cx::reduce_add(saturated);
    if (all != 0 && Cx::lane() == 0) Cx::atomic_add(counts + head, uint64_t{all});
}

}  // namespace kvrt::kernels
