#include "retention/transform.hpp"

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "retention/transform.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <limits>

#include "attention/softmax-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

/// Runs body(tag, i) over [0, count), by vectors and one by one.
template <class callable>
HWY_INLINE void by_vectors(uint32_t count, const callable& body) {
    const hn::CappedTag<float, 16> wide;
    const hn::CappedTag<float, 1> single;
    uint32_t i = 0;
    for (const uint32_t step = static_cast<uint32_t>(hn::Lanes(wide)); i + step <= count;
         i += step) {
        body(wide, i);
    }
    for (; i < count; ++i) body(single, i);
}

/// values[0, count) = exp(value - peak); NaN for +infinity.
void exponentials(float* values, uint32_t count, float peak) {
    const auto transform = [peak](auto d, float* at) HWY_ATTR {
        const auto value = hn::LoadU(d, at);
        const auto endless = hn::Gt(value, hn::Set(d, std::numeric_limits<float>::max()));
        const auto power = fast_exp(d, hn::Sub(value, hn::Set(d, peak)));
        const auto none = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
        hn::StoreU(hn::IfThenElse(endless, none, power), d, at);
    };
    by_vectors(count, [&](auto d, uint32_t i) HWY_ATTR { transform(d, values + i); });
}

/// The greatest of `peak` and the numbers below infinity.
float find_peak(const float* values, uint32_t count, float peak) {
    alignas(64) float lanes[16];
    const hn::CappedTag<float, 16> wide;
    auto peaks = hn::Set(wide, peak);
    by_vectors(count, [&](auto d, uint32_t i) HWY_ATTR {
        const auto value = hn::LoadU(d, values + i);
        const auto finite = hn::Lt(value, hn::Set(d, std::numeric_limits<float>::infinity()));
        const auto lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
        const auto found = hn::IfThenElse(finite, value, lowest);
        if constexpr (hn::MaxLanes(d) == hn::MaxLanes(wide)) {
            peaks = hn::Max(peaks, found);
        } else {
            peak = HWY_MAX(peak, hn::GetLane(found));
        }
    });
    hn::Store(peaks, wide, lanes);
    for (uint32_t i = 0; i < hn::Lanes(wide); ++i) peak = HWY_MAX(peak, lanes[i]);
    return peak;
}

/// out = share * values, or out plus that.
void add_share(const float* values, uint32_t count, float share, bool adds, float* out) {
    by_vectors(count, [&](auto d, uint32_t i) HWY_ATTR {
        const auto part = hn::Mul(hn::LoadU(d, values + i), hn::Set(d, share));
        hn::StoreU(adds ? hn::Add(hn::LoadU(d, out + i), part) : part, d, out + i);
    });
}

/// sums [16] += values, each sixteenth to the same; count is a multiple of 16. NaN is nothing.
void add_to_sums(const float* values, uint32_t count, double* sums) {
    const hn::CappedTag<double, 8> d;
    const hn::Rebind<float, decltype(d)> narrow;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(d)), parts = 16 / lanes;
    hn::Vec<decltype(d)> sum[parts];
    for (uint32_t p = 0; p < parts; ++p) sum[p] = hn::LoadU(d, sums + p * lanes);
    for (uint32_t i = 0; i < count; i += 16) {
        for (uint32_t p = 0; p < parts; ++p) {
            const auto value = hn::PromoteTo(d, hn::LoadU(narrow, values + i + p * lanes));
            sum[p] = hn::Add(sum[p], hn::IfThenElseZero(hn::Eq(value, value), value));
        }
    }
    for (uint32_t p = 0; p < parts; ++p) hn::StoreU(sum[p], d, sums + p * lanes);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(exponentials);
HWY_EXPORT(find_peak);
HWY_EXPORT(add_share);
HWY_EXPORT(add_to_sums);

namespace {

constexpr uint32_t lanes = 16;
constexpr uint32_t chunk = 512;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// Sums over slots: sixteen partial sums that are joined in order.
struct running_sum {
    double sums[lanes] = {};

