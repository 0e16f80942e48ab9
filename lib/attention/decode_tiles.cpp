// Decode attention over sealed tiles: which kernel takes which codes. Kernels of each kind of codes
// are compiled here, once per instruction set.

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/decode_tiles.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "attention/amx_tiles-inl.hpp"
#include "attention/coded-inl.hpp"
#include "attention/tiles-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

namespace {

using tile_kinds = kind_list<code_kind::nibbles, code_kind::two_bits>;

}  // namespace

void score_sealed(const run_tiles& tiles, const tile_layout& layout, const sealed_tile& from,
                  uint32_t place, uint32_t heads, const float* queries, float* scores) {
    for (uint32_t done = 0; done < heads; done += 4) {
        tile_kinds::call(from.operand.format->tile.reading.codes, [&](auto kind) {
            with_heads(std::min(4u, heads - done), [&](auto count) {
                const auto run = [&](auto products) {
                    score_tile<decltype(products), decltype(kind)::value, decltype(count)::value>(
                        from, place, tiles.keys, tiles.next_keys, tiles.groups,
                        queries + done * from.operand.dim, scores + done * run_slots);
                };
#if HWY_TARGET == HWY_AVX3
                if (multiplies_tiles(layout, from.operand)) return run(amx_products());
#endif
                run(float_products());
            });
        });
    }
}

void add_sealed_values(const run_tiles& tiles, const tile_layout& layout, const sealed_tile& from,
                       uint32_t place, uint32_t heads, const float* weights, uint32_t first,
                       uint32_t end, float* out) {
    for (uint32_t done = 0; done < heads; done += 4) {
        tile_kinds::call(from.operand.format->tile.reading.codes, [&](auto kind) {
            with_heads(std::min(4u, heads - done), [&](auto count) {
                const auto run = [&](auto products) {
                    add_tile_values<decltype(products), decltype(kind)::value,
                                    decltype(count)::value>(
                        from, place, tiles.values, tiles.next_values, weights + done * run_slots,
                        first, end, out + done * from.operand.dim);
                };
#if HWY_TARGET == HWY_AVX3
                if (multiplies_tiles(layout, from.operand)) return run(amx_products());
#endif
                run(float_products());
            });
        });
    }
}

#else

void score_sealed(const run_tiles&, const tile_layout&, const sealed_tile&, uint32_t, uint32_t,
                  const float*, float*) {}
void add_sealed_values(const run_tiles&, const tile_layout&, const sealed_tile&, uint32_t, uint32_t,
                       const float*, uint32_t, uint32_t, float*) {}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();
