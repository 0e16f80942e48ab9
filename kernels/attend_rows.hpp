// Attention of many rows of a sequence at once: chunks of prompts, and drafts to verify. A vector
// is one query head of one row; those of a KV head stand row by row, vector v being query head v %
// group of row v / group, and 128 of them are a tile. A block of threads has one tile and a piece
// of the context. All its warps bring in keys and values, 64 slots a stage, and each multiplies 16
// vectors by all slots of a stage; where a tile has few vectors, warps share out the slots instead,
// and their parts are joined in order.
//
// Many rows are work enough: their context is one piece, and output is written at once. That of few
// is cut (cut_rows), and pieces leave partial softmaxes, for attend_join.hpp.
#pragma once

#include "kernels/attend_parts.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t rows_threads = 256;
inline constexpr uint32_t rows_warps = rows_threads / warp_lanes;
inline constexpr uint32_t set_vectors = 16;  ///< of a warp
inline constexpr uint32_t tile_vectors = rows_warps * set_vectors;
inline constexpr uint32_t piece_unit = 64;  ///< pieces start on multiples of it
inline constexpr uint32_t written_at_once = 0xffffffffu;

/// A tile of vectors over slots [first_slot, end_slot), first_slot being a multiple of 16.
/// `sequence` may be no_sequence: nothing is to be done.
struct rows_piece {
    uint32_t sequence;
    uint32_t first_vector;
    uint32_t vectors;  ///< 1 to tile_vectors
    uint32_t first_slot;
    uint32_t end_slot;
    uint32_t partial;  ///< of row 0 of the sequence, as in attend_piece; or written_at_once
};

/// The base's pieces are not used. A join needs the most rows of sequences that have pieces.
struct rows_parameters : attend_parameters {
    const rows_piece* row_pieces = nullptr;  ///< [row_piece_count], the longest best first
    uint32_t row_piece_count = 0;
};

inline uint32_t rows_blocks(const rows_parameters& call) {
    return call.row_piece_count * call.place.kv_heads;
}

// ---- Cutting ------------------------------------------------------------------------------------

/// How a sequence is cut, which depends on its own rows and slots alone. For the host.
struct rows_cut {
    uint32_t rows, vectors, tiles, pieces;
    uint32_t piece_slots;           ///< of slots that any row sees
    uint32_t hole_first, hole_end;  ///< none sees these; multiples of piece_unit
    uint32_t slots;

    bool at_once() const { return pieces == 1; }
    rows_piece piece(uint32_t sequence, uint32_t tile, uint32_t index,
                     uint32_t first_partial) const {
        const uint32_t first = tile * tile_vectors;
        const uint32_t left = vectors - first;
        return {sequence,
                first,
                left < tile_vectors ? left : tile_vectors,
                slot_of(index * piece_slots),
                index + 1 == pieces ? slots : slot_of((index + 1) * piece_slots),
                at_once() ? written_at_once : first_partial + index * rows};
    }

  private:
    uint32_t slot_of(uint32_t seen) const {
        return seen <= hole_first ? seen : seen + (hole_end - hole_first);
    }
};

// A partial of one vector has the bytes of a slot of f16, and is read again: the more vectors, the
// longer the pieces, and the fewer. At least 8 slots a vector, while there is work for a device.

/// Of 16 vectors: with these a sequence is work enough without being cut.
inline constexpr uint32_t enough_sets = 128;
constexpr uint32_t most_rows_pieces(uint32_t sets) {
    return sets <= 2 ? 64 : sets >= enough_sets ? 1 : enough_sets / sets;
}
constexpr uint32_t least_piece_slots(uint32_t sets) { return sets <= 2 ? 256 : 128 * sets; }
/// The same of a sequence of up to so many slots.
constexpr uint32_t most_rows_pieces(uint32_t sets, uint32_t slots) {
    const uint32_t most = most_rows_pieces(sets), least = least_piece_slots(sets);
    return slots > most * least || most == 1 ? most : slots == 0 ? 1 : (slots - 1) / least + 1;
}

