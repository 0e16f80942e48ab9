// The passes over cached keys: TriAttention and key norms, on tiles that visit-inl.hpp brings.

#include "base/simd_targets.hpp"
#include "retention/triattention.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "retention/score_keys.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "retention/scores.hpp"
#include "retention/visit-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

constexpr uint32_t most_heads_at_once = 8;

// ---- TriAttention
// --------------------------------------------------------------------------------

// `heads` query heads from `first_head` on, of one KV head's group.
template <uint32_t heads>
struct triattention_kernel {
    const triattention_shape& shape;
    const rope_description& rope;
    const float* weights;
    uint32_t first_head;
    float* scores;
    uint64_t score_stride;

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t slots, tile_prefetch coming) const {
        const float_tag d;
        const uint32_t bands = rope.bands(shape.key_dim), rotated = rope.rotated_bands();
        const uint32_t group = shape.group;
        const float* norm_weights = weights + first_head;
        const float* dot_weights = weights + bands * group;
        const uint32_t variant_size = shape.key_dim * group;
        for (uint32_t first = 0; first < slots; first += vector_slots) {
            floats best[heads], norm[heads];
            for (uint32_t h = 0; h < heads; ++h) best[h] = norm[h] = hn::Zero(d);
            for (uint32_t band = 0; band < rotated; ++band) {
                if (first == 0) coming.advance(2 * slot_group * element_bytes(type));
                const floats a = load_lanes<type>(tile, first_dimension(band), first);
                const floats b = load_lanes<type>(tile, second_dimension(band), first);
                const floats magnitude = hn::Sqrt(hn::MulAdd(a, a, hn::Mul(b, b)));
                const float* dot = dot_weights + 2 * (band * group + first_head);
                const float* spread = norm_weights + band * group;
                for (uint32_t h = 0; h < heads; ++h) {
                    norm[h] = hn::MulAdd(hn::Set(d, spread[h]), magnitude, norm[h]);
                    best[h] = hn::MulAdd(hn::Set(d, dot[2 * h]), a, best[h]);
                    best[h] = hn::MulAdd(hn::Set(d, dot[2 * h + 1]), b, best[h]);
                }
            }
            for (uint32_t band = rotated; band < bands; ++band) {
                if (first == 0) coming.advance(slot_group * element_bytes(type));
                const floats a = load_lanes<type>(tile, rotated + band, first);
                const floats magnitude = hn::Abs(a);
                const float* dot = dot_weights + (rotated + band) * group + first_head;
                const float* spread = norm_weights + band * group;
                for (uint32_t h = 0; h < heads; ++h) {
                    norm[h] = hn::MulAdd(hn::Set(d, spread[h]), magnitude, norm[h]);
                    best[h] = hn::MulAdd(hn::Set(d, dot[h]), a, best[h]);
                }
            }
            for (uint32_t variant = 1; variant < shape.variants(); ++variant) {
                floats sum[heads];
                add_dot<type>(tile, first, dot_weights + variant * variant_size, sum);
                for (uint32_t h = 0; h < heads; ++h) best[h] = hn::Max(best[h], sum[h]);
            }
            for (uint32_t h = 0; h < heads; ++h) {
                store_lanes(hn::Add(best[h], norm[h]), first, slots,
                            scores + (first_head + h) * score_stride + slot);
            }
        }
    }

  private:
    uint32_t first_dimension(uint32_t band) const {
        return rope.style == KV_ROPE_HALF ? band : 2 * band;
    }
    uint32_t second_dimension(uint32_t band) const {
        return rope.style == KV_ROPE_HALF ? band + rope.rotated_bands() : 2 * band + 1;
    }

    // The dot products of one variant; the tile is in the first-level cache by now.
    template <element type>
    HWY_INLINE void add_dot(const std::byte* tile, uint32_t first, const float* variant_weights,
                            floats* sum) const {
        const float_tag d;
        const uint32_t rotated = rope.rotated_bands(), group = shape.group;
        for (uint32_t h = 0; h < heads; ++h) sum[h] = hn::Zero(d);
        for (uint32_t band = 0; band < rotated; ++band) {
            const floats a = load_lanes<type>(tile, first_dimension(band), first);
            const floats b = load_lanes<type>(tile, second_dimension(band), first);
            const float* dot = variant_weights + 2 * (band * group + first_head);
            for (uint32_t h = 0; h < heads; ++h) {
                sum[h] = hn::MulAdd(hn::Set(d, dot[2 * h]), a, sum[h]);
                sum[h] = hn::MulAdd(hn::Set(d, dot[2 * h + 1]), b, sum[h]);
            }
        }
        for (uint32_t dimension = 2 * rotated; dimension < shape.key_dim; ++dimension) {
            const floats a = load_lanes<type>(tile, dimension, first);
            const float* dot = variant_weights + dimension * group + first_head;
            for (uint32_t h = 0; h < heads; ++h) {
                sum[h] = hn::MulAdd(hn::Set(d, dot[h]), a, sum[h]);
            }
        }
    }
};

template <uint32_t heads>
void score_heads(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                 const triattention_shape& shape, const rope_description& rope,
                 const float* weights, uint32_t first_head, float* scores, uint64_t score_stride) {
    visit_tiles(operand_role::keys, rows, first_slot, end_slot,
                triattention_kernel<heads>{shape, rope, weights, first_head, scores, score_stride});
}

void triattention(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                  const triattention_shape& shape, const rope_description& rope,
                  const float* weights, float* scores, uint64_t score_stride) {
    constexpr decltype(&score_heads<1>) kernels[most_heads_at_once] = {
        score_heads<1>, score_heads<2>, score_heads<3>, score_heads<4>,
        score_heads<5>, score_heads<6>, score_heads<7>, score_heads<8>};
    for (uint32_t head = 0; head < shape.group; head += most_heads_at_once) {
        const uint32_t heads = HWY_MIN(most_heads_at_once, shape.group - head);
        kernels[heads - 1](rows, first_slot, end_slot, shape, rope, weights, head, scores,
                           score_stride);
    }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(triattention);

void score_triattention(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                        const triattention_shape& shape, const rope_description& rope,
                        const float* weights, float* scores, uint64_t score_stride) {
    HWY_DYNAMIC_DISPATCH(triattention)
    (rows, first_slot, end_slot, shape, rope, weights, scores, score_stride);
}

}  // namespace kvrt
#endif
