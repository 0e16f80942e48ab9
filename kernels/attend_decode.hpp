// Attention over one piece of one sequence's context: a block of threads has the query vectors of
// one KV head (heads of one row, or of a few; 16 at most), each of its warps every fourth group of
// 16 slots. A warp is on its own: it has its stages of keys and values on the way by cp.async, and
// its running softmax; at the end the warps' parts are joined, in order.
#pragma once

#include "kernels/attend_parts.hpp"

namespace kvrt::kernels {

/// What shared memory holds, in bytes from its start.
template <class tiles>
struct attend_memory {
    static constexpr uint32_t stages = tiles::stages;
    static constexpr uint32_t query_row = odd_row(tiles::channels);
    static constexpr uint32_t query_bytes = query_rows * query_row;
    static constexpr uint32_t row_bytes = query_rows * 2 * sizeof(float);  // sums, factors
    static constexpr uint32_t head_bytes = query_bytes + row_bytes;
    static constexpr uint32_t part_bytes = warp_part<tiles>::bytes;  // at the end

    static KVRT_BOTH uint32_t stage_bytes(const block_place& place) {
        return tiles::key_bytes(place.keys) + tiles::value_bytes(place.values);
    }
    static KVRT_BOTH uint32_t bytes(const block_place& place) {
        const uint32_t warp = stages * stage_bytes(place);
        return head_bytes + attend_warps * (warp > part_bytes ? warp : part_bytes);
    }
};

template <class Cx, class tiles>
struct piece_of_context {
    using memory = attend_memory<tiles>;

    const attend_parameters& call;
    attend_sequence sequence;
    attend_piece piece;
    query_vectors vectors;
    row_view all;  ///< where any row looks

    KVRT_DEVICE std::byte* queries() const { return Cx::shared(); }
    KVRT_DEVICE float* query_sums() const {
        return reinterpret_cast<float*>(Cx::shared() + memory::query_bytes);
    }
    KVRT_DEVICE float* query_factors() const { return query_sums() + query_rows; }
    KVRT_DEVICE std::byte* stage(uint32_t index) const {
        return Cx::shared() + memory::head_bytes +
               (Cx::warp() * memory::stages + index) * memory::stage_bytes(call.place);
    }

    KVRT_DEVICE void load_queries() const {
        for (uint32_t vector = Cx::warp(); vector < query_rows; vector += attend_warps) {
            float sum, factor;
            load_query<Cx, tiles>(call, sequence, vectors, vector,
                                  queries() + vector * memory::query_row, sum, factor);
            if (Cx::lane() != 0) continue;
            query_sums()[vector] = sum;
            query_factors()[vector] = factor;
        }
    }

    /// Which of 16 slots any row sees.
    KVRT_DEVICE uint32_t seen(uint32_t group) const {
        return slots_seen(call, all, group * slots_of_group);
    }
    /// The next group of this warp, from `group` on, of which something is seen.
    KVRT_DEVICE uint32_t next_group(uint32_t group, uint32_t end) const {
        while (group < end && seen(group) == 0) group += attend_warps;
        return group;
    }

    KVRT_DEVICE void fetch(uint32_t group, uint32_t stage_index) const {
        const uint32_t slot = group * slots_of_group;
        const uint32_t tokens = call.place.block_tokens;
        const uint32_t id =
            Cx::template load_constant<uint32_t>(call.tables.of(sequence.table) + slot / tokens)
            << call.tables.shift;
        const group_source from =
            source_of_group(call, sequence, vectors.kv_head, slot, id, seen(group));
        std::byte* const to = stage(stage_index);
        tiles::fetch_keys(call.place.keys, from, to);
        tiles::fetch_values(call.place.values, from, to + tiles::key_bytes(call.place.keys));
    }

    /// The warp's groups, with stages - 1 of them on the way.
    KVRT_DEVICE void take_groups(running_softmax<tiles>& state) const {
        const shared_fragments<Cx> fragments(queries(), memory::query_row);
        const warp_vectors mine =
            vectors_of_warp<Cx>(call, sequence, vectors, 0, query_sums(), query_factors());
        const uint32_t end = (piece.end_slot + slots_of_group - 1) / slots_of_group;
        uint32_t group = next_group(piece.first_slot / slots_of_group + Cx::warp(), end);
        uint32_t coming = group;
        for (uint32_t i = 0; i + 1 < memory::stages; ++i) {
            if (coming < end) {
                fetch(coming, i);
                coming = next_group(coming + attend_warps, end);
            }
            Cx::commit_async();
        }
        uint32_t here = 0;
        while (group < end) {
            if constexpr (memory::stages > 1) Cx::template wait_async<memory::stages - 2>();
            // The group has arrived for all lanes, and all are through with the one before it.
            Cx::warp_barrier();
            if (coming < end) {
                fetch(coming, (here + memory::stages - 1) % memory::stages);
                coming = next_group(coming + attend_warps, end);
            }
            Cx::commit_async();
            if constexpr (memory::stages == 1) Cx::warp_barrier();  // the group is here now
            take_group<Cx, tiles>(call, sequence, vectors.kv_head, group * slots_of_group,
                                  stage(here), fragments, mine, state);
            here = (here + 1) % memory::stages;
            group = next_group(group + attend_warps, end);
        }
        Cx::template wait_async<0>();
    }

    /// The warps' softmaxes, where the stages were, become the piece's.
    KVRT_DEVICE void join_warps(const running_softmax<tiles>& state) const {
        constexpr uint32_t part = warp_part<tiles>::floats;
        float* const parts = reinterpret_cast<float*>(Cx::shared() + memory::head_bytes);
        Cx::barrier();
        leave_part<Cx, tiles>(call.place.values, state, parts + Cx::warp() * part);
        Cx::barrier();
        for (uint32_t vector = Cx::warp(); vector < vectors.count; vector += attend_warps) {
            const joined_vector<Cx> joined(parts + vector * warp_part<tiles>::row_floats, part,
                                           attend_warps);
            store_partial<Cx>(call, uint64_t{piece.partial} + vectors.row_of(vector),
                              vectors.head_of(vector), joined);
        }
    }
};

/// The kernel. Launch with attend_blocks(...) blocks of attend_threads threads and
/// attend_memory<tiles>::bytes(...) of shared memory.
template <class Cx, class tiles>
KVRT_DEVICE void attend_pieces(const attend_parameters& call) {
    const uint32_t tile = Cx::block() % call.vector_tiles();
    const uint32_t kv_head = Cx::block() / call.vector_tiles() % call.place.kv_heads;
    const uint32_t index = Cx::block() / call.vector_tiles() / call.place.kv_heads;
    const word4 piece = Cx::template load_constant<word4>(call.pieces + index);
    if (piece.x == no_sequence) return;
    const attend_sequence sequence = load_sequence<Cx>(call.sequences + piece.x);
    const uint32_t all_vectors = sequence.rows * call.group(), first_vector = tile * query_rows;
    if (first_vector >= all_vectors) return;
    const uint32_t vectors = all_vectors - first_vector;
    piece_of_context<Cx, tiles> work{
        call,
        sequence,
        {piece.x, piece.y, piece.z, piece.w},
        {kv_head, call.group(), first_vector, vectors < query_rows ? vectors : query_rows},
        {}};
    work.all = view_of_rows(call, work.sequence, work.vectors);
    running_softmax<tiles> state = empty_softmax<Cx, tiles>();
    work.load_queries();
    Cx::barrier();
    work.take_groups(state);
    work.join_warps(state);
}

}  // namespace kvrt::kernels
