#include "retention/lagkv.hpp"

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "retention/lagkv.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "attention/softmax-inl.hpp"
#include "retention/extremes-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

// What a channel is measured by: x' = x * inverse - offset, 0 in the middle of the range.
// Deviations do not change when all is measured from there, and their sums lose less.
struct channel_ranges {
    alignas(64) float inverse[widest_row];
    alignas(64) float offset[widest_row];
};

void set_ranges(const channel_extremes& extremes, channel_ranges& ranges) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    for (uint32_t i = 0; i < extremes.dim; ++i) {
        const float lowest = extremes.least[i];
        const float range = extremes.greatest[i] - lowest;
        const float inverse = 1.0f / range;
        const bool usable = range > 0.0f && range < infinity && inverse < infinity;
        ranges.inverse[i] = usable ? inverse : 0.0f;
        ranges.offset[i] = usable ? (lowest + range / 2.0f) * inverse : 0.0f;
    }
}

struct deviation_kernel {
    uint32_t dim;
    part_slots part;
    const channel_ranges& ranges;
    float* deviations;  // [end - first]

    template <element type>
    void rows(const row_group<type>& group, uint32_t slot, uint32_t slots,
              tile_prefetch coming) const {
        const float_tag d;
        for (uint32_t row = HWY_MAX(part.first, slot) - slot; row < slots; ++row) {
            floats sums = hn::Zero(d), others = sums, squares = sums, more_squares = sums;
            coming.advance(dim * element_bytes(type));
            for (uint32_t i = 0; i < dim; i += 2 * vector_slots) {
                const floats a = scaled(group, row, i);
                const floats b = scaled(group, row, i + vector_slots);
                sums = hn::Add(sums, a);
                others = hn::Add(others, b);
                squares = hn::MulAdd(a, a, squares);
                more_squares = hn::MulAdd(b, b, more_squares);
            }
            const float sum = hn::GetLane(hn::SumOfLanes(d, hn::Add(sums, others)));
            const float square = hn::GetLane(hn::SumOfLanes(d, hn::Add(squares, more_squares))) -
                                 sum / static_cast<float>(dim) * sum;
            const float variance = square / static_cast<float>(dim - 1);
            deviations[slot + row - part.first] = variance < 0.0f ? 0.0f : std::sqrt(variance);
        }
    }

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
            const floats deviation = hn::IfThenElse(hn::IsNaN(square), square, hn::Sqrt(variance));
            if (slot + first >= part.first) {
                store_lanes(deviation, first, slots, deviations + (int64_t{slot} - part.first));
                continue;
            }
            alignas(64) float lanes[vector_slots];
            hn::Store(deviation, d, lanes);
            const uint32_t from = slot + first, count = HWY_MIN(vector_slots, slots - first);
            for (uint32_t i = 0; i < count; ++i) {
                if (from + i >= part.first) deviations[from + i - part.first] = lanes[i];
            }
        }
    }

  private:
    template <element type>
    HWY_INLINE floats scaled(const row_group<type>& group, uint32_t row, uint32_t i) const {
        const float_tag d;
        return hn::MulSub(group.load(row, i), hn::Load(d, ranges.inverse + i),
                          hn::Load(d, ranges.offset + i));
    }
    template <element type>
    HWY_INLINE floats scaled(const std::byte* tile, uint32_t i, uint32_t first) const {
        const float_tag d;
        return hn::MulSub(load_lanes<type>(tile, i, first), hn::Set(d, ranges.inverse[i]),
                          hn::Set(d, ranges.offset[i]));
    }
};

// Measures a part by the ranges of the next one, if it is wanted, and finds its own.
struct part_kernel {
    deviation_kernel deviations;
    extremes_kernel extremes;
    bool measures, finds;

    static constexpr bool takes_rows = true;

