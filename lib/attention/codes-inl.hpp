// Decode attention over integer codes (format.hpp, code_reading), multiplied as they are stored by
// the 8-bit dot products of AVX-512 VNNI. Include it after decode.cpp's own pieces, per target.
//
// The other factor, a query or a weight, becomes a whole number of 24 bits per group, split into
// digits of one signed byte, the lowest first. Sums of products of codes and digits are exact, so
// all that is lost is half a unit of n, 2^-24 of the group's largest number: as much as a float's
// mantissa loses. With x = step (c - zero) + least
//
//   q . k  = sum over groups: s_g (step (sum n c) + (least - step zero) (sum n)),   q = s_g n
//   w . v  = S_g (sum over slots n c - zero n) + sum over slots w least,            w step = S_g n
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

#include <cstring>

#include "attention/kernels.hpp"
#include "format/record.hpp"
#include "format/tile.hpp"

// AVX-512 as Highway's target has it, and VNNI: callers ask the processor first.
#if HWY_TARGET == HWY_AVX3

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR ",avx512vnni")
namespace kvrt {
namespace HWY_NAMESPACE {

inline constexpr uint32_t digits = 3;
// Below 127 (2^16 + 2^8 + 1), where the digits end, by more than rounding adds to the largest.
inline constexpr float largest_number = 127 * 65536 + 127 * 256;

/// The sums of products with each digit as one float; each is exact below 2^24.
HWY_INLINE __m512 joined(const __m512i* sums) {
    const __m512 base = _mm512_set1_ps(256.0f);
    __m512 all = _mm512_cvtepi32_ps(sums[digits - 1]);
    for (uint32_t digit = digits - 1; digit-- > 0;) {
        all = _mm512_fmadd_ps(all, base, _mm512_cvtepi32_ps(sums[digit]));
    }
    return all;
}

/// What a kernel needs of an operand whose format has a code_reading.
struct coded_operand {
    const operand_layout& layout;
    code_reading reading;
    uint32_t dim, group, groups, code_bytes;
    float scale;  ///< the head's static scale times the reading's unit

    coded_operand(const operand_layout& operand, uint32_t head)
        : layout(operand),
          reading(operand.format->reading),
          dim(operand.dim),
          group(operand.format->group_of(operand.dim)),
          groups(operand.format->groups(operand.dim)),
          code_bytes(operand.format->code_bytes(operand.dim)),
          scale(operand.constants(head).scale * operand.format->reading.unit) {}

    uint32_t channels(uint32_t index) const { return HWY_MIN(group, dim - index * group); }

    /// What unsigned codes, as the dot product takes them, have for 0.
    float zero() const {
        switch (reading.codes) {
            case code_kind::signed_bytes:
                return 128.0f;
            case code_kind::e2m1_nibbles:
                return 12.0f;
            default:
                return reading.zero;
        }
    }
};

/// A query head as whole numbers: the digits of all channels, [digit][dim], and two floats per
/// group.
struct coded_query {
    const float* scale;  ///< [groups]
    const float* sum;    ///< [groups], of the numbers times the scale

