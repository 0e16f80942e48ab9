// Decode attention over integer codes (format.hpp, code_reading), multiplied as they are stored by
// the 8-bit dot products of AVX-512 VNNI. Include it per target.
//
// The other factor, a query or a weight, becomes a whole number n of 24 bits per group, split into
// digits of one signed byte, the lowest first. Sums of products of codes and digits are exact, and
// begin with what takes the codes' zero off; so all that is lost is half a unit of n, 2^-24 of the
// group's largest number: as much as a float's mantissa loses. With x = step (c - zero) + least
//
//   q . k  = sum over groups: s_g (step (sum n (c - zero)) + least (sum n)),        q = s_g n
//   w . v  = S_g (sum over slots n (c - zero)) + sum over slots w least,            w step = S_g n
//
// VNNI multiplies 4 unsigned by 4 signed bytes per lane: keys lie so already (a word is 4 channels
// of a slot, 16 slots side by side); of values the rows of 4 slots are interleaved byte by byte.

// Per-target include guard.
#if defined(KVRT_ATTENTION_CODES_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_CODES_INL_HPP
#undef KVRT_ATTENTION_CODES_INL_HPP
#else
#define KVRT_ATTENTION_CODES_INL_HPP
#endif

#include <hwy/highway.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <utility>

#include "attention/records-inl.hpp"

// AVX-512 as Highway's target has it, and VNNI: callers ask the processor first.
#if HWY_TARGET == HWY_AVX3

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni")
namespace kvrt {
namespace HWY_NAMESPACE {

#define KVRT_INLINE_LAMBDA __attribute__((always_inline))

inline constexpr uint32_t digits = 3;
// Below 127 (2^16 + 2^8 + 1), where the digits end, by more than rounding adds to the largest.
inline constexpr float largest_number = 127 * 65536 + 127 * 256;

/// Calls body with 0, 1, ... count - 1 as constants: arrays of sums that loops index, even unrolled
/// ones, GCC 12 keeps in memory.
template <uint32_t... indices, class callable>
HWY_INLINE void repeat(std::integer_sequence<uint32_t, indices...>, const callable& body) {
    (body(std::integral_constant<uint32_t, indices>()), ...);
}
template <uint32_t count, class callable>
HWY_INLINE void repeat(const callable& body) {
    repeat(std::make_integer_sequence<uint32_t, count>(), body);
}

/// sum += 4 unsigned by 4 signed bytes of each lane. Written out, because GCC 12 copies the sums of
/// the intrinsic.
HWY_INLINE void add_products(__m512i& sum, __m512i codes, __m512i digit) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(digit));
}

/// The sums of products with each digit as one float; each is exact below 2^24.
HWY_INLINE __m512 joined(const __m512i* sums) {
    const __m512 base = _mm512_set1_ps(256.0f);
    const __m512 upper =
        _mm512_fmadd_ps(_mm512_cvtepi32_ps(sums[2]), base, _mm512_cvtepi32_ps(sums[1]));
    return _mm512_fmadd_ps(upper, base, _mm512_cvtepi32_ps(sums[0]));
}

/// What unsigned codes, as the dot product takes them, have for 0. Where the zero differs from slot
/// to slot, it is added to the codes that 16 is for all.
inline int32_t unsigned_zero(const coded_operand& operand) {
    if (operand.has_least()) return 16;
    switch (operand.reading.codes) {
        case code_kind::signed_bytes:
            return 128;
        case code_kind::e2m1_nibbles:
            return 12;
        default:
            return static_cast<int32_t>(operand.reading.zero);
    }
}

/// What brings codes whose zeros are `zero` to one of 16, in all bytes of a lane.
HWY_INLINE __m512i to_common_zero(__m512 zero) {
    const __m512i more = _mm512_cvtps_epi32(_mm512_sub_ps(_mm512_set1_ps(16.0f), zero));
    return _mm512_mullo_epi32(more, _mm512_set1_epi32(0x01010101));
}

/// A query head as whole numbers: for each four channels the bytes of a digit of theirs,
/// [dim / 4][digit][4], and numbers per group.
struct coded_query {
    const float* scale;    ///< [groups]
    const float* sum;      ///< [groups], of the numbers times the scale
    const int32_t* start;  ///< [groups][digits], minus zero times the sum of the digits

