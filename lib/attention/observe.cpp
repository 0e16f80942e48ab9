// What is kept of attention: weights of query vectors, once their sums over all slots are known,
// are added up by slot.

#include "attention/kernels.hpp"
#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/observe.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "attention/softmax-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

using floats_tag = hn::CappedTag<float, slot_group>;
using floats = hn::Vec<floats_tag>;
constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(floats_tag()));
// Sums that stay in registers: of whole groups.
constexpr uint32_t vectors_at_once = HWY_MAX(8u, slot_group / lanes);
constexpr uint32_t slots_at_once = vectors_at_once * lanes;
constexpr uint32_t groups_at_once = slots_at_once / slot_group;

float power(float base, uint32_t exponent) {
    if (exponent == 0 || base == 1.0f) return 1.0f;
    return static_cast<float>(std::pow(double{base}, static_cast<double>(exponent)));
}

float row_factor(const attend_item& item, uint32_t row) {
    return power(item.observer->decay, item.rows - 1 - row);
}

// Calls body(row, vector) for the query vectors of one KV head that count.
template <class callable>
void for_each_vector(const observed_rows& rows, uint32_t kv_head, const callable& body) {
    for (uint32_t row = std::max(rows.first_row, rows.item->observer->first_row);
         row < rows.end_row; ++row) {
        const uint64_t first =
            uint64_t{row - rows.first_row} * rows.query_heads + kv_head * rows.group;
        for (uint32_t g = 0; g < rows.group; ++g) body(row, first + g);
    }
}

uint32_t slots_seen_by_last(const observed_rows& rows) {
    return rows.item->slots - (rows.item->rows - rows.end_row);
}

// Largest logits of the groups of slots [first, end) become what weights are to be multiplied with:
// exp(largest - log_sum), times the row's factor. A vector without a finite sum loses its weights.
void make_factors(const observed_rows& rows, uint32_t kv_head, uint32_t first, uint32_t end) {
    const floats_tag d;
    const uint32_t groups = (end - first + slot_group - 1) / slot_group;
    for_each_vector(rows, kv_head, [&](uint32_t row, uint64_t vector) {
        float* factors = rows.kept.largest_at(vector, first);
        const float log_sum = rows.kept.log_sums[vector];
        if (!std::isfinite(log_sum)) {
            std::fill_n(factors, groups, 0.0f);
            for (uint32_t slot = first; slot < end; slot += slot_group) {
                std::fill_n(rows.kept.weights_at(vector, slot), slot_group, uint16_t{0});
            }
            return;
        }
        const auto by = hn::Set(d, row_factor(*rows.item, row));
        const auto origin = hn::Set(d, log_sum);
        for (uint32_t g = 0; g < groups; g += lanes) {
            const auto exponent = hn::Sub(hn::LoadU(d, factors + g), origin);
            hn::StoreU(hn::Mul(fast_exp(d, exponent), by), d, factors + g);
        }
    });
}

// sums[v] += factor * weight, of one query vector; or += `counted` where that reaches `threshold`.
template <bool counts, uint32_t vectors>
HWY_INLINE void add_vector(const kept_weights& kept, uint64_t vector, uint32_t first,
                           float threshold, float counted, floats (&sums)[vectors]) {
    const floats_tag d;
    const hn::Rebind<hwy::float16_t, floats_tag> half;
    constexpr uint32_t vectors_per_group = slot_group / lanes;
    constexpr uint32_t vectors_per_run = run_slots / lanes;
    const float* factors = kept.largest_at(vector, first);
    const uint64_t run_step = uint64_t{kept.vectors} * run_slots;
    const auto* weights = reinterpret_cast<const hwy::float16_t*>(kept.weights_at(vector, first));
    constexpr uint32_t runs = HWY_MAX(1u, vectors / vectors_per_run);
    HWY_UNROLL(16)
    for (uint32_t v = 0; v < vectors; ++v) {
        const auto* here = weights + v / vectors_per_run * run_step + v % vectors_per_run * lanes;
        // Those of the next slots lie too far behind for hardware to guess.
        if (v % vectors_per_group == 0) hwy::Prefetch(here + runs * run_step);
        const auto factor = hn::Set(d, factors[v / vectors_per_group]);
        const auto weight = hn::PromoteTo(d, hn::LoadU(half, here));
        if constexpr (counts) {
            const auto reaches = hn::Ge(hn::Mul(weight, factor), hn::Set(d, threshold));
            sums[v] = hn::Add(sums[v], hn::IfThenElseZero(reaches, hn::Set(d, counted)));
        } else {
            sums[v] = hn::MulAdd(weight, factor, sums[v]);
        }
    }
}

