// Decode attention over fp8 codes, multiplied by AMX as bf16, which holds each of their numbers.
// Queries and weights are three bf16 each, together as exact as a float; AMX sums in floats.
//
// AMX takes bf16 in pairs: a product takes 16 words of a pair, 32 channels of 16 slots or 32 slots
// of 16 channels. Of a word of four bytes the even ones make one pair and the odd ones another, so
// that four channels or slots are taken in the order 0 2 1 3. Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_AMX_FP8_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_AMX_FP8_INL_HPP
#undef KVRT_ATTENTION_AMX_FP8_INL_HPP
#else
#define KVRT_ATTENTION_AMX_FP8_INL_HPP
#endif

#include <hwy/highway.h>

#include "attention/amx_values-inl.hpp"

#if HWY_TARGET == HWY_AVX3

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR KVRT_AMX_ATTRIBUTES)
namespace kvrt {
namespace HWY_NAMESPACE {

#define KVRT_INLINE_LAMBDA __attribute__((always_inline))

/// Pairs of bf16, summed as floats.
template <int sums, int left, int right>
HWY_INLINE void multiply_pairs() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(left), "i"(right));
}

inline constexpr uint32_t pairs_of_word = 2;

/// Codes become halves, these are raised so that none is subnormal, and their exponent of 5 bits
/// becomes the lower bits of that of bf16: 2^-exponent_of_fp8 of the number. AMX takes subnormal
/// numbers for 0.
template <code_kind kind>
inline constexpr int exponent_of_fp8 = kind == code_kind::e4m3_bytes ? 105 : 110;

/// Codes whose magnitude is less are raised without overflow: all numbers of e4m3, those of e5m2
/// below 2^14.
template <code_kind kind>
inline constexpr uint8_t end_of_magnitudes = kind == code_kind::e4m3_bytes ? 0x7f : 0x74;

template <code_kind kind>
HWY_INLINE void make_pairs(__m512i codes, __m512i& even, __m512i& odd) {
    constexpr bool is_e4m3 = kind == code_kind::e4m3_bytes;
    const auto raised = [](__m512i half) KVRT_INLINE_LAMBDA {
        const __m512i factor = _mm512_set1_epi16(is_e4m3 ? 0x7800 : 0x4400);  // 2^15, 2^2
        const __m512h number =
            _mm512_mul_ph(_mm512_castsi512_ph(half), _mm512_castsi512_ph(factor));
        return _mm512_and_si512(_mm512_srai_epi16(_mm512_castph_si512(number), 3),
                                _mm512_set1_epi16(static_cast<short>(0x8fff)));
    };
    const auto half = [](__m512i upper) KVRT_INLINE_LAMBDA {
        if constexpr (is_e4m3) {
            return _mm512_and_si512(_mm512_srai_epi16(upper, 1),
                                    _mm512_set1_epi16(static_cast<short>(0xbf80)));
        } else {
            return _mm512_and_si512(upper, _mm512_set1_epi16(static_cast<short>(0xff00)));
        }
    };
    even = raised(half(_mm512_slli_epi16(codes, 8)));
    odd = raised(half(codes));
}

/// The largest magnitude of codes, its sign set.
HWY_INLINE __m512i larger_code(__m512i largest, __m512i codes) {
    return _mm512_max_epu8(largest,
                           _mm512_or_si512(codes, _mm512_set1_epi8(static_cast<char>(0x80))));
}
template <code_kind kind>
HWY_INLINE bool all_below_end(__m512i largest) {
    const __m512i end = _mm512_set1_epi8(static_cast<char>(0x80 | end_of_magnitudes<kind>));
    return _mm512_cmpge_epu8_mask(largest, end) == 0;
}

/// A number as the sum of three bf16, in the upper halves of words.
HWY_INLINE void three_parts(__m512 number, __m512i (&parts)[amx_parts]) {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    each_of<amx_parts>([&](auto part) KVRT_INLINE_LAMBDA {
        parts[part] = _mm512_and_si512(_mm512_castps_si512(number), upper);
        number = _mm512_sub_ps(number, _mm512_castsi512_ps(parts[part]));
    });
}

