// What attention gave each slot, added up once the sums of its weights are known
// (attention/observe.cpp): for every KV head of every sequence of a step in one launch.
//
// A thread has two slots and adds the query vectors that count in their order, so sums have the
// same bits whatever else runs; nothing is added atomically. Layers with a window have no
// observers.
#pragma once

#include "kernels/compact.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t observe_threads = 128;
inline constexpr uint32_t observe_stretch = 2 * observe_threads;  ///< slots of a block of threads

/// Rows of one sequence; row r sees the slots below slots - (rows - 1 - r). Weights are kept of
/// rows [first_kept, end_kept): vector v is query head v % query_heads of row first_kept + v /
/// query_heads, and group g has slots [16 g, 16 g + 16). Groups are kept as far as row end_kept - 1
/// sees; what a vector does not see is not looked at.
struct observe_item {
    uint64_t weights;   ///< place of [groups][vectors][16]: f16, relative to the largest logit
    uint64_t largest;   ///< place of [groups][vectors]: that logit, in units of log(2)
    uint64_t log_sums;  ///< place of [end_kept - first_kept][query_heads]: natural logarithms
    uint64_t powers;    ///< place of decay^0, decay^1, ... decay^rows
    uint64_t sums;      ///< place of KV head 0's slot 0; those of the next are sums_stride further
    uint64_t before;    ///< likewise, what they begin with; no_sums: 0
    uint32_t slots;
    uint32_t slots_before;  ///< slots that have a sum before
    uint32_t rows;
    uint32_t first_row;  ///< rows before it do not count
    uint32_t first_kept, end_kept;
    uint32_t begins;         ///< 0: sums go on from what an earlier launch left in them
    uint32_t before_decays;  ///< with all rows that count
};

/// Launch with observe_blocks(count, kv_heads, most_slots) blocks of observe_threads threads.
/// Writes sums of slots [0, slots).
struct observe_parameters {
    const uint16_t* weights = nullptr;
    const float* largest = nullptr;
    const float* log_sums = nullptr;
    const float* powers = nullptr;
    const float* before = nullptr;  ///< may be sums
    float* sums = nullptr;
    const observe_item* items = nullptr;  ///< [count]
    uint64_t sums_stride = 0;
    uint32_t count = 0;
    uint32_t kv_heads = 0;
    uint32_t group = 1;  ///< query heads of a KV head
    uint32_t most_slots = 0;
    /// Instead of a weight, count 1 where it is at least 1 / (slots that the row sees).
    bool counts = false;
};

KVRT_BOTH constexpr uint32_t observe_stretches(uint32_t most_slots) {
    return most_slots / observe_stretch + (most_slots % observe_stretch != 0 ? 1 : 0);
}
constexpr uint32_t observe_blocks(uint32_t items, uint32_t kv_heads, uint32_t most_slots) {
    return items * kv_heads * observe_stretches(most_slots);
}

