// Scores of keys whose groups have powers of two for steps, multiplied by AMX as one group: where
// the steps of a key differ by no more than three binary places, a code is brought to the largest
// of them as it becomes a byte, and sums of all channels are one. Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_AMX_FOLDED_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_AMX_FOLDED_INL_HPP
#undef KVRT_ATTENTION_AMX_FOLDED_INL_HPP
#else
#define KVRT_ATTENTION_AMX_FOLDED_INL_HPP
#endif

#include <hwy/highway.h>

#include <cmath>

#include "attention/amx_codes-inl.hpp"

#if HWY_TARGET == HWY_AVX3

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR KVRT_AMX_ATTRIBUTES)
namespace kvrt {
namespace HWY_NAMESPACE {

#define KVRT_INLINE_LAMBDA __attribute__((always_inline))

inline constexpr uint32_t most_places = 3;  // that a code is shifted by: 12 << 3 is a byte

/// Whether keys may be taken so: all bytes of their metadata are exponents.
inline bool has_folded_keys(const coded_operand& keys) {
    return keys.reading.groups == group_kind::e8m0_step && keys.group == 32 &&
           keys.reading.codes == code_kind::e2m1_nibbles && keys.groups % 4 == 0;
}

/// A query head of such keys has its rows twice: by groups, and behind that as one.
struct folded_query_shape {
    uint32_t stride, codes;

    folded_query_shape(const coded_operand& keys, uint32_t query_bytes)
        : stride(query_bytes / amx_parts), codes(keys.dim) {}
    uint32_t rows_at() const { return stride / 2; }
    uint32_t unit_at() const { return rows_at() + round_up(codes, amx_row_bytes); }
    float unit_of(const std::byte* head) const {
        float unit;
        std::memcpy(&unit, head + unit_at(), sizeof unit);
        return unit;
    }
};

/// The rows as one; their unit is NaN where channels are too far apart for that.
inline void encode_folded_query(const float* query, const coded_operand& keys, uint32_t query_bytes,
                                bool too_far_apart, std::byte* head) {
    const amx_query_shape grouped(keys, query_bytes);
    const folded_query_shape shape(keys, query_bytes);
    amx_query_shape whole = grouped;
    whole.padded = whole.codes = keys.dim;
    split_query_group(query, keys.dim, whole, 0, head + shape.rows_at());
    if (!too_far_apart) return;
    const float none = std::numeric_limits<float>::quiet_NaN();
    std::memcpy(head + shape.unit_at(), &none, sizeof none);
}

/// Exponents of 16 keys' groups: the largest in each byte of a word, and how far the others are
/// below it.
struct key_places {
    alignas(64) std::byte below[most_groups / 4][amx_row_bytes];
    alignas(64) int32_t largest[slot_group];
};

/// False where a code of the slots in `seen` would not be a byte, or an exponent stands for NaN.
HWY_INLINE bool read_places(const std::byte* metadata, uint32_t words, __mmask16 seen,
                            key_places& out) {
    const auto load = [&](uint32_t w) KVRT_INLINE_LAMBDA {
        return _mm512_loadu_si512(metadata + w * amx_row_bytes);
    };
    __m512i largest = load(0);
    for (uint32_t w = 1; w < words; ++w) largest = _mm512_max_epu8(largest, load(w));
    largest = _mm512_max_epu8(largest, _mm512_rol_epi32(largest, 8));
    largest = _mm512_max_epu8(largest, _mm512_rol_epi32(largest, 16));
    _mm512_store_si512(out.largest, _mm512_and_si512(largest, _mm512_set1_epi32(0xff)));
    __mmask64 refused = _mm512_cmpeq_epi8_mask(largest, _mm512_set1_epi8(-1));
    for (uint32_t w = 0; w < words; ++w) {
        const __m512i below = _mm512_sub_epi8(largest, load(w));
        refused |= _mm512_cmpgt_epu8_mask(below, _mm512_set1_epi8(most_places));
        _mm512_store_si512(out.below[w], _mm512_slli_epi16(below, 4));
    }
    return (refused & _mm512_movepi8_mask(_mm512_movm_epi32(seen))) == 0;
}

/// Of code c and p places at 16 p + c.
struct placed_numbers {
    alignas(64) int8_t number[64];