/// Numbers whose largest magnitude has these bits are multiplied with a power of two, so that no
/// part or product that matters is subnormal; what products with codes are to be multiplied with
/// then, NaN where a number is not finite. Each lane by itself.
template <code_kind kind>
HWY_INLINE __m512i fp8_factor(__m512i peak, __m512& unit) {
    constexpr int raised = 110;
    const __m512i power = _mm512_and_si512(
        _mm512_max_epi32(peak, _mm512_set1_epi32((127 - 10) << 23)), _mm512_set1_epi32(0x7f800000));
    const __mmask16 infinite = _mm512_cmpge_epi32_mask(peak, _mm512_set1_epi32(0x7f800000));
    const __m512i back =
        _mm512_sub_epi32(power, _mm512_set1_epi32((raised - exponent_of_fp8<kind>) << 23));
    unit = _mm512_mask_mov_ps(_mm512_castsi512_ps(back), infinite,
                              _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
    return _mm512_sub_epi32(_mm512_set1_epi32((127 + 127 + raised) << 23), power);
}

// ---- Keys -------------------------------------------------------------------------------------

/// A query head: for each part a row of channels, the first with the head's unit behind it.
struct fp8_query_shape {
    uint32_t stride;  ///< of rows, a third of a query head
    uint32_t unit;

    fp8_query_shape(uint32_t dim, uint32_t query_bytes)
        : stride(query_bytes / amx_parts), unit(2 * dim) {}
};

/// Whether the kernels take rows of that many channels.
inline bool amx_takes_fp8(uint32_t dim) { return dim % 64 == 0; }

template <code_kind kind>
inline void encode_fp8_query(const float* query, const coded_operand& keys, uint32_t query_bytes,
                             std::byte* head) {
    const fp8_query_shape shape(keys.dim, query_bytes);
    // Of four channels the second and the third change places.
    const auto load = [&](uint32_t i) KVRT_INLINE_LAMBDA {
        return _mm512_permute_ps(_mm512_loadu_ps(query + i), 0xd8);
    };
    __m512i peak = _mm512_setzero_si512();
    for (uint32_t i = 0; i < keys.dim; i += 16) peak = larger_magnitude(peak, load(i));
    __m512 unit;
    const __m512i factor = fp8_factor<kind>(_mm512_set1_epi32(_mm512_reduce_max_epi32(peak)), unit);
    for (uint32_t i = 0; i < keys.dim; i += 16) {
        __m512i parts[amx_parts];
        three_parts(_mm512_mul_ps(load(i), _mm512_castsi512_ps(factor)), parts);
        for (uint32_t part = 0; part < amx_parts; ++part) {
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(head + part * shape.stride + 2 * i),
                                _mm512_cvtepi32_epi16(_mm512_srli_epi32(parts[part], 16)));
        }
    }
    _mm_store_ss(reinterpret_cast<float*>(head + shape.unit), _mm512_castps512_ps128(unit));
}

HWY_INLINE float fp8_query_unit(const fp8_query_shape& shape, const std::byte* head) {
    float unit;
    std::memcpy(&unit, head + shape.unit, sizeof unit);
    return unit;
}

/// Scores of codes that AMX cannot take, with queries as floats again.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void score_fp8_as_floats(const std::byte* const* tiles,
                                      const std::byte* const* next_tiles, uint32_t tile_count,
                                      const coded_operand& keys, const std::byte* queries,
                                      uint32_t query_bytes, float* scores) {
    constexpr uint32_t stride = widest_row + 16;  // floats
    const fp8_query_shape shape(keys.dim, query_bytes);
    alignas(64) float channels[heads][stride];
    for (uint32_t h = 0; h < heads; ++h) {
        const std::byte* head = queries + h * query_bytes;
        const __m512 back = _mm512_set1_ps(std::ldexp(1.0f, -exponent_of_fp8<kind>));
        const __m512 unit = _mm512_set1_ps(fp8_query_unit(shape, head));
        for (uint32_t i = 0; i < keys.dim; i += 16) {
            const auto part = [&](uint32_t index) KVRT_INLINE_LAMBDA {
                const __m256i upper = _mm256_loadu_si256(
                    reinterpret_cast<const __m256i*>(head + index * shape.stride + 2 * i));
                return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(upper), 16));
            };
            const __m512 number = _mm512_add_ps(part(0), _mm512_add_ps(part(1), part(2)));
            _mm512_store_ps(channels[h] + i, _mm512_mul_ps(_mm512_mul_ps(number, back), unit));
        }
    }
    score_fp8<kind, heads>(tiles, next_tiles, tile_count, keys,
                           reinterpret_cast<const std::byte*>(channels[0]), stride * 4, scores);
}

