// What attention gave each slot, added up once the sums of its weights are known
// (attention/observe.cpp), from the weights that it kept (attend.hpp): for every KV head of every
// sequence of a step in one launch.
//
// A thread has two slots and adds the query vectors that count in their order, so sums have the
// same bits whatever else runs; nothing is added atomically. Layers with a window have no
// observers.
#pragma once

#include "kernels/attend_vectors.hpp"
#include "kernels/compact.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t observe_threads = 128;
inline constexpr uint32_t observe_stretch = 2 * observe_threads;  ///< slots of a block of threads
inline constexpr uint32_t observed_at_once = 48;                  ///< parameters take up to 4 KiB

/// Rows of one sequence; row r sees the slots below slots - (rows - 1 - r). Weights are kept of
/// rows [first_kept, end_kept), from entry kept * query_heads on.
struct observe_item {
    uint64_t sums;    ///< place of KV head 0's slot 0; those of the next are sums_stride further
    uint64_t before;  ///< likewise, what they begin with; no_sums: 0
    uint32_t kept;
    uint32_t slots;
    uint32_t slots_before;  ///< slots that have a sum before
    uint32_t rows;
    uint32_t first_row;  ///< rows before it do not count
    uint32_t first_kept, end_kept;
    uint32_t begins;         ///< 0: sums go on from what an earlier launch left in them
    uint32_t before_decays;  ///< with all rows that count
    /// Instead of a weight, count 1 where it is at least 1 / (slots that the row sees).
    uint32_t counts;
    float log2_decay;  ///< of what a row counts after each row behind it; 0: no less
    uint32_t unused;
};

/// Launch with observe_blocks(count, kv_heads, most_slots) blocks of observe_threads threads.
/// Writes sums of slots [0, slots).
struct observe_parameters {
    kept_weights kept;
    float* sums = nullptr;
    uint64_t sums_stride = 0;
    uint32_t count = 0;
    uint32_t kv_heads = 0;
    uint32_t group = 1;  ///< query heads of a KV head
    uint32_t most_slots = 0;
    observe_item items[observed_at_once] = {};  ///< [count]
};
static_assert(sizeof(observe_parameters) <= 4096);

KVRT_BOTH constexpr uint32_t observe_stretches(uint32_t most_slots) {
    return most_slots / observe_stretch + (most_slots % observe_stretch != 0 ? 1 : 0);
}
constexpr uint32_t observe_blocks(uint32_t items, uint32_t kv_heads, uint32_t most_slots) {
    return items * kv_heads * observe_stretches(most_slots);
}

/// What a row counts with so many rows behind it.
template <class Cx>
KVRT_DEVICE float decayed(const observe_item& item, uint32_t rows) {
    if (rows == 0 || item.log2_decay == 0.0f) return 1.0f;
    return Cx::exp2(item.log2_decay * static_cast<float>(rows));
}

/// The sums of a thread's two slots before any row.
template <class Cx>
KVRT_DEVICE void begin_sums(const observe_parameters& call, const observe_item& item, uint32_t head,
                            uint32_t slot, float (&sums)[2]) {
    const uint64_t row = head * call.sums_stride;
    uint32_t known = item.slots;
    const float* from = call.sums + item.sums + row;
    float factor = 1.0f;
    if (item.begins != 0) {
        known = item.before == no_sums ? 0 : item.slots_before;
        from = item.before == no_sums ? nullptr : call.sums + item.before + row;
        const uint32_t counted = item.first_row < item.rows ? item.rows - item.first_row : 0;
        if (item.before_decays != 0) factor = decayed<Cx>(item, counted);
    }
    KVRT_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        sums[i] = slot + i < known ? factor * Cx::template load<float>(from + slot + i) : 0.0f;
    }
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void observe_rows(const observe_parameters& call) {
    const uint32_t stretches = observe_stretches(call.most_slots);
    const uint32_t slot = Cx::block() % stretches * observe_stretch + 2 * Cx::thread();
    const uint32_t head = Cx::block() / stretches % call.kv_heads;
    const uint32_t index = Cx::block() / stretches / call.kv_heads;
    if (index >= call.count) return;
    const observe_item& item = call.items[index];
    if (slot >= item.slots) return;
    float sums[2];
    begin_sums<Cx>(call, item, head, slot, sums);

    const uint32_t query_heads = call.kv_heads * call.group;
    const uint64_t first = uint64_t{item.kept} * query_heads;
    const uint64_t step = uint64_t{item.end_kept - item.first_kept} * query_heads;
    const uint32_t groups =
        (item.slots - (item.rows - item.end_kept) + slots_of_group - 1) / slots_of_group;
    const uint64_t in_group = first + slot / slots_of_group * step;
    const float* const log_sums = call.kept.largest + first + groups * step;

    const uint32_t first_row = item.first_row > item.first_kept ? item.first_row : item.first_kept;
    for (uint32_t row = first_row; row < item.end_kept; ++row) {
        const uint32_t seen = item.slots - (item.rows - 1 - row);
        if (slot >= seen) continue;
        const float row_factor = decayed<Cx>(item, item.rows - 1 - row);
        const float threshold = row_factor / static_cast<float>(seen);
        for (uint32_t g = 0; g < call.group; ++g) {
            const uint64_t vector =
                uint64_t{row - item.first_kept} * query_heads + head * call.group + g;
            const float log_sum = Cx::template load_constant<float>(log_sums + vector);
            // Logits that sum up to nothing finite say nothing of any slot.
            if ((Cx::f32_to_bits(log_sum) & 0x7f800000u) == 0x7f800000u) continue;
            const float above =
                Cx::template load_constant<float>(call.kept.largest + in_group + vector);
            const float factor = Cx::exp2(above - log_sum * log2_of_e) * row_factor;
            const uint32_t pair = Cx::template load_once<uint32_t>(
                call.kept.weights + (in_group + vector) * slots_of_group + slot % slots_of_group);
            KVRT_UNROLL
            for (uint32_t i = 0; i < 2; ++i) {
                if (slot + i >= seen) continue;
                const float weight = Cx::f16_to_f32(static_cast<uint16_t>(pair >> 16 * i));
                if (item.counts != 0) {
                    if (weight * factor >= threshold) sums[i] += row_factor;
                } else {
                    sums[i] = Cx::multiply_add(weight, factor, sums[i]);
                }
            }
        }
    }
    float* const out = call.sums + item.sums + head * call.sums_stride + slot;
    KVRT_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        if (slot + i < item.slots) Cx::store(out + i, sums[i]);
    }
}

}  // namespace kvrt::kernels
