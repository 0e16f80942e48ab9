// LagKV's scores (retention/lagkv.hpp says what they are), in two launches for a whole cohort: how
// far each slot of a part deviates by the channels' ranges in the part that follows, of keys and of
// values; then their ranks within each part.
#pragma once

#include <cmath>

#include "kernels/content.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t lag_slots = 128;  ///< of a part; a thread has one
inline constexpr uint32_t lag_threads = lag_slots;

/// Rows of deviations and scores are those of KV heads; deviations of values lie `stride` behind
/// those of keys, and head h of lane i has its two at (i * kv_heads + h) * 2 * stride.
///
/// Launch measure_deviations with lag_blocks(...) blocks of lag_threads threads and
/// lag_shared_bytes(greater of the dims), rank_lag_parts with rank_blocks(...) of as many and
/// rank_shared_bytes.
struct lag_parameters {
    const std::byte* arena = nullptr;
    block_place place;
    const score_lane* lanes = nullptr;  ///< [count]; means and phases are not looked at
    const uint32_t* tables = nullptr;
    float* deviations = nullptr;
    float* scores = nullptr;
    uint64_t stride = 0;  ///< of both
    uint32_t count = 0;
    uint32_t most_slots = 0;  ///< of a lane
    uint32_t sinks = 0;
};

/// Parts that have a part after them; 0 when the sequence is too short.
KVRT_BOTH constexpr uint32_t lag_parts(uint32_t sinks, uint32_t slots) {
    const uint32_t parts = slots > sinks ? (slots - sinks) / lag_slots : 0;
    return parts > 1 ? parts - 1 : 0;
}
/// For keys and for values.
constexpr uint32_t lag_blocks(uint32_t lanes, uint32_t kv_heads, uint32_t sinks,
                              uint32_t most_slots) {
    return lanes * kv_heads * lag_parts(sinks, most_slots) * 2;
}
/// One more for slots that are in no part.
constexpr uint32_t rank_blocks(uint32_t lanes, uint32_t kv_heads, uint32_t sinks,
                               uint32_t most_slots) {
    return lanes * kv_heads * (lag_parts(sinks, most_slots) + 1);
}
inline constexpr uint32_t most_lag_rows = 16;  ///< that are compared at once
constexpr uint32_t lag_shared_bytes(uint32_t dim) {
    return 2 * most_lag_rows * dim * static_cast<uint32_t>(sizeof(float));
}
inline constexpr uint32_t rank_shared_bytes = lag_slots * sizeof(float);

/// What a channel is measured by: x' = x * inverse - offset, 0 in the middle of the range.
struct channel_range {
    float inverse, offset;
};
template <class Cx>
KVRT_DEVICE channel_range range_of_channel(float least, float greatest) {
    const float infinity = Cx::bits_to_f32(0x7f800000u);
    const float range = greatest - least, inverse = 1.0f / range;
    const bool usable = range > 0.0f && range < infinity && inverse < infinity;
    return {usable ? inverse : 0.0f, usable ? (least + range / 2.0f) * inverse : 0.0f};
}