HWY_INLINE __m512 sum_of_rows(const float (*rows)[16]) {
    return _mm512_add_ps(_mm512_load_ps(rows[0]),
                         _mm512_add_ps(_mm512_load_ps(rows[1]), _mm512_load_ps(rows[2])));
}

/// Of 16 keys, a line longer: what is 4 KiB behind another's lines delays loading those.
using fp8_key_rows = std::byte[widest_row / 4 * pairs_of_word + 1][amx_row_bytes];

/// scores[h][group * 16 + slot] = query h . key, for `heads` queries from encode_fp8_query. Keys of
/// 16 slots are multiplied while those of the next become bf16.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void score_amx_fp8(const std::byte* const* tiles, const std::byte* const* next_tiles,
                                uint32_t tile_count, const coded_operand& keys,
                                const std::byte* queries, uint32_t query_bytes, float* scores) {
    const fp8_query_shape shape(keys.dim, query_bytes);
    const uint32_t code_words = keys.dim / 4, products = keys.dim / 32;
    alignas(64) fp8_key_rows rows[2];
    alignas(64) float sums[run_tiles_of_16][amx_rows][16];
    // Queries of the first channels stay in registers.
    load_tile<1>(queries, shape.stride);
    load_tile<2>(queries + amx_row_bytes, shape.stride);
    if (products > 2) load_tile<3>(queries + 2 * amx_row_bytes, shape.stride);
    __m512i largest = _mm512_setzero_si512();
    const auto multiply = [&](uint32_t t, uint32_t k) KVRT_INLINE_LAMBDA {
        if (k == 0) zero_tile<0>();
        load_tile<right_of_keys>(rows[t % 2][16 * k], amx_row_bytes);
        switch (k) {
            case 0:
                multiply_pairs<0, 1, right_of_keys>();
                break;
            case 1:
                multiply_pairs<0, 2, right_of_keys>();
                break;
            case 2:
                multiply_pairs<0, 3, right_of_keys>();
                break;
            default:
                load_tile<left_of_keys>(queries + k * amx_row_bytes, shape.stride);
                multiply_pairs<0, left_of_keys, right_of_keys>();
        }
        if (k + 1 == products) store_tile<0>(sums[t], amx_row_bytes);
    };
    for (uint32_t t = 0; t < tile_count; ++t) {
        for (uint32_t k = 0; k < products; ++k) {
            each_of<8>([&](auto i) KVRT_INLINE_LAMBDA {
                const uint32_t w = 8 * k + i;
                __builtin_prefetch(next_tiles[t] + w * amx_row_bytes, 0, 2);
                const __m512i codes = _mm512_loadu_si512(tiles[t] + w * amx_row_bytes);
                largest = larger_code(largest, codes);
                __m512i even, odd;
                make_pairs<kind>(codes, even, odd);
                _mm512_store_si512(rows[t % 2][2 * w], even);
                _mm512_store_si512(rows[t % 2][2 * w + 1], odd);
            });
            if (t == 0) {
                stay_awake();
            } else {
                multiply(t - 1, k);
            }
        }
        prefetch_lines(next_tiles[t], code_words, keys.layout.words);
    }
    for (uint32_t k = 0; k < products; ++k) multiply(tile_count - 1, k);
    if (!all_below_end<kind>(largest)) {
        return score_fp8_as_floats<kind, heads>(tiles, next_tiles, tile_count, keys, queries,
                                                query_bytes, scores);
    }
    const hn::CappedTag<float, slot_group> d;
    for (uint32_t t = 0; t < tile_count; ++t) {
        const auto group = read_group(d, keys, 0, [&](uint32_t m) {
            return hn::Vec<hn::Rebind<uint32_t, decltype(d)>>{
                _mm512_loadu_si512(tiles[t] + (code_words + m) * amx_row_bytes)};
        });
        each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            const float unit = fp8_query_unit(shape, queries + h * query_bytes);
            const __m512 scale = _mm512_mul_ps(group.step.raw, _mm512_set1_ps(unit));
            _mm512_storeu_ps(scores + h * run_slots + t * slot_group,
                             _mm512_mul_ps(sum_of_rows(sums[t] + h * amx_parts), scale));
        });
    }
}

