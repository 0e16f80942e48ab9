// From rows of scores to others, as retention/transform.cpp does it: softmax over the candidates
// and the mean over query heads, times the norms of values; scores over their sum. Sums are in
// double, in the CPU's order. Only candidates are looked at and written.
#pragma once

#include "kernels/content.hpp"
#include "kernels/normalise.hpp"

namespace kvrt::kernels {

/// Launch soften_rows like normalise_and_reduce (normalise.hpp), with soften_shared_bytes(group);
/// share_rows likewise, for a group of 1, without shared memory.
struct transform_parameters {
    float* scores = nullptr;
    const float* norms = nullptr;  ///< block h multiplies by row h, `stride` apart
    const guarded_slots* guarded = nullptr;
    const normalise_head* heads = nullptr;  ///< [count]
    uint64_t stride = 0;
    uint32_t group = 1;
    uint32_t count = 0;
};
constexpr uint32_t soften_shared_bytes(uint32_t group) {
    return group * static_cast<uint32_t>(sizeof(float));
}

/// Calls body(slot) for the candidates of this thread, one of sum_lanes that share a row; all
/// that the ranges have in places of equal remainder.
template <class Cx, class callable>
KVRT_DEVICE void for_each_of_lane(const guarded_slots* guarded, uint32_t ranges,
                                  const callable& body) {
    for (uint32_t r = 0; r < ranges; ++r) {
        const slot_range range = range_of<Cx>(guarded, r);
        for (uint32_t i = Cx::lane() % sum_lanes; i < range.end - range.first; i += sum_lanes) {
            body(range.first + i);
        }
    }
}

/// The sum over the lanes of a row, in their order.
template <class Cx>
KVRT_DEVICE double sum_of_lanes(double mine) {
    double total = 0.0;
    for (uint32_t i = 0; i < sum_lanes; ++i) {
        total += Cx::shuffle(mine, Cx::lane() / sum_lanes * sum_lanes + i);
    }
    return total;
}

/// Leaves the candidates' powers of e in the row, below that of the greatest; NaN for those that
/// are no numbers or infinite. Returns one over their sum, of `group` rows.
template <class Cx>
KVRT_DEVICE float soften_row(const guarded_slots* guarded, uint32_t ranges, uint32_t group,
                             float* row, bool active) {
    const float infinity = Cx::bits_to_f32(0x7f800000u);
    float peak = -infinity;
    if (active) {
        for_each_of_lane<Cx>(guarded, ranges, [&](uint32_t slot) {
            const float value = Cx::template load<float>(row + slot);
            if (value < infinity && value > peak) peak = value;
        });
    }
    for (uint32_t by = 1; by < sum_lanes; by *= 2) {
        const float other = Cx::shuffle_xor(peak, by);
        peak = other > peak ? other : peak;
    }
    if (peak == -infinity) peak = 0.0f;
    double sum = 0.0;
    if (active) {
        for_each_of_lane<Cx>(guarded, ranges, [&](uint32_t slot) {
            const float value = Cx::template load<float>(row + slot);
            const float power =
                value < infinity ? natural_exp<Cx>(value - peak) : Cx::bits_to_f32(0x7fc00000u);
            Cx::store(row + slot, power);
            sum += power == power ? double{power} : 0.0;
        });
    }
    const double total = sum_of_lanes<Cx>(sum) * group;
    return total > 0.0 ? static_cast<float>(1.0 / total) : 0.0f;
}

/// The kernel of Expected Attention's: means of softmaxes, times norms.
template <class Cx>
KVRT_DEVICE void soften_rows(const transform_parameters& call) {
    constexpr uint32_t rows_at_once = normalise_threads / sum_lanes;
    const normalise_head& head = call.heads[Cx::block()];
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&head.scores);
    float* const out = call.scores + Cx::template load_constant<uint64_t>(&head.out);
    const guarded_slots* const guarded =
        call.guarded + Cx::template load_constant<uint64_t>(&head.guarded);
    const uint32_t ranges = Cx::template load_constant<uint32_t>(&guarded->count);
    float* const shares = reinterpret_cast<float*>(Cx::shared());  // [group]
    for (uint32_t first = 0; first < call.group; first += rows_at_once) {
        const uint32_t index = first + Cx::thread() / sum_lanes;
        const bool active = index < call.group;
        const float share = soften_row<Cx>(guarded, ranges, call.group,
                                           scores + (active ? index : 0) * call.stride, active);
        if (active && Cx::lane() % sum_lanes == 0) Cx::store(shares + index, share);
    }
    Cx::barrier();
    const float* const norms = call.norms + uint64_t{Cx::block()} * call.stride;
    for (uint32_t r = 0; r < ranges; ++r) {
        const slot_range range = range_of<Cx>(guarded, r);
        for (uint32_t i = Cx::thread(); i < range.end - range.first; i += normalise_threads) {
            const uint32_t slot = range.first + i;
            float sum = 0.0f;
            for (uint32_t h = 0; h < call.group; ++h) {
                const float part = Cx::template load<float>(scores + h * call.stride + slot) *
                                   Cx::template load<float>(shares + h);
                sum = h == 0 ? part : sum + part;
            }
            Cx::store(out + slot, sum * Cx::template load<float>(norms + slot));
        }
    }
}

/// The sum of a row's candidates that are numbers, known to all threads.
struct row_total {
    double sum;
    bool divides;  ///< it is positive and finite

    KVRT_DEVICE float share_of(float score) const {
        return divides ? static_cast<float>(double{score} / sum) : score;
    }
};
/// Each half of a warp sums the whole row.
template <class Cx>
KVRT_DEVICE row_total total_of_row(const guarded_slots* guarded, uint32_t ranges,
                                   const float* row) {
    double sum = 0.0;
    for_each_of_lane<Cx>(guarded, ranges, [&](uint32_t slot) {
        const float score = Cx::template load<float>(row + slot);
        sum += score == score ? double{score} : 0.0;
    });
    const double total = sum_of_lanes<Cx>(sum);
    return {total, total > 0.0 && total <= 0x1.fffffffffffffp1023};
}

/// The kernel of shares: scores over their sum, where that is positive and finite.
template <class Cx>
KVRT_DEVICE void share_rows(const transform_parameters& call) {
    const normalise_head& head = call.heads[Cx::block()];
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&head.scores);
    float* const out = call.scores + Cx::template load_constant<uint64_t>(&head.out);
    const guarded_slots* const guarded =
        call.guarded + Cx::template load_constant<uint64_t>(&head.guarded);
    const uint32_t ranges = Cx::template load_constant<uint32_t>(&guarded->count);
    const row_total total = total_of_row<Cx>(guarded, ranges, scores);
    Cx::barrier();  // nobody reads the row any more, so `out` may be it
    for (uint32_t r = 0; r < ranges; ++r) {
        const slot_range range = range_of<Cx>(guarded, r);
        for (uint32_t i = Cx::thread(); i < range.end - range.first; i += normalise_threads) {
            const float score = Cx::template load<float>(scores + range.first + i);
            Cx::store(out + range.first + i, total.share_of(score));
        }
    }
}

}  // namespace kvrt::kernels
