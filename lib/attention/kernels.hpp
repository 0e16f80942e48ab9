// The two kernels of attention, each over one piece of one sequence.
//
//   decode   one row, native tiles: all query heads of a KV head together read each tile once,
//   where
//            it lies, in its stored format
//   blocked  a tile of rows, any layout: keys and values of a run of slots are converted once to
//            f32 on the stack, and serve all rows and query heads of the tile
//
// A piece leaves a partial softmax per (row, query head): the largest logit, the sum of weights
// relative to it, and the weighted sum of values. Pieces of a row are joined in attend.cpp.
#pragma once

#include "attention/attend.hpp"

namespace kvrt {

/// Slots that a kernel takes at once. Pieces start on multiples of slot_group.
inline constexpr uint32_t run_slots = 64;
/// Slots whose weights decode makes at once: as many runs, from the piece's first slot on.
inline constexpr uint32_t span_runs = 4, span_slots = span_runs * run_slots;
inline constexpr uint32_t widest_register = 16;  ///< floats that any instruction set has in one

/// Partial softmaxes of [rows][query heads]; largest is -infinity where nothing was seen.
struct partial_softmax {
    float* largest = nullptr;
    float* sum = nullptr;
    float* values = nullptr;  ///< [rows][query heads][value_dim]
};

/// Weights of a task's query vectors, kept until it is known what their sums over all slots are.
/// They are f16, relative to the largest logit that their vector had met by then. A vector is a
/// query head of a row: row * query heads + head.
struct kept_weights {
    uint16_t* weights = nullptr;  ///< [runs][vectors][run_slots]: written in this order
    float* largest = nullptr;     ///< [vectors][group_stride]
    float* log_sums = nullptr;    ///< [vectors]: what join_pieces returned
    uint32_t vectors = 0;
    uint32_t group_stride = 0;  ///< an odd multiple of widest_register, against aliasing

