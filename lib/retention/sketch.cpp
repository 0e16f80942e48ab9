#include "retention/sketch.hpp"

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "retention/sketch.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cmath>
#include <numbers>

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

// out = |x G|^2, or out times that.
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
            if constexpr (multiply) {
                alignas(64) float before[vector_slots] = {};
                const uint32_t count = HWY_MIN(vector_slots, slots - first);
                for (uint32_t i = 0; i < count; ++i) before[i] = out[slot + first + i];
                square = hn::Mul(square, hn::Load(d, before));
            }
            store_lanes(square, first, slots, out + slot);
        }
    }
};

void score_both(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                const float* sketch, float* scores) {
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

void draw_sketch(const random_key& key, uint32_t dim, float* sketch) {
    static_assert(sketch_directions % 2 == 0);
    for (uint64_t i = 0; i < sketch_count(dim); i += 2) {
        // Box-Muller: one draw makes two normal numbers.
        const uint64_t bits = draw_bits(key, draw_purpose::sketch, i / 2);
        const double radius_draw = (static_cast<double>(bits >> 32) + 0.5) * 0x1p-32;
        const double angle_draw = static_cast<double>(bits & 0xffffffffu) * 0x1p-32;
        const double radius = std::sqrt(-2.0 * std::log(radius_draw) / sketch_directions);
        const double angle = 2.0 * std::numbers::pi * angle_draw;
        sketch[i] = static_cast<float>(radius * std::cos(angle));
        sketch[i + 1] = static_cast<float>(radius * std::sin(angle));
    }
}

void score_sketch(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                  const float* sketch, float* scores) {
    HWY_DYNAMIC_DISPATCH(score_both)(rows, first_slot, end_slot, sketch, scores);
}

}  // namespace kvrt
#endif
