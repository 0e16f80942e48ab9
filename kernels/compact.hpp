// Compaction of a whole cohort of lanes in one launch: survivors slide to the front, in order,
// their records byte for byte, and with them positions and sums of observed attention.
//
// A block of threads moves one operand of one KV head of one lane, a tile of target slots at a
// time: it loads what will be there into registers, meets at a barrier, and stores. That is safe in
// place. survivors[i] >= i, so a tile takes from slots at or behind its own first; what a tile
// overwrites, earlier tiles and this one have loaded before the barrier, and later ones do not
// need.
//
// Lanes some of whose blocks are sealed have two layouts: compact_sealed.hpp moves them.
#pragma once

#include "kernels/layout.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t compact_threads = 128;
inline constexpr uint32_t staged_words = 32;  ///< registers of a thread that hold what moves
inline constexpr uint32_t tile_bytes = compact_threads * staged_words * 4;
inline constexpr uint32_t most_tile_slots = 64;
inline constexpr uint32_t compact_shared_bytes = 3 * 2 * most_tile_slots * 8;

inline constexpr uint64_t no_sums = ~uint64_t{0};

/// One lane of one sequence. Tables, survivors and sums are places in the arrays of the launch.
struct compact_lane {
    uint64_t source_table;
    uint64_t target_table;  ///< may be the same table, or share its first blocks
    uint64_t survivors;     ///< of head 0; those of the next are survivor_stride further
    uint64_t sums;          ///< of head 0, likewise, sums_stride apart; no_sums: none
    uint32_t count;         ///< of survivors
    uint32_t slots;         ///< before
    uint32_t explicit_slots;
    uint32_t next_position;
    uint64_t before = no_sums;  ///< a second array of sums
    /// So many slots have a sum in each; survivors behind them get `unknown`, and 0.
    uint32_t sums_slots = 0, before_slots = 0;
    float unknown = 0.0f;
    uint32_t unused = 0;
};
inline constexpr uint32_t no_block = 0xffffffffu;

/// Launch with compact_blocks(...) blocks of compact_threads threads and compact_shared_bytes.
struct compact_parameters {
    std::byte* arena = nullptr;
    block_place place;
    position_place positions;
    const compact_lane* lanes = nullptr;  ///< [count]
    const uint32_t* tables = nullptr;
    const uint32_t* survivors = nullptr;
    float* sums = nullptr;
    uint64_t survivor_stride = 0;
    uint64_t sums_stride = 0;
    uint32_t count = 0;
};

/// Keys, values, and what is known of slots.
inline constexpr uint32_t compact_parts = 3;
constexpr uint32_t compact_blocks(uint32_t lanes, uint32_t kv_heads) {
    return lanes * kv_heads * compact_parts;
}

inline constexpr uint64_t stays = ~uint64_t{0};

/// Where a tile's slots come from and go to: bytes in the arena; stays: nothing is to be done.
struct tile_slots {
    uint64_t* from;
    uint64_t* to;
};

template <class Cx>
struct head_move {
    const compact_parameters& call;
    const operand_place& operand;
    const uint32_t* source;
    const uint32_t* target;
    const uint32_t* survivors;
    uint32_t head;
    uint32_t end;        ///< of target slots
    uint32_t first = 0;  ///< of them, a multiple of 16: where tiles begin
    uint32_t low = 0;    ///< and what is before this one stays

    KVRT_DEVICE uint64_t place_of(const uint32_t* table, uint32_t slot) const {
        const uint32_t tokens = call.place.block_tokens;
        return uint64_t{Cx::template load_constant<uint32_t>(table + slot / tokens)} *
                   block_unit_bytes +
               operand.at(slot % tokens, head, 0);
    }

    KVRT_DEVICE tile_slots slots_of(uint32_t tile) const {
        uint64_t* const shared = reinterpret_cast<uint64_t*>(Cx::shared());
        uint64_t* const from = shared + tile % 3 * 2 * most_tile_slots;
        return {from, from + most_tile_slots};
    }

    KVRT_DEVICE void look_up(uint32_t tile, uint32_t tile_size) const {
        const uint32_t begin = first + tile * tile_size, slot = begin + Cx::thread();
        if (Cx::thread() >= tile_size || begin >= end) return;
        uint64_t from = stays, to = stays;
        if (slot >= low && slot < end) {
            from = place_of(source, Cx::template load_constant<uint32_t>(survivors + slot));
            to = place_of(target, slot);
            if (from == to) from = to = stays;
        }
        const tile_slots slots = slots_of(tile);
        slots.from[Cx::thread()] = from;
        slots.to[Cx::thread()] = to;
    }
};

/// Rows in one piece: item i of a thread is `width` bytes of one row.
template <class Cx, class piece>
struct row_pieces {
    static constexpr uint32_t words = sizeof(piece) / 4;
    static constexpr uint32_t items = staged_words / words;
    piece staged[items];

