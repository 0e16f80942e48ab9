// Compaction of tiles: survivors, which open_lanes.hpp has opened, become whole tiles; those behind
// the last full block go back to rows as they are written. Each row is coded once. Blocks in which
// nothing moves stay as they are, or are copied where the table to be has another in their place;
// retention/compact_tiles.cpp says which these are.
//
// In place it is safe by launches: a round opens the survivors of some blocks of every lane, then
// fills these blocks, and goes on behind them, as survivors come from where they go or behind it.
// A block of threads has one operand of one head of one block.
#pragma once

#include "kernels/open_lanes.hpp"
#include "kernels/seal.hpp"

namespace kvrt::kernels {

/// Blocks [first_block, first_block + blocks_each) of the tables to be; what survivors are opened
/// in is `what`, as of open_survivors_parameters. Launch with compact_tiles_blocks(...) blocks of
/// seal_threads threads and seal_shared_bytes.
struct compact_tiles_parameters {
    open_survivors_parameters from;
    std::byte* arena = nullptr;
};
constexpr uint32_t compact_tiles_blocks(const compact_tiles_parameters& call) {
    const opening& what = call.from.what;
    const uint32_t operands = what.operands == (opened_keys | opened_values) ? 2 : 1;
    return what.count * what.place.kv_heads * operands * call.from.blocks_each;
}

/// The first slot that survivors of some KV head leave; `count` if there is none.
template <class Cx>
KVRT_DEVICE uint32_t first_moving(const uint32_t* survivors, uint64_t stride, uint32_t heads,
                                  uint32_t count) {
    for (uint32_t head = 0; head < (stride == 0 ? 1 : heads); ++head) {
        const uint32_t* const mine = survivors + head * stride;
        uint32_t low = 0;
        while (low < count) {
            const uint32_t middle = low + (count - low) / 2;
            if (Cx::template load_constant<uint32_t>(mine + middle) == middle) {
                low = middle + 1;
            } else {
                count = middle;
            }
        }
    }
    return count;
}

/// Plain rows of a block to the rows of another.
template <class Cx>
KVRT_DEVICE void close_rows(const operand_place& from, const operand_place& to, uint32_t slots,
                            uint32_t head, const std::byte* source, std::byte* target) {
    for (uint32_t slot = Cx::warp(); slot < slots; slot += seal_threads / warp_lanes) {
        float row[lane_channels] = {};
        load_row<Cx>(from, source, slot, head, 0, row);
        (void)store_row<Cx, false>(to, head, 0, row, target + to.at(slot, head, 0), nullptr);
    }
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void compact_tiles(const compact_tiles_parameters& call) {
    const open_survivors_parameters& from = call.from;
    const opening& what = from.what;
    const bool both = what.operands == (opened_keys | opened_values);
    const uint32_t operands = both ? 2 : 1, heads = what.place.kv_heads;
    const uint32_t tokens = what.place.block_tokens;
    const uint32_t in_part = Cx::block() % from.blocks_each;
    const uint32_t operand = Cx::block() / from.blocks_each % operands;
    const bool value = both ? operand != 0 : what.operands == opened_values;
    const uint32_t head = Cx::block() / from.blocks_each / operands % heads;
    const uint32_t lane_index = Cx::block() / from.blocks_each / operands / heads;
    if (lane_index >= what.count) return;
    const compact_lane lane = load_lane<Cx>(from.lanes[lane_index]);
    const sealed_lane more = load_lane<Cx>(from.more[lane_index]);
    const uint32_t index = from.first_slot / tokens + in_part, first = index * tokens;
    if (first >= lane.count) return;
    const uint32_t slots = lane.count - first < tokens ? lane.count - first : tokens;
    const uint32_t source_id =
        Cx::template load_constant<uint32_t>(what.tables + lane.source_table + index);
    const uint32_t target_id =
        Cx::template load_constant<uint32_t>(what.tables + lane.target_table + index);
    const operand_place& tile = value ? what.sealed.values : what.sealed.keys;
    const operand_place& open = value ? what.place.values : what.place.keys;
    std::byte* const target = block_at(call.arena, target_id);

    const bool was_sealed = first < more.sealed_slots, is_sealed = first < more.sealed_after;
    const uint32_t moving =
        first_moving<Cx>(from.survivors + lane.survivors, from.survivor_stride, heads, lane.count);
    if (was_sealed && is_sealed && moving >= first + slots) {
        if (source_id == target_id) return;
        const uint32_t at = tile.offset + head * tile.head_stride;
        const std::byte* const source = block_at(what.arena, source_id) + at;
        for (uint32_t i = 4 * Cx::thread(); i < shape_of_tile(tile).bytes(); i += 4 * Cx::threads())
            Cx::store(target + at + i, Cx::template load_constant<uint32_t>(source + i));
        return;
    }
    const operand_place& opened = value ? what.opened.values : what.opened.keys;
    const std::byte* const rows =
        what.out + uint64_t{lane_index * from.blocks_each + in_part} * what.opened.block_bytes;
    if (is_sealed) return seal_tile<Cx>(opened, tile, head, rows, target);
    close_rows<Cx>(opened, open, slots, head, rows, target);
}

}  // namespace kvrt::kernels
