// Scores from the directions of keys, KeyDiff's and R-KV's redundancy (retention/unit_keys.hpp says
// what they are): sums of directions over parts of slots, then each key against their sum. Bit for
// bit as the CPU where that fuses multiplication and addition.
#pragma once

#include <cmath>

#include "kernels/content.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t direction_threads = 256;
inline constexpr uint32_t direction_part = 2048;  ///< slots that one sum is of

/// Sums of KV head h of lane i begin at (i * kv_heads + h) * sums_stride: [parts][key dim]. Rows of
/// scores as in score.hpp, one for each KV head.
///
/// Launch sum_directions with direction_blocks(...) blocks of direction_threads threads and
/// direction_shared_bytes(key dim); score_directions with score_blocks(...) of score_threads and
/// total_shared_bytes(key dim).
struct direction_parameters {
    const std::byte* arena = nullptr;
    block_place place;
    const score_lane* lanes = nullptr;  ///< [count]; means and phases are not looked at
    const uint32_t* tables = nullptr;
    double* sums = nullptr;
    float* scores = nullptr;
    uint64_t sums_stride = 0;
    uint64_t score_stride = 0;
    uint32_t count = 0;
    uint32_t most_slots = 0;  ///< of a lane
    bool redundancy = false;  ///< R-KV's linear form, instead of KeyDiff's scores
};

KVRT_BOTH constexpr uint32_t direction_parts(uint32_t slots) {
    return slots / direction_part + (slots % direction_part != 0 ? 1 : 0);
}
constexpr uint32_t direction_blocks(uint32_t lanes, uint32_t kv_heads, uint32_t most_slots) {
    return lanes * kv_heads * direction_parts(most_slots);
}
constexpr uint32_t direction_shared_bytes(uint32_t dim) {
    return (direction_part + slots_of_group * dim) * static_cast<uint32_t>(sizeof(float));
}

constexpr uint32_t total_shared_bytes(uint32_t dim) {
    return dim * static_cast<uint32_t>(sizeof(double) + sizeof(float));
}

/// The kernel of sums. Each of 16 places of a slot in its group has a sum of its own.
template <class Cx>
KVRT_DEVICE void sum_directions(const direction_parameters& call) {
    const uint32_t dim = call.place.keys.dim;
    const score_share share = share_of_stretch<Cx, direction_part>(
        call.lanes, call.count, call.place.kv_heads, call.most_slots);
    if (share.end == 0) return;
    const uint32_t* const table =
        call.tables + Cx::template load_constant<uint64_t>(&call.lanes[share.index].table);
    const uint32_t slots = share.end - share.first;
    float* const inverse = reinterpret_cast<float*>(Cx::shared());  // of norms, [slots]
    float* const partial = inverse + direction_part;                // [16][dim]
    const auto row_of = [&](uint32_t i) {
        return opened_row<Cx>(call.place, call.place.keys, call.arena, table, share.first + i,
                              share.head);
    };
    for (uint32_t i = Cx::thread(); i < slots; i += direction_threads) {
        const float square = square_of_row<Cx>(row_of(i));
        // A key that is not finite has no direction, and leaves the sum to the others.
        const float by = square == 0.0f ? 0.0f : 1.0f / std::sqrt(square);
        Cx::store(inverse + i, by > 0.0f ? by : 0.0f);
    }
    Cx::barrier();
    const uint32_t groups = dim / lane_channels;
    for (uint32_t p = Cx::thread(); p < slots_of_group * groups; p += direction_threads) {
        const uint32_t first = p % groups * lane_channels;
        float sums[lane_channels] = {};
        for (uint32_t i = p / groups; i < slots; i += slots_of_group) {
            const float by = Cx::template load<float>(inverse + i);
            if (by == 0.0f) continue;
            float key[lane_channels];
            row_of(i).read(first, key);
            KVRT_UNROLL
            for (uint32_t k = 0; k < lane_channels; ++k) {
                sums[k] = Cx::multiply_add(key[k], by, sums[k]);
            }
        }
        KVRT_UNROLL
        for (uint32_t k = 0; k < lane_channels; ++k) {
            Cx::store(partial + p / groups * dim + first + k, sums[k]);
        }
    }
    Cx::barrier();
    double* const out =
        call.sums + (uint64_t{share.index} * call.place.kv_heads + share.head) * call.sums_stride +
        share.first / direction_part * dim;
    for (uint32_t i = Cx::thread(); i < dim; i += direction_threads) {
        double sum = 0.0;
        for (uint32_t s = 0; s < slots_of_group; ++s) {
            sum += double{Cx::template load<float>(partial + s * dim + i)};
        }
        Cx::store(out + i, sum);
    }
}