// ---- Values -----------------------------------------------------------------------------------

/// Weights times steps in three parts. A pair is the same slot of two of the run's 16: of the first
/// and the third, or of the second and the fourth.
struct fp8_weights {
    alignas(64) std::byte rows[pairs_of_word][amx_rows][amx_row_bytes];
    alignas(16) float unit[amx_heads];
};

/// weights are 0 outside [first, end) wherever whole vectors of 16 slots reach.
template <code_kind kind, uint32_t heads>
HWY_INLINE void split_fp8_weights(const value_groups& groups, const float* weights, uint32_t first,
                                  uint32_t end, fp8_weights& out) {
    __m512 products[heads][run_tiles_of_16];
    __m512i peaks[amx_heads];
    each_of<amx_heads>([&](auto h) KVRT_INLINE_LAMBDA { peaks[h] = _mm512_setzero_si512(); });
    each_of<run_tiles_of_16>([&](auto v) KVRT_INLINE_LAMBDA {
        const bool inside = v >= first / 16 && v < (end + 15) / 16;
        each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            products[h][v] = inside ? weighted_step(groups, weights, 0, h, v) : _mm512_setzero_ps();
            peaks[h] = larger_magnitude(peaks[h], products[h][v]);
        });
    });
    const __m512i peak = lanes_together(
        peaks, [](__m512i a, __m512i b) KVRT_INLINE_LAMBDA { return _mm512_max_epi32(a, b); });
    __m512 unit;
    const __m512i factor = fp8_factor<kind>(peak, unit);
    _mm_store_ps(out.unit, _mm512_castps512_ps128(unit));
    each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
        __m512i parts[run_tiles_of_16][amx_parts];
        each_of<run_tiles_of_16>([&](auto v) KVRT_INLINE_LAMBDA {
            three_parts(_mm512_mul_ps(products[h][v], one_of_four<h>(factor)), parts[v]);
        });
        each_of<amx_parts>([&](auto part) KVRT_INLINE_LAMBDA {
            each_of<pairs_of_word>([&](auto pair) KVRT_INLINE_LAMBDA {
                _mm512_store_si512(out.rows[pair][h * amx_parts + part],
                                   _mm512_or_si512(_mm512_srli_epi32(parts[pair][part], 16),
                                                   parts[pair + 2][part]));
            });
        });
    });
}