    coded_query(const std::byte* at, uint32_t dim, uint32_t groups)
        : scale(reinterpret_cast<const float*>(at + digits * dim)), sum(scale + groups) {}
};

/// Splits a query head; a group that is not finite keeps its flaw in its scale.
inline void encode_query(const float* query, const coded_operand& keys, std::byte* out) {
    int8_t* bytes = reinterpret_cast<int8_t*>(out);
    float* scale = reinterpret_cast<float*>(bytes + digits * keys.dim);
    float* sum = scale + keys.groups;
    for (uint32_t g = 0; g < keys.groups; ++g) {
        const uint32_t first = g * keys.group, count = keys.channels(g);
        const group_reach reach = reach_of(query + first, count);
        const float peak = reach.magnitude();
        const float factor = reach.finite && peak > 0.0f ? largest_number / peak : 0.0f;
        const bool usable = std::isfinite(factor);
        int64_t total = 0;
        for (uint32_t i = first; i < first + count; ++i) {
            int32_t number = usable ? static_cast<int32_t>(std::lrint(query[i] * factor)) : 0;
            total += number;
            for (uint32_t digit = 0; digit < digits; ++digit) {
                const int8_t lowest = static_cast<int8_t>(number);
                bytes[digit * keys.dim + i] = lowest;
                number = (number - lowest) >> 8;
            }
        }
        scale[g] = !reach.finite ? NAN : usable ? peak / largest_number : 0.0f;
        sum[g] = static_cast<float>(total) * scale[g];
    }
}

HWY_INLINE __m512 halves_to_floats(__m512i words) {
    return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(words));
}

/// Step and least of 16 slots from the metadata words that hold a group's.
/// word(i) gives the i-th metadata word of the 16 slots.
template <class word_source>
HWY_INLINE void read_group(const coded_operand& operand, uint32_t g, const word_source& word,
                           __m512& step, __m512& least) {
    least = _mm512_setzero_ps();
    switch (operand.reading.groups) {
        case group_kind::f16_step:
            step = halves_to_floats(
                _mm512_srlv_epi32(word(g / 2), _mm512_set1_epi32(static_cast<int>(16 * (g % 2)))));
            break;
        case group_kind::f16_step_least: {
            const __m512i both = word(g);
            step = halves_to_floats(both);
            least = halves_to_floats(_mm512_srli_epi32(both, 16));
            break;
        }
        case group_kind::f32_step:
            step = _mm512_castsi512_ps(word(0));
            break;
        default: {
            const __m512i byte = _mm512_and_si512(
                _mm512_srlv_epi32(word(g / 4), _mm512_set1_epi32(static_cast<int>(8 * (g % 4)))),
                _mm512_set1_epi32(0xff));
            const __m512 nan = _mm512_set1_ps(NAN);
            if (operand.reading.groups == group_kind::e4m3_step) {
                // The bits as those of a float are 2^-120 of the number, subnormals too.
                step = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(byte, 20)),
                                     _mm512_set1_ps(0x1p120f));
                step = _mm512_mask_mov_ps(
                    step, _mm512_cmpeq_epi32_mask(byte, _mm512_set1_epi32(0x7f)), nan);
            } else {
                step = _mm512_castsi512_ps(_mm512_slli_epi32(byte, 23));
                step = _mm512_mask_mov_ps(step, _mm512_testn_epi32_mask(byte, byte),
                                          _mm512_set1_ps(0x1p-127f));
                step = _mm512_mask_mov_ps(
                    step, _mm512_cmpeq_epi32_mask(byte, _mm512_set1_epi32(0xff)), nan);
            }
        }
    }
    step = _mm512_mul_ps(step, _mm512_set1_ps(operand.scale));
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

HWY_INLINE __m512i four_bytes(const int8_t* at) {
    int32_t word;
    std::memcpy(&word, at, sizeof word);
    return _mm512_set1_epi32(word);
}

