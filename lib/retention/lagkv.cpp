#include "retention/lagkv.hpp"

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "retention/lagkv.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "retention/rank.hpp"
#include "retention/visit-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

// Parts start anywhere in a group of 16 slots: its other lanes are not the part's.
struct part_slots {
    uint32_t first;
    uint32_t end;

    uint32_t first_group() const { return first / slot_group * slot_group; }
    HWY_INLINE auto lanes(uint32_t slot) const {
        const float_tag d;
        const auto before = hn::FirstN(d, first > slot ? HWY_MIN(first - slot, vector_slots) : 0);
        const auto behind = hn::FirstN(d, end > slot ? HWY_MIN(end - slot, vector_slots) : 0);
        return hn::AndNot(before, behind);
    }
};

struct extremes_kernel {
    uint32_t dim;
    part_slots part;
    float* extremes;  // [dim][least, greatest][16]

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t slots, tile_prefetch coming) const {
        const float_tag d;
        const floats endless = hn::Set(d, std::numeric_limits<float>::infinity());
        for (uint32_t first = 0; first < slots; first += vector_slots) {
            const auto mine = part.lanes(slot + first);
            for (uint32_t i = 0; i < dim; ++i) {
                if (first == 0) coming.advance(slot_group * element_bytes(type));
                const floats x = load_lanes<type>(tile, i, first);
                float* low = extremes + 2 * i * slot_group + first;
                float* high = low + slot_group;
                const floats not_above = hn::IfThenElse(mine, x, endless);
                const floats not_below = hn::IfThenElse(mine, x, hn::Neg(endless));
                hn::Store(hn::Min(hn::Load(d, low), not_above), d, low);
                hn::Store(hn::Max(hn::Load(d, high), not_below), d, high);
            }
        }
    }
};

// What a channel is measured by: x' = (x - centre) * inverse. Deviations do not change when all is
// measured from the middle of the range, and their sums lose less.
struct channel_ranges {
    alignas(64) float centre[widest_row];
    alignas(64) float inverse[widest_row];
};

void find_ranges(operand_role role, const stored_rows& rows, const part_slots& part,
                 channel_ranges& ranges) {
    const uint32_t dim = rows.operand(role, *rows.open).dim;
    constexpr float infinity = std::numeric_limits<float>::infinity();
    // Side by side: apart they would share their places in a page, and stores would hold up loads.
    alignas(64) float extremes[widest_row * 2 * slot_group];
    for (uint32_t i = 0; i < dim; ++i) {
        std::fill_n(extremes + 2 * i * slot_group, slot_group, infinity);
        std::fill_n(extremes + (2 * i + 1) * slot_group, slot_group, -infinity);
    }
    visit_tiles(role, rows, part.first_group(), part.end, extremes_kernel{dim, part, extremes});
    for (uint32_t i = 0; i < dim; ++i) {
        const float* low = extremes + 2 * i * slot_group;
        const float* high = low + slot_group;
        const float lowest = *std::min_element(low, low + slot_group);
        const float range = *std::max_element(high, high + slot_group) - lowest;
        const float inverse = 1.0f / range;
        const bool usable = range > 0.0f && range < infinity && inverse < infinity;
        ranges.centre[i] = usable ? lowest + range / 2.0f : 0.0f;
        ranges.inverse[i] = usable ? inverse : 0.0f;
    }
}

struct deviation_kernel {
    uint32_t dim;
    part_slots part;
    const channel_ranges& ranges;
    float* deviations;  // [end - first]

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t slots, tile_prefetch coming) const {
        const float_tag d;
        const floats share = hn::Set(d, 1.0f / static_cast<float>(dim));
        const floats freedom = hn::Set(d, 1.0f / static_cast<float>(dim - 1));
        for (uint32_t first = 0; first < slots; first += vector_slots) {
            floats sums = hn::Zero(d), others = sums, squares = sums, more_squares = sums;
            for (uint32_t i = 0; i < dim; i += 2) {
                if (first == 0) coming.advance(2 * slot_group * element_bytes(type));
                const floats a = scaled<type>(tile, i, first);
                const floats b = scaled<type>(tile, i + 1, first);
                sums = hn::Add(sums, a);
                others = hn::Add(others, b);
                squares = hn::MulAdd(a, a, squares);
                more_squares = hn::MulAdd(b, b, more_squares);
            }
            const floats sum = hn::Add(sums, others);
            const floats square =
                hn::NegMulAdd(hn::Mul(sum, share), sum, hn::Add(squares, more_squares));
            const floats variance = hn::Max(hn::Mul(square, freedom), hn::Zero(d));
            alignas(64) float lanes[vector_slots];
            hn::Store(hn::IfThenElse(hn::IsNaN(square), square, hn::Sqrt(variance)), d, lanes);
            const uint32_t from = slot + first, count = HWY_MIN(vector_slots, slots - first);
            for (uint32_t i = 0; i < count; ++i) {
                if (from + i >= part.first) deviations[from + i - part.first] = lanes[i];
            }
        }
    }

  private:
    template <element type>
    HWY_INLINE floats scaled(const std::byte* tile, uint32_t i, uint32_t first) const {
        const float_tag d;
        const floats centred =
            hn::Sub(load_lanes<type>(tile, i, first), hn::Set(d, ranges.centre[i]));
        return hn::Mul(centred, hn::Set(d, ranges.inverse[i]));
    }
};

