// The pass over the keys of Expected Attention.

#include "base/simd_targets.hpp"
#include "retention/expected_attention.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "retention/expected_logits.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "retention/visit-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

constexpr uint32_t most_heads_at_once = 4;

// `heads` query heads from `first_head` on, of one KV head's group.
template <uint32_t heads, bool with_covariances>
struct expected_kernel {
    const expected_shape& shape;
    const rope_description& rope;
    const float* weights;
    uint32_t first_head;
    float* logits;
    uint64_t stride;

    static constexpr uint32_t per_rotated = with_covariances ? 5 : 2;
    static constexpr uint32_t per_other = with_covariances ? 2 : 1;

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t slots, tile_prefetch coming) const {
        const float_tag d;
        const uint32_t rotated = rope.rotated_bands(), others = shape.key_dim - 2 * rotated;
        const bool halves = rope.style == KV_ROPE_HALF;
        for (uint32_t first = 0; first < slots; first += vector_slots) {
            floats sums[heads];
            for (floats& sum : sums) sum = hn::Zero(d);
            const float* weight = weights + first_head * per_rotated;
            for (uint32_t band = 0; band < rotated; ++band) {
                if (first == 0) coming.advance(2 * slot_group * element_bytes(type));
                const uint32_t real = halves ? band : 2 * band;
                const floats a = load_lanes<type>(tile, real, first);
                const floats b = load_lanes<type>(tile, halves ? band + rotated : real + 1, first);
                const float* of = weight + uint64_t{band} * shape.group * per_rotated;
                add(a, of, sums);
                add(b, of + 1, sums);
                if constexpr (with_covariances) {
                    add(hn::Mul(a, a), of + 2, sums);
                    add(hn::Mul(b, b), of + 3, sums);
                    add(hn::Mul(a, b), of + 4, sums);
                }
            }
            weight =
                weights + uint64_t{rotated} * shape.group * per_rotated + first_head * per_other;
            for (uint32_t band = 0; band < others; ++band) {
                if (first == 0) coming.advance(slot_group * element_bytes(type));
                const floats a = load_lanes<type>(tile, 2 * rotated + band, first);
                const float* of = weight + uint64_t{band} * shape.group * per_other;
                add<per_other>(a, of, sums);
                if constexpr (with_covariances) add<per_other>(hn::Mul(a, a), of + 1, sums);
            }
            for (uint32_t h = 0; h < heads; ++h) {
                store_lanes(sums[h], first, slots, logits + (first_head + h) * stride + slot);
            }
        }
    }

  private:
    template <uint32_t step = per_rotated>
    static HWY_INLINE void add(floats x, const float* weight, floats (&sums)[heads]) {
        const float_tag d;
        for (uint32_t h = 0; h < heads; ++h) {
            sums[h] = hn::MulAdd(hn::Set(d, weight[h * step]), x, sums[h]);
        }
    }
};

template <uint32_t heads>
void score_heads(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                 const expected_shape& shape, const rope_description& rope, const float* weights,
                 bool with_covariances, uint32_t first_head, float* logits, uint64_t stride) {
    if (with_covariances) {
        visit_tiles(operand_role::keys, rows, first_slot, end_slot,
                    expected_kernel<heads, true>{shape, rope, weights, first_head, logits, stride});
    } else {
        visit_tiles(
            operand_role::keys, rows, first_slot, end_slot,
            expected_kernel<heads, false>{shape, rope, weights, first_head, logits, stride});
    }
}

void score_group(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                 const expected_shape& shape, const rope_description& rope, const float* weights,
                 bool with_covariances, float* logits, uint64_t stride) {
    constexpr decltype(&score_heads<1>) kernels[most_heads_at_once] = {
        score_heads<1>, score_heads<2>, score_heads<3>, score_heads<4>};
    for (uint32_t head = 0; head < shape.group; head += most_heads_at_once) {
        const uint32_t heads = HWY_MIN(most_heads_at_once, shape.group - head);
        kernels[heads - 1](rows, first_slot, end_slot, shape, rope, weights, with_covariances, head,
                           logits, stride);
    }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(score_group);

void score_expected_logits(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                           const expected_shape& shape, const rope_description& rope,
                           const float* weights, bool with_covariances, float* logits,
                           uint64_t stride) {
    HWY_DYNAMIC_DISPATCH(score_group)
    (rows, first_slot, end_slot, shape, rope, weights, with_covariances, logits, stride);
}

}  // namespace kvrt
#endif
