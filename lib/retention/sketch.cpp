#include "retention/sketch.hpp"

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "retention/sketch.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <bit>
#include <cmath>
#include <numbers>

#include "base/amx.hpp"
#include "retention/amx_sketch-inl.hpp"
#include "retention/sampling.hpp"
#include "retention/visit-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

// As many directions at once as leave registers for a channel and its weights on 16 registers, and
// as compilers unroll.
constexpr uint32_t directions_at_once = 10;
static_assert(sketch_directions % directions_at_once == 0);

// out = squares of slots [first, ...) of a tile, or out times those.
template <bool multiply>
HWY_INLINE void put_squares(floats squares, uint32_t first, uint32_t slots, float* out) {
    const float_tag d;
    if constexpr (multiply) {
        alignas(64) float before[vector_slots] = {};
        const uint32_t count = HWY_MIN(vector_slots, slots - first);
        for (uint32_t i = 0; i < count; ++i) before[i] = out[first + i];
        squares = hn::Mul(squares, hn::Load(d, before));
    }
    store_lanes(squares, first, slots, out);
}

template <bool multiply>
struct sketch_kernel {
    uint32_t dim;
    const float* sketch;
    float* out;

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t slots, tile_prefetch coming) const {
        const float_tag d;
        for (uint32_t first = 0; first < slots; first += vector_slots) {
            floats square = hn::Zero(d);
            for (uint32_t from = 0; from < sketch_directions; from += directions_at_once) {
                floats sums[directions_at_once];
                for (floats& sum : sums) sum = hn::Zero(d);
                const float* weights = sketch + from;
                for (uint32_t i = 0; i < dim; ++i, weights += sketch_directions) {
                    if (first + from == 0) coming.advance(slot_group * element_bytes(type));
                    const floats channel = load_lanes<type>(tile, i, first);
                    for (uint32_t c = 0; c < directions_at_once; ++c) {
                        sums[c] = hn::MulAdd(hn::Set(d, weights[c]), channel, sums[c]);
                    }
                }
                for (const floats& sum : sums) square = hn::MulAdd(sum, sum, square);
            }
            put_squares<multiply>(square, first, slots, out + slot);
        }
    }
};

#if HWY_TARGET == HWY_AVX3
// Where the answers of tiles go.
template <bool multiply>
struct amx_sketch {
    amx_squares squares;
    float* out;
    uint32_t slot = 0, slots = 0;  // of the last one asked for

    void put(uint32_t before) {
        put_squares<multiply>(squares.answer(before), 0, slots, out + slot);
    }
    void asked(uint32_t first, uint32_t count) {
        if (slots != 0) put(1);
        slot = first;
        slots = count;
    }
    void finish() {
        if (slots != 0) put(0);
    }
};

template <bool multiply>
struct amx_sketch_kernel {
    amx_sketch<multiply>& sketch;

    static constexpr bool takes_rows = true;

    template <element type>
    void rows(const row_group<type>& group, uint32_t slot, uint32_t slots,
              tile_prefetch coming) const {
        sketch.squares.ask(group, coming);
        sketch.asked(slot, slots);
    }

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t slots, tile_prefetch coming) const {
        sketch.squares.template ask<type>(tile, coming);
        sketch.asked(slot, slots);
    }
};

template <bool multiply>
void score_one_by_amx(operand_role role, const stored_rows& rows, uint32_t dim, uint32_t first_slot,
                      uint32_t end_slot, amx_directions& directions, float* scores) {
    amx_sketch<multiply> sketch{amx_squares(directions, dim), scores};
    visit_tiles(role, rows, first_slot, end_slot, amx_sketch_kernel<multiply>{sketch});
    sketch.finish();
}

bool amx_takes(const stored_rows& rows) {
    return rows.key_dim() % amx_channels == 0 && rows.value_dim() % amx_channels == 0 &&
           amx_usable();
}

void score_both_by_amx(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                       const float* sketch, float* scores) {
    amx_directions directions(sketch, HWY_MAX(rows.key_dim(), rows.value_dim()));
    set_sketch_shapes();
    score_one_by_amx<false>(operand_role::keys, rows, rows.key_dim(), first_slot, end_slot,
                            directions, scores);
    score_one_by_amx<true>(operand_role::values, rows, rows.value_dim(), first_slot, end_slot,
                           directions, scores);
    release_sketch_shapes();
}
#endif

void score_both(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                const float* sketch, float* scores) {
#if HWY_TARGET == HWY_AVX3
    if (amx_takes(rows)) return score_both_by_amx(rows, first_slot, end_slot, sketch, scores);
#endif
    visit_tiles(operand_role::keys, rows, first_slot, end_slot,
                sketch_kernel<false>{rows.key_dim(), sketch, scores});
    visit_tiles(operand_role::values, rows, first_slot, end_slot,
                sketch_kernel<true>{rows.value_dim(), sketch, scores});
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(score_both);

namespace {

/// The bf16 number nearest to a finite one: matrix units take it as it is.
float nearest_bf16(double value) {
    const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(value));
    return std::bit_cast<float>((bits + 0x7fffu + (bits >> 16 & 1)) & 0xffff0000u);
}

}  // namespace

void draw_sketch(const random_key& key, uint32_t dim, float* sketch) {
    static_assert(sketch_directions % 2 == 0);
    for (uint64_t i = 0; i < sketch_count(dim); i += 2) {
        // Box-Muller: one draw makes two normal numbers.
        const uint64_t bits = draw_bits(key, draw_purpose::sketch, i / 2);
        const double radius_draw = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
        const double angle_draw = static_cast<double>(bits & 0xffffffffu) * 0x1p-32;
        const double radius = std::sqrt(-2.0 * std::log(radius_draw) / sketch_directions);
        const double angle = 2.0 * std::numbers::pi * angle_draw;
        sketch[i] = nearest_bf16(radius * std::cos(angle));
        sketch[i + 1] = nearest_bf16(radius * std::sin(angle));
    }
}

void score_sketch(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                  const float* sketch, float* scores) {
    HWY_DYNAMIC_DISPATCH(score_both)(rows, first_slot, end_slot, sketch, scores);
}

}  // namespace kvrt
#endif
