// VaSE's scores by a sketch (retention/sketch.hpp says what they are), for a whole cohort: the
// random directions of each lane, then how large keys and values are in them.
#pragma once

#include <cmath>

#include "kernels/content.hpp"
#include "kernels/places.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t sketch_directions = 20;
inline constexpr uint32_t sketch_threads = 128;

/// Sketches are [count][greater of the dims][sketch_directions]. Rows of scores as in places.hpp.
///
/// Launch draw_sketches with `count` blocks of sketch_threads threads, score_sketches with
/// score_blocks(...) of score_threads and sketch_shared_bytes(greater of the dims).
struct sketch_parameters {
    const std::byte* arena = nullptr;
    block_place place;
    const place_lane* lanes = nullptr;  ///< [count]; positions are not looked at
    const uint32_t* tables = nullptr;
    float* sketches = nullptr;
    float* scores = nullptr;
    uint64_t stride = 0;
    uint32_t count = 0;
    uint32_t most_slots = 0;  ///< of a lane

    KVRT_BOTH uint32_t dim() const {
        return place.keys.dim < place.values.dim ? place.values.dim : place.keys.dim;
    }
};
KVRT_BOTH constexpr uint32_t sketch_floats(uint32_t dim) { return dim * sketch_directions; }
constexpr uint32_t sketch_shared_bytes(uint32_t dim) {
    return sketch_floats(dim) * static_cast<uint32_t>(sizeof(float));
}

/// cos and sin of a part of a turn in [0, 1), to 1e-15: quarters are taken off, and what is left is
/// within 1/8. The compiler's own take a stack, for arguments of any size.
KVRT_DEVICE void turn_of_part(double part, double& cosine, double& sine) {
    const uint32_t quarter = static_cast<uint32_t>(part * 4.0 + 0.5);
    const double x = 6.283185307179586476925286766559 * (part - 0.25 * quarter), xx = x * x;
    double s = 1.0, c = 1.0;
    KVRT_UNROLL
    for (int32_t k = 16; k > 0; k -= 2) {
        s = 1.0 - s * xx / (k * (k + 1));
        c = 1.0 - c * xx / (k * (k - 1));
    }
    s *= x;
    const bool odd = quarter % 2 != 0;
    cosine = (odd ? s : c) * (quarter == 1 || quarter == 2 ? -1.0 : 1.0);
    sine = (odd ? c : s) * (quarter == 2 || quarter == 3 ? -1.0 : 1.0);
}

/// The kernel that draws: normal numbers / sqrt(sketch_directions), two of one draw by Box and
/// Muller, rounded to bf16.
template <class Cx>
KVRT_DEVICE void draw_sketches(const sketch_parameters& call) {
    constexpr uint64_t purpose = 1;  // draw_purpose::sketch
    const place_lane& lane = call.lanes[Cx::block()];
    const uint64_t seed = Cx::template load_constant<uint64_t>(&lane.seed);
    const uint64_t round = Cx::template load_constant<uint64_t>(&lane.round);
    const uint64_t layer = uint64_t{Cx::template load_constant<uint32_t>(&lane.layer)} << 32;
    const uint32_t count = sketch_floats(call.dim());
    float* const sketch = call.sketches + uint64_t{Cx::block()} * count;
    for (uint32_t i = Cx::thread(); i < count / 2; i += sketch_threads) {
        const uint64_t bits = draw_bits(round, layer, i, purpose, seed);
        const double radius_draw = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
        const double angle_draw = static_cast<double>(bits & 0xffffffffu) * 0x1p-32;
        const double radius = Cx::square_root(-2.0 * std::log(radius_draw) / sketch_directions);
        double cosine, sine;
        turn_of_part(angle_draw, cosine, sine);
        const auto put = [&](uint32_t at, double value) {
            const uint32_t word = Cx::f32_to_bits(static_cast<float>(value));
            Cx::store(sketch + at,
                      Cx::bits_to_f32((word + 0x7fffu + (word >> 16 & 1)) & 0xffff0000u));
        };
        put(2 * i, radius * cosine);
        put(2 * i + 1, radius * sine);
    }
}

/// The square of a row's length in the sketch's directions. `sketch`: in shared memory.
template <class Cx>
KVRT_DEVICE float square_in_sketch(const opened_row<Cx>& row, const float* sketch) {
    float sums[sketch_directions] = {};
    KVRT_ROLLED
    for (uint32_t first = 0; first < row.operand.dim; first += lane_channels) {
        float x[lane_channels];
        row.read(first, x);
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            const float* const weights = sketch + (first + i) * sketch_directions;
            KVRT_UNROLL
            for (uint32_t c = 0; c < sketch_directions; c += 4) {
                const word4 four = Cx::template load<word4>(weights + c);
                sums[c] = Cx::multiply_add(Cx::bits_to_f32(four.x), x[i], sums[c]);
                sums[c + 1] = Cx::multiply_add(Cx::bits_to_f32(four.y), x[i], sums[c + 1]);
                sums[c + 2] = Cx::multiply_add(Cx::bits_to_f32(four.z), x[i], sums[c + 2]);
                sums[c + 3] = Cx::multiply_add(Cx::bits_to_f32(four.w), x[i], sums[c + 3]);
            }
        }
    }
    float square = 0.0f;
    KVRT_UNROLL
    for (uint32_t c = 0; c < sketch_directions; ++c) {
        square = Cx::multiply_add(sums[c], sums[c], square);
    }
    return square;
}

/// The kernel of scores.
template <class Cx>
KVRT_DEVICE void score_sketches(const sketch_parameters& call) {
    const score_share share =
        share_of_stretch<Cx>(call.lanes, call.count, call.place.kv_heads, call.most_slots);
    if (share.end == 0) return;
    const place_lane& lane = call.lanes[share.index];
    const uint32_t* const table = call.tables + Cx::template load_constant<uint64_t>(&lane.table);
    float* const scores = call.scores + Cx::template load_constant<uint64_t>(&lane.scores) +
                          uint64_t{share.head} * call.stride;
    const uint32_t count = sketch_floats(call.dim());
    float* const sketch = reinterpret_cast<float*>(Cx::shared());
    for (uint32_t i = Cx::thread(); i < count; i += score_threads) {
        Cx::store(sketch + i, Cx::template load_constant<float>(call.sketches +
                                                                uint64_t{share.index} * count + i));
    }
    Cx::barrier();
    for (uint32_t slot = share.first + Cx::thread(); slot < share.end; slot += score_threads) {
        float product = 1.0f;
        KVRT_ROLLED
        for (uint32_t which = 0; which < 2; ++which) {
            const opened_row<Cx> row(call.place, which == 0 ? call.place.keys : call.place.values,
                                     call.arena, table, slot, share.head);
            product *= square_in_sketch<Cx>(row, sketch);
        }
        Cx::store(scores + slot, product);
    }
}

}  // namespace kvrt::kernels