/// scores[h][group * 16 + slot] = query h . key, for `heads` queries prepared by encode_query.
template <code_kind kind, uint32_t heads>
HWY_NOINLINE void score_codes(const std::byte* const* tiles, const std::byte* const* next_tiles,
                              uint32_t tile_count, const coded_operand& keys,
                              const std::byte* queries, uint32_t query_bytes, float* scores) {
    const uint32_t code_words = keys.code_bytes / record_word;
    const __m512 zero = _mm512_set1_ps(keys.zero());
    for (uint32_t t = 0; t < tile_count; ++t) {
        const std::byte* tile = tiles[t];
        const auto word = [&](uint32_t w) { return _mm512_loadu_si512(tile + w * 64); };
        __m512 total[heads];
        for (uint32_t h = 0; h < heads; ++h) total[h] = _mm512_setzero_ps();
        uint32_t w = 0;
        for (uint32_t g = 0; g < keys.groups; ++g) {
            const uint32_t first = g * keys.group, count = keys.channels(g);
            __m512i sums[heads][digits];
            for (uint32_t h = 0; h < heads; ++h) {
                for (__m512i& sum : sums[h]) sum = _mm512_setzero_si512();
            }
            const auto add = [&](__m512i codes, uint32_t channel) {
                HWY_UNROLL(8)
                for (uint32_t h = 0; h < heads; ++h) {
                    const int8_t* query =
                        reinterpret_cast<const int8_t*>(queries + h * query_bytes) + channel;
                    HWY_UNROLL(3)
                    for (uint32_t digit = 0; digit < digits; ++digit) {
                        sums[h][digit] = _mm512_dpbusd_epi32(sums[h][digit], codes,
                                                             four_bytes(query + digit * keys.dim));
                    }
                }
            };
            if constexpr (kind == code_kind::signed_bytes) {
                for (uint32_t i = 0; i < count; i += 4, ++w) {
                    __builtin_prefetch(next_tiles[t] + w * 64, 0, 2);
                    add(unsigned_codes<kind>(word(w)), first + i);
                }
            } else {
                for (uint32_t i = 0; i < count / 2; i += 4, ++w) {
                    __builtin_prefetch(next_tiles[t] + w * 64, 0, 2);
                    const __m512i both = word(w);
                    add(unsigned_codes<kind>(low_nibbles(both)), first + i);
                    add(unsigned_codes<kind>(high_nibbles(both)), first + count / 2 + i);
                }
            }
            __m512 step, least;
            read_group(
                keys, g, [&](uint32_t m) { return word(code_words + m); }, step, least);
            least = _mm512_fnmadd_ps(step, zero, least);
            for (uint32_t h = 0; h < heads; ++h) {
                const coded_query query(queries + h * query_bytes, keys.dim, keys.groups);
                const __m512 sum = _mm512_mul_ps(joined(sums[h]), _mm512_set1_ps(query.scale[g]));
                total[h] = _mm512_fmadd_ps(sum, step, total[h]);
                total[h] = _mm512_fmadd_ps(least, _mm512_set1_ps(query.sum[g]), total[h]);
            }
        }
        for (uint32_t m = code_words; m < keys.layout.words; ++m) {
            __builtin_prefetch(next_tiles[t] + m * 64, 0, 2);
        }
        for (uint32_t h = 0; h < heads; ++h) {
            _mm512_storeu_ps(scores + h * run_slots + t * slot_group, total[h]);
        }
    }
}

// ---- Values
// ---------------------------------------------------------------------------------------

inline constexpr uint32_t most_value_groups = 16;  // 256 channels in groups of 16
inline constexpr uint32_t run_quads = run_slots / 4;

/// Where the rows of a run's slots lie.
struct value_rows {
    const std::byte* const* tiles;
    uint32_t row_bytes;

    const std::byte* of(uint32_t slot) const {
        return tiles[slot / slot_group] + slot % slot_group * row_bytes;
    }
};

/// Steps and leasts of a run, [group][slot]; 0 for slots outside [first, end).
struct value_groups {
    alignas(64) float step[most_value_groups][run_slots];
    alignas(64) float least[most_value_groups][run_slots];
};

HWY_INLINE __mmask16 slots_inside(uint32_t slot, uint32_t first, uint32_t end) {
    const uint32_t from = first > slot ? HWY_MIN(first - slot, 16u) : 0;
    const uint32_t to = end > slot ? HWY_MIN(end - slot, 16u) : 0;
    return static_cast<__mmask16>(((1u << to) - 1) & ~((1u << from) - 1));
}