/// Without a window window_first and window_sinks are 0.
inline rows_cut cut_rows(uint32_t rows, uint32_t group, uint32_t slots, int32_t window_first,
                         uint32_t window_sinks) {
    rows_cut cut;
    cut.slots = slots;
    cut.rows = rows;
    cut.vectors = rows * group;
    cut.tiles = (cut.vectors + tile_vectors - 1) / tile_vectors;
    cut.hole_first = (window_sinks + piece_unit - 1) / piece_unit * piece_unit;
    const uint32_t from = window_first < 0 ? 0 : static_cast<uint32_t>(window_first);
    cut.hole_end = (from < slots ? from : slots) / piece_unit * piece_unit;
    if (cut.hole_end < cut.hole_first) cut.hole_end = cut.hole_first;
    const uint32_t seen = slots - (cut.hole_end - cut.hole_first);
    const uint32_t sets = (cut.vectors + set_vectors - 1) / set_vectors;
    const uint32_t most = most_rows_pieces(sets), least = least_piece_slots(sets);
    const uint32_t even = ((seen + most - 1) / most + piece_unit - 1) / piece_unit * piece_unit;
    cut.piece_slots = even < least ? least : even;
    if (most == 1) cut.piece_slots = (seen + piece_unit - 1) / piece_unit * piece_unit;
    cut.pieces = seen == 0 ? 1 : (seen + cut.piece_slots - 1) / cut.piece_slots;
    return cut;
}

// ---- The kernel ---------------------------------------------------------------------------------

/// What shared memory holds: queries, then stages, then parts of warps, one after the other; where
/// registers do not hold queries, these stay in front.
template <class tiles>
struct rows_memory {
    static constexpr bool holds_queries = tiles::channels <= 128;
    static constexpr uint32_t stages = tiles::stages;
    static constexpr uint32_t groups = tiles::channels <= 128 ? 4 : 2;  ///< of a stage
    static constexpr uint32_t slots = groups * slots_of_group;
    static constexpr uint32_t query_row = odd_row(tiles::channels);
    static constexpr uint32_t query_bytes = tile_vectors * query_row;
    static constexpr uint32_t term_bytes = tile_vectors * 2 * sizeof(float);  // sums, factors
    static constexpr uint32_t head_bytes = term_bytes + (holds_queries ? 0 : query_bytes);
    static constexpr uint32_t part_bytes = rows_warps * warp_part<tiles>::bytes;

    static KVRT_BOTH uint32_t group_bytes(const block_place& place) {
        return tiles::key_bytes(place.keys) + tiles::value_bytes(place.values);
    }
    static KVRT_BOTH uint32_t bytes(const block_place& place) {
        uint32_t most = stages * groups * group_bytes(place);
        if (holds_queries && most < query_bytes) most = query_bytes;
        // Parts overwrite queries.
        const uint32_t parts = term_bytes + part_bytes;
        return head_bytes + most < parts ? parts : head_bytes + most;
    }
};

/// Fragments of queries in registers.
template <class Cx, uint32_t channels>
struct held_fragments {
    uint32_t held[channels / 16][4];

    KVRT_DEVICE held_fragments(const std::byte* first_row, uint32_t row_bytes) {
        const shared_fragments<Cx> shared(first_row, row_bytes);
        KVRT_UNROLL
        for (uint32_t step = 0; step < channels / 16; ++step) shared.of_step(step, held[step]);
    }
    KVRT_DEVICE void of_step(uint32_t step, uint32_t (&a)[4]) const {
        KVRT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) a[i] = held[step][i];
    }
};

template <bool held, class Cx, uint32_t channels>
struct fragments_choice {
    using type = shared_fragments<Cx>;
};
template <class Cx, uint32_t channels>
struct fragments_choice<true, Cx, channels> {
    using type = held_fragments<Cx, channels>;
};

template <class Cx, class tiles>
struct tile_of_rows {
    using memory = rows_memory<tiles>;
    using fragments = typename fragments_choice<memory::holds_queries, Cx, tiles::channels>::type;

    const rows_parameters& call;
    attend_sequence sequence;
    rows_piece piece;
    query_vectors vectors;
    uint32_t sets;        ///< of 16 vectors: 1, 2, 4 or 8, each of a warp
    uint32_t slot_warps;  ///< that have the same set, and other groups of a stage
    row_view all;         ///< where any row looks, within the piece