    coded_query(const std::byte* at, uint32_t dim, uint32_t groups)
        : scale(reinterpret_cast<const float*>(at + digits * dim)),
          sum(scale + groups),
          start(reinterpret_cast<const int32_t*>(sum + groups)) {}
};

/// Splits a query head; a group that is not finite keeps its flaw in its scale.
inline void encode_query(const float* query, const coded_operand& keys, std::byte* out) {
    int8_t* bytes = reinterpret_cast<int8_t*>(out);
    float* scale = reinterpret_cast<float*>(bytes + digits * keys.dim);
    float* sum = scale + keys.groups;
    int32_t* start = reinterpret_cast<int32_t*>(sum + keys.groups);
    const int32_t zero = unsigned_zero(keys);
    for (uint32_t g = 0; g < keys.groups; ++g) {
        const uint32_t first = g * keys.group, count = keys.channels(g);
        const group_reach reach = reach_of(query + first, count);
        const float peak = reach.magnitude();
        const float factor = reach.finite && peak > 0.0f ? largest_number / peak : 0.0f;
        const bool usable = std::isfinite(factor);
        int32_t totals[digits] = {};
        for (uint32_t i = first; i < first + count; ++i) {
            int32_t number = usable ? static_cast<int32_t>(std::lrint(query[i] * factor)) : 0;
            for (uint32_t digit = 0; digit < digits; ++digit) {
                const int8_t lowest = static_cast<int8_t>(number);
                bytes[i / 4 * 4 * digits + 4 * digit + i % 4] = lowest;
                totals[digit] += lowest;
                number = (number - lowest) >> 8;
            }
        }
        scale[g] = !reach.finite ? NAN : usable ? peak / largest_number : 0.0f;
        int64_t total = 0;
        for (uint32_t digit = digits; digit-- > 0;) {
            total = total * 256 + totals[digit];
            start[g * digits + digit] = -zero * totals[digit];
        }
        sum[g] = static_cast<float>(total) * scale[g];
    }
}

/// Twice the numbers of e2m1, plus 12.
HWY_INLINE __m512i e2m1_table() {
    return _mm512_broadcast_i32x4(
        _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0));
}

template <code_kind kind>
HWY_INLINE __m512i unsigned_codes(__m512i low_nibbles_or_bytes) {
    if constexpr (kind == code_kind::signed_bytes) {
        return _mm512_xor_si512(low_nibbles_or_bytes, _mm512_set1_epi8(static_cast<char>(0x80)));
    } else if constexpr (kind == code_kind::e2m1_nibbles) {
        return _mm512_shuffle_epi8(e2m1_table(), low_nibbles_or_bytes);
    } else {
        return low_nibbles_or_bytes;
    }
}

HWY_INLINE __m512i low_nibbles(__m512i bytes) {
    return _mm512_and_si512(bytes, _mm512_set1_epi8(15));
}
HWY_INLINE __m512i high_nibbles(__m512i bytes) { return low_nibbles(_mm512_srli_epi16(bytes, 4)); }

HWY_INLINE __m512i four_bytes(const std::byte* at) {
    int32_t word;
    std::memcpy(&word, at, sizeof word);
    return _mm512_set1_epi32(word);
}

