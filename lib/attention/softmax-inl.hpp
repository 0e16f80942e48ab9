// Vector pieces of softmax, compiled once per instruction set.

// Per-target include guard.
#if defined(KVRT_ATTENTION_SOFTMAX_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_SOFTMAX_INL_HPP
#undef KVRT_ATTENTION_SOFTMAX_INL_HPP
#else
#define KVRT_ATTENTION_SOFTMAX_INL_HPP
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/kernels.hpp"
#include "base/checked.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// e^x for x <= 88, within 2e-7 relative; 0 below -87.3, NaN stays NaN. x = n ln2 + r with |r| <=
/// ln2 / 2; e^r by its Taylor polynomial of degree 6 in Horner form; 2^n through the exponent.
template <class tag>
HWY_INLINE hn::Vec<tag> fast_exp(tag d, hn::Vec<tag> x) {
    const hn::RebindToSigned<tag> di;
    const auto n = hn::Round(hn::Mul(x, hn::Set(d, 1.44269504f)));
    // ln2 in two parts, the first with trailing zeros, so that n * first is exact.
    auto r = hn::NegMulAdd(n, hn::Set(d, 0.693359375f), x);
    r = hn::NegMulAdd(n, hn::Set(d, -2.12194440e-4f), r);
    auto p = hn::Set(d, 1.0f / 720.0f);
    p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 120.0f));
    p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 24.0f));
    p = hn::MulAdd(p, r, hn::Set(d, 1.0f / 6.0f));
    p = hn::MulAdd(p, r, hn::Set(d, 0.5f));
    p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
    p = hn::MulAdd(p, r, hn::Set(d, 1.0f));
#if HWY_TARGET == HWY_AVX3
    if constexpr (hn::MaxLanes(d) == 16) {
        return hn::IfThenZeroElse(hn::Lt(x, hn::Set(d, -87.3f)),
                                  hn::Vec<tag>{_mm512_scalef_ps(p.raw, n.raw)});
    }
#endif
    const auto exponent = hn::ShiftLeft<23>(hn::Add(hn::ConvertTo(di, n), hn::Set(di, 127)));
    const auto result = hn::Mul(p, hn::BitCast(d, exponent));
    return hn::IfThenElse(hn::Lt(x, hn::Set(d, -87.3f)), hn::Zero(d), result);
}

/// tanh(x), within 2e-7 absolute.
template <class tag>
HWY_INLINE hn::Vec<tag> fast_tanh(tag d, hn::Vec<tag> x) {
    const auto one = hn::Set(d, 1.0f);
    const auto bounded = hn::Max(hn::Set(d, -20.0f), hn::Min(hn::Set(d, 20.0f), x));
    const auto e = fast_exp(d, hn::Add(bounded, bounded));
    const auto result = hn::Sub(one, hn::Div(hn::Set(d, 2.0f), hn::Add(e, one)));
    return hn::IfThenElse(hn::IsNaN(x), x, result);
}

/// values[0, count) *= factor; count is a multiple of 8.
HWY_INLINE void scale_run(float* values, uint32_t count, float factor) {
    const hn::CappedTag<float, 8> d;
    const auto by = hn::Set(d, factor);
    for (uint32_t i = 0; i < count; i += static_cast<uint32_t>(hn::Lanes(d))) {
        hn::StoreU(hn::Mul(hn::LoadU(d, values + i), by), d, values + i);
    }
}

/// The slots of a run that a query vector sees, relative to the run: sinks and the rest.
struct seen_run {
    uint32_t first[2] = {0, 0};
    uint32_t end[2] = {0, 0};

    bool sees(uint32_t slot) const {
        return (slot >= first[0] && slot < end[0]) || (slot >= first[1] && slot < end[1]);
    }
};

/// A query vector's softmax while it is being summed: largest logit so far, sum of weights relative
/// to it, weighted sum of values.
struct running_softmax {
    float& largest;
    float& sum;
    float* values;
    uint32_t value_dim;
};

/// Where a query vector's weights are kept, if they are: those of slots relative to `origin`, a
/// multiple of slot_group.
struct kept_span {
    const kept_weights* kept = nullptr;
    uint64_t vector = 0;
    uint32_t origin = 0;

    uint16_t* at(uint32_t slot) const { return kept->weights_at(vector, origin + slot); }

    /// What weights of slots [first, end) are relative to.
    void set_largest(uint32_t first, uint32_t end, float largest) const {
        const uint32_t groups = ceil_divide(end, slot_group) - first / slot_group;
        std::fill_n(kept->largest_at(vector, origin + first), groups, largest);
    }