    constexpr placed_numbers() : number() {
        constexpr int8_t magnitude[8] = {0, 1, 2, 3, 4, 6, 8, 12};
        for (uint32_t i = 0; i < 64; ++i) {
            const int placed = magnitude[i % 8] << (most_places - i / 16);
            number[i] = static_cast<int8_t>(i % 16 < 8 ? placed : -placed);
        }
    }
};
inline constexpr placed_numbers all_placed_numbers;

/// score_expanded() of such keys; false where it does not apply, and nothing is written. That
/// depends on slots [first, end) of the run alone: nobody knows what others hold.
template <uint32_t heads>
HWY_NOINLINE bool score_folded(const std::byte* const* tiles, const std::byte* const* next_tiles,
                               uint32_t tile_count, const coded_operand& keys,
                               const std::byte* queries, uint32_t query_bytes, uint32_t first,
                               uint32_t end, float* scores) {
    const amx_query_shape grouped(keys, query_bytes);
    const folded_query_shape shape(keys, query_bytes);
    for (uint32_t h = 0; h < heads; ++h) {
        if (std::isnan(shape.unit_of(queries + h * query_bytes))) return false;
    }
    const uint32_t code_words = keys.code_bytes / record_word;
    key_places places[run_tiles_of_16];
    for (uint32_t t = 0; t < tile_count; ++t) {
        stay_awake();
        const std::byte* metadata = tiles[t] + code_words * amx_row_bytes;
        const __mmask16 seen = lanes_inside(first, end, t);
        if (!read_places(metadata, keys.groups / 4, seen, places[t])) return false;
    }
    amx_keys run(grouped);
    const uint32_t products = keys.dim / amx_row_bytes;  // of two groups each
    keep_query_rows(queries + shape.rows_at(), shape.stride, keys.dim);
    const __m512i numbers = _mm512_load_si512(all_placed_numbers.number);
    const __m512i nibble = _mm512_set1_epi8(0x0f);
    const auto expand = [&](uint32_t t, uint32_t g) KVRT_INLINE_LAMBDA {
        const uint32_t words = keys.group / 8;
        const std::byte* from = tiles[t] + g * words * amx_row_bytes;
        const std::byte* next = next_tiles[t] + g * words * amx_row_bytes;
        // The byte of the group in all bytes of a word.
        const __m512i order =
            _mm512_add_epi8(_mm512_set1_epi8(static_cast<char>(g % 4)),
                            _mm512_broadcast_i32x4(
                                _mm_setr_epi8(0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12)));
        const __m512i place = _mm512_shuffle_epi8(_mm512_load_si512(places[t].below[g / 4]), order);
        std::byte* out = run.rows(t, 0) + 2 * g * words * amx_row_bytes;
        for (uint32_t w = 0; w < words; ++w) {
            __builtin_prefetch(next + w * amx_row_bytes, 0, 2);
            const __m512i codes = _mm512_loadu_si512(from + w * amx_row_bytes);
            const __m512i low = _mm512_ternarylogic_epi32(nibble, codes, place, 0xca);
            const __m512i high =
                _mm512_ternarylogic_epi32(nibble, _mm512_srli_epi16(codes, 4), place, 0xca);
            _mm512_store_si512(out + w * amx_row_bytes, _mm512_permutexvar_epi8(low, numbers));
            _mm512_store_si512(out + (words + w) * amx_row_bytes,
                               _mm512_permutexvar_epi8(high, numbers));
        }
    };
    const auto multiply = [&](uint32_t t, uint32_t k) KVRT_INLINE_LAMBDA {
        if (k == 0) zero_tile<0>();
        multiply_kept_rows(k, run.rows(t, 0) + k * 16 * amx_row_bytes);
    };
    const auto join = [&](uint32_t t) KVRT_INLINE_LAMBDA {
        const __m512i largest = _mm512_load_si512(places[t].largest);
        const __m512 power = _mm512_mask_mov_ps(_mm512_castsi512_ps(_mm512_slli_epi32(largest, 23)),
                                                _mm512_testn_epi32_mask(largest, largest),
                                                _mm512_set1_ps(0x1p-127f));
        const __m512 step =
            _mm512_mul_ps(power, _mm512_set1_ps(keys.scale / static_cast<float>(1 << most_places)));
        each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            const __m512 unit = _mm512_set1_ps(shape.unit_of(queries + h * query_bytes));
            const __m512 sum = joined_rows(run.sums(t, 0) + h * amx_parts);
            _mm512_storeu_ps(scores + h * run_slots + t * slot_group,
                             _mm512_mul_ps(_mm512_mul_ps(sum, unit), step));
        });
    };
    for (uint32_t t = 0; t < tile_count + 2; ++t) {
        const bool multiplied = t >= 1 && t <= tile_count;
        for (uint32_t k = 0; k < products; ++k) {
            if (multiplied) multiply(t - 1, k);
            if (t < tile_count) {
                expand(t, 2 * k);
                expand(t, 2 * k + 1);
            }
        }
        if (t >= 2) join(t - 2);
        if (multiplied) store_tile<0>(run.sums(t - 1, 0), amx_row_bytes);
        if (t < tile_count) prefetch_lines(next_tiles[t], code_words, keys.layout.words);
    }
    return true;
}

#undef KVRT_INLINE_LAMBDA

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_POP_ATTRIBUTES

#endif  // HWY_AVX3

#endif  // per-target include guard
