// The passes over cached keys: TriAttention and key norms. A unit is the tile of one group of 16
// slots, dim-major, read once where it lies; row-major layouts are turned around on the stack
// first. Lanes are slots, so no sum runs across a register, and a slot's score does not depend on
// others.

#include "base/simd_targets.hpp"
#include "retention/triattention.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "retention/score_keys.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include "format/rows.hpp"
#include "format/vector-inl.hpp"
#include "retention/scores.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

using float_tag = hn::CappedTag<float, slot_group>;
using floats = hn::Vec<float_tag>;
constexpr uint32_t vector_slots = static_cast<uint32_t>(hn::MaxLanes(float_tag()));

constexpr uint32_t most_heads_at_once = 8;

// Tiles of one head lie apart; so many tiles ahead are on their way into the second-level cache.
constexpr uint32_t tiles_ahead = 4;

struct key_source {
    const tile_layout& layout;
    const std::byte* arena;
    const block_id* blocks;
    uint32_t head;
    const slot_positions* positions;

    uint32_t position(uint32_t slot) const {
        return layout.keys.format->needs_positions ? static_cast<uint32_t>(positions->at(slot)) : 0;
    }
    const std::byte* block(uint32_t slot) const {
        return block_address(arena, blocks[slot / layout.block_tokens]);
    }
    const std::byte* at(uint32_t slot) const {
        return block(slot) + layout.keys.at(slot % layout.block_tokens, head, 0);
    }
};

// `bytes` of a tile that will be read soon, a little at a time.
struct tile_prefetch {
    const std::byte* next = nullptr;
    const std::byte* end = nullptr;

    HWY_INLINE void advance(uint32_t bytes) {
        for (uint32_t done = 0; done < bytes && next < end; done += 64, next += 64) {
            __builtin_prefetch(next, 0, 2);
        }
    }
};

// Calls kernel.tile<type>(tile, first slot, slots, prefetch) for each group of 16 slots.
template <element type, class tile_kernel>
void visit_dim_major(const key_source& keys, uint32_t first_slot, uint32_t end_slot,
                     const tile_kernel& kernel) {
    const uint32_t bytes = keys.layout.keys.dim * slot_group * element_bytes(type);
    for (uint32_t slot = first_slot; slot < end_slot; slot += slot_group) {
        tile_prefetch coming;
        const uint64_t later = uint64_t{slot} + tiles_ahead * slot_group;
        if (later < end_slot) {
            coming.next = keys.at(static_cast<uint32_t>(later));
            coming.end = coming.next + bytes;
        }
        kernel.template tile<type>(keys.at(slot), slot, HWY_MIN(slot_group, end_slot - slot),
                                   coming);
    }
}

// Tiles of f32, of rows that fill(slot, row) makes from however they are stored.
template <class tile_kernel, class row_source>
void visit_rows(uint32_t dim, uint32_t first_slot, uint32_t end_slot, const tile_kernel& kernel,
                const row_source& fill) {
    alignas(64) uint32_t rows[slot_group][widest_row] = {};
    alignas(64) uint32_t tile[widest_row * slot_group];
    const uint32_t* row_pointers[slot_group];
    for (uint32_t s = 0; s < slot_group; ++s) row_pointers[s] = rows[s];
    for (uint32_t slot = first_slot; slot < end_slot; slot += slot_group) {
        const uint32_t slots = HWY_MIN(slot_group, end_slot - slot);
        for (uint32_t s = 0; s < slots; ++s) fill(slot + s, reinterpret_cast<float*>(rows[s]));
        transpose_rows(row_pointers, dim, tile);
        tile_prefetch none;
        kernel.template tile<element::f32>(reinterpret_cast<const std::byte*>(tile), slot, slots,
                                           none);
    }
}

template <class tile_kernel>
void visit_tiles(const key_source& keys, uint32_t first_slot, uint32_t end_slot,
                 const tile_kernel& kernel) {
    const operand_layout& operand = keys.layout.keys;
    if (!operand.plain() || operand.rotated) {
        return visit_rows(operand.dim, first_slot, end_slot, kernel,
                          [&](uint32_t slot, float* row) {
                              read_row(operand, keys.block(slot), slot % keys.layout.block_tokens,
                                       keys.head, keys.position(slot), row);
                          });
    }
    const auto visit = [&](auto type) {
        constexpr element stored = decltype(type)::value;
        if (operand.word_stride != 1) {
            return visit_dim_major<stored>(keys, first_slot, end_slot, kernel);
        }
        visit_rows(operand.dim, first_slot, end_slot, kernel, [&](uint32_t slot, float* row) {
            convert_run<stored, element::f32>(keys.at(slot), reinterpret_cast<std::byte*>(row),
                                              operand.dim);
        });
    };
    switch (operand.type) {
        case element::f32:
            return visit(std::integral_constant<element, element::f32>());
        case element::f16:
            return visit(std::integral_constant<element, element::f16>());
        case element::bf16:
            return visit(std::integral_constant<element, element::bf16>());
    }
}