/// Leaves the channels' ranges over slots [first, first + lag_slots) in shared memory: inverses,
/// then offsets. NaN is left out.
template <class Cx, class rows>
KVRT_DEVICE void find_ranges(const rows& row_of, uint32_t dim, uint32_t first) {
    float* const least = reinterpret_cast<float*>(Cx::shared());
    float* const greatest = least + most_lag_rows * dim;
    const uint32_t groups = dim / lane_channels;
    const uint32_t abreast = lag_threads / groups;
    const uint32_t at_once = abreast < most_lag_rows ? abreast : most_lag_rows;
    const uint32_t mine = Cx::thread() / groups, channel = Cx::thread() % groups * lane_channels;
    if (mine < at_once) {
        float low[lane_channels], high[lane_channels];
        KVRT_UNROLL
        for (uint32_t k = 0; k < lane_channels; ++k) {
            low[k] = Cx::bits_to_f32(0x7f800000u);
            high[k] = Cx::bits_to_f32(0xff800000u);
        }
        KVRT_ROLLED
        for (uint32_t i = mine; i < lag_slots; i += at_once) {
            float x[lane_channels];
            row_of(first + i).read(channel, x);
            KVRT_UNROLL
            for (uint32_t k = 0; k < lane_channels; ++k) {
                low[k] = x[k] < low[k] ? x[k] : low[k];
                high[k] = high[k] < x[k] ? x[k] : high[k];
            }
        }
        KVRT_UNROLL
        for (uint32_t k = 0; k < lane_channels; ++k) {
            Cx::store(least + mine * dim + channel + k, low[k]);
            Cx::store(greatest + mine * dim + channel + k, high[k]);
        }
    }
    Cx::barrier();
    for (uint32_t i = Cx::thread(); i < dim; i += lag_threads) {
        float low = Cx::template load<float>(least + i);
        float high = Cx::template load<float>(greatest + i);
        for (uint32_t r = 1; r < at_once; ++r) {
            const float x = Cx::template load<float>(least + r * dim + i);
            const float y = Cx::template load<float>(greatest + r * dim + i);
            low = x < low ? x : low;
            high = high < y ? y : high;
        }
        // In the place of the first row's, which no other thread reads.
        const channel_range range = range_of_channel<Cx>(low, high);
        Cx::store(least + i, range.inverse);
        Cx::store(greatest + i, range.offset);
    }
    Cx::barrier();
}

/// Of a row, measured so: the deviation over its channels.
template <class Cx>
KVRT_DEVICE float deviation_of(const opened_row<Cx>& row, const float* inverses,
                               const float* offsets) {
    float sums[2] = {}, squares[2] = {};
    const uint32_t dim = row.operand.dim;
    KVRT_ROLLED
    for (uint32_t first = 0; first < dim; first += lane_channels) {
        float x[lane_channels];
        row.read(first, x);
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            const float measured =
                Cx::multiply_add(x[i], Cx::template load<float>(inverses + first + i),
                                 -Cx::template load<float>(offsets + first + i));
            sums[i % 2] += measured;
            squares[i % 2] = Cx::multiply_add(measured, measured, squares[i % 2]);
        }
    }
    const float sum = sums[0] + sums[1];
    const float share = 1.0f / static_cast<float>(dim);
    const float freedom = 1.0f / static_cast<float>(dim - 1);
    const float square = Cx::multiply_add(-(sum * share), sum, squares[0] + squares[1]);
    if (square != square) return square;
    const float variance = square * freedom;
    return std::sqrt(variance < 0.0f ? 0.0f : variance);
}

/// The kernel of deviations.
template <class Cx>
KVRT_DEVICE void measure_deviations(const lag_parameters& call) {
    const uint32_t parts = lag_parts(call.sinks, call.most_slots);
    const bool value = Cx::block() % 2 != 0;
    const uint32_t part = Cx::block() / 2 % parts;
    const uint32_t unit = Cx::block() / 2 / parts;
    const uint32_t head = unit % call.place.kv_heads;
    const score_lane& lane = call.lanes[unit / call.place.kv_heads];
    const uint32_t slots = Cx::template load_constant<uint32_t>(&lane.slots);
    if (part >= lag_parts(call.sinks, slots)) return;
    const operand_place& operand = value ? call.place.values : call.place.keys;
    const uint32_t* const table = call.tables + Cx::template load_constant<uint64_t>(&lane.table);
    const auto row_of = [&](uint32_t slot) {
        return opened_row<Cx>(call.place, operand, call.arena, table, slot, head);
    };
    const uint32_t first = call.sinks + part * lag_slots;
    find_ranges<Cx>(row_of, operand.dim, first + lag_slots);
    const float* const inverses = reinterpret_cast<const float*>(Cx::shared());
    const uint32_t slot = first + Cx::thread();
    Cx::store(call.deviations + (uint64_t{unit} * 2 + (value ? 1 : 0)) * call.stride + slot,
              deviation_of<Cx>(row_of(slot), inverses, inverses + most_lag_rows * operand.dim));
}

