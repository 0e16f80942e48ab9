// What is kept of attention: weights of query vectors, once their sums over all slots are known,
// are added up by slot.

#include "attention/kernels.hpp"
#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/observe.cpp"
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

void scale_before(const attend_item& item, uint32_t kv_head) {
    const attend_observer& observer = *item.observer;
    const uint32_t counted = item.rows - std::min(item.rows, observer.first_row);
    const float factor =
        static_cast<float>(std::pow(double{observer.decay}, static_cast<double>(counted)));
    const uint64_t offset = kv_head * observer.stride;
    float* sums = observer.sums + offset;
    const uint32_t known =
        observer.before == nullptr ? 0 : std::min(observer.slots_before, item.slots);
    if (known != 0) std::copy_n(observer.before + offset, known, sums);
    if (factor != 1.0f) {
        for (uint32_t slot = 0; slot < known; ++slot) sums[slot] *= factor;
    }
    std::fill(sums + known, sums + item.slots, 0.0f);
}

// sums[0, vectors * lanes) += factor * weight, of one query vector; or += 1 where that reaches
// `threshold`.
template <bool counts>
HWY_INLINE void add_vector(const kept_weights& kept, uint64_t vector, uint32_t first, float log_sum,
                           float row_factor, float threshold, floats (&sums)[vectors_at_once]) {
    const floats_tag d;
    const hn::Rebind<hwy::float16_t, floats_tag> half;
    alignas(64) float factors[groups_at_once + lanes];
    const float* largest = kept.largest_at(vector, first);
    const uint32_t groups = std::min(groups_at_once, (kept.slot_stride - first) / slot_group);
    for (uint32_t g = 0; g < groups; ++g) factors[g] = largest[g];
    for (uint32_t g = 0; g < groups; g += lanes) {
        const auto exponent = hn::Sub(hn::LoadU(d, factors + g), hn::Set(d, log_sum));
        hn::StoreU(hn::Mul(fast_exp(d, exponent), hn::Set(d, row_factor)), d, factors + g);
    }
    const auto* weights = reinterpret_cast<const hwy::float16_t*>(kept.weights_at(vector, first));
    const uint32_t vectors = groups * slot_group / lanes;
    HWY_UNROLL(16)
    for (uint32_t v = 0; v < vectors_at_once; ++v) {
        if (v >= vectors) break;
        const auto factor = hn::Set(d, factors[v * lanes / slot_group]);
        const auto weight = hn::PromoteTo(d, hn::LoadU(half, weights + v * lanes));
        if constexpr (counts) {
            const auto reaches = hn::Ge(hn::Mul(weight, factor), hn::Set(d, threshold));
            sums[v] = hn::Add(sums[v], hn::IfThenElseZero(reaches, hn::Set(d, row_factor)));
        } else {
            sums[v] = hn::MulAdd(weight, factor, sums[v]);
        }
    }
}

template <bool counts>
void add_rows(const observed_rows& rows, uint32_t kv_head) {
    const floats_tag d;
    const attend_item& item = *rows.item;
    const attend_observer& observer = *item.observer;
    const uint32_t seen = item.slots - (item.rows - rows.end_row);  // by the last row
    float* sums = observer.sums + kv_head * observer.stride;
    for (uint32_t first = 0; first < seen; first += slots_at_once) {
        floats here[vectors_at_once];
        for (uint32_t v = 0; v < vectors_at_once; ++v) {
            const uint32_t slot = first + v * lanes;
            here[v] = slot < seen ? hn::LoadU(d, sums + slot) : hn::Zero(d);
        }
        for (uint32_t row = std::max(rows.first_row, observer.first_row); row < rows.end_row;
             ++row) {
            const uint32_t behind = item.rows - 1 - row;
            const float row_factor =
                behind == 0 || observer.decay == 1.0f
                    ? 1.0f
                    : static_cast<float>(
                          std::pow(double{observer.decay}, static_cast<double>(behind)));
            const float threshold = row_factor / static_cast<float>(item.slots - behind);
            for (uint32_t g = 0; g < rows.group; ++g) {
                const uint64_t vector =
                    uint64_t{row - rows.first_row} * rows.query_heads + kv_head * rows.group + g;
                const float log_sum = rows.log_sums[vector];
                if (!std::isfinite(log_sum)) continue;
                add_vector<counts>(rows.kept, vector, first, log_sum, row_factor, threshold, here);
            }
        }
        for (uint32_t v = 0; v < vectors_at_once && first + v * lanes < seen; ++v) {
            hn::StoreU(here[v], d, sums + first + v * lanes);
        }
    }
}

void add_rows_of(const observed_rows& rows, uint32_t kv_head) {
    if (rows.item->observer->counts) {
        add_rows<true>(rows, kv_head);
    } else {
        add_rows<false>(rows, kv_head);
    }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(scale_before);
HWY_EXPORT(add_rows_of);

void start_observation(const attend_item& item, uint32_t kv_head) {
    HWY_DYNAMIC_DISPATCH(scale_before)(item, kv_head);
}

void add_observation(const observed_rows& rows, uint32_t kv_head) {
    HWY_DYNAMIC_DISPATCH(add_rows_of)(rows, kv_head);
}

}  // namespace kvrt
#endif