/// The kernel of scores: -cos(key, sum of all directions); or what the others' directions have of
/// the key's on average. 0 for keys of 0.
template <class Cx>
KVRT_DEVICE void score_directions(const direction_parameters& call) {
    const uint32_t dim = call.place.keys.dim;
    const score_share share =
        share_of_stretch<Cx>(call.lanes, call.count, call.place.kv_heads, call.most_slots);
    if (share.end == 0) return;
    const score_lane& lane = call.lanes[share.index];
    const uint32_t* const table = call.tables + Cx::template load_constant<uint64_t>(&lane.table);
    const uint32_t slots = Cx::template load_constant<uint32_t>(&lane.slots);
    const uint32_t parts = direction_parts(slots);
    const double* const sums =
        call.sums + (uint64_t{share.index} * call.place.kv_heads + share.head) * call.sums_stride;
    double* const total = reinterpret_cast<double*>(Cx::shared());
    for (uint32_t i = Cx::thread(); i < dim; i += score_threads) {
        double sum = 0.0;
        for (uint32_t part = 0; part < parts; ++part) {
            sum += Cx::template load<double>(sums + uint64_t{part} * dim + i);
        }
        Cx::store(total + i, sum);
    }
    Cx::barrier();
    double square_of_total = 0.0;
    for (uint32_t i = 0; i < dim; ++i) {
        const double sum = Cx::template load<double>(total + i);
        square_of_total += sum * sum;
    }
    const double inverse = square_of_total > 0.0 ? 1.0 / std::sqrt(square_of_total) : 0.0;
    float* const direction = reinterpret_cast<float*>(total + dim);
    for (uint32_t i = Cx::thread(); i < dim; i += score_threads) {
        const double sum = Cx::template load<double>(total + i);
        Cx::store(direction + i, static_cast<float>(call.redundancy ? sum / slots : sum * inverse));
    }
    Cx::barrier();
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&lane.scores) +
                          uint64_t{share.head} * call.score_stride;
    const float own = 1.0f / static_cast<float>(slots);
    for (uint32_t slot = share.first + Cx::thread(); slot < share.end; slot += score_threads) {
        const opened_row<Cx> row(call.place, call.place.keys, call.arena, table, slot, share.head);
        float dots[2] = {}, squares[2] = {};
        KVRT_ROLLED
        for (uint32_t first = 0; first < dim; first += lane_channels) {
            float key[lane_channels];
            row.read(first, key);
            KVRT_UNROLL
            for (uint32_t i = 0; i < lane_channels; ++i) {
                const float along = Cx::template load<float>(direction + first + i);
                dots[i % 2] = Cx::multiply_add(along, key[i], dots[i % 2]);
                squares[i % 2] = Cx::multiply_add(key[i], key[i], squares[i % 2]);
            }
        }
        const float square = squares[0] + squares[1];
        const float cosine = (dots[0] + dots[1]) / std::sqrt(square);
        const float score = call.redundancy ? cosine - own : 0.0f - cosine;
        Cx::store(scores + slot, square == 0.0f ? 0.0f : score);
    }
}

}  // namespace kvrt::kernels