/// Scores of `count` tiles at `tiles`, which share each digit that is broadcast.
template <code_kind kind, uint32_t heads, uint32_t count>
HWY_INLINE void score_tiles(const std::byte* const* tiles, const std::byte* const* next_tiles,
                            const coded_operand& keys, const std::byte* queries,
                            uint32_t query_bytes, float* scores) {
    const hn::CappedTag<float, slot_group> d;
    const uint32_t code_words = keys.code_bytes / record_word;
    const auto word = [&](uint32_t t, uint32_t w)
                          KVRT_INLINE_LAMBDA { return _mm512_loadu_si512(tiles[t] + w * 64); };
    __m512 total[count][heads];
    repeat<count>([&](auto t) KVRT_INLINE_LAMBDA {
        repeat<heads>([&](auto h) KVRT_INLINE_LAMBDA { total[t][h] = _mm512_setzero_ps(); });
    });
    uint32_t w = 0;
    for (uint32_t g = 0; g < keys.groups; ++g) {
        const uint32_t first = g * keys.group, channels = keys.channels(g);
        __m512 step[count], least[count];
        __m512i more[count];
        repeat<count>([&](auto t) KVRT_INLINE_LAMBDA {
            const auto group = read_group(d, keys, g, [&](uint32_t m) {
                return hn::Vec<hn::Rebind<uint32_t, decltype(d)>>{word(t, code_words + m)};
            });
            step[t] = group.step.raw;
            least[t] = group.least.raw;
            more[t] = _mm512_setzero_si512();
            if (kind == code_kind::nibbles && keys.has_least()) {
                more[t] = to_common_zero(group.zero.raw);
            }
        });
        __m512i sums[count][heads][digits];
        repeat<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            const coded_query query(queries + h * query_bytes, keys.dim, keys.groups);
            repeat<digits>([&](auto digit) KVRT_INLINE_LAMBDA {
                repeat<count>([&](auto t) KVRT_INLINE_LAMBDA {
                    sums[t][h][digit] = _mm512_set1_epi32(query.start[g * digits + digit]);
                });
            });
        });
        const auto add = [&](const __m512i(&codes)[count], uint32_t channel) KVRT_INLINE_LAMBDA {
            const std::byte* query = queries + channel * digits;
            repeat<heads>([&](auto h) KVRT_INLINE_LAMBDA {
                repeat<digits>([&](auto digit) KVRT_INLINE_LAMBDA {
                    const __m512i four = four_bytes(query + h * query_bytes + 4 * digit);
                    repeat<count>([&](auto t) KVRT_INLINE_LAMBDA {
                        add_products(sums[t][h][digit], codes[t], four);
                    });
                });
            });
        };
        const uint32_t words = channels / (is_nibbles(kind) ? 8 : 4);
        for (uint32_t i = 0; i < words; ++i, ++w) {
            __m512i low[count], high[count];
            repeat<count>([&](auto t) KVRT_INLINE_LAMBDA {
                __builtin_prefetch(next_tiles[t] + w * 64, 0, 2);
                const __m512i codes = word(t, w);
                if constexpr (is_nibbles(kind)) {
                    low[t] = unsigned_codes<kind>(low_nibbles(codes));
                    high[t] = unsigned_codes<kind>(high_nibbles(codes));
                    if constexpr (kind == code_kind::nibbles) {
                        low[t] = _mm512_add_epi8(low[t], more[t]);
                        high[t] = _mm512_add_epi8(high[t], more[t]);
                    }
                } else {
                    low[t] = unsigned_codes<kind>(codes);
                }
            });
            add(low, first + 4 * i);
            if constexpr (is_nibbles(kind)) add(high, first + channels / 2 + 4 * i);
        }
        repeat<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            const coded_query query(queries + h * query_bytes, keys.dim, keys.groups);
            const __m512 scale = _mm512_set1_ps(query.scale[g]);
            repeat<count>([&](auto t) KVRT_INLINE_LAMBDA {
                const __m512 sum = _mm512_mul_ps(joined(sums[t][h]), scale);
                total[t][h] = _mm512_fmadd_ps(sum, step[t], total[t][h]);
                if (keys.has_least()) {
                    total[t][h] =
                        _mm512_fmadd_ps(least[t], _mm512_set1_ps(query.sum[g]), total[t][h]);
                }
            });
        });
    }
    for (uint32_t m = code_words; m < keys.layout.words; ++m) {
        for (uint32_t t = 0; t < count; ++t) __builtin_prefetch(next_tiles[t] + m * 64, 0, 2);
    }
    repeat<count>([&](auto t) KVRT_INLINE_LAMBDA {
        repeat<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            _mm512_storeu_ps(scores + h * run_slots + t * slot_group, total[t][h]);
        });
    });
}

/// scores[h][group * 16 + slot] = query h . key, for `heads` queries prepared by encode_query.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void score_codes(const std::byte* const* tiles, const std::byte* const* next_tiles,
                              uint32_t tile_count, const coded_operand& keys,
                              const std::byte* queries, uint32_t query_bytes, float* scores) {
    uint32_t t = 0;
    for (; t + 2 <= tile_count; t += 2) {
        score_tiles<kind, heads, 2>(tiles + t, next_tiles + t, keys, queries, query_bytes,
                                    scores + t * slot_group);
    }
    if (t < tile_count) {
        score_tiles<kind, heads, 1>(tiles + t, next_tiles + t, keys, queries, query_bytes,
                                    scores + t * slot_group);
    }
}

