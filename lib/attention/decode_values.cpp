// Decode attention's weighted sums of values in records: which kernel takes which codes. Kernels of
// each kind of codes are compiled here, once per instruction set.

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/decode_values.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>

#include "attention/coded-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

namespace {

/// What records of values have.
using value_kinds = kind_list<code_kind::signed_bytes, code_kind::nibbles, code_kind::e2m1_nibbles,
                              code_kind::e4m3_bytes, code_kind::e5m2_bytes, code_kind::two_bits,
                              code_kind::three_bits>;

}  // namespace

void add_coded_values(const span_tiles& tiles, const tile_layout& layout, uint32_t head,
                      uint32_t heads, const float* weights, uint32_t first, uint32_t end,
                      float* out) {
    const coded_operand values(layout.values, head);
    for (uint32_t done = 0; done < heads; done += 4) {
        value_kinds::call(values.reading.codes, [&](auto kind_constant) {
            constexpr code_kind kind = decltype(kind_constant)::value;
            with_heads(std::min(4u, heads - done), [&](auto count) {
                constexpr uint32_t some = decltype(count)::value;
                const auto run = [&](auto* kernel) {
                    for (uint32_t r = first / run_slots; r * run_slots < end; ++r) {
                        const run_tiles part = tiles.of_run(r);
                        const uint32_t begin = r * run_slots;
                        kernel(part.values, part.next_values, values,
                               weights + r * span_stride + done * run_slots,
                               std::max(first, begin) - begin,
                               std::min(end, begin + run_slots) - begin, out + done * values.dim);
                    }
                };
#if HWY_TARGET == HWY_AVX3
                if (multiplies_tiles(layout, layout.values)) {
                    if constexpr (is_fp8(kind)) {
                        return run(&add_amx_fp8_values<kind, some>);
                    } else {
                        return add_amx_record_values<kind, some>(
                            tiles.values, tiles.next_values, values, weights + done * run_slots,
                            span_stride, first, end, out + done * values.dim);
                    }
                }
                if constexpr (is_multiplied(kind)) {
                    if (multiplies_codes(layout, layout.values)) {
                        // Groups of 16 nibbles are halves of a chunk.
                        if constexpr (kind == code_kind::e2m1_nibbles) {
                            if (values.group == 16) return run(&add_code_values<kind, some, 2>);
                        }
                        return run(&add_code_values<kind, some, 1>);
                    }
                }
#endif
                run(&add_record_values<kind, some>);
            });
        });
    }
}

#else

void add_coded_values(const span_tiles&, const tile_layout&, uint32_t, uint32_t, const float*,
                      uint32_t, uint32_t, float*) {}

#endif

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();