// Lanes [first, first + vector_slots) of one dimension of a tile.
template <element type>
HWY_INLINE floats load_lanes(const std::byte* tile, uint32_t dimension, uint32_t first) {
    return load_f32<type>(float_tag(),
                          tile + (dimension * slot_group + first) * element_bytes(type));
}

// Of a vector that stands for slots [first, ...) of a tile, stores those below `slots`.
HWY_INLINE void store_lanes(floats value, uint32_t first, uint32_t slots, float* out) {
    const float_tag d;
    if (first + vector_slots <= slots) {
        hn::StoreU(value, d, out + first);
        return;
    }
    alignas(64) float lanes[vector_slots];
    hn::Store(value, d, lanes);
    for (uint32_t i = 0; first + i < slots; ++i) out[first + i] = lanes[i];
}

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
void score_heads(const key_source& keys, uint32_t first_slot, uint32_t end_slot,
                 const triattention_shape& shape, const rope_description& rope,
                 const float* weights, uint32_t first_head, float* scores, uint64_t score_stride) {
    visit_tiles(keys, first_slot, end_slot,
                triattention_kernel<heads>{shape, rope, weights, first_head, scores, score_stride});
}

void triattention(const tile_layout& layout, const std::byte* arena, const block_id* blocks,
                  uint32_t first_slot, uint32_t end_slot, uint32_t kv_head,
                  const triattention_shape& shape, const rope_description& rope,
                  const float* weights, float* scores, uint64_t score_stride,
                  const slot_positions* positions) {
    constexpr decltype(&score_heads<1>) kernels[most_heads_at_once] = {
        score_heads<1>, score_heads<2>, score_heads<3>, score_heads<4>,
        score_heads<5>, score_heads<6>, score_heads<7>, score_heads<8>};
    const key_source keys{layout, arena, blocks, kv_head, positions};
    for (uint32_t head = 0; head < shape.group; head += most_heads_at_once) {
        const uint32_t heads = HWY_MIN(most_heads_at_once, shape.group - head);
        kernels[heads - 1](keys, first_slot, end_slot, shape, rope, weights, head, scores,
                           score_stride);
    }
}

// ---- Key norms
// -----------------------------------------------------------------------------------

struct key_norm_kernel {
    uint32_t dim;
    float* scores;

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t slots, tile_prefetch coming) const {
        const float_tag d;
        for (uint32_t first = 0; first < slots; first += vector_slots) {
            floats even = hn::Zero(d), odd = hn::Zero(d);
            for (uint32_t i = 0; i < dim; i += 2) {
                if (first == 0) coming.advance(2 * slot_group * element_bytes(type));
                const floats a = load_lanes<type>(tile, i, first);
                const floats b = load_lanes<type>(tile, i + 1, first);
                even = hn::MulAdd(a, a, even);
                odd = hn::MulAdd(b, b, odd);
            }
            store_lanes(hn::Neg(hn::Sqrt(hn::Add(even, odd))), first, slots, scores + slot);
        }
    }
};

void key_norm(const tile_layout& layout, const std::byte* arena, const block_id* blocks,
              uint32_t first_slot, uint32_t end_slot, uint32_t kv_head, float* scores,
              const slot_positions* positions) {
    visit_tiles(key_source{layout, arena, blocks, kv_head, positions}, first_slot, end_slot,
                key_norm_kernel{layout.keys.dim, scores});
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(triattention);
HWY_EXPORT(key_norm);

void score_triattention(const tile_layout& layout, const std::byte* arena, const block_id* blocks,
                        uint32_t first_slot, uint32_t end_slot, uint32_t kv_head,
                        const triattention_shape& shape, const rope_description& rope,
                        const float* weights, float* scores, uint64_t score_stride,
                        const slot_positions* positions) {
    HWY_DYNAMIC_DISPATCH(triattention)
    (layout, arena, blocks, first_slot, end_slot, kv_head, shape, rope, weights, scores,
     score_stride, positions);
}

void score_key_norm(const tile_layout& layout, const std::byte* arena, const block_id* blocks,
                    uint32_t first_slot, uint32_t end_slot, uint32_t kv_head, float* scores,
                    const slot_positions* positions) {
    HWY_DYNAMIC_DISPATCH(key_norm)
    (layout, arena, blocks, first_slot, end_slot, kv_head, scores, positions);
}

}  // namespace kvrt
#endif