// ---- Values -----------------------------------------------------------------------------------

inline constexpr uint32_t run_quads = run_slots / 4;
inline constexpr uint32_t chunk_bytes = 16;  // of codes of a row

/// Weights of `heads` heads times steps, as whole numbers. A quad of 4 slots has a word for each
/// digit, the digit's bytes of the 4 slots. Groups of 8 bytes share a chunk: their words lie in
/// pairs.
template <uint32_t heads, uint32_t together>
struct coded_weights {
    struct of_chunk {
        alignas(64) int32_t words[heads][run_slots / 16][together][16];
        float scale[heads][together];
        float offset[heads][together];
        int32_t start[heads][together][4];

        /// The words of a quad's digit, `together` of them.
        const int32_t* at(uint32_t h, uint32_t quad, uint32_t digit) const {
            const int32_t* sixteen = words[h][quad / 4][0];
            if constexpr (together == 1) return sixteen + quad % 4 * 4 + digit;
            return sixteen + digit / 2 * 16 + quad % 4 * 4 + digit % 2 * 2;
        }
    };
    of_chunk groups[most_groups / together];
};

/// Numbers of 16 slots -> in each 128 bits a quad: the words of its digits 0, 1 and 2.
HWY_INLINE __m512i digits_of(__m512i numbers) {
    // With 128 added to each digit none borrows from the next: they are the bytes.
    const __m512i bytes = _mm512_add_epi32(numbers, _mm512_set1_epi32(0x00808080));
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return _mm512_xor_si512(
        _mm512_shuffle_epi8(bytes, order),
        _mm512_broadcast_i32x4(_mm_set_epi32(0, -0x7f7f7f80, -0x7f7f7f80, -0x7f7f7f80)));
}

/// Weights of head h times the steps of group g, of the run's v-th 16 slots.
HWY_INLINE __m512 weighted_step(const value_groups& groups, const float* weights, uint32_t g,
                                uint32_t h, uint32_t v) {
    return _mm512_mul_ps(_mm512_loadu_ps(weights + h * run_slots + 16 * v),
                         _mm512_load_ps(groups.step[g] + 16 * v));
}

/// What makes whole numbers of weighted_step()s, for each group and head: the factor, 0 where there
/// is no usable one; the unit of the numbers; what leasts add, NaN where a product is not finite.
/// weights are 0 outside [first, end) wherever whole vectors of 16 slots reach.
template <uint32_t heads>
struct weight_numbers {
    static constexpr uint32_t most = most_groups * heads + 16;  // taken 16 at a time
    alignas(64) float factor[most], unit[most], offset[most];

    HWY_INLINE weight_numbers(const value_groups& groups, const coded_operand& values,
                              const float* weights, uint32_t first, uint32_t end) {
        const uint32_t from = first / 16, to = (end + 15) / 16;
        const uint32_t pairs = values.groups * heads;
        const bool has_least = values.has_least() || values.layout.tiled();
        alignas(64) float largest[most];
        for (uint32_t pair = 0; pair < pairs; ++pair) {
            const uint32_t g = pair / heads, h = pair % heads;
            __m512i peak = _mm512_setzero_si512();
            __m512 sum = _mm512_setzero_ps();
            for (uint32_t v = from; v < to; ++v) {
                // Bits of magnitudes order as they do, those that are not finite last.
                const __m512i bits = _mm512_castps_si512(weighted_step(groups, weights, g, h, v));
                peak =
                    _mm512_max_epi32(peak, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
                if (has_least) {
                    sum = _mm512_fmadd_ps(_mm512_loadu_ps(weights + h * run_slots + 16 * v),
                                          _mm512_load_ps(groups.least[g] + 16 * v), sum);
                }
            }
            largest[pair] = std::bit_cast<float>(_mm512_reduce_max_epi32(peak));
            offset[pair] = has_least ? _mm512_reduce_add_ps(sum) : 0.0f;
        }
        for (uint32_t pair = 0; pair < pairs; pair += 16) {
            const __m512 peak = _mm512_load_ps(largest + pair);
            const __m512 number = _mm512_set1_ps(largest_number);
            const __m512 infinity = _mm512_set1_ps(std::numeric_limits<float>::infinity());
            const __m512 raised = _mm512_div_ps(number, peak);
            const __mmask16 finite = _mm512_cmp_ps_mask(peak, infinity, _CMP_LT_OQ);
            const __mmask16 usable = _mm512_mask_cmp_ps_mask(finite, raised, infinity, _CMP_LT_OQ);
            _mm512_store_ps(factor + pair, _mm512_maskz_mov_ps(usable, raised));
            _mm512_store_ps(unit + pair, _mm512_maskz_div_ps(usable, peak, number));
            _mm512_store_ps(
                offset + pair,
                _mm512_mask_mov_ps(_mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()), finite,
                                   _mm512_load_ps(offset + pair)));
        }
    }
};