    /// NaN counts as nothing.
    void add(const float* values, uint32_t count) {
        const auto number = [](float value) { return value == value ? double{value} : 0.0; };
        uint32_t i = count / lanes * lanes;
        HWY_DYNAMIC_DISPATCH(add_to_sums)(values, i, sums);
        for (uint32_t lane = 0; i < count; ++i, ++lane) sums[lane] += number(values[i]);
    }
    double total() const {
        double sum = 0.0;
        for (double part : sums) sum += part;
        return sum;
    }
};

/// Runs combine(window, count, out) over chunks of slots: window holds in[-half, count + half) of a
/// chunk, with `outside` beyond the ends, and may be followed by nothing else.
template <class callable>
void pool(const float* in, uint32_t slots, uint32_t width, float outside, float* out,
          const callable& combine) {
    const uint32_t half = width / 2;
    float window[chunk + widest_pool];
    std::fill(window, window + half, outside);
    // The window's front is what the chunk before ended with; `in` may be overwritten by then.
    uint32_t held = half, read = 0;
    for (uint32_t first = 0; first < slots; first += chunk) {
        const uint32_t count = std::min(chunk, slots - first), wanted = count + 2 * half;
        const uint32_t more = std::min(wanted - held, slots - read);
        std::copy(in + read, in + read + more, window + held);
        read += more;
        std::fill(window + held + more, window + wanted, outside);
        combine(window, count, out + first);
        std::copy(window + count, window + wanted, window);
        held = 2 * half;
    }
}

}  // namespace

void pool_mean(const float* in, uint32_t slots, uint32_t width, float* out) {
    const float share = 1.0f / static_cast<float>(width);
    pool(in, slots, width, 0.0f, out, [=](const float* window, uint32_t count, float* to) {
        std::copy(window, window + count, to);
        for (uint32_t offset = 1; offset < width; ++offset) {
            for (uint32_t i = 0; i < count; ++i) to[i] += window[i + offset];
        }
        for (uint32_t i = 0; i < count; ++i) to[i] *= share;
    });
}

void pool_max(const float* in, uint32_t slots, uint32_t width, float* out) {
    pool(in, slots, width, -infinity, out, [=](const float* window, uint32_t count, float* to) {
        std::copy(window, window + count, to);
        for (uint32_t offset = 1; offset < width; ++offset) {
            for (uint32_t i = 0; i < count; ++i) {
                const float other = window[i + offset];
                to[i] = to[i] >= other || other != other ? to[i] : other;
            }
        }
    });
}

void softmax_mean(float* logits, uint64_t stride, uint32_t heads, const slot_ranges& candidates,
                  float* out) {
    for (uint32_t head = 0; head < heads; ++head) {
        float* row = logits + head * stride;
        float peak = -infinity;
        for (const slot_range& range : candidates) {
            const uint32_t count = range.end - range.first;
            peak = HWY_DYNAMIC_DISPATCH(find_peak)(row + range.first, count, peak);
        }
        if (peak == -infinity) peak = 0.0f;
        running_sum sum;
        for (const slot_range& range : candidates) {
            for (uint32_t slot = range.first; slot < range.end; slot += chunk) {
                const uint32_t count = std::min(chunk, range.end - slot);
                HWY_DYNAMIC_DISPATCH(exponentials)(row + slot, count, peak);
                sum.add(row + slot, count);
            }
        }
        const double total = sum.total() * heads;
        const float share = total > 0.0 ? static_cast<float>(1.0 / total) : 0.0f;
        for (const slot_range& range : candidates) {
            HWY_DYNAMIC_DISPATCH(add_share)
            (row + range.first, range.end - range.first, share, head != 0, out + range.first);
        }
    }
}

void normalise_to_sum(const slot_ranges& candidates, float* scores) {
    running_sum sum;
    for (const slot_range& range : candidates) {
        sum.add(scores + range.first, range.end - range.first);
    }
    const double total = sum.total();
    if (!(total > 0.0) || total > std::numeric_limits<double>::max()) return;
    for (const slot_range& range : candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) {
            scores[slot] = static_cast<float>(scores[slot] / total);
        }
    }
}

void scale_by_norm(const slot_ranges& candidates, const float* norm, float epsilon, float* scores) {
    for (const slot_range& range : candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) {
            scores[slot] = (scores[slot] + epsilon) * norm[slot];
        }
    }
}

void mix_redundancy(const slot_ranges& candidates, const float* importance, const float* redundancy,
                    float lambda, float* out) {
    for (const slot_range& range : candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) {
            out[slot] = lambda * importance[slot] - (1.0f - lambda) * redundancy[slot];
        }
    }
}

}  // namespace kvrt
#endif