    /// Slots [first, end) that the vector does not see.
    void set_unseen(uint32_t first, uint32_t end, float largest) const {
        set_largest(first, end, largest);
        for (uint32_t slot = first; slot < end; ++slot) *at(slot) = 0;
    }
};

/// Scores of slots [first, end), both multiples of the vector's lanes -> weights relative to the
/// largest logit so far; 0 where the vector does not see (`whole`: it sees them all). What was
/// summed before is rescaled when the largest grows. Scores of runs are run_stride apart. Weights
/// are kept as f16 on the way, where somebody observes.
HWY_INLINE void soften(const attend_layer& layer, uint32_t head, const float* positions,
                       const seen_run& seen, bool whole, uint32_t first, uint32_t end,
                       float* scores, uint32_t run_stride, const running_softmax& running,
                       const kept_span& keeps) {
    const hn::CappedTag<float, slot_group> d;
    const hn::Rebind<hwy::float16_t, decltype(d)> half;
    const hn::RebindToSigned<decltype(d)> di;
    const uint32_t lanes = static_cast<uint32_t>(hn::Lanes(d));
    constexpr float infinity = std::numeric_limits<float>::infinity();
    constexpr uint32_t line_weights = 64 / sizeof(uint16_t);
    const auto at = [&](uint32_t slot) {
        return scores + slot / run_slots * run_stride + slot % run_slots;
    };
    auto peak = hn::Set(d, -infinity);
    for (uint32_t slot = first; slot < end; slot += lanes) {
        auto logit = hn::LoadU(d, at(slot));
        if (layer.softcap != 0.0f) {
            const auto cap = hn::Set(d, layer.softcap);
            logit = hn::Mul(cap, fast_tanh(d, hn::Div(logit, cap)));
        }
        if (layer.alibi_slopes != nullptr) {
            logit = hn::MulAdd(hn::Set(d, layer.alibi_slopes[head]), hn::LoadU(d, positions + slot),
                               logit);
        }
        if (!whole) {
            const auto index = hn::Iota(di, static_cast<int32_t>(slot));
            const auto in = [&](uint32_t range) {
                const auto from = hn::Set(di, static_cast<int32_t>(seen.first[range]) - 1);
                return hn::And(hn::Gt(index, from),
                               hn::Lt(index, hn::Set(di, static_cast<int32_t>(seen.end[range]))));
            };
            logit = hn::IfThenElse(hn::RebindMask(d, hn::Or(in(0), in(1))), logit,
                                   hn::Set(d, -infinity));
        }
        peak = hn::Max(peak, logit);
        hn::StoreU(logit, d, at(slot));
    }
    float here = hn::GetLane(hn::MaxOfLanes(d, peak));
    if (here == -infinity) {
        // A maximum may pass NaN over. Else every logit is: nothing to be relative to or to weigh.
        bool is_number = true;
        for (uint32_t slot = first; slot < end; ++slot) {
            is_number = is_number && !std::isnan(*at(slot));
        }
        if (is_number) {
            for (uint32_t slot = first; slot < end; ++slot) *at(slot) = 0.0f;
            if (keeps.kept != nullptr) keeps.set_unseen(first, end, running.largest);
            return;
        }
        here = std::numeric_limits<float>::quiet_NaN();
    }
    if (!(here <= running.largest)) {
        const float factor = running.largest == -infinity ? 0.0f : std::exp(running.largest - here);
        running.largest = here;
        running.sum *= factor;
        scale_run(running.values, running.value_dim, factor);
    }
    auto total = hn::Zero(d);
    const auto origin = hn::Set(d, running.largest);
    if (keeps.kept != nullptr) keeps.set_largest(first, end, running.largest);
    for (uint32_t slot = first; slot < end; slot += lanes) {
        const auto weight = fast_exp(d, hn::Sub(hn::LoadU(d, at(slot)), origin));
        total = hn::Add(total, weight);
        hn::StoreU(weight, d, at(slot));
        if (keeps.kept == nullptr) continue;
        uint16_t* out = keeps.at(slot);
        // The same place of the next run is on its way meanwhile.
        if (slot % line_weights == 0) {
            __builtin_prefetch(out + uint64_t{keeps.kept->vectors} * run_slots, 1, 2);
        }
        hn::StoreU(hn::DemoteTo(half, weight), half, reinterpret_cast<hwy::float16_t*>(out));
    }
    running.sum += hn::GetLane(hn::SumOfLanes(d, total));
}

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