/// weights are 0 outside [first, end) wherever whole vectors of 16 slots reach.
template <uint32_t heads, uint32_t together>
HWY_INLINE void encode_weights(const value_groups& groups, const coded_operand& values,
                               const float* weights, uint32_t first, uint32_t end,
                               coded_weights<heads, together>& out) {
    const uint32_t from = first / 16, to = (end + 15) / 16;
    const auto product = [&](uint32_t g, uint32_t h, uint32_t v) {
        return weighted_step(groups, weights, g, h, v);
    };
    const weight_numbers<heads> numbers(groups, values, weights, first, end);
    const __m128i zero = _mm_set1_epi32(-unsigned_zero(values));
    for (uint32_t g = 0; g < round_up(values.groups, together); ++g) {
        auto& chunk = out.groups[g / together];
        const uint32_t side = g % together;
        for (uint32_t h = 0; h < heads; ++h) {
            if (g >= values.groups) {
                for (uint32_t v = from; v < to; ++v) {
                    _mm512_store_si512(chunk.words[h][v][side], _mm512_setzero_si512());
                }
                continue;
            }
            // Where the factor is 0 for what is not finite, digits may be anything.
            const __m512 factor = _mm512_set1_ps(numbers.factor[g * heads + h]);
            __m512i totals = _mm512_setzero_si512();
            for (uint32_t v = from; v < to; ++v) {
                const __m512i words =
                    digits_of(_mm512_cvtps_epi32(_mm512_mul_ps(product(g, h, v), factor)));
                _mm512_store_si512(chunk.words[h][v][side], words);
                add_products(totals, _mm512_set1_epi8(1), words);
            }
            const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(totals),
                                                  _mm512_extracti64x4_epi64(totals, 1));
            const __m128i total =
                _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(chunk.start[h][side]),
                             _mm_mullo_epi32(total, zero));
            chunk.scale[h][side] = numbers.unit[g * heads + h];
            chunk.offset[h][side] = numbers.offset[g * heads + h];
        }
        if constexpr (together == 2) {
            if (side == 0) continue;
            for (uint32_t h = 0; h < heads; ++h) {
                for (uint32_t v = from; v < to; ++v) {
                    const __m512i a = _mm512_load_si512(chunk.words[h][v][0]);
                    const __m512i b = _mm512_load_si512(chunk.words[h][v][1]);
                    _mm512_store_si512(chunk.words[h][v][0], _mm512_unpacklo_epi32(a, b));
                    _mm512_store_si512(chunk.words[h][v][1], _mm512_unpackhi_epi32(a, b));
                }
            }
        }
    }
}

/// `bytes` code bytes (up to 16) of the rows of 4 slots -> dword j holds byte j of the 4 slots.
template <bool whole>
HWY_INLINE __m512i interleaved(const std::byte* row, std::size_t row_bytes, uint32_t bytes) {
    const auto part = [&](uint32_t s) {
        const std::byte* at = row + s * row_bytes;
        if constexpr (whole) return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        return _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << bytes) - 1), at);
    };
    __m512i all = _mm512_castsi128_si512(part(0));
    all = _mm512_inserti32x4(all, part(1), 1);
    all = _mm512_inserti32x4(all, part(2), 2);
    all = _mm512_inserti32x4(all, part(3), 3);
    const __m512i words = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512i order =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    return _mm512_shuffle_epi8(_mm512_permutexvar_epi32(words, all), order);
}