/// From a deviation to its power of e, where the part's greatest, or 0, has 1; returns one over the
/// sum of all. NaN stays with its slot. `values`: [lag_slots], in shared memory.
template <class Cx>
KVRT_DEVICE float take_powers(float& value, float* values) {
    Cx::barrier();
    Cx::store(values + Cx::thread(), value);
    Cx::barrier();
    float peak = 0.0f;
    for (uint32_t i = 0; i < lag_slots; ++i) {
        const float other = Cx::template load<float>(values + i);
        if (other > peak) peak = other;
    }
    value = natural_exp<Cx>(value - peak);
    Cx::barrier();
    Cx::store(values + Cx::thread(), value);
    Cx::barrier();
    double sum = 0.0;
    for (uint32_t s = 0; s < slots_of_group; ++s) {
        float partial = 0.0f;
        for (uint32_t i = s; i < lag_slots; i += slots_of_group) {
            const float other = Cx::template load<float>(values + i);
            if (other == other) partial += other;
        }
        sum += double{partial};
    }
    return static_cast<float>(1.0 / sum);
}

/// Slots that are in no part: sinks, the last part and what is left over after it.
template <class Cx>
KVRT_DEVICE void score_kept(uint32_t sinks, uint32_t slots, float* scores) {
    const uint32_t parts = lag_parts(sinks, slots);
    const uint32_t held = sinks < slots ? sinks : slots;
    const uint32_t first = parts != 0 ? sinks + parts * lag_slots : held;
    const float count = static_cast<float>(slots - first);
    for (uint32_t slot = Cx::thread(); slot < held; slot += lag_threads) {
        Cx::store(scores + slot, 2.0f);
    }
    for (uint32_t slot = first + Cx::thread(); slot < slots; slot += lag_threads) {
        const float share = static_cast<float>(slot - first) / count;
        Cx::store(scores + slot, parts != 0 ? 1.0f + share : share);
    }
}

/// The kernel of ranks.
template <class Cx>
KVRT_DEVICE void rank_lag_parts(const lag_parameters& call) {
    const uint32_t parts = lag_parts(call.sinks, call.most_slots);
    const uint32_t part = Cx::block() % (parts + 1);
    const uint32_t unit = Cx::block() / (parts + 1);
    const uint32_t head = unit % call.place.kv_heads;
    const score_lane& lane = call.lanes[unit / call.place.kv_heads];
    const uint32_t slots = Cx::template load_constant<uint32_t>(&lane.slots);
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&lane.scores) +
                          uint64_t{head} * call.stride;
    if (part == parts) return score_kept<Cx>(call.sinks, slots, scores);
    if (part >= lag_parts(call.sinks, slots)) return;
    const uint32_t slot = call.sinks + part * lag_slots + Cx::thread();
    const float* const deviations = call.deviations + uint64_t{unit} * 2 * call.stride;
    float* const values = reinterpret_cast<float*>(Cx::shared());
    float of_key = Cx::template load<float>(deviations + slot);
    float of_value = Cx::template load<float>(deviations + call.stride + slot);
    const float share_of_keys = take_powers<Cx>(of_key, values);
    const float share_of_values = take_powers<Cx>(of_value, values);
    const float mine = Cx::multiply_add(of_key, share_of_keys, of_value * share_of_values);
    Cx::barrier();
    Cx::store(values + Cx::thread(), mine);
    Cx::barrier();
    uint32_t rank = 0;
    for (uint32_t i = 0; i < lag_slots; ++i) {
        const float other = Cx::template load<float>(values + i);
        const bool equal = other == mine || (other != other && mine != mine);
        const bool lower = other < mine || (other != other && mine == mine);
        if (lower || (equal && i > Cx::thread())) ++rank;
    }
    Cx::store(scores + slot, static_cast<float>(rank) / static_cast<float>(lag_slots));
}

}  // namespace kvrt::kernels