    KVRT_DEVICE void load(const head_move<Cx>& move, const tile_slots& slots, uint32_t tile_size) {
        const uint32_t in_row = move.operand.row_bytes() / sizeof(piece);
        KVRT_UNROLL
        for (uint32_t i = 0; i < items; ++i) {
            const uint32_t index = i * compact_threads + Cx::thread();
            if (index >= tile_size * in_row) continue;
            const uint64_t from = slots.from[index / in_row];
            if (from == stays) continue;
            staged[i] = Cx::template load_once<piece>(move.call.arena + from +
                                                      index % in_row * sizeof(piece));
        }
    }
    KVRT_DEVICE void store(const head_move<Cx>& move, const tile_slots& slots, uint32_t tile_size) {
        const uint32_t in_row = move.operand.row_bytes() / sizeof(piece);
        KVRT_UNROLL
        for (uint32_t i = 0; i < items; ++i) {
            const uint32_t index = i * compact_threads + Cx::thread();
            if (index >= tile_size * in_row) continue;
            const uint64_t to = slots.to[index / in_row];
            if (to == stays) continue;
            Cx::store_once(move.call.arena + to + index % in_row * sizeof(piece), staged[i]);
        }
    }
};

/// Words of 16 slots side by side: item i of a thread is 16 bytes of one word, of several slots.
template <class Cx, class element>
struct column_pieces {
    static constexpr uint32_t width = 16 / sizeof(element);  // slots
    static constexpr uint32_t items = staged_words / 4;
    uint32_t staged[items][4];

    struct place {
        uint32_t slot;  // in the tile
        uint64_t word;  // bytes behind that of word 0
        bool inside;
    };
    static KVRT_DEVICE place place_of(const head_move<Cx>& move, uint32_t i, uint32_t tile_size) {
        constexpr uint32_t in_group = slots_of_group / width;
        const uint32_t index = i * compact_threads + Cx::thread();
        const uint32_t word = index / in_group % move.operand.words;
        const uint32_t group = index / in_group / move.operand.words;
        return {group * slots_of_group + index % in_group * width,
                uint64_t{word} * move.operand.word_stride, group * slots_of_group < tile_size};
    }

    KVRT_DEVICE void load(const head_move<Cx>& move, const tile_slots& slots, uint32_t tile_size) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < items; ++i) {
            const place at = place_of(move, i, tile_size);
            if (!at.inside) continue;
            KVRT_UNROLL
            for (uint32_t s = 0; s < width; ++s) {
                const uint64_t from = slots.from[at.slot + s];
                uint32_t bits = 0;
                if (from != stays) {
                    bits = Cx::template load<element>(move.call.arena + from + at.word);
                }
                if constexpr (sizeof(element) == 4) {
                    staged[i][s] = bits;
                } else {
                    staged[i][s / 2] = s % 2 == 0 ? bits : staged[i][s / 2] | bits << 16;
                }
            }
        }
    }
    KVRT_DEVICE void store(const head_move<Cx>& move, const tile_slots& slots, uint32_t tile_size) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < items; ++i) {
            const place at = place_of(move, i, tile_size);
            if (!at.inside) continue;
            bool whole = true;
            KVRT_UNROLL
            for (uint32_t s = 0; s < width; ++s) whole = whole && slots.to[at.slot + s] != stays;
            if (whole) {
                Cx::store(move.call.arena + slots.to[at.slot] + at.word,
                          word4{staged[i][0], staged[i][1], staged[i][2], staged[i][3]});
                continue;
            }
            KVRT_UNROLL
            for (uint32_t s = 0; s < width; ++s) {
                const uint64_t to = slots.to[at.slot + s];
                if (to == stays) continue;
                const uint32_t bits =
                    sizeof(element) == 4 ? staged[i][s % 4] : staged[i][s / 2] >> (16 * (s % 2));
                Cx::store(move.call.arena + to + at.word, static_cast<element>(bits));
            }
        }
    }
};

template <class Cx, class pieces>
KVRT_DEVICE void move_tiles(const head_move<Cx>& move, uint32_t tile_size) {
    pieces held;
    move.look_up(0, tile_size);
    Cx::barrier();
    for (uint32_t tile = 0; move.first + tile * tile_size < move.end; ++tile) {
        held.load(move, move.slots_of(tile), tile_size);
        // Of the three tables, stragglers may still store by that of the tile before.
        move.look_up(tile + 1, tile_size);
        Cx::barrier();
        held.store(move, move.slots_of(tile), tile_size);
    }
}

/// Tiles of the size and pieces that the operand's rows take.
template <class Cx>
KVRT_DEVICE void move_rows(const head_move<Cx>& move) {
    const operand_place& operand = move.operand;
    uint32_t tile_size = most_tile_slots;
    while (tile_size * operand.row_bytes() > tile_bytes) tile_size /= 2;
    if (!operand.by_rows()) {
        if (operand.word_bytes == 2)
            return move_tiles<Cx, column_pieces<Cx, uint16_t>>(move, tile_size);
        return move_tiles<Cx, column_pieces<Cx, uint32_t>>(move, tile_size);
    }
    if (operand.row_bytes() % 16 == 0)
        return move_tiles<Cx, row_pieces<Cx, word4>>(move, tile_size);
    move_tiles<Cx, row_pieces<Cx, uint32_t>>(move, tile_size);
}

