// From scores of query heads to one row of scores per set of survivors, as retention/scores.cpp
// makes it, bit for bit: z-scores of each query head over the candidates and the greatest of them
// per slot; then sums, or the greatest, over all the rows that share a set.
#pragma once

#include <cmath>

#include "kernels/candidates.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t normalise_threads = 128;
inline constexpr uint32_t sum_lanes = 16;  ///< partial sums over candidates

/// Rows of one KV head's query heads, `stride` apart, and where the row of their greatest z-scores
/// goes, which may be the first of them.
struct normalise_head {
    uint64_t scores;
    uint64_t out;
    uint64_t guarded;  ///< place of its candidates
};

/// Launch with `count` blocks of normalise_threads threads and normalise_shared_bytes(group). Only
/// candidates are looked at and written.
struct normalise_parameters {
    float* scores = nullptr;
    const guarded_slots* guarded = nullptr;
    const normalise_head* heads = nullptr;  ///< [count]
    uint64_t stride = 0;
    uint32_t group = 1;
    uint32_t count = 0;
};
constexpr uint32_t normalise_shared_bytes(uint32_t group) {
    return group * 2 * static_cast<uint32_t>(sizeof(double));
}

/// Adds to a row's sum and count what one range brings. The row is that of half a warp, whose lanes
/// have a partial sum each; they join in their order.
template <class Cx, class callable>
KVRT_DEVICE void add_range(const float* row, const slot_range& range, bool active,
                           const callable& value, double& total, uint32_t& count) {
    const uint32_t lane = Cx::lane() % sum_lanes, length = range.end - range.first;
    double sum = 0.0;
    uint32_t counted = 0;
    if (active) {
        for (uint32_t i = lane; i < length; i += sum_lanes) {
            const float score = Cx::template load<float>(row + range.first + i);
            const bool finite = (Cx::f32_to_bits(score) & 0x7f800000u) != 0x7f800000u;
            sum += finite ? value(double{score}) : 0.0;
            counted += finite ? 1 : 0;
        }
    }
    for (uint32_t i = 0; i < sum_lanes; ++i) {
        const uint32_t from = Cx::lane() / sum_lanes * sum_lanes + i;
        total += Cx::shuffle(sum, from);
        count += Cx::shuffle(counted, from);
    }
}

template <class Cx>
KVRT_DEVICE slot_range range_of(const guarded_slots* guarded, uint32_t index) {
    return {Cx::template load_constant<uint32_t>(&guarded->range[index].first),
            Cx::template load_constant<uint32_t>(&guarded->range[index].end)};
}

/// What a row's z-scores are made with.
struct row_moments {
    double mean;
    double factor;
};
/// Those of a row of half a warp, or of nothing.
template <class Cx>
KVRT_DEVICE row_moments moments_of_row(const float* row, const guarded_slots* guarded,
                                       uint32_t ranges, bool active) {
    constexpr double smallest_deviation = 1e-6;
    double sum = 0.0, squares = 0.0;
    uint32_t count = 0, counted = 0;
    for (uint32_t r = 0; r < ranges; ++r) {
        add_range<Cx>(
            row, range_of<Cx>(guarded, r), active, [](double s) { return s; }, sum, count);
    }
    const double mean = count == 0 ? 0.0 : sum / static_cast<double>(count);
    for (uint32_t r = 0; r < ranges; ++r) {
        const auto square = [mean](double s) { return (s - mean) * (s - mean); };
        add_range<Cx>(row, range_of<Cx>(guarded, r), active, square, squares, counted);
    }
    const double deviation = count == 0 ? 0.0 : std::sqrt(squares / static_cast<double>(count));
    return {mean, 1.0 / (deviation < smallest_deviation ? smallest_deviation : deviation)};
}
template <class Cx>
KVRT_DEVICE void store_moments(row_moments* at, const row_moments& moments) {
    Cx::store(&at->mean, moments.mean);
    Cx::store(&at->factor, moments.factor);
}
template <class Cx>
KVRT_DEVICE float z_score(const row_moments* moments, const float* at) {
    const double score = Cx::template load<float>(at);
    return static_cast<float>((score - Cx::template load<double>(&moments->mean)) *
                              Cx::template load<double>(&moments->factor));
}