    template <element type>
    void rows(const row_group<type>& group, uint32_t slot, uint32_t slots,
              tile_prefetch coming) const {
        const auto [first, second] = shared(coming);
        if (measures) deviations.rows(group, slot, slots, first);
        if (finds) extremes.rows(group, slot, slots, second);
    }

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t slots, tile_prefetch coming) const {
        const auto [first, second] = shared(coming);
        if (measures) deviations.template tile<type>(tile, slot, slots, first);
        if (finds) extremes.template tile<type>(tile, slot, slots, second);
    }

  private:
    HWY_INLINE std::pair<tile_prefetch, tile_prefetch> shared(const tile_prefetch& coming) const {
        if (!measures || !finds) return {coming, coming};
        return coming.halves();
    }
};

// One operand of parts that come from the last to the first.
struct operand_measure {
    operand_role role;
    channel_ranges ranges;  // of the part before this one

    void take(const stored_rows& rows, const part_slots& part, bool measures, bool finds,
              float* deviations) {
        const uint32_t dim = rows.operand(role, *rows.open).dim;
        channel_extremes extremes(dim);
        const part_kernel kernel{
            {dim, part, ranges, deviations}, {dim, part, extremes}, measures, finds};
        const int64_t lag = round_up(part.end - part.first, slot_group);
        visit_tiles(role, rows, part.first_group(), part.end, kernel, -lag);
        if (!finds) return;
        extremes.join();
        set_ranges(extremes, ranges);
        if (extremes.holds_nan) set_ranges_among_numbers(rows, part);
    }

  private:
    HWY_NOINLINE void set_ranges_among_numbers(const stored_rows& rows, const part_slots& part) {
        channel_extremes extremes(rows.operand(role, *rows.open).dim);
        find_among_numbers(role, rows, part, extremes);
        set_ranges(extremes, ranges);
    }
};

// values [count] -> their powers of e, below 1, and one over the sum of these; NaN stays with its
// slot. What lies behind count is overwritten, up to a whole group.
float take_powers(float* values, uint32_t count) {
    const float_tag d;
    floats peaks = hn::Zero(d), sums = hn::Zero(d);
    for (uint32_t i = 0; i < count; i += vector_slots) {
        const auto mine = hn::FirstN(d, count - i);
        const floats value = hn::IfThenElseZero(mine, hn::LoadU(d, values + i));
        peaks = hn::IfThenElse(hn::Gt(value, peaks), value, peaks);
    }
    const floats peak = hn::MaxOfLanes(d, peaks);
    for (uint32_t i = 0; i < count; i += vector_slots) {
        const auto mine = hn::FirstN(d, count - i);
        const floats power = fast_exp(d, hn::Sub(hn::LoadU(d, values + i), peak));
        const auto number = hn::And(mine, hn::Eq(power, power));
        sums = hn::Add(sums, hn::IfThenElseZero(number, power));
        hn::StoreU(power, d, values + i);
    }
    alignas(64) float lanes[vector_slots];
    hn::Store(sums, d, lanes);
    double sum = 0.0;
    for (const float lane : lanes) sum += double{lane};
    return static_cast<float>(1.0 / sum);
}

using int_tag = hn::RebindToSigned<float_tag>;
using ints = hn::Vec<int_tag>;

// Numbers that order as these do, with -0 as 0 and NaN below everything.
HWY_INLINE ints order_of(floats value) {
    const float_tag d;
    const int_tag di;
    const ints bits = hn::BitCast(di, hn::Add(value, hn::Zero(d)));
    const ints negative = hn::And(hn::ShiftRight<31>(bits), hn::Set(di, 0x7fffffff));
    const ints lowest = hn::Set(di, std::numeric_limits<int32_t>::min());
    return hn::IfThenElse(hn::RebindMask(di, hn::IsNaN(value)), lowest, hn::Xor(bits, negative));
}

HWY_INLINE ints count_where(hn::Mask<int_tag> counts, ints count) {
    return hn::IfThenElse(counts, hn::Add(count, hn::Set(int_tag(), 1)), count);
}