inline void read_value_groups(const coded_operand& values, const value_rows& rows, uint32_t first,
                              uint32_t end, value_groups& out) {
    const __m512i offsets =
        _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                           _mm512_set1_epi32(static_cast<int>(rows.row_bytes)));
    for (uint32_t slot = first / slot_group * slot_group; slot < end; slot += slot_group) {
        const __mmask16 inside = slots_inside(slot, first, end);
        const std::byte* meta = rows.of(slot) + values.code_bytes;
        for (uint32_t g = 0; g < values.groups; ++g) {
            __m512 step, least;
            read_group(
                values, g,
                [&](uint32_t m) {
                    return _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), inside, offsets,
                                                       meta + m * record_word, 1);
                },
                step, least);
            _mm512_store_ps(out.step[g] + slot, _mm512_maskz_mov_ps(inside, step));
            _mm512_store_ps(out.least[g] + slot, _mm512_maskz_mov_ps(inside, least));
        }
    }
}

/// Weights of one head times steps, as whole numbers: the bytes of a digit of all slots side by
/// side, so that a quad of 4 slots is a word. scale and offset turn a group's sums into values.
struct coded_weights {
    alignas(64) int8_t digit_bytes[digits][most_value_groups][run_slots];
    float scale[most_value_groups];
    float offset[most_value_groups];
};

/// weights are 0 outside [first, end) wherever whole vectors of 16 slots reach.
inline void encode_weights(const value_groups& groups, const coded_operand& values,
                           const float* weights, uint32_t first, uint32_t end, coded_weights& out) {
    const uint32_t from = first / slot_group * slot_group;
    const __m512 none = _mm512_setzero_ps();
    for (uint32_t g = 0; g < values.groups; ++g) {
        __m512 peak = none, offset = none, flaw = none;
        for (uint32_t slot = from; slot < end; slot += slot_group) {
            const __m512 weight =
                _mm512_maskz_loadu_ps(slots_inside(slot, first, end), weights + slot);
            const __m512 product = _mm512_mul_ps(weight, _mm512_load_ps(groups.step[g] + slot));
            peak = _mm512_max_ps(peak, _mm512_abs_ps(product));
            flaw = _mm512_fmadd_ps(product, none, flaw);  // NaN unless all are finite
            offset = _mm512_fmadd_ps(weight, _mm512_load_ps(groups.least[g] + slot), offset);
        }
        const float largest = _mm512_reduce_max_ps(peak);
        const float broken = _mm512_reduce_add_ps(flaw);
        const bool usable =
            broken == 0.0f && largest > 0.0f && std::isfinite(largest_number / largest);
        const __m512 factor = _mm512_set1_ps(usable ? largest_number / largest : 0.0f);
        __m512i total = _mm512_setzero_si512();
        for (uint32_t slot = from; slot < end; slot += slot_group) {
            const __m512 weight =
                _mm512_maskz_loadu_ps(slots_inside(slot, first, end), weights + slot);
            const __m512 product = _mm512_mul_ps(weight, _mm512_load_ps(groups.step[g] + slot));
            __m512i number = usable ? _mm512_cvtps_epi32(_mm512_mul_ps(product, factor))
                                    : _mm512_setzero_si512();
            total = _mm512_add_epi32(total, number);
            for (uint32_t digit = 0; digit < digits; ++digit) {
                _mm_store_si128(reinterpret_cast<__m128i*>(out.digit_bytes[digit][g] + slot),
                                _mm512_cvtepi32_epi8(number));
                const __m512i lowest = _mm512_srai_epi32(_mm512_slli_epi32(number, 24), 24);
                number = _mm512_srai_epi32(_mm512_sub_epi32(number, lowest), 8);
            }
        }
        out.scale[g] = usable ? largest / largest_number : 0.0f;
        const float numbers = static_cast<float>(_mm512_reduce_add_epi32(total));
        out.offset[g] =
            _mm512_reduce_add_ps(offset) + broken - values.zero() * out.scale[g] * numbers;
    }
}