/// The kernel of z-scores.
template <class Cx>
KVRT_DEVICE void normalise_and_reduce(const normalise_parameters& call) {
    constexpr uint32_t rows_at_once = normalise_threads / sum_lanes;
    const normalise_head& head = call.heads[Cx::block()];
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&head.scores);
    float* const out = call.scores + Cx::template load_constant<uint64_t>(&head.out);
    const guarded_slots* const guarded =
        call.guarded + Cx::template load_constant<uint64_t>(&head.guarded);
    const uint32_t ranges = Cx::template load_constant<uint32_t>(&guarded->count);
    row_moments* const moments = reinterpret_cast<row_moments*>(Cx::shared());  // [group]

    for (uint32_t first = 0; first < call.group; first += rows_at_once) {
        const uint32_t index = first + Cx::thread() / sum_lanes;
        const bool active = index < call.group;
        const float* const row = scores + (active ? index : 0) * call.stride;
        const row_moments mine = moments_of_row<Cx>(row, guarded, ranges, active);
        if (active && Cx::lane() % sum_lanes == 0) store_moments<Cx>(moments + index, mine);
    }
    Cx::barrier();  // also: nobody reads a whole row any more, so `out` may be one
    for (uint32_t r = 0; r < ranges; ++r) {
        const slot_range range = range_of<Cx>(guarded, r);
        for (uint32_t i = Cx::thread(); i < range.end - range.first; i += normalise_threads) {
            const uint32_t slot = range.first + i;
            float greatest = 0.0f;
            for (uint32_t h = 0; h < call.group; ++h) {
                const float z = z_score<Cx>(moments + h, scores + h * call.stride + slot);
                // Written so that NaN on either side loses.
                if (h == 0 || !(greatest >= z || z != z)) greatest = z;
            }
            Cx::store(out + slot, greatest);
        }
    }
}

/// A set of survivors that several rows share; `out` may be one of them.
struct score_join {
    uint64_t out;
    uint64_t members;  ///< place of the first in members
    uint64_t guarded;  ///< place of the candidates that all of them have
    uint32_t member_count;
    uint32_t unused;
};

inline constexpr uint32_t join_stretch = 1024;  ///< slots of a block of threads

/// Launch with join_blocks(count, most_slots) blocks of normalise_threads threads. Rows are joined
/// in the order of members. Sums: +infinity stands for what stays, whatever others say. The
/// greatest: NaN loses against any number.
struct join_parameters {
    float* scores = nullptr;
    const guarded_slots* guarded = nullptr;
    const score_join* joins = nullptr;  ///< [count]
    const uint64_t* members = nullptr;  ///< places of rows
    uint32_t count = 0;
    uint32_t most_slots = 0;
    bool greatest = false;  ///< instead of sums
};
KVRT_BOTH constexpr uint32_t join_stretches(uint32_t most_slots) {
    return most_slots / join_stretch + (most_slots % join_stretch != 0 ? 1 : 0);
}
constexpr uint32_t join_blocks(uint32_t sets, uint32_t most_slots) {
    return sets * join_stretches(most_slots);
}

/// What of a range is in the stretch from `first` on; its end is no more than its begin where that
/// is nothing.
KVRT_DEVICE slot_range cut_to_stretch(const slot_range& range, uint32_t first) {
    const uint32_t from = range.first > first ? range.first : first;
    const bool ends_here = range.end < first || range.end - first < join_stretch;
    return {from, ends_here ? range.end : first + join_stretch};
}

/// The kernel of sums and maxima over rows.
template <class Cx>
KVRT_DEVICE void join_rows(const join_parameters& call) {
    const uint32_t stretches = join_stretches(call.most_slots);
    const uint32_t first = Cx::block() % stretches * join_stretch;
    const score_join& join = call.joins[Cx::block() / stretches];
    const guarded_slots* const guarded =
        call.guarded + Cx::template load_constant<uint64_t>(&join.guarded);
    const uint64_t* const members =
        call.members + Cx::template load_constant<uint64_t>(&join.members);
    float* const out = call.scores + Cx::template load_constant<uint64_t>(&join.out);
    const uint32_t member_count = Cx::template load_constant<uint32_t>(&join.member_count);
    const uint32_t ranges = Cx::template load_constant<uint32_t>(&guarded->count);
    const float infinity = Cx::bits_to_f32(0x7f800000u);
    for (uint32_t r = 0; r < ranges; ++r) {
        const slot_range range = cut_to_stretch(range_of<Cx>(guarded, r), first);
        for (uint64_t place = uint64_t{range.first} + Cx::thread(); place < range.end;
             place += normalise_threads) {
            float total = call.greatest ? -infinity : 0.0f;
            for (uint32_t m = 0; m < member_count; ++m) {
                const float part = Cx::template load<float>(
                    call.scores + Cx::template load_constant<uint64_t>(members + m) + place);
                if (call.greatest) {
                    if (!(total >= part || part != part)) total = part;
                } else {
                    const bool held = total == infinity || part == infinity;
                    total = held ? infinity : total + part;
                }
            }
            Cx::store(out + place, total);
        }
    }
}

}  // namespace kvrt::kernels