    uint16_t* weights_at(uint64_t vector, uint32_t slot) const {
        return weights + (uint64_t{slot / run_slots} * vectors + vector) * run_slots +
               slot % run_slots;
    }
    float* largest_at(uint64_t vector, uint32_t slot) const {
        return largest + vector * group_stride + slot / slot_group;
    }
};

/// Slots [first_slot, end_slot) of one item, KV heads [first_head, end_head). Blocks of a piece are
/// all sealed or none is.
struct attend_piece {
    const attend_call* call = nullptr;
    const attend_item* item = nullptr;
    const tile_layout* layout = nullptr;
    uint32_t first_slot = 0, end_slot = 0;
    uint32_t first_head = 0, end_head = 0;
    uint32_t first_row = 0, end_row = 0;       ///< within the item; partials are of these rows
    const float* queries = nullptr;            ///< decode: load_queries of the row, all heads
    const std::byte* coded_queries = nullptr;  ///< decode of records: encode_queries of them
    const uint8_t* float_queries = nullptr;    ///< and what that left there, by KV head
    const kept_weights* kept = nullptr;        ///< null: nobody observes
};

/// Query heads [first_head, first_head + heads) of an item's row, times the layer's scale, as
/// [heads][key_dim]: in the basis of stored keys, or, where keys are turned by slots, turned.
void load_queries(const attend_call& call, const attend_item& item, uint32_t row,
                  uint32_t first_head, uint32_t heads, float* out);

/// Whether attend_decode reads both operands of a layout, on this processor.
bool decode_reads(const tile_layout& layout);

/// The same for a layer, whose keys may be turned by slots: then floats, and codes of 8 and 4 bits
/// whose records hold all there is.
bool decode_reads(const attend_layer& layer, const tile_layout& layout);

/// Bytes of a query head that encode_queries writes, three rows of a multiple of 64; 0: nothing is
/// written.
uint32_t coded_query_bytes(const tile_layout& layout);

/// What is read, but not used, behind the last query head: kernels take four heads.
inline constexpr uint32_t spare_coded_queries = 3;

/// Where among them its products with the mean of keys begin (means-inl.hpp), where keys have one.
uint32_t mean_query_offset(const tile_layout& layout);

/// Brings the queries of a row into the form that codes of keys are multiplied with. as_floats says
/// for each KV head whether that is floats: whole numbers of 24 bits are too coarse for heads with
/// a channel that is far above the others.
void encode_queries(const tile_layout& layout, uint32_t query_heads, const float* queries,
                    std::byte* out, uint8_t* as_floats);

/// item.rows == 1, decode_reads(layer, piece.layout).
void attend_decode(const attend_piece& piece, const partial_softmax& partial);

/// One KV head; (end_row - first_row) * group <= blocked_vectors(...), or one row.
void attend_blocked(const attend_piece& piece, const partial_softmax& partial);

/// Query vectors (rows x query heads of a KV head) that the blocked kernel takes at once.
uint32_t blocked_vectors(const attend_layer& layer);

/// The slots that a row sees within [first, end): at most two ranges (sinks, window).
struct seen_slots {
    uint32_t first[2] = {0, 0};
    uint32_t end[2] = {0, 0};
};
inline seen_slots slots_seen(const attend_layer& layer, const attend_item& item, uint32_t row,
                             uint32_t first, uint32_t end) {
    const auto cut = [&](int64_t from, int64_t to, uint32_t& out_first, uint32_t& out_end) {
        out_first = static_cast<uint32_t>(from < int64_t{first} ? int64_t{first} : from);
        out_end = static_cast<uint32_t>(to > int64_t{end} ? int64_t{end} : (to < 0 ? 0 : to));
        if (out_end < out_first) out_end = out_first;
    };
    const int64_t limit = int64_t{item.slots} - (item.rows - 1 - row);
    seen_slots seen;
    if (layer.window == 0) {
        cut(0, limit, seen.first[1], seen.end[1]);
        return seen;
    }
    const int64_t sinks = layer.window_sinks < limit ? int64_t{layer.window_sinks} : limit;
    const int64_t from = item.window_first + int64_t{row};
    cut(0, sinks, seen.first[0], seen.end[0]);
    cut(from < sinks ? sinks : from, limit, seen.first[1], seen.end[1]);
    return seen;
}

/// Joins the partial softmaxes of `pieces` pieces, `stride` floats apart, of one (row, query head)
/// at `index` within each, and writes row `row` of the tensors. Returns the logarithm of the sum of
/// all exp(logit), the sink's among them; -infinity when nothing was seen.
float join_pieces(const attend_call& call, const partial_softmax& first, uint64_t stride,
                  uint32_t pieces, uint32_t index, uint32_t row, uint32_t head);

/// Rows [first_row, end_row) of an item. Weights are null where none of the rows counts.
struct observed_rows {
    const attend_item* item = nullptr;
    uint32_t query_heads = 0;
    uint32_t group = 0;  ///< query heads of a KV head
    uint32_t first_row = 0, end_row = 0;
    kept_weights kept;
};

/// Slots that observe_rows takes at once; stretches begin at multiples of them.
inline constexpr uint32_t observed_slots = 1024;

/// Adds the weights of consecutive rows of one item, in their order, to the sums of slots
/// [first_slot, end_slot) for all KV heads. `begins`: what was there before is still to be taken. A
/// row whose logits sum up to nothing finite adds nothing. What was kept is used up.
void observe_rows(const observed_rows* tasks, uint32_t task_count, uint32_t kv_heads,
                  uint32_t first_slot, uint32_t end_slot, bool begins);

/// Position of slots [first, first + count) for a KV head.
void positions_of_slots(const attend_call& call, const attend_item& item, uint32_t kv_head,
                        uint32_t first, uint32_t count, uint32_t* out);

/// The same, minus `origin`, as f32.
void relative_positions(const attend_call& call, const attend_item& item, uint32_t kv_head,
                        uint32_t first, uint32_t count, uint64_t origin, float* out);

}  // namespace kvrt