    KVRT_DEVICE float* query_sums() const { return reinterpret_cast<float*>(Cx::shared()); }
    KVRT_DEVICE float* query_factors() const { return query_sums() + tile_vectors; }
    KVRT_DEVICE std::byte* queries() const { return Cx::shared() + memory::term_bytes; }
    KVRT_DEVICE std::byte* group_at(uint32_t stage, uint32_t group) const {
        return Cx::shared() + memory::head_bytes +
               (stage * memory::groups + group) * memory::group_bytes(call.place);
    }
    /// The first vector of this warp's set.
    KVRT_DEVICE uint32_t first_vector() const { return Cx::warp() % sets * set_vectors; }
    KVRT_DEVICE bool multiplies() const {
        return Cx::warp() < sets * slot_warps && first_vector() < vectors.count;
    }
    /// The next stage, from the one at `slot` on, of which anything is seen.
    KVRT_DEVICE uint32_t next_stage(uint32_t slot) const {
        if (slot + memory::slots > all.from || slot < call.window_sinks) return slot;
        return all.from / memory::slots * memory::slots;
    }

    KVRT_DEVICE void load_queries() const {
        for (uint32_t v = Cx::warp(); v < sets * set_vectors; v += rows_warps) {
            float sum, factor;
            load_query<Cx, tiles>(call, sequence, vectors, v, queries() + v * memory::query_row,
                                  sum, factor);
            if (Cx::lane() != 0) continue;
            query_sums()[v] = sum;
            query_factors()[v] = factor;
        }
    }

    /// Each warp brings in the keys or the values of a group, in turn.
    KVRT_DEVICE void fetch(uint32_t slot, uint32_t stage) const {
        const uint32_t tokens = call.place.block_tokens;
        for (uint32_t i = Cx::warp(); i < 2 * memory::groups; i += rows_warps) {
            const uint32_t group = i % memory::groups, first = slot + group * slots_of_group;
            const uint32_t wanted = slots_seen(call, all, first);
            if (wanted == 0) continue;
            const uint32_t id = Cx::template load_constant<uint32_t>(
                                    call.tables.of(sequence.table) + first / tokens)
                                << call.tables.shift;
            const group_source from =
                source_of_group(call, sequence, vectors.kv_head, first, id, wanted);
            std::byte* const to = group_at(stage, group);
            if (i < memory::groups) {
                tiles::fetch_keys(call.place.keys, from, to);
            } else {
                tiles::fetch_values(call.place.values, from,
                                    to + tiles::key_bytes(call.place.keys));
            }
        }
    }

    /// All stages, with memory::stages - 1 of them on the way.
    KVRT_DEVICE void take_stages(const fragments& held, const warp_vectors& mine,
                                 running_softmax<tiles>& state) const {
        uint32_t slot = next_stage(piece.first_slot);
        uint32_t coming = slot;
        for (uint32_t i = 0; i + 1 < memory::stages; ++i) {
            if (coming < all.limit) {
                fetch(coming, i);
                coming = next_stage(coming + memory::slots);
            }
            Cx::commit_async();
        }
        uint32_t here = 0;
        while (slot < all.limit) {
            if constexpr (memory::stages > 1) Cx::template wait_async<memory::stages - 2>();
            // The stage has arrived for all warps, and all are through with the one before it.
            Cx::barrier();
            if (coming < all.limit) {
                fetch(coming, (here + memory::stages - 1) % memory::stages);
                coming = next_stage(coming + memory::slots);
            }
            Cx::commit_async();
            if constexpr (memory::stages == 1) Cx::barrier();  // the stage is here now
            for (uint32_t group = Cx::warp() / sets; group < memory::groups && multiplies();
                 group += slot_warps) {
                const uint32_t first = slot + group * slots_of_group;
                if (first >= all.limit) break;
                take_group<Cx, tiles>(call, sequence, vectors.kv_head, first, group_at(here, group),
                                      held, mine, state);
            }
            here = (here + 1) % memory::stages;
            slot = next_stage(slot + memory::slots);
        }
        Cx::template wait_async<0>();
    }

