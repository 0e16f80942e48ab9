// What attention of decoded tokens, and of a few rows at once, is told: by layer, by sequence and
// by piece of a sequence. The meaning of windows, sinks, soft-caps and slopes is that of
// attention/attend.hpp.
//
// Two launches: pieces of contexts leave partial softmaxes (attend_decode.hpp), which are joined in
// ascending order of slots (attend_join.hpp). Where older blocks are stored otherwise there are
// three: pieces of either kind are launched with their own place, and share the partials. What is
// cut where depends on a sequence's own length alone, so its output does not depend on what else is
// in the batch.
#pragma once

#include "kernels/layout.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t attend_threads = 128;
inline constexpr uint32_t attend_warps = attend_threads / warp_lanes;
inline constexpr uint32_t query_rows = 16;  ///< query vectors of a KV head that are taken at once

/// Rows of one sequence: its last tokens. Row r has position next_position - rows + r and sees the
/// slots below slots - (rows - 1 - r); with a window, of those only the sinks and those from
/// window_first + r on. A query vector is a query head of a row.
struct attend_sequence {
    uint32_t table;      ///< row of the block tables
    uint32_t first_row;  ///< of the tensors
    uint32_t rows;       ///< up to most_rows of the launch
    uint32_t slots;
    uint32_t explicit_slots;  ///< positions of these are stored
    uint32_t next_position;
    int32_t window_first;    ///< may be negative: all are inside
    uint32_t first_partial;  ///< a piece has one for each row
    uint32_t pieces;         ///< 0: rows that are written at once (attend_rows.hpp)
    uint32_t sealed_slots;   ///< of the first blocks; which pieces are of which has been decided
    uint32_t kept;           ///< where kept weights begin, in entries of all query heads
    uint32_t kept_rows;      ///< of so many rows, the last ones
};

/// Slots [first_slot, end_slot) of a sequence; first_slot is a multiple of 16, and end_slot is, or
/// is the sequence's last, or lies beyond. `sequence` may be no_sequence: nothing is to be done.
struct attend_piece {
    uint32_t sequence;
    uint32_t first_slot;
    uint32_t end_slot;
    uint32_t partial;  ///< of row 0; piece p of a sequence has first_partial + p * rows
};

/// Slots of a piece of a sequence of so many slots: at most 64 pieces, none smaller than 256 slots.
constexpr uint32_t attend_piece_slots(uint32_t slots) {
    const uint32_t even = (slots + 63) / 64;
    return even <= 256 ? 256 : (even + 63) / 64 * 64;
}

/// Pieces of a sequence of up to so many slots.
constexpr uint32_t most_few_pieces(uint32_t slots) {
    return slots >= 64 * 256 ? 64 : (slots + 255) / 256;
}

/// Partial softmaxes, by [partial][query head]. Logits are in units of log(2).
struct attend_partials {
    float* largest = nullptr;
    float* sum = nullptr;     ///< of exp2(logit - largest)
    float* values = nullptr;  ///< [..][value dim]: weighted so, not divided by the sum
};

/// Weights of a sequence's kept rows, for observe.hpp, by [group of 16 slots][row][query head], as
/// far as the last row sees. Behind the last group there are [row][query head] logarithms of the
/// sums of all weights, in the place of the largest logits.
struct kept_weights {
    uint16_t* weights = nullptr;  ///< [entries][16]: f16, relative to the largest; null: none
    float* largest = nullptr;     ///< [entries]: largest logit so far, in units of log(2)
};

struct attend_parameters {
    const std::byte* arena = nullptr;
    block_place place;
    block_tables tables;
    position_place positions;                    ///< read where there are slopes
    const attend_sequence* sequences = nullptr;  ///< [sequence_count]
    const attend_piece* pieces = nullptr;        ///< [piece_count]
    uint32_t sequence_count = 0;
    uint32_t piece_count = 0;
    tensor_place queries;  ///< [rows, query_heads, key dim]
    tensor_place out;      ///< [rows, query_heads, value dim]
    number query_type = number::f16;
    number out_type = number::f16;
    attend_partials partials;
    kept_weights kept;
    float* log_sum_exp = nullptr;  ///< [rows][row_heads], or null
    uint32_t query_heads = 0;
    uint32_t row_heads = 0;  ///< query_heads, or more where the layer is one of several lanes
    float scale = 1.0f;
    float softcap = 0.0f;                 ///< 0: none
    const float* sink_logits = nullptr;   ///< [query_heads], or null
    const float* alibi_slopes = nullptr;  ///< [query_heads], or null
    bool window = false;
    uint32_t window_sinks = 0;
    uint32_t most_rows = 1;
    /// With pairs, keys and queries come before rotation: a key is turned by its slot, the query of
    /// row r by slots - rows + r (attend_opened.hpp).
    turning_place turning;

    KVRT_BOTH uint32_t group() const { return query_heads / place.kv_heads; }
    /// Of the most rows; a sequence of fewer has none for the last ones.
    KVRT_BOTH uint32_t vector_tiles() const {
        return (most_rows * group() + query_rows - 1) / query_rows;
    }
};

/// Blocks of a launch of attend_pieces.
inline uint32_t attend_blocks(const attend_parameters& call) {
    return call.piece_count * call.place.kv_heads * call.vector_tiles();
}

}  // namespace kvrt::kernels