// What a sum begins with: the one before, which `factor` decays by all rows that count.
HWY_INLINE floats load_before(const attend_observer& observer, const float* before, uint32_t slot,
                              float factor) {
    const floats_tag d;
    if (before == nullptr || slot >= observer.slots_before) return hn::Zero(d);
    const auto decayed = hn::Mul(hn::Set(d, factor), hn::LoadU(d, before + slot));
    const uint32_t known = observer.slots_before - slot;
    return known >= lanes ? decayed : hn::IfThenElseZero(hn::FirstN(d, known), decayed);
}

// Slots [first, first + vectors * lanes) of one KV head.
template <bool counts, uint32_t vectors>
HWY_NOINLINE void add_tasks(const observed_rows* tasks, uint32_t task_count, uint32_t kv_head,
                            uint32_t first, bool begins) {
    const floats_tag d;
    const attend_item& item = *tasks->item;
    const attend_observer& observer = *item.observer;
    const uint64_t offset = kv_head * observer.stride;
    const float* before = observer.before == nullptr ? nullptr : observer.before + offset;
    float* out = observer.sums + offset + first;
    floats sums[vectors];
    if (begins) {
        const uint32_t counted = item.rows - std::min(item.rows, observer.first_row);
        const float factor = observer.before_decays ? power(observer.decay, counted) : 1.0f;
        for (uint32_t v = 0; v < vectors; ++v) {
            // Of the next slots, whose turn comes when all KV heads have had these.
            if (before != nullptr) hwy::Prefetch(before + first + (vectors + v) * lanes);
            sums[v] = load_before(observer, before, first + v * lanes, factor);
        }
    } else {
        for (uint32_t v = 0; v < vectors; ++v) sums[v] = hn::LoadU(d, out + v * lanes);
    }
    for (uint32_t t = 0; t < task_count; ++t) {
        const observed_rows& rows = tasks[t];
        if (rows.kept.weights == nullptr || first >= slots_seen_by_last(rows)) continue;
        for_each_vector(rows, kv_head, [&](uint32_t row, uint64_t vector) HWY_ATTR {
            float counted = 0.0f, threshold = 0.0f;
            if constexpr (counts) {
                counted = row_factor(item, row);
                threshold = counted / static_cast<float>(item.slots - (item.rows - 1 - row));
            }
            add_vector<counts>(rows.kept, vector, first, threshold, counted, sums);
        });
    }
    // Nothing reads them before the next step.
    for (uint32_t v = 0; v < vectors; ++v) hn::Stream(sums[v], d, out + v * lanes);
}

// Of a few slots all KV heads, whose weights lie side by side.
template <bool counts>
void add_stretch(const observed_rows* tasks, uint32_t task_count, uint32_t kv_heads,
                 uint32_t first_slot, uint32_t end_slot, bool begins) {
    // A task has kept whole groups of the slots that its last row sees, and its rows may end apart.
    uint32_t least_seen = end_slot;
    for (uint32_t t = 0; t < task_count; ++t) {
        if (tasks[t].kept.weights == nullptr) continue;
        least_seen = std::min(least_seen, slots_seen_by_last(tasks[t]));
    }
    uint32_t first = first_slot;
    for (; first + slots_at_once <= least_seen; first += slots_at_once) {
        for (uint32_t head = 0; head < kv_heads; ++head) {
            add_tasks<counts, vectors_at_once>(tasks, task_count, head, first, begins);
        }
    }
    for (; first < end_slot; first += slot_group) {
        for (uint32_t head = 0; head < kv_heads; ++head) {
            add_tasks<counts, slot_group / lanes>(tasks, task_count, head, first, begins);
        }
    }
}

void observe_stretch(const observed_rows* tasks, uint32_t task_count, uint32_t kv_heads,
                     uint32_t first_slot, uint32_t end_slot, bool begins) {
    for (uint32_t head = 0; head < kv_heads; ++head) {
        for (uint32_t t = 0; t < task_count; ++t) {
            const uint32_t end = std::min(end_slot, slots_seen_by_last(tasks[t]));
            if (tasks[t].kept.weights == nullptr || first_slot >= end) continue;
            make_factors(tasks[t], head, first_slot, end);
        }
    }
    if (tasks->item->observer->counts) {
        add_stretch<true>(tasks, task_count, kv_heads, first_slot, end_slot, begins);
    } else {
        add_stretch<false>(tasks, task_count, kv_heads, first_slot, end_slot, begins);
    }
    hwy::FlushStream();
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(observe_stretch);

void observe_rows(const observed_rows* tasks, uint32_t task_count, uint32_t kv_heads,
                  uint32_t first_slot, uint32_t end_slot, bool begins) {
    HWY_DYNAMIC_DISPATCH(observe_stretch)
    (tasks, task_count, kv_heads, first_slot, end_slot, begins);
}

}  // namespace kvrt
#endif