/// Two vectors of 16 channels: those of byte codes from `byte` on, or the low and the high nibbles
/// of 16 bytes. sums[v][h] are their sums over the run.
template <code_kind kind, uint32_t heads, uint32_t together, bool whole>
HWY_INLINE void sum_codes(const value_rows& rows, const value_rows& next_rows, uint32_t byte,
                          uint32_t bytes,
                          const typename coded_weights<heads, together>::of_chunk& by,
                          const uint32_t* more, uint32_t first_quad, uint32_t end_quad,
                          __m512 (&out)[2][heads]) {
    // With two groups in a chunk: dwords of the one at even places, of the other at odd ones.
    const __m512i mixed_places =
        _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    const __m512i unmixed_places =
        _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    const auto set = [&](const int32_t* words, uint32_t apart) {
        if constexpr (together == 1) return _mm512_set1_epi32(words[0]);
        int32_t pair[2] = {words[0], words[apart]};
        int64_t both;
        std::memcpy(&both, pair, sizeof both);
        return _mm512_set1_epi64(both);
    };
    __m512i sums[2][heads][digits];
    repeat<heads>([&](auto h) KVRT_INLINE_LAMBDA {
        repeat<digits>([&](auto digit) KVRT_INLINE_LAMBDA {
            sums[0][h][digit] = sums[1][h][digit] = set(by.start[h][0] + digit, 4);
        });
    });
    const std::size_t row_bytes = rows.row_bytes;
    const bool new_line = byte % 64 == 0 || byte % 64 + (is_nibbles(kind) ? 16 : 32) > 64;
    for (uint32_t quad = first_quad; quad < end_quad; ++quad) {
        const std::byte* row = rows.of(4 * quad) + byte;
        if (new_line) {
            const std::byte* next = next_rows.of(4 * quad) + round_up(byte, 64u);
            for (uint32_t s = 0; s < 4; ++s) __builtin_prefetch(next + s * row_bytes, 0, 2);
        }
        __m512i codes[2];
        if constexpr (is_nibbles(kind)) {
            __m512i both = interleaved<whole>(row, row_bytes, bytes);
            if constexpr (together == 2) both = _mm512_permutexvar_epi32(mixed_places, both);
            codes[0] = unsigned_codes<kind>(low_nibbles(both));
            codes[1] = unsigned_codes<kind>(high_nibbles(both));
            if constexpr (kind == code_kind::nibbles) {
                const __m512i zeros = _mm512_set1_epi32(static_cast<int32_t>(more[quad]));
                codes[0] = _mm512_add_epi8(codes[0], zeros);
                codes[1] = _mm512_add_epi8(codes[1], zeros);
            }
        } else {
            const uint32_t here = HWY_MIN(bytes, chunk_bytes);
            codes[0] = unsigned_codes<kind>(interleaved<whole>(row, row_bytes, here));
            codes[1] = unsigned_codes<kind>(
                interleaved<whole>(row + chunk_bytes, row_bytes, bytes - here));
        }
        repeat<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            repeat<digits>([&](auto digit) KVRT_INLINE_LAMBDA {
                const __m512i weight = set(by.at(h, quad, digit), 1);
                add_products(sums[0][h][digit], codes[0], weight);
                add_products(sums[1][h][digit], codes[1], weight);
            });
        });
    }
    const auto floats = [](const float* numbers) {
        if constexpr (together == 1) return _mm512_set1_ps(numbers[0]);
        int64_t both;
        std::memcpy(&both, numbers, sizeof both);
        return _mm512_castsi512_ps(_mm512_set1_epi64(both));
    };
    repeat<2>([&](auto v) KVRT_INLINE_LAMBDA {
        repeat<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            __m512 sum =
                _mm512_fmadd_ps(joined(sums[v][h]), floats(by.scale[h]), floats(by.offset[h]));
            if constexpr (together == 2) sum = _mm512_permutexvar_ps(unmixed_places, sum);
            out[v][h] = sum;
        });
    });
}