/// Where positions of a lane's slots are: of those in sealed blocks, which are the first, apart.
struct note_stores {
    const position_place& open;
    const position_place* sealed = nullptr;
    uint32_t sealed_slots = 0;  ///< before
    uint32_t sealed_after = 0;

    KVRT_DEVICE uint32_t* of(uint32_t id, uint32_t head, bool is_sealed) const {
        return is_sealed ? sealed->of(id, head) : open.of(id, head);
    }
};

/// What is known of slots, one number each: positions and sums.
template <class Cx>
KVRT_DEVICE void move_notes(const head_move<Cx>& move, const compact_lane& lane,
                            const note_stores& stores) {
    const compact_parameters& call = move.call;
    const uint32_t tokens = call.place.block_tokens;
    const uint64_t of_head = move.head * call.sums_stride;
    float* const sums = lane.sums == no_sums ? nullptr : call.sums + lane.sums + of_head;
    float* const before = lane.before == no_sums ? nullptr : call.sums + lane.before + of_head;
    const bool positions = call.positions.base != nullptr;
    for (uint32_t first = 0; first < lane.count; first += compact_threads) {
        const uint32_t slot = first + Cx::thread();
        uint32_t position = 0;
        uint32_t kept_in = no_block;  // the block whose entry is right already
        float sum = lane.unknown, sum_before = 0.0f;
        if (slot < lane.count) {
            const uint32_t from = Cx::template load_constant<uint32_t>(move.survivors + slot);
            if (positions) {
                position = lane.next_position - (lane.slots - from);
                if (from < lane.explicit_slots) {
                    const uint32_t id =
                        Cx::template load_constant<uint32_t>(move.source + from / tokens);
                    if (from == slot) kept_in = id;
                    position = Cx::template load<uint32_t>(
                        stores.of(id, move.head, from < stores.sealed_slots) + from % tokens);
                }
            }
            if (from < lane.sums_slots) sum = Cx::template load<float>(sums + from);
            if (from < lane.before_slots) sum_before = Cx::template load<float>(before + from);
        }
        Cx::barrier();
        if (slot >= lane.count) continue;
        if (positions) {
            const uint32_t id = Cx::template load_constant<uint32_t>(move.target + slot / tokens);
            if (id != kept_in) {
                Cx::store(stores.of(id, move.head, slot < stores.sealed_after) + slot % tokens,
                          position);
            }
        }
        if (sums != nullptr) Cx::store(sums + slot, sum);
        if (before != nullptr) Cx::store(before + slot, sum_before);
    }
}

template <class Cx>
KVRT_DEVICE compact_lane load_lane(const compact_lane& listed) {
    compact_lane lane;
    lane.source_table = Cx::template load_constant<uint64_t>(&listed.source_table);
    lane.target_table = Cx::template load_constant<uint64_t>(&listed.target_table);
    lane.survivors = Cx::template load_constant<uint64_t>(&listed.survivors);
    lane.sums = Cx::template load_constant<uint64_t>(&listed.sums);
    lane.count = Cx::template load_constant<uint32_t>(&listed.count);
    lane.slots = Cx::template load_constant<uint32_t>(&listed.slots);
    lane.explicit_slots = Cx::template load_constant<uint32_t>(&listed.explicit_slots);
    lane.next_position = Cx::template load_constant<uint32_t>(&listed.next_position);
    lane.before = Cx::template load_constant<uint64_t>(&listed.before);
    lane.sums_slots = Cx::template load_constant<uint32_t>(&listed.sums_slots);
    lane.before_slots = Cx::template load_constant<uint32_t>(&listed.before_slots);
    lane.unknown = Cx::template load_constant<float>(&listed.unknown);
    return lane;
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void compact_lanes(const compact_parameters& call) {
    const uint32_t part = Cx::block() % compact_parts;
    const uint32_t head = Cx::block() / compact_parts % call.place.kv_heads;
    const uint32_t index = Cx::block() / compact_parts / call.place.kv_heads;
    if (index >= call.count) return;
    const compact_lane lane = load_lane<Cx>(call.lanes[index]);
    const head_move<Cx> move{call,
                             part == 1 ? call.place.values : call.place.keys,
                             call.tables + lane.source_table,
                             call.tables + lane.target_table,
                             call.survivors + lane.survivors + head * call.survivor_stride,
                             head,
                             lane.count};
    if (part == 2) return move_notes<Cx>(move, lane, {call.positions});
    move_rows<Cx>(move);
}

}  // namespace kvrt::kernels
