// Compaction of lanes whose first blocks are sealed, in another layout than the others: survivors
// slide forward as in compact.hpp, within each layout byte for byte. Those that change layout are
// coded once, or copied where both layouts store an operand alike: rows as they were written that
// come among sealed ones, and, of lanes with tiles, rows of the other operand that were sealed and
// come behind the last full block. Operands of tiles are compact_tiles.hpp's.
//
// In that order it is safe in place: sealed rows move first, and what changes layout is read before
// anything moves that lies behind it.
#pragma once

#include "kernels/compact.hpp"
#include "kernels/decode.hpp"
#include "kernels/encode.hpp"

namespace kvrt::kernels {

/// What there is to know of such a lane beside compact_lane.
struct sealed_lane {
    uint64_t* saturated_keys;  ///< [kv_heads], added to by rows that were not coded before
    uint64_t* saturated_values;
    uint32_t sealed_slots;  ///< in sealed blocks before,
    uint32_t sealed_after;  ///< and in the table to be: whole blocks
    uint32_t coded_slots;   ///< rows of slots below were coded before
    uint32_t unused;
};

inline constexpr uint32_t compact_sealed_shared_bytes =
    compact_threads / warp_lanes * warp_record_bytes > compact_shared_bytes
        ? compact_threads / warp_lanes* warp_record_bytes
        : compact_shared_bytes;

/// Launch with compact_blocks(...) blocks of compact_threads threads and
/// compact_sealed_shared_bytes.
struct compact_sealed_parameters {
    compact_parameters all;  ///< place and positions of blocks as they are written
    block_place sealed;
    position_place sealed_positions;
    const sealed_lane* lanes = nullptr;  ///< [count]
};

template <class Cx>
KVRT_DEVICE sealed_lane load_lane(const sealed_lane& listed) {
    sealed_lane lane;
    lane.saturated_keys =
        reinterpret_cast<uint64_t*>(Cx::template load_constant<uint64_t>(&listed.saturated_keys));
    lane.saturated_values =
        reinterpret_cast<uint64_t*>(Cx::template load_constant<uint64_t>(&listed.saturated_values));
    lane.sealed_slots = Cx::template load_constant<uint32_t>(&listed.sealed_slots);
    lane.sealed_after = Cx::template load_constant<uint32_t>(&listed.sealed_after);
    lane.coded_slots = Cx::template load_constant<uint32_t>(&listed.coded_slots);
    return lane;
}

/// How many survivors, which ascend, lie below a slot.
template <class Cx>
KVRT_DEVICE uint32_t survivors_below(const uint32_t* survivors, uint32_t count, uint32_t slot) {
    uint32_t low = 0;
    while (low < count) {
        const uint32_t middle = low + (count - low) / 2;
        if (Cx::template load_constant<uint32_t>(survivors + middle) < slot) {
            low = middle + 1;
        } else {
            count = middle;
        }
    }
    return low;
}

KVRT_BOTH bool stored_alike(const operand_place& a, const operand_place& b) {
    return a.codes == b.codes && (a.codes != coding::plain || a.type == b.type);
}

/// The words of a row, by a warp.
template <class Cx>
KVRT_DEVICE void copy_row(const operand_place& from, const operand_place& to,
                          const std::byte* source, std::byte* target) {
    for (uint32_t word = Cx::lane(); word < to.words; word += warp_lanes) {
        const std::byte* const at = source + word * from.word_stride;
        if (to.word_bytes == 4) {
            Cx::store(target + word * to.word_stride, Cx::template load<uint32_t>(at));
        } else {
            Cx::store(target + word * to.word_stride, Cx::template load<uint16_t>(at));
        }
    }
}

/// Target slots [first, end), which all change layout the same way. A warp has a row. Returns how
/// many of this lane's channels saturated, of rows that were coded for the first time.
template <class Cx>
KVRT_DEVICE uint32_t change_layout(const head_move<Cx>& move, const operand_place& from,
                                   const operand_place& to, uint32_t first, uint32_t end,
                                   uint32_t coded_slots) {
    const uint32_t tokens = move.call.place.block_tokens;
    std::byte* const record = Cx::shared() + Cx::warp() * warp_record_bytes;
    uint32_t saturated = 0;
    for (uint32_t slot = first + Cx::warp(); slot < end; slot += compact_threads / warp_lanes) {
        const uint32_t old = Cx::template load_constant<uint32_t>(move.survivors + slot);
        const std::byte* const source = block_at(
            move.call.arena, Cx::template load_constant<uint32_t>(move.source + old / tokens));
        std::byte* const target =
            block_at(move.call.arena,
                     Cx::template load_constant<uint32_t>(move.target + slot / tokens)) +
            to.at(slot % tokens, move.head, 0);
        if (stored_alike(from, to)) {
            copy_row<Cx>(from, to, source + from.at(old % tokens, move.head, 0), target);
            continue;
        }
        float row[lane_channels] = {};
        load_row<Cx>(from, source, old % tokens, move.head, 0, row);
        const uint32_t beyond = store_row<Cx, true>(to, move.head, 0, row, target, record);
        if (old >= coded_slots) saturated += beyond;
        Cx::warp_barrier();  // the record is used again
    }
    return saturated;
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void compact_sealed_lanes(const compact_sealed_parameters& call) {
    const compact_parameters& all = call.all;
    const uint32_t part = Cx::block() % compact_parts;
    const uint32_t head = Cx::block() / compact_parts % all.place.kv_heads;
    const uint32_t index = Cx::block() / compact_parts / all.place.kv_heads;
    if (index >= all.count) return;
    const compact_lane lane = load_lane<Cx>(all.lanes[index]);
    const sealed_lane more = load_lane<Cx>(call.lanes[index]);
    const uint32_t* const source = all.tables + lane.source_table;
    const uint32_t* const target = all.tables + lane.target_table;
    const uint32_t* const survivors = all.survivors + lane.survivors + head * all.survivor_stride;
    const operand_place& open = part == 1 ? all.place.values : all.place.keys;
    const operand_place& sealed = part == 1 ? call.sealed.values : call.sealed.keys;
    if (part == 2) {
        const head_move<Cx> move{all, open, source, target, survivors, head, lane.count};
        return move_notes<Cx>(
            move, lane,
            {all.positions, &call.sealed_positions, more.sealed_slots, more.sealed_after});
    }
    if (is_tile(sealed.codes)) return;
    // Of these so many were sealed, and so many will be.
    const uint32_t before = survivors_below<Cx>(survivors, lane.count, more.sealed_slots);
    const uint32_t after = more.sealed_after < lane.count ? more.sealed_after : lane.count;
    const uint32_t still = before < after ? before : after;
    const uint32_t changed = before < after ? after : before;
    move_rows<Cx>({all, sealed, source, target, survivors, head, still});
    Cx::barrier();
    const bool seals = before < after;
    const head_move<Cx> raw{all, open, source, target, survivors, head, lane.count, after, changed};
    const uint32_t saturated = change_layout<Cx>(raw, seals ? open : sealed, seals ? sealed : open,
                                                 still, changed, more.coded_slots);
    uint64_t* const counts = part == 1 ? more.saturated_values : more.saturated_keys;
    const uint32_t sum = Cx::reduce_add(saturated);
    if (sum != 0 && counts != nullptr && Cx::lane() == 0) {
        Cx::atomic_add(counts + head, uint64_t{sum});
    }
    Cx::barrier();
    move_rows<Cx>(raw);
}

}  // namespace kvrt::kernels