HWY_INLINE void add_masked(float* target, __mmask16 which, __m512 sum) {
    _mm512_mask_storeu_ps(target, which, _mm512_add_ps(_mm512_maskz_loadu_ps(which, target), sum));
}

/// out[h][channel] += sum over slots [first, end) of weights[h][slot] * value.
template <code_kind kind, uint32_t heads, uint32_t together>
HWY_NOINLINE void add_code_values(const std::byte* const* tiles, const std::byte* const* next_tiles,
                                  const coded_operand& values, const float* weights, uint32_t first,
                                  uint32_t end, float* out) {
    const value_rows rows{tiles, values.layout.row_bytes()};
    const value_rows next_rows{next_tiles, values.layout.row_bytes()};
    value_groups groups;
    coded_weights<heads, together> coded;
    read_value_groups(values, rows, first, end, groups);
    encode_weights<heads, together>(groups, values, weights, first, end, coded);
    const uint32_t first_quad = first / 4, end_quad = (end + 3) / 4;
    const uint32_t step = is_nibbles(kind) ? chunk_bytes : 2 * chunk_bytes;
    alignas(64) uint32_t more[run_quads] = {};
    for (uint32_t g = 0; g < values.groups; g += together) {
        if (kind == code_kind::nibbles && values.has_least()) {
            for (uint32_t v = first / 16; v < (end + 15) / 16; ++v) {
                const __m512i zeros = to_common_zero(_mm512_load_ps(groups.zero[g] + 16 * v));
                _mm_store_si128(
                    reinterpret_cast<__m128i*>(more + 4 * v),
                    _mm512_cvtepi32_epi8(_mm512_and_si512(zeros, _mm512_set1_epi32(0xff))));
            }
        }
        const uint32_t begin = is_nibbles(kind) ? g * values.group / 2 : g * values.group;
        const uint32_t end_channel = HWY_MIN(values.dim, (g + together) * values.group);
        const uint32_t group_bytes = (end_channel - g * values.group) / (is_nibbles(kind) ? 2 : 1);
        for (uint32_t at = 0; at < group_bytes; at += step) {
            const uint32_t bytes = HWY_MIN(step, group_bytes - at);
            __m512 sums[2][heads];
            const auto& by = coded.groups[g / together];
            if (bytes == step) {
                sum_codes<kind, heads, together, true>(rows, next_rows, begin + at, bytes, by, more,
                                                       first_quad, end_quad, sums);
            } else {
                sum_codes<kind, heads, together, false>(rows, next_rows, begin + at, bytes, by,
                                                        more, first_quad, end_quad, sums);
            }
            for (uint32_t h = 0; h < heads; ++h) {
                float* target = out + h * values.dim + g * values.group;
                const auto lanes = [](uint32_t count) {
                    return static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1);
                };
                if constexpr (!is_nibbles(kind)) {
                    add_masked(target + at, lanes(bytes), sums[0][h]);
                    if (bytes > 16) add_masked(target + at + 16, lanes(bytes - 16), sums[1][h]);
                } else if constexpr (together == 1) {
                    const uint32_t half = values.channels(g) / 2;
                    add_masked(target + at, lanes(bytes), sums[0][h]);
                    add_masked(target + half + at, lanes(bytes), sums[1][h]);
                } else {
                    // Bytes 8 to 15 are those of the second group.
                    const uint32_t half = values.channels(g) / 2;
                    const __mmask16 low = lanes(half);
                    add_masked(target, low, sums[0][h]);
                    add_masked(target + half, low, sums[1][h]);
                    if (g + 1 == values.groups) continue;
                    const uint32_t other = values.channels(g + 1) / 2;
                    const __mmask16 high = static_cast<__mmask16>(lanes(other) << half);
                    // Stores begin `half` channels before the group, which the mask leaves out.
                    float* next = target + values.group;
                    add_masked(next - half, high, sums[0][h]);
                    add_masked(next - half + other, high, sums[1][h]);
                }
            }
        }
    }
    for (uint32_t slot = first; slot < end; ++slot) {
        __builtin_prefetch(next_rows.of(slot) + values.code_bytes, 0, 2);
    }
}

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_POP_ATTRIBUTES

#undef KVRT_INLINE_LAMBDA

#endif  // HWY_AVX3

#endif  // per-target include guard