/// 64 code bytes of the rows of 4 slots -> for each 4 bytes, those of the 4 slots side by side:
/// lane L of 128 bits of out[k] holds bytes 16 L + 4 k ... of the slots.
HWY_INLINE void interleave(const __m512i* rows, __m512i* out) {
    const __m512i a = _mm512_unpacklo_epi8(rows[0], rows[1]);
    const __m512i b = _mm512_unpackhi_epi8(rows[0], rows[1]);
    const __m512i c = _mm512_unpacklo_epi8(rows[2], rows[3]);
    const __m512i d = _mm512_unpackhi_epi8(rows[2], rows[3]);
    out[0] = _mm512_unpacklo_epi16(a, c);
    out[1] = _mm512_unpackhi_epi16(a, c);
    out[2] = _mm512_unpacklo_epi16(b, d);
    out[3] = _mm512_unpackhi_epi16(b, d);
}

/// The group of a lane of 128 bits in half `half` of its bytes (groups end on 8 bytes or more).
template <code_kind kind>
HWY_INLINE uint32_t group_of_byte(const coded_operand& values, uint32_t byte) {
    const uint32_t channel = kind == code_kind::signed_bytes ? byte : 2 * byte;
    return HWY_MIN(channel / values.group, values.groups - 1);
}

/// values[h][channel] += sum over slots [first, end) of weights[h][slot] * value.
template <code_kind kind>
HWY_NOINLINE void add_code_values(const std::byte* const* tiles, const std::byte* const* next_tiles,
                                  const coded_operand& values, uint32_t heads, const float* weights,
                                  uint32_t first, uint32_t end, float* out) {
    constexpr uint32_t halves = kind == code_kind::signed_bytes ? 1 : 2;
    const value_rows rows{tiles, values.layout.row_bytes()};
    const value_rows next_rows{next_tiles, values.layout.row_bytes()};
    value_groups groups;
    read_value_groups(values, rows, first, end, groups);
    coded_weights coded[8];
    for (uint32_t h = 0; h < heads; ++h) {
        encode_weights(groups, values, weights + h * run_slots, first, end, coded[h]);
    }
    const uint32_t first_quad = first / 4, end_quad = (end + 3) / 4;
    for (uint32_t chunk = 0; chunk < values.code_bytes; chunk += 64) {
        const uint32_t bytes = HWY_MIN(64u, values.code_bytes - chunk);
        const __mmask64 there = bytes == 64 ? ~__mmask64{0} : (__mmask64{1} << bytes) - 1;
        alignas(64) __m512i codes[run_quads][halves][4];
        for (uint32_t quad = first_quad; quad < end_quad; ++quad) {
            __m512i row[4], mixed[4];
            for (uint32_t s = 0; s < 4; ++s) {
                row[s] = _mm512_maskz_loadu_epi8(there, rows.of(4 * quad + s) + chunk);
                __builtin_prefetch(next_rows.of(4 * quad + s) + chunk, 0, 2);
            }
            interleave(row, mixed);
            for (uint32_t k = 0; k < 4; ++k) {
                if constexpr (halves == 1) {
                    codes[quad][0][k] = unsigned_codes<kind>(mixed[k]);
                } else {
                    codes[quad][0][k] = unsigned_codes<kind>(low_nibbles(mixed[k]));
                    codes[quad][1][k] = unsigned_codes<kind>(high_nibbles(mixed[k]));
                }
            }
        }
        // Groups of the lanes, for k below 2 and from 2 on.
        uint32_t lane_group[2][4];
        for (uint32_t upper = 0; upper < 2; ++upper) {
            for (uint32_t lane = 0; lane < 4; ++lane) {
                lane_group[upper][lane] =
                    group_of_byte<kind>(values, chunk + 16 * lane + 8 * upper);
            }
        }
        const bool split = std::memcmp(lane_group[0], lane_group[1], sizeof lane_group[0]) != 0;
        for (uint32_t h = 0; h < heads; ++h) {
            __m512i all_sums[halves][4][digits];
            for (auto& half : all_sums) {
                for (auto& sums_of_k : half) {
                    for (__m512i& sum : sums_of_k) sum = _mm512_setzero_si512();
                }
            }
            const auto lanes_of = [&](const int8_t(*bytes_of)[run_slots], uint32_t upper,
                                      uint32_t quad) {
                const auto part = [&](uint32_t lane) {
                    return _mm_load_si128(reinterpret_cast<const __m128i*>(
                        bytes_of[lane_group[upper][lane]] + quad / 4 * 16));
                };
                __m512i all = _mm512_castsi128_si512(part(0));
                all = _mm512_inserti32x4(all, part(1), 1);
                all = _mm512_inserti32x4(all, part(2), 2);
                return _mm512_inserti32x4(all, part(3), 3);
            };
            for (uint32_t four = first_quad / 4 * 4; four < end_quad; four += 4) {
                __m512i words[2][digits];
                for (uint32_t digit = 0; digit < digits; ++digit) {
                    words[0][digit] = lanes_of(coded[h].digit_bytes[digit], 0, four);
                    words[1][digit] =
                        split ? lanes_of(coded[h].digit_bytes[digit], 1, four) : words[0][digit];
                }
                const auto take = [&](auto index) {
                    constexpr int q = decltype(index)::value;
                    constexpr auto pick = static_cast<_MM_PERM_ENUM>(q * 0x55);
                    const uint32_t quad = four + q;
                    if (quad < first_quad || quad >= end_quad) return;
                    HWY_UNROLL(3)
                    for (uint32_t digit = 0; digit < digits; ++digit) {
                        const __m512i by[2] = {_mm512_shuffle_epi32(words[0][digit], pick),
                                               _mm512_shuffle_epi32(words[1][digit], pick)};
                        HWY_UNROLL(2)
                        for (uint32_t half = 0; half < halves; ++half) {
                            HWY_UNROLL(4)
                            for (uint32_t k = 0; k < 4; ++k) {
                                all_sums[half][k][digit] = _mm512_dpbusd_epi32(
                                    all_sums[half][k][digit], codes[quad][half][k], by[k / 2]);
                            }
                        }
                    }
                };
                take(std::integral_constant<int, 0>());
                take(std::integral_constant<int, 1>());
                take(std::integral_constant<int, 2>());
                take(std::integral_constant<int, 3>());
            }
            alignas(64) float sums[halves][4][16];  // [k][lane, byte]
            for (uint32_t half = 0; half < halves; ++half) {
                for (uint32_t k = 0; k < 4; ++k) {
                    _mm512_store_ps(sums[half][k], joined(all_sums[half][k]));
                }
            }
            // Byte b of the chunk is in lane b / 16, register b % 16 / 4, place b % 4.
            float* target = out + h * values.dim;
            for (uint32_t byte = 0; byte < bytes; byte += 4) {
                const uint32_t whole = chunk + byte;
                const uint32_t g = group_of_byte<kind>(values, whole);
                const float* sum = sums[0][byte % 16 / 4] + byte / 16 * 4;
                uint32_t channel = whole;
                if constexpr (halves == 2)
                    channel = g * values.group + (whole - g * values.group / 2);
                const __m128 scale = _mm_set1_ps(coded[h].scale[g]);
                const __m128 offset = _mm_set1_ps(coded[h].offset[g]);
                const auto put = [&](const float* from, float* to) {
                    _mm_storeu_ps(to, _mm_add_ps(_mm_loadu_ps(to),
                                                 _mm_fmadd_ps(_mm_loadu_ps(from), scale, offset)));
                };
                put(sum, target + channel);
                if constexpr (halves == 2) {
                    put(sums[1][byte % 16 / 4] + byte / 16 * 4,
                        target + channel + values.channels(g) / 2);
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

#endif  // HWY_AVX3

#endif  // per-target include guard