/// out[h][channel] += sum over slots [first, end) of weights[h][slot] * value, 64 channels at a
/// time, in four tiles as add_wide_values takes them.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void add_amx_fp8_values(const std::byte* const* tiles,
                                     const std::byte* const* next_tiles,
                                     const coded_operand& values, const float* weights,
                                     uint32_t first, uint32_t end, float* out) {
    const value_rows rows{tiles, values.layout.row_bytes()};
    const value_rows next_rows{next_tiles, values.layout.row_bytes()};
    const uint32_t first_vector = first / 16, end_vector = (end + 15) / 16;
    const uint32_t blocks = values.dim / 64, row_bytes = rows.row_bytes;
    const uint32_t lines = ceil_divide(slot_group * row_bytes, 64u);
    value_groups groups;
    read_value_groups(values, rows, first, end, groups);
    struct {
        alignas(64) padded_tile right[2][4][pairs_of_word];
        alignas(64) float sums[widest_row / 64][4][amx_rows][16];
        fp8_weights left;
    } run;
    // Slots that are not there weigh nothing.
    const std::byte* columns[run_tiles_of_16];
    for (uint32_t v = 0; v < run_tiles_of_16; ++v) {
        columns[v] = tiles[v >= first_vector && v < end_vector ? v : first_vector];
    }
    __m512i largest = _mm512_setzero_si512();
    // Product `step` of 8 of a block: each pair of four tiles.
    const auto multiply = [&](uint32_t b, uint32_t step) KVRT_INLINE_LAMBDA {
        each_of<8>([&](auto at) KVRT_INLINE_LAMBDA {
            constexpr uint32_t i = at % 4, pair = at / 4;
            if (at != step) return;
            if (i == 0) load_tile<left_of_values>(run.left.rows[pair], amx_row_bytes);
            if (pair == 0) zero_tile<i>();
            load_tile<right_of_values>(run.right[b % 2][i][pair], amx_row_bytes);
            multiply_pairs<i, left_of_values, right_of_values>();
            if (pair == 1) store_tile<i>(run.sums[b][i], amx_row_bytes);
        });
    };
    const auto expand = [&](uint32_t b) KVRT_INLINE_LAMBDA {
        for (uint32_t slot = 0; slot < slot_group; ++slot) {
            const auto load = [&](uint32_t v) KVRT_INLINE_LAMBDA {
                const __m512i codes = _mm512_loadu_si512(columns[v] + slot * row_bytes + 64 * b);
                largest = larger_code(largest, codes);
                return codes;
            };
            // Few lines at a time: what else misses waits for them.
            for (uint32_t v = first_vector; v < end_vector; ++v) {
                __builtin_prefetch(next_rows.tiles[v] + (slot_group * b + slot) * 64, 0, 2);
            }
            const __m512i a0 = load(0), a1 = load(1), a2 = load(2), a3 = load(3);
            const __m512i low = _mm512_unpacklo_epi8(a0, a1), high = _mm512_unpackhi_epi8(a0, a1);
            const __m512i low2 = _mm512_unpacklo_epi8(a2, a3), high2 = _mm512_unpackhi_epi8(a2, a3);
            const __m512i mixed[4] = {
                _mm512_unpacklo_epi16(low, low2), _mm512_unpackhi_epi16(low, low2),
                _mm512_unpacklo_epi16(high, high2), _mm512_unpackhi_epi16(high, high2)};
            each_of<4>([&](auto i) KVRT_INLINE_LAMBDA {
                __m512i even, odd;
                make_pairs<kind>(mixed[i], even, odd);
                _mm512_store_si512(run.right[b % 2][i][0][slot], even);
                _mm512_store_si512(run.right[b % 2][i][1][slot], odd);
            });
            if (slot % 2 == 0) continue;
            if (b == 0) {
                stay_awake();
            } else {
                multiply(b - 1, slot / 2);
            }
        }
    };
    const auto join = [&](uint32_t b) KVRT_INLINE_LAMBDA {
        each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            __m512 sum[4];
            each_of<4>([&](auto i) KVRT_INLINE_LAMBDA {
                sum[i] = sum_of_rows(run.sums[b][i] + h * amx_parts);
            });
            add_wide_sums(sum, _mm512_set1_ps(run.left.unit[h]), _mm512_setzero_ps(), nullptr,
                          out + h * values.dim + 64 * b);
        });
    };
    for (uint32_t b = 0; b < blocks; ++b) {
        expand(b);
        if (b == 0) split_fp8_weights<kind, heads>(groups, weights, first, end, run.left);
    }
    each_of<8>([&](auto step) KVRT_INLINE_LAMBDA { multiply(blocks - 1, step); });
    if (!all_below_end<kind>(largest)) {
        return add_record_values<kind, heads>(tiles, next_tiles, values, weights, first, end, out);
    }
    for (uint32_t b = 0; b < blocks; ++b) join(b);
    for (uint32_t v = first_vector; v < end_vector; ++v) {
        prefetch_lines(next_rows.tiles[v], slot_group * blocks, lines);
    }
}

#undef KVRT_INLINE_LAMBDA

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_POP_ATTRIBUTES

#endif  // HWY_AVX3

#endif  // per-target include guard
