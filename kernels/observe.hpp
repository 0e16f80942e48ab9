// What attention gave each slot, added up once the sums of its weights are known
// (attention/observe.cpp), from the weights that it kept (attend.hpp): for every KV head of every
// sequence of a step in one launch, by lists, so that a captured one serves any step.
//
// A thread has two slots and adds the query vectors that count in their order, so sums have the
// same bits whatever else runs; nothing is added atomically. Layers with a window have no
// observers.
#pragma once

#include <type_traits>

#include "kernels/attend_vectors.hpp"
#include "kernels/compact.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t observe_threads = 128;
inline constexpr uint32_t observe_stretch = 2 * observe_threads;  ///< slots of a block of threads
inline constexpr uint32_t most_observe_blocks = 4096;             ///< more would have nothing to do
inline constexpr uint32_t no_array = 0xffffffffu;

/// Sums of one sequence. Rows that count are those of which weights are kept; the last row of the
/// step sees all slots, the row r rows before it r less.
struct observe_item {
    uint32_t array;           ///< where sums go
    uint32_t before;          ///< likewise, what they begin with; no_array: 0
    uint32_t slots;           ///< that get one
    uint32_t slots_before;    ///< that have one before
    uint32_t rows_of_decay;   ///< with so many rows what was before decays
    uint32_t first_sequence;  ///< of attention's, as listed in this wave
    uint32_t sequences;
    uint32_t first_stretch;  ///< of all stretches of the wave
    /// Instead of a weight, count 1 where it is at least 1 / (slots that the row sees).
    uint32_t counts;
    float log2_decay;  ///< of what a row counts after each row behind it; 0: no less
};

/// Items of a wave of attention.
struct observe_wave {
    uint32_t first_item, items;
    uint32_t stretches;
    uint32_t step;  ///< its number, or what is left of it in 32 bits
};

/// Launch with `blocks` blocks of observe_threads threads: any number, observe_blocks(...) is
/// enough. Writes sums of slots [0, slots) of every item.
struct observe_parameters {
    kept_weights kept;
    float* sums = nullptr;     ///< of KV head 0 of the lane, in array 0
    uint64_t sums_stride = 0;  ///< between KV heads
    uint64_t array_stride = 0;
    /// Of every array, KV head and stretch the step that wrote it last. Sums go on from those of
    /// another launch of the same step.
    uint32_t* marks = nullptr;  ///< of KV head 0 of the lane, in array 0
    uint64_t marks_stride = 0;  ///< between KV heads
    uint64_t marks_array_stride = 0;
    const attend_sequence* sequences = nullptr;  ///< of the view
    const observe_item* items = nullptr;
    const observe_wave* wave = nullptr;
    uint32_t kv_heads = 0;
    uint32_t group = 1;  ///< query heads of a KV head
    uint32_t blocks = 0;
    uint32_t unused = 0;
};

KVRT_BOTH constexpr uint32_t observe_stretches(uint32_t slots) {
    return slots / observe_stretch + (slots % observe_stretch != 0 ? 1 : 0);
}
constexpr uint32_t observe_blocks(uint32_t stretches, uint32_t kv_heads) {
    return stretches < most_observe_blocks / kv_heads ? stretches * kv_heads : most_observe_blocks;
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
                            uint32_t slot, bool goes_on, float (&sums)[2]) {
    const uint32_t array = goes_on ? item.array : item.before;
    const uint32_t known = array == no_array ? 0 : goes_on ? item.slots : item.slots_before;
    const float factor = goes_on ? 1.0f : decayed<Cx>(item, item.rows_of_decay);
    const float* const from =
        call.sums + (array == no_array ? 0 : array * call.array_stride + head * call.sums_stride);
    KVRT_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        sums[i] = slot + i < known ? factor * Cx::template load<float>(from + slot + i) : 0.0f;
    }
}

/// Adds the kept rows of a listed sequence.
template <class Cx>
KVRT_DEVICE void add_kept_rows(const observe_parameters& call, const observe_item& item,
                               const attend_sequence& sequence, uint32_t head, uint32_t slot,
                               float (&sums)[2]) {
    const uint32_t query_heads = call.kv_heads * call.group;
    const uint64_t first = uint64_t{sequence.kept} * query_heads;
    const uint64_t step = uint64_t{sequence.kept_rows} * query_heads;
    const uint32_t groups = (sequence.slots + slots_of_group - 1) / slots_of_group;
    const uint64_t in_group = first + slot / slots_of_group * step;
    const float* const log_sums = call.kept.largest + first + groups * step;
    for (uint32_t row = 0; row < sequence.kept_rows; ++row) {
        const uint32_t seen = sequence.slots - (sequence.kept_rows - 1 - row);
        if (slot >= seen) continue;
        const float row_factor = decayed<Cx>(item, item.slots - seen);
        const float threshold = row_factor / static_cast<float>(seen);
        for (uint32_t g = 0; g < call.group; ++g) {
            const uint64_t vector = uint64_t{row} * query_heads + head * call.group + g;
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
}

/// One stretch of a KV head.
template <class Cx>
KVRT_DEVICE void observe_slots(const observe_parameters& call, const observe_item& item,
                               uint32_t head, uint32_t stretch, uint32_t step) {
    uint32_t* const mark =
        call.marks + item.array * call.marks_array_stride + head * call.marks_stride + stretch;
    const bool goes_on = Cx::template load<uint32_t>(mark) == step;
    Cx::barrier();  // all have looked
    if (Cx::thread() == 0) Cx::store(mark, step);
    const uint32_t slot = stretch * observe_stretch + 2 * Cx::thread();
    if (slot >= item.slots) return;
    float sums[2];
    begin_sums<Cx>(call, item, head, slot, goes_on, sums);
    for (uint32_t i = 0; i < item.sequences; ++i) {
        const attend_sequence sequence =
            load_sequence<Cx>(call.sequences + item.first_sequence + i);
        add_kept_rows<Cx>(call, item, sequence, head, slot, sums);
    }
    float* const out = call.sums + item.array * call.array_stride + head * call.sums_stride + slot;
    KVRT_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        if (slot + i < item.slots) Cx::store(out + i, sums[i]);
    }
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void observe_rows(const observe_parameters& call) {
    const auto load = [](const auto& from) {
        return Cx::template load_constant<std::decay_t<decltype(from)>>(&from);
    };
    const uint32_t first = load(call.wave->first_item), items = load(call.wave->items);
    const uint32_t units = load(call.wave->stretches) * call.kv_heads;
    if (items == 0 || items == no_sequence) return;
    for (uint32_t unit = Cx::block(); unit < units; unit += call.blocks) {
        const uint32_t stretch = unit / call.kv_heads;
        uint32_t index = first, end = first + items;  // the last item that begins at it, or before
        while (end - index > 1) {
            const uint32_t middle = (index + end) / 2;
            if (load(call.items[middle].first_stretch) <= stretch) {
                index = middle;
            } else {
                end = middle;
            }
        }
        const observe_item& from = call.items[index];
        const observe_item item{load(from.array),         load(from.before),
                                load(from.slots),         load(from.slots_before),
                                load(from.rows_of_decay), load(from.first_sequence),
                                load(from.sequences),     load(from.first_stretch),
                                load(from.counts),        load(from.log2_decay)};
        observe_slots<Cx>(call, item, unit % call.kv_heads, stretch - item.first_stretch,
                          load(call.wave->step));
    }
}

}  // namespace kvrt::kernels