void measure_part(operand_role role, const stored_rows& rows, const part_slots& part,
                  const part_slots& next, float* deviations) {
    const uint32_t dim = rows.operand(role, *rows.open).dim;
    channel_ranges ranges;
    find_ranges(role, rows, next, ranges);
    visit_tiles(role, rows, part.first_group(), part.end,
                deviation_kernel{dim, part, ranges, deviations});
}

// Deviations of keys and of values in the slots [first, first + lag), against the next `lag`.
void measure_lag(const stored_rows& rows, uint32_t first, uint32_t lag, float* of_keys,
                 float* of_values) {
    const part_slots part{first, first + lag}, next{first + lag, first + 2 * lag};
    measure_part(operand_role::keys, rows, part, next, of_keys);
    measure_part(operand_role::values, rows, part, next, of_values);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(measure_lag);

namespace {

/// values -> their softmax; NaN stays with its slot.
void soften(float* values, uint32_t count) {
    float peak = 0.0f;
    for (uint32_t i = 0; i < count; ++i) peak = values[i] > peak ? values[i] : peak;
    double sum = 0.0;
    for (uint32_t i = 0; i < count; ++i) {
        values[i] = std::exp(values[i] - peak);
        sum += values[i] == values[i] ? double{values[i]} : 0.0;
    }
    const float share = static_cast<float>(1.0 / sum);
    for (uint32_t i = 0; i < count; ++i) values[i] *= share;
}

}  // namespace

uint32_t lag_parts(const lag_shape& shape, uint32_t slots) {
    const uint32_t parts = slots > shape.sinks ? (slots - shape.sinks) / shape.lag : 0;
    return parts > 1 ? parts - 1 : 0;
}

uint64_t lag_scratch_bytes(const lag_shape& shape) {
    return uint64_t{shape.lag} * (sizeof(uint64_t) + 2 * sizeof(float));
}

void score_lag_parts(const stored_rows& rows, const lag_shape& shape, uint32_t first_part,
                     uint32_t end_part, void* scratch, float* scores) {
    const uint32_t lag = shape.lag;
    uint64_t* order = static_cast<uint64_t*>(scratch);
    float* of_keys = reinterpret_cast<float*>(order + lag);
    float* of_values = of_keys + lag;
    for (uint32_t part = first_part; part < end_part; ++part) {
        const uint32_t first = shape.sinks + part * lag;
        HWY_DYNAMIC_DISPATCH(measure_lag)(rows, first, lag, of_keys, of_values);
        soften(of_keys, lag);
        soften(of_values, lag);
        for (uint32_t i = 0; i < lag; ++i) {
            const uint64_t key = score_order(of_keys[i] + of_values[i]);
            order[i] = key << 32 | (0xffffffffu - i);  // of equals the lower slot comes last
        }
        std::sort(order, order + lag);
        for (uint32_t rank = 0; rank < lag; ++rank) {
            const uint32_t i = 0xffffffffu - static_cast<uint32_t>(order[rank]);
            scores[first + i] = static_cast<float>(rank) / static_cast<float>(lag);
        }
    }
}

void score_lag_kept(const lag_shape& shape, uint32_t slots, float* scores) {
    const uint32_t sinks = std::min(shape.sinks, slots), parts = lag_parts(shape, slots);
    std::fill(scores, scores + sinks, 2.0f);
    if (parts != 0) {
        const uint32_t first = shape.sinks + parts * shape.lag;
        const float kept = static_cast<float>(slots - first);
        for (uint32_t slot = first; slot < slots; ++slot) {
            scores[slot] = 1.0f + static_cast<float>(slot - first) / kept;
        }
        return;
    }
    const float others = static_cast<float>(slots - sinks);
    for (uint32_t slot = sinks; slot < slots; ++slot) {
        scores[slot] = static_cast<float>(slot - sinks) / others;
    }
}

}  // namespace kvrt
#endif
