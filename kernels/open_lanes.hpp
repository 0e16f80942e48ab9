// Rows of lanes whose first blocks are sealed, in two layouts, to plain f32 rows in memory that is
// described as blocks: of all slots in the basis that they were written in, for scorers of content,
// which then read one layout; or of survivors in their stored basis, to be coded anew
// (compact_tiles.hpp).
//
// A warp has a row, a block of threads some rows of one operand of one head.
#pragma once

#include "kernels/compact_sealed.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t open_lanes_threads = 128;
inline constexpr uint32_t open_lanes_stretch = 64;  ///< slots of a block of threads

enum opened_operands : uint32_t { opened_keys = 1, opened_values = 2 };

/// What both kernels open, and where to. The first block of `opened` is at `out`.
struct opening {
    const std::byte* arena = nullptr;
    block_place place;
    block_place sealed;  ///< of blocks that are sealed
    std::byte* out = nullptr;
    block_place opened;  ///< blocks of as many slots, plain f32 rows in one piece
    const uint32_t* tables = nullptr;
    uint32_t operands = opened_keys;
    uint32_t count = 0;  ///< of lanes
    uint32_t most_slots = 0;
};

/// A lane, all of whose slots are opened.
struct open_lane {
    uint64_t table;        ///< place in tables
    uint32_t first_block;  ///< where they go
    uint32_t slots;
    uint32_t sealed_slots;
    uint32_t unused;
};

/// Launch with open_lanes_blocks(opening) blocks of open_lanes_threads threads.
struct open_lanes_parameters {
    opening what;
    const open_lane* lanes = nullptr;  ///< [what.count]
};

/// Target slots [first_slot, first_slot + what.most_slots) of the lanes of a compaction. Those of
/// lane i go to blocks from i * blocks_each on. Launch as the other.
struct open_survivors_parameters {
    opening what;
    const compact_lane* lanes = nullptr;
    const sealed_lane* more = nullptr;
    const uint32_t* survivors = nullptr;
    uint64_t survivor_stride = 0;
    uint32_t first_slot = 0;  ///< of a block
    uint32_t blocks_each = 0;
};

constexpr uint32_t open_lanes_blocks(const opening& what) {
    const uint32_t operands = what.operands == (opened_keys | opened_values) ? 2 : 1;
    return what.count * what.place.kv_heads * operands *
           ((what.most_slots + open_lanes_stretch - 1) / open_lanes_stretch);
}

/// What a block of threads has.
struct opened_share {
    uint32_t lane, head;
    bool value;
    uint32_t first;  ///< slot
};
template <class Cx>
KVRT_DEVICE opened_share opened_share_of(const opening& what) {
    const bool both = what.operands == (opened_keys | opened_values);
    const uint32_t operands = both ? 2 : 1, heads = what.place.kv_heads;
    const uint32_t stretches = (what.most_slots + open_lanes_stretch - 1) / open_lanes_stretch;
    opened_share made;
    made.first = Cx::block() % stretches * open_lanes_stretch;
    const uint32_t operand = Cx::block() / stretches % operands;
    made.value = both ? operand != 0 : what.operands == opened_values;
    made.head = Cx::block() / stretches / operands % heads;
    made.lane = Cx::block() / stretches / operands / heads;
    return made;
}

/// Slot `slot` of a table to slot `to` of the opened blocks from first_block on.
template <class Cx>
KVRT_DEVICE void open_slot(const opening& what, const opened_share& share, const uint32_t* table,
                           uint32_t slot, bool sealed, uint32_t first_block, uint32_t to,
                           bool stored_basis) {
    const uint32_t tokens = what.place.block_tokens;
    const block_place& place = sealed ? what.sealed : what.place;
    const operand_place& operand = share.value ? place.values : place.keys;
    const std::byte* const block =
        block_at(what.arena, Cx::template load_constant<uint32_t>(table + slot / tokens));
    float row[lane_channels] = {};
    load_row<Cx>(operand, block, slot % tokens, share.head, 0, row);
    if (operand.rotated && !stored_basis) rotate_channels<Cx>(operand.dim, row);
    const uint32_t first = Cx::lane() * lane_channels;
    if (first >= operand.dim) return;
    const operand_place& out = share.value ? what.opened.values : what.opened.keys;
    std::byte* const target = what.out +
                              uint64_t{first_block + to / tokens} * what.opened.block_bytes +
                              out.at(to % tokens, share.head, first);
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; i += 4) {
        Cx::store(target + i * sizeof(float),
                  word4{Cx::f32_to_bits(row[i]), Cx::f32_to_bits(row[i + 1]),
                        Cx::f32_to_bits(row[i + 2]), Cx::f32_to_bits(row[i + 3])});
    }
}

/// The kernel for scorers.
template <class Cx>
KVRT_DEVICE void open_lanes(const open_lanes_parameters& call) {
    const opened_share share = opened_share_of<Cx>(call.what);
    if (share.lane >= call.what.count) return;
    const open_lane& lane = call.lanes[share.lane];
    const uint32_t* const table =
        call.what.tables + Cx::template load_constant<uint64_t>(&lane.table);
    const uint32_t first_block = Cx::template load_constant<uint32_t>(&lane.first_block);
    const uint32_t slots = Cx::template load_constant<uint32_t>(&lane.slots);
    const uint32_t sealed_slots = Cx::template load_constant<uint32_t>(&lane.sealed_slots);
    for (uint32_t i = Cx::warp(); i < open_lanes_stretch; i += open_lanes_threads / warp_lanes) {
        const uint32_t slot = share.first + i;
        if (slot >= slots) return;
        open_slot<Cx>(call.what, share, table, slot, slot < sealed_slots, first_block, slot, false);
    }
}

/// The kernel for survivors.
template <class Cx>
KVRT_DEVICE void open_survivors(const open_survivors_parameters& call) {
    const opened_share share = opened_share_of<Cx>(call.what);
    if (share.lane >= call.what.count) return;
    const compact_lane& lane = call.lanes[share.lane];
    const uint32_t* const table =
        call.what.tables + Cx::template load_constant<uint64_t>(&lane.source_table);
    const uint32_t* const survivors = call.survivors +
                                      Cx::template load_constant<uint64_t>(&lane.survivors) +
                                      share.head * call.survivor_stride;
    const uint32_t kept = Cx::template load_constant<uint32_t>(&lane.count);
    const uint32_t sealed_slots =
        Cx::template load_constant<uint32_t>(&call.more[share.lane].sealed_slots);
    for (uint32_t i = Cx::warp(); i < open_lanes_stretch; i += open_lanes_threads / warp_lanes) {
        const uint32_t to = share.first + i;
        if (to >= call.what.most_slots || call.first_slot + to >= kept) return;
        const uint32_t slot =
            Cx::template load_constant<uint32_t>(survivors + call.first_slot + to);
        open_slot<Cx>(call.what, share, table, slot, slot < sealed_slots,
                      share.lane * call.blocks_each, to, true);
    }
}

}  // namespace kvrt::kernels