/// The sums of a thread's two slots before any row.
template <class Cx>
KVRT_DEVICE void begin_sums(const observe_parameters& call, const observe_item& item, uint32_t head,
                            uint32_t slot, float (&sums)[2]) {
    const bool begins = Cx::template load_constant<uint32_t>(&item.begins) != 0;
    const uint64_t before = Cx::template load_constant<uint64_t>(&item.before);
    const uint64_t row = head * call.sums_stride;
    uint32_t known = Cx::template load_constant<uint32_t>(&item.slots);
    const float* from = call.sums + Cx::template load_constant<uint64_t>(&item.sums) + row;
    float factor = 1.0f;
    if (begins) {
        known = before == no_sums ? 0 : Cx::template load_constant<uint32_t>(&item.slots_before);
        from = before == no_sums ? nullptr : call.before + before + row;
        if (Cx::template load_constant<uint32_t>(&item.before_decays) != 0) {
            const uint32_t rows = Cx::template load_constant<uint32_t>(&item.rows);
            const uint32_t first = Cx::template load_constant<uint32_t>(&item.first_row);
            const float* const powers =
                call.powers + Cx::template load_constant<uint64_t>(&item.powers);
            factor = Cx::template load_constant<float>(powers + (first < rows ? rows - first : 0));
        }
    }
    KVRT_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        sums[i] = slot + i < known ? factor * Cx::template load<float>(from + slot + i) : 0.0f;
    }
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void observe_rows(const observe_parameters& call) {
    constexpr float log2_e = 1.44269504088896340736f;
    const uint32_t stretches = observe_stretches(call.most_slots);
    const uint32_t slot = Cx::block() % stretches * observe_stretch + 2 * Cx::thread();
    const uint32_t head = Cx::block() / stretches % call.kv_heads;
    const uint32_t index = Cx::block() / stretches / call.kv_heads;
    if (index >= call.count) return;
    const observe_item& item = call.items[index];
    const uint32_t slots = Cx::template load_constant<uint32_t>(&item.slots);
    if (slot >= slots) return;
    float sums[2];
    begin_sums<Cx>(call, item, head, slot, sums);

    const uint32_t rows = Cx::template load_constant<uint32_t>(&item.rows);
    const uint32_t first_row = Cx::template load_constant<uint32_t>(&item.first_row);
    const uint32_t first_kept = Cx::template load_constant<uint32_t>(&item.first_kept);
    const uint32_t end_kept = Cx::template load_constant<uint32_t>(&item.end_kept);
    const uint32_t query_heads = call.kv_heads * call.group;
    const uint64_t vectors = uint64_t{end_kept - first_kept} * query_heads;
    const uint64_t first_vector = slot / slots_of_group * vectors;
    const uint16_t* const weights = call.weights +
                                    Cx::template load_constant<uint64_t>(&item.weights) +
                                    first_vector * slots_of_group + slot % slots_of_group;
    const float* const largest =
        call.largest + Cx::template load_constant<uint64_t>(&item.largest) + first_vector;
    const float* const log_sums =
        call.log_sums + Cx::template load_constant<uint64_t>(&item.log_sums);
    const float* const powers = call.powers + Cx::template load_constant<uint64_t>(&item.powers);

    for (uint32_t row = first_row > first_kept ? first_row : first_kept; row < end_kept; ++row) {
        const uint32_t seen = slots - (rows - 1 - row);
        if (slot >= seen) continue;
        const float row_factor = Cx::template load_constant<float>(powers + (rows - 1 - row));
        const float threshold = row_factor / static_cast<float>(seen);
        for (uint32_t g = 0; g < call.group; ++g) {
            const uint64_t vector =
                uint64_t{row - first_kept} * query_heads + head * call.group + g;
            const float log_sum = Cx::template load_constant<float>(log_sums + vector);
            // Logits that sum up to nothing finite say nothing of any slot.
            if ((Cx::f32_to_bits(log_sum) & 0x7f800000u) == 0x7f800000u) continue;
            const float above = Cx::template load_constant<float>(largest + vector);
            const float factor = Cx::exp2(above - log_sum * log2_e) * row_factor;
            const uint32_t pair =
                Cx::template load_once<uint32_t>(weights + vector * slots_of_group);
            KVRT_UNROLL
            for (uint32_t i = 0; i < 2; ++i) {
                if (slot + i >= seen) continue;
                const float weight = Cx::f16_to_f32(static_cast<uint16_t>(pair >> 16 * i));
                if (call.counts) {
                    if (weight * factor >= threshold) sums[i] += row_factor;
                } else {
                    sums[i] = Cx::multiply_add(weight, factor, sums[i]);
                }
            }
        }
    }
    float* const out = call.sums + Cx::template load_constant<uint64_t>(&item.sums) +
                       head * call.sums_stride + slot;
    KVRT_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        if (slot + i < slots) Cx::store(out + i, sums[i]);
    }
}

}  // namespace kvrt::kernels
