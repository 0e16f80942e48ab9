// Attention over the paged cache of one layer, for all sequences of a step. A layer whose KV heads
// have lanes of their own is a call for each of them, all run together.
//
// Cut: a sequence's context is cut into chunks by its own length alone, its rows into tiles by
// their own number alone; partial results are joined in ascending chunk order. So the output has
// the same bits whatever the thread count and whatever else is in the batch.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/executor.hpp"
#include "format/tile.hpp"
#include "memory/block_id.hpp"

namespace kvrt {

/// What a layer's attention depends on besides data.
struct attend_layer {
    tile_layout layout;
    tile_layout sealed_layout;  ///< of the blocks that items say are sealed; without format: none
    uint32_t query_heads = 0;
    uint32_t kv_heads = 0;  ///< query head h reads KV head h / (query_heads / kv_heads)
    float scale = 1.0f;
    float softcap = 0.0f;                 ///< 0: off
    const float* sink_logits = nullptr;   ///< [query_heads] or null: join the denominator only
    const float* alibi_slopes = nullptr;  ///< [query_heads] or null
    uint32_t window = 0;                  ///< 0: all
    uint32_t window_sinks = 0;            ///< slots below this are always seen
    /// Not null: keys are stored before rotation, and queries come so. Attention turns a key by its
    /// slot, and the query of row r by slots - rows + r.
    const position_rotation* slot_turning = nullptr;

    bool seals() const { return sealed_layout.keys.format != nullptr; }
};

/// What is kept of the attention that a sequence's rows pay, per KV head and slot: the weights of
/// its query heads (softmax(...), so that a head gives 1 to all slots together), summed over heads
/// and rows.
struct attend_observer {
    float* sums = nullptr;  ///< out: [kv_heads][stride], at a multiple of 64 bytes; of all slots
    const float* before = nullptr;  ///< [kv_heads][stride]: sums to which these are added, of the
                                    ///< first slots_before slots; null: nothing
    uint64_t stride = 0;            ///< a multiple of 64, >= slots
    uint32_t slots_before = 0;
    uint32_t first_row = 0;     ///< rows before it do not count
    float decay = 1.0f;         ///< what a row counts after each row behind it
    bool before_decays = true;  ///< so do the sums before
    /// Instead of a weight, count 1 where it is at least 1 / (slots that the row sees).
    bool counts = false;
};

/// One sequence's rows over one lane.
///   row r (0-based) has position next_position - rows + r and sees the slots
///     [0, slots - (rows - 1 - r))  without a window; with one, of those only
///     [0, window_sinks) and [window_first + r, ...).
///   position of slot s for head h: s < explicit_slots ? stored : next_position - (slots - s).
struct attend_item {
    const block_id* blocks = nullptr;  ///< [ceil(slots / block_tokens)]
    uint32_t first_row = 0;            ///< in q, out, log_sum_exp
    uint32_t rows = 0;
    uint32_t slots = 0;
    uint32_t explicit_slots = 0;
    uint32_t sealed_blocks = 0;
    int64_t window_first = 0;  ///< may be negative: all are inside
    uint64_t next_position = 0;
    const attend_observer* observer = nullptr;  ///< of layers without a window
};

struct attend_call {
    const attend_layer* layer = nullptr;
    const std::byte* arena = nullptr;
    position_store positions;  ///< read of explicit slots, for ALiBi and key formats that
                               ///< need positions
    position_store sealed_positions;
    const attend_item* items = nullptr;
    uint32_t item_count = 0;
    tensor_view queries;           ///< [rows, query_heads, key_dim]
    tensor_view out;               ///< [rows, query_heads, value_dim]
    float* log_sum_exp = nullptr;  ///< [rows, row_heads] or null
    uint32_t row_heads = 0;        ///< 0: query_heads; more where the layer is one of several lanes
    std::byte* workspace = nullptr;
    uint64_t workspace_bytes = 0;

    float& log_sum_at(uint32_t row, uint32_t head) const {
        return log_sum_exp[uint64_t{row} * (row_heads != 0 ? row_heads : layer->query_heads) +
                           head];
    }
    lane_positions positions_of(const attend_item& item) const {
        return {positions, sealed_positions, item.sealed_blocks};
    }
};

/// Workspace that `attend` needs at least for sequences of up to `max_slots` slots, whose items
/// have observers or do not.
uint64_t attend_workspace_bytes(const attend_layer& layer, uint32_t max_slots,
                                bool observed = false);

/// SIMD, on the best instruction set of this processor. Allocates nothing. Several calls run as
/// one: lanes of a layer, whose attend_layers differ in what they point to alone. All work in the
/// workspace of the first.
void attend(const attend_call* calls, uint32_t call_count, executor& threads);
inline void attend(const attend_call& call, executor& threads) { attend(&call, 1, threads); }

/// Name of the instruction set in use, such as "AVX3_ZEN4".
const char* attend_target_name();

/// The oracle: one row and head at a time, in double, no workspace.
void attend_reference(const attend_call& call);

}  // namespace kvrt