    /// The warps' parts, where the stages were, become output or partials.
    KVRT_DEVICE void finish(const running_softmax<tiles>& state) const {
        constexpr uint32_t part = warp_part<tiles>::floats;
        float* const parts = reinterpret_cast<float*>(queries());
        Cx::barrier();
        if (multiplies()) {
            leave_part<Cx, tiles>(call.place.values, state, parts + Cx::warp() * part);
        }
        Cx::barrier();
        const uint32_t dim = call.place.values.dim;
        for (uint32_t v = Cx::warp(); v < vectors.count; v += rows_warps) {
            const joined_vector<Cx> joined(
                parts + v / set_vectors * part + v % set_vectors * warp_part<tiles>::row_floats,
                sets * part, slot_warps);
            const uint32_t row = vectors.row_of(v), head = vectors.head_of(v);
            if (piece.partial == written_at_once) {
                const finished_row finished =
                    finish_row<Cx>(call, head, joined.largest, joined.sum);
                const uint32_t to = sequence.first_row + row;
                for (uint32_t channel = Cx::lane(); channel < dim && !call.place.values.rotated;
                     channel += warp_lanes) {
                    store_out<Cx>(call, to, head, channel, joined.value(channel) * finished.factor);
                }
                if (call.place.values.rotated) {
                    float values[lane_channels];
                    KVRT_UNROLL
                    for (uint32_t i = 0; i < lane_channels; ++i) {
                        const uint32_t channel = Cx::lane() * lane_channels + i;
                        values[i] = channel < dim ? joined.value(channel) * finished.factor : 0.0f;
                    }
                    store_rotated<Cx>(call, to, head, values);
                }
                if (Cx::lane() != 0) continue;
                store_log_sum<Cx>(call, to, head, finished.log_sum);
                keep_log_sum<Cx>(call, piece.sequence, row, head, finished.log_sum);
                continue;
            }
            store_partial<Cx>(call, uint64_t{piece.partial} + row, head, joined);
        }
    }
};

/// The kernel. Launch with rows_blocks(...) blocks of rows_threads threads and
/// rows_memory<tiles>::bytes(...) of shared memory.
template <class Cx, class tiles>
KVRT_DEVICE void attend_rows(const rows_parameters& call) {
    using memory = rows_memory<tiles>;
    const uint32_t kv_head = Cx::block() % call.place.kv_heads;
    const rows_piece* const listed = call.row_pieces + Cx::block() / call.place.kv_heads;
    const auto load = [](const uint32_t& from) {
        return Cx::template load_constant<uint32_t>(&from);
    };
    const rows_piece piece{load(listed->sequence), load(listed->first_vector),
                           load(listed->vectors),  load(listed->first_slot),
                           load(listed->end_slot), load(listed->partial)};
    if (piece.sequence == no_sequence) return;
    uint32_t sets = 1;
    while (sets * set_vectors < piece.vectors) sets *= 2;
    constexpr uint32_t groups = memory::groups;
    const uint32_t slot_warps = rows_warps / sets < groups ? rows_warps / sets : groups;
    tile_of_rows<Cx, tiles> work{call,  load_sequence<Cx>(call.sequences + piece.sequence),
                                 piece, {kv_head, call.group(), piece.first_vector, piece.vectors},
                                 sets,  slot_warps,
                                 {}};
    work.all = view_of_rows(call, work.sequence, work.vectors);
    if (work.all.limit > piece.end_slot) work.all.limit = piece.end_slot;

    work.load_queries();
    Cx::barrier();
    // Without vectors of its own a warp takes the first ones, to no end.
    const uint32_t first = work.first_vector() < piece.vectors ? work.first_vector() : 0;
    const typename tile_of_rows<Cx, tiles>::fragments queries(
        work.queries() + first * memory::query_row, memory::query_row);
    const warp_vectors mine = vectors_of_warp<Cx>(call, work.sequence, work.vectors, first,
                                                  work.query_sums(), work.query_factors());
    running_softmax<tiles> state = empty_softmax<Cx, tiles>();
    // Registers hold them: stages may take their place.
    if constexpr (memory::holds_queries) Cx::barrier();
    work.take_stages(queries, mine, state);
    work.finish(state);
}

}  // namespace kvrt::kernels
