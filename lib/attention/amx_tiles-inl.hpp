// Sealed tiles (tiles-inl.hpp) as AMX multiplies them: queries with the steps of the channels
// folded in become whole numbers at once. Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_AMX_TILES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_AMX_TILES_INL_HPP
#undef KVRT_ATTENTION_AMX_TILES_INL_HPP
#else
#define KVRT_ATTENTION_AMX_TILES_INL_HPP
#endif

#include <hwy/highway.h>

#include "attention/amx_values-inl.hpp"

#if HWY_TARGET == HWY_AVX3

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR KVRT_AMX_ATTRIBUTES)
namespace kvrt {
namespace HWY_NAMESPACE {

#define KVRT_INLINE_LAMBDA __attribute__((always_inline))

/// folded_queries of tiles-inl.hpp in the form of encode_amx_query, of one group.
template <uint32_t heads>
struct amx_tile_queries {
    static constexpr uint32_t query_bytes = amx_query_shape::bytes_of(widest_row);
    alignas(64) std::byte coded[amx_heads][query_bytes];
    alignas(16) float bias[amx_heads];

    HWY_NOINLINE void fold(const float* queries, const coded_operand& keys,
                           const std::byte* numbers, float middle_code) {
        const uint32_t dim = keys.dim;
        const amx_query_shape shape(keys, query_bytes);
        alignas(64) float channels[amx_heads][widest_row];
        __m512i peaks[amx_heads], sums[amx_heads];
        each_of<amx_heads>([&](auto h)
                               KVRT_INLINE_LAMBDA { peaks[h] = sums[h] = _mm512_setzero_si512(); });
        for (uint32_t i = 0; i < dim; i += 16) {
            const __mmask16 inside = first_lanes(dim - i);
            const auto load_halves = [&](uint32_t at) KVRT_INLINE_LAMBDA {
                return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(inside, numbers + at * 2));
            };
            const __m512 step = load_halves(i);
            const __m512 middle =
                _mm512_fmadd_ps(step, _mm512_set1_ps(middle_code), load_halves(dim + i));
            each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
                const __m512 query = _mm512_maskz_loadu_ps(inside, queries + h * dim + i);
                const __m512 channel = _mm512_mul_ps(query, step);
                _mm512_store_ps(channels[h] + i, channel);
                peaks[h] = larger_magnitude(peaks[h], channel);
                sums[h] = _mm512_castps_si512(
                    _mm512_fmadd_ps(query, middle, _mm512_castsi512_ps(sums[h])));
            });
        }
        for (uint32_t i = round_up(dim, 16u); i < shape.padded; i += 16) {
            each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
                _mm512_store_ps(channels[h] + i, _mm512_setzero_ps());
            });
        }
        const __m512i total = lanes_together(sums, [](__m512i a, __m512i b) KVRT_INLINE_LAMBDA {
            return _mm512_castps_si512(
                _mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
        });
        _mm_store_ps(bias, _mm512_castps512_ps128(_mm512_castsi512_ps(total)));
        // As number_scale has them.
        const __m512 peak = _mm512_castsi512_ps(lanes_together(
            peaks, [](__m512i a, __m512i b) KVRT_INLINE_LAMBDA { return _mm512_max_epi32(a, b); }));
        const __m512 largest = _mm512_set1_ps(largest_number);
        const __m512 infinity = _mm512_set1_ps(std::numeric_limits<float>::infinity());
        const __mmask16 finite = _mm512_cmp_ps_mask(peak, infinity, _CMP_LT_OQ);
        const __m512 raised = _mm512_div_ps(largest, peak);
        const __mmask16 usable = _mm512_mask_cmp_ps_mask(finite, raised, infinity, _CMP_LT_OQ);
        const __m512 nan = _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN());
        const __m512i factor = _mm512_castps_si512(_mm512_maskz_mov_ps(usable, raised));
        alignas(16) float unit[amx_heads];
        _mm_store_ps(unit, _mm512_castps512_ps128(
                               _mm512_mask_mov_ps(_mm512_maskz_div_ps(usable, peak, largest),
                                                  static_cast<__mmask16>(~finite), nan)));
        const __m512i in_order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        // Added before rounding: what is rounded stays below 2^24.
        const __m512 raise = _mm512_set1_ps(static_cast<float>(raised_digits));
        each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            stay_awake();
            const __m512 by = one_of_four<h>(factor);
            for (uint32_t at = 0; at < shape.padded; at += amx_row_bytes) {
                __m512i whole[4], bytes[amx_parts];
                each_of<4>([&](auto v) KVRT_INLINE_LAMBDA {
                    const __m512 channel = _mm512_load_ps(channels[h] + at + 16 * v);
                    whole[v] = _mm512_cvtps_epi32(_mm512_fmadd_ps(channel, by, raise));
                });
                pack_digits(whole, bytes);
                each_of<amx_parts>([&](auto part) KVRT_INLINE_LAMBDA {
                    _mm512_storeu_si512(coded[h] + part * shape.stride + at,
                                        _mm512_permutexvar_epi32(in_order, bytes[part]));
                });
            }
            shape.tail(coded[h], 0)[0] = unit[h];
        });
    }
};

/// How codes of tiles are multiplied: by AMX.
struct amx_products {
    using groups = amx_groups;
    static constexpr bool takes_factors = true;
    template <uint32_t heads>
    using queries = amx_tile_queries<heads>;

    template <code_kind kind, uint32_t heads>
    static void score(const std::byte* const* tiles, const std::byte* const* next_tiles,
                      uint32_t tile_count, const coded_operand& keys,
                      const amx_tile_queries<heads>& folded, float* scores) {
        score_amx_codes<kind, heads>(tiles, next_tiles, tile_count, keys, folded.coded[0],
                                     folded.query_bytes, scores);
    }
    template <code_kind kind, uint32_t heads>
    static void add_values(const value_rows& rows, const value_rows& next_rows,
                           const coded_operand& values, const amx_groups& groups,
                           const float* weights, uint32_t first, uint32_t end, float* out) {
        add_amx_values<kind, heads>(rows, next_rows, values, groups, {weights, 0}, first, end, out);
    }
};

#undef KVRT_INLINE_LAMBDA

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_POP_ATTRIBUTES

#endif  // HWY_AVX3

#endif  // per-target include guard