// scores[i] = (how many of `count` keys are lower, or equal and of a higher slot) / count. Keys lie
// in whole groups.
void rank_keys(const int32_t* keys, uint32_t count, float* scores) {
    const float_tag d;
    const int_tag di;
    for (uint32_t first = 0; first < count; first += vector_slots) {
        const ints mine = hn::LoadU(di, keys + first);
        const uint32_t end = HWY_MIN(first + vector_slots, count);
        ints rank = hn::Zero(di), higher = rank;
        for (uint32_t j = 0; j < first; ++j) {
            rank = count_where(hn::Lt(hn::Set(di, keys[j]), mine), rank);
        }
        for (uint32_t j = first; j < end; ++j) {
            const ints key = hn::Set(di, keys[j]);
            const auto equal = hn::And(hn::Eq(key, mine), hn::FirstN(di, j - first));
            rank = count_where(hn::Or(hn::Lt(key, mine), equal), rank);
        }
        for (uint32_t j = end; j < count; ++j) {
            higher = count_where(hn::Lt(mine, hn::Set(di, keys[j])), higher);
        }
        const ints behind = hn::Set(di, static_cast<int32_t>(count - end));
        const floats ranks = hn::ConvertTo(d, hn::Add(rank, hn::Sub(behind, higher)));
        store_lanes(hn::Div(ranks, hn::Set(d, static_cast<float>(count))), first, count, scores);
    }
}

// From deviations of keys and values to ranks.
void rank_part(uint32_t lag, float* of_keys, float* of_values, int32_t* order, float* scores) {
    const float_tag d;
    const floats share_of_keys = hn::Set(d, take_powers(of_keys, lag));
    const floats share_of_values = hn::Set(d, take_powers(of_values, lag));
    for (uint32_t i = 0; i < lag; i += vector_slots) {
        const floats sum = hn::MulAdd(hn::LoadU(d, of_keys + i), share_of_keys,
                                      hn::Mul(hn::LoadU(d, of_values + i), share_of_values));
        hn::StoreU(order_of(sum), int_tag(), order + i);
    }
    rank_keys(order, lag, scores);
}

void score_parts(const stored_rows& rows, const lag_shape& shape, uint32_t first_part,
                 uint32_t end_part, float* of_keys, float* of_values, int32_t* order,
                 float* scores) {
    operand_measure keys{operand_role::keys, {}}, values{operand_role::values, {}};
    for (uint32_t part = end_part + 1; part-- > first_part;) {
        const uint32_t first = shape.sinks + part * shape.lag;
        const part_slots slots{first, first + shape.lag};
        const bool measures = part != end_part, finds = part != first_part;
        keys.take(rows, slots, measures, finds, of_keys);
        values.take(rows, slots, measures, finds, of_values);
        if (measures) rank_part(shape.lag, of_keys, of_values, order, scores + first);
    }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(score_parts);

uint32_t lag_parts(const lag_shape& shape, uint32_t slots) {
    const uint32_t parts = slots > shape.sinks ? (slots - shape.sinks) / shape.lag : 0;
    return parts > 1 ? parts - 1 : 0;
}

uint64_t lag_scratch_bytes(const lag_shape& shape) {
    return 3 * round_up<uint64_t>(shape.lag, slot_group) * sizeof(float);
}

void score_lag_parts(const stored_rows& rows, const lag_shape& shape, uint32_t first_part,
                     uint32_t end_part, void* scratch, float* scores) {
    float* of_keys = static_cast<float*>(scratch);
    float* of_values = of_keys + round_up<uint64_t>(shape.lag, slot_group);
    int32_t* order =
        reinterpret_cast<int32_t*>(of_values + round_up<uint64_t>(shape.lag, slot_group));
    if (first_part >= end_part) return;
    HWY_DYNAMIC_DISPATCH(score_parts)
    (rows, shape, first_part, end_part, of_keys, of_values, order, scores);
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
