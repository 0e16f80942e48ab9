// Weights of a span as AMX multiplies them with values (amx_values-inl.hpp): times the steps of a
// group, as whole numbers in three digits of a signed byte, of a unit that all runs of the span
// share, so that their sums of products can stay in tile registers. Include it per target.

// Per-target include guard.
#if defined(KVRT_ATTENTION_AMX_WEIGHTS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_AMX_WEIGHTS_INL_HPP
#undef KVRT_ATTENTION_AMX_WEIGHTS_INL_HPP
#else
#define KVRT_ATTENTION_AMX_WEIGHTS_INL_HPP
#endif

#include <hwy/highway.h>

#include "attention/amx_codes-inl.hpp"

#if HWY_TARGET == HWY_AVX3

HWY_PUSH_ATTRIBUTES(HWY_TARGET_STR KVRT_AMX_ATTRIBUTES)
namespace kvrt {
namespace HWY_NAMESPACE {

#define KVRT_INLINE_LAMBDA __attribute__((always_inline))

/// Weights of a span, which outlive the softmax of one: of `heads` query heads, 0 outside the
/// span's slots wherever whole vectors of 16 of them reach.
struct span_weights {
    const float* first;   ///< [run][stride], of a run [heads][run_slots]
    uint32_t run_stride;  ///< floats

    HWY_INLINE __m512 of(uint32_t head, uint32_t vector) const {
        return _mm512_loadu_ps(first + vector / run_tiles_of_16 * run_stride + head * run_slots +
                               vector % run_tiles_of_16 * 16);
    }
};

/// Vectors of 16 slots of a span, [first, end), and the runs that they lie in.
struct span_part {
    uint32_t first, end;

    span_part(uint32_t first_slot, uint32_t end_slot)
        : first(first_slot / 16), end((end_slot + 15) / 16) {}
    uint32_t first_run() const { return first / run_tiles_of_16; }
    uint32_t end_run() const { return (end + run_tiles_of_16 - 1) / run_tiles_of_16; }
    uint32_t first_of(uint32_t run) const { return HWY_MAX(first, run * run_tiles_of_16); }
    uint32_t end_of(uint32_t run) const { return HWY_MIN(end, (run + 1) * run_tiles_of_16); }
    bool has(uint32_t vector) const { return vector >= first && vector < end; }
};

/// What the metadata of a span's slots say, [group][slot], with middle codes for 0; 0 for slots
/// outside of it.
struct amx_groups {
    alignas(64) float step[most_groups][span_slots];
    alignas(64) float least[most_groups][span_slots];  ///< where the operand has one
    bool has_factors = false;
    alignas(64) float factors[widest_row];  ///< of channels: of tiles
};

/// Weights times the steps of a group, as whole numbers of a power of two: rows of `left`, over the
/// slots of each run in the order of pack_digits. What leasts add to each channel.
struct amx_weights {
    alignas(64) std::byte rows[span_runs][amx_rows][run_slots];
    alignas(16) float unit[amx_heads];  ///< NaN where a product is not finite
    alignas(16) float offset[amx_heads];
};

/// Combines all lanes of each of four vectors: lane i of any four has those of vector i.
template <class callable>
HWY_INLINE __m512i lanes_together(const __m512i (&v)[4], const callable& both) {
    const __m512i a = both(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
    const __m512i b = both(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
    const __m512i four = both(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m512i two = both(four, _mm512_shuffle_i64x2(four, four, 0x4e));
    return both(two, _mm512_shuffle_i64x2(two, two, 0xb1));
}

/// Lane h of all four lanes.
template <uint32_t h>
HWY_INLINE __m512 one_of_four(__m512i of_heads) {
    return _mm512_castsi512_ps(
        _mm512_shuffle_epi32(of_heads, static_cast<_MM_PERM_ENUM>(h * 0x55)));
}

/// The last words of 16 rows of records, up to four of each.
struct last_words {
    __m512i words[4];

    HWY_INLINE last_words(const std::byte* row_end, std::size_t row_bytes) {
        const auto four_rows = [&](uint32_t first) KVRT_INLINE_LAMBDA {
            const auto row = [&](uint32_t s) KVRT_INLINE_LAMBDA {
                return _mm_loadu_si128(
                    reinterpret_cast<const __m128i*>(row_end + (first + 4 * s) * row_bytes) - 1);
            };
            __m512i all = _mm512_castsi128_si512(row(0));
            all = _mm512_inserti32x4(all, row(1), 1);
            all = _mm512_inserti32x4(all, row(2), 2);
            return _mm512_inserti32x4(all, row(3), 3);
        };
        const __m512i a = four_rows(0), b = four_rows(1), c = four_rows(2), d = four_rows(3);
        const __m512i low = _mm512_unpacklo_epi32(a, b), low2 = _mm512_unpacklo_epi32(c, d);
        const __m512i high = _mm512_unpackhi_epi32(a, b), high2 = _mm512_unpackhi_epi32(c, d);
        words[0] = _mm512_unpacklo_epi64(low, low2);
        words[1] = _mm512_unpackhi_epi64(low, low2);
        words[2] = _mm512_unpacklo_epi64(high, high2);
        words[3] = _mm512_unpackhi_epi64(high, high2);
    }
};

/// Of records, for slots [first, end) of a span.
template <code_kind kind>
HWY_INLINE void read_span_groups(const coded_operand& values, const value_rows& rows,
                                 uint32_t first, uint32_t end, amx_groups& out) {
    const uint32_t meta_words = (rows.row_bytes - values.code_bytes) / record_word;
    const uint32_t fours = ceil_divide(meta_words, 4u);
    const span_part part(first, end);
    alignas(64) __m512i words[most_groups + 4];
    for (uint32_t v = part.first; v < part.end; ++v) {
        for (uint32_t i = 0; i < fours; ++i) {
            const last_words last(rows.tiles[v] + rows.row_bytes - 16 * i, rows.row_bytes);
            each_of<4>([&](auto w) KVRT_INLINE_LAMBDA {
                _mm512_store_si512(words + 4 * (fours - 1 - i) + w, last.words[w]);
            });
        }
        const __m512i* metadata = words + (4 * fours - meta_words);
        const __mmask16 inside = lanes_inside(first, end, v);
        for (uint32_t g = 0; g < values.groups; ++g) {
            const auto group = read_middle_group<kind>(
                values, g,
                [&](uint32_t m) KVRT_INLINE_LAMBDA { return _mm512_load_si512(metadata + m); });
            _mm512_store_ps(out.step[g] + 16 * v, _mm512_maskz_mov_ps(inside, group.step));
            if (values.has_least()) {
                _mm512_store_ps(out.least[g] + 16 * v, _mm512_maskz_mov_ps(inside, group.least));
            }
        }
    }
}

/// Weights of group g over the runs of `part`, which share a unit.
template <code_kind kind, uint32_t heads>
HWY_INLINE void split_weights(const amx_groups& groups, bool has_least, const span_weights& weights,
                              uint32_t g, const span_part& part, amx_weights& out) {
    __m512i peaks[amx_heads], sums[amx_heads];
    each_of<amx_heads>([&](auto h)
                           KVRT_INLINE_LAMBDA { peaks[h] = sums[h] = _mm512_setzero_si512(); });
    for (uint32_t v = part.first; v < part.end; ++v) {
        const __m512 step = _mm512_load_ps(groups.step[g] + 16 * v);
        const __m512 least =
            has_least ? _mm512_load_ps(groups.least[g] + 16 * v) : _mm512_setzero_ps();
        each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            const __m512 weight = weights.of(h, v);
            peaks[h] = larger_magnitude(peaks[h], _mm512_mul_ps(weight, step));
            if (has_least) {
                sums[h] = _mm512_castps_si512(
                    _mm512_fmadd_ps(weight, least, _mm512_castsi512_ps(sums[h])));
            }
        });
    }
    // The largest number has 22 bits. What is below 2^-105 keeps fewer.
    const __m512i peak = lanes_together(
        peaks, [](__m512i a, __m512i b) KVRT_INLINE_LAMBDA { return _mm512_max_epi32(a, b); });
    const __m512i power =
        _mm512_and_si512(_mm512_max_epi32(peak, _mm512_set1_epi32((127 - 105) << 23)),
                         _mm512_set1_epi32(0x7f800000));
    const __m512i factor = _mm512_sub_epi32(_mm512_set1_epi32((127 + 127 + 21) << 23), power);
    const __m512i unit = _mm512_sub_epi32(power, _mm512_set1_epi32(21 << 23));
    const __mmask16 infinite = _mm512_cmpge_epi32_mask(peak, _mm512_set1_epi32(0x7f800000));
    const __m512 scaled = _mm512_mask_mov_ps(
        _mm512_mul_ps(_mm512_castsi512_ps(unit), _mm512_set1_ps(byte_unit<kind>)), infinite,
        _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
    _mm_store_ps(out.unit, _mm512_castps512_ps128(scaled));
    __m128 offset = _mm_setzero_ps();
    if (has_least) {
        offset = _mm512_castps512_ps128(
            _mm512_castsi512_ps(lanes_together(sums, [](__m512i a, __m512i b) KVRT_INLINE_LAMBDA {
                return _mm512_castps_si512(
                    _mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
            })));
    }
    _mm_store_ps(out.offset, offset);
    // Added before rounding: what is rounded stays below 2^24.
    const __m512 raise = _mm512_set1_ps(static_cast<float>(raised_digits));
    for (uint32_t run = part.first_run(); run < part.end_run(); ++run) {
        each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            const __m512 by = one_of_four<h>(factor);
            __m512i numbers[run_tiles_of_16], bytes[amx_parts];
            each_of<run_tiles_of_16>([&](auto i) KVRT_INLINE_LAMBDA {
                const uint32_t v = run * run_tiles_of_16 + i;
                const __m512 product =
                    part.has(v)
                        ? _mm512_mul_ps(weights.of(h, v), _mm512_load_ps(groups.step[g] + 16 * v))
                        : _mm512_setzero_ps();
                numbers[i] = _mm512_cvtps_epi32(_mm512_fmadd_ps(product, by, raise));
            });
            pack_digits(numbers, bytes);
            each_of<amx_parts>([&](auto digit) KVRT_INLINE_LAMBDA {
                _mm512_store_si512(out.rows[run][h * amx_parts + digit], bytes[digit]);
            });
        });
    }
}

#undef KVRT_INLINE_LAMBDA

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_POP_ATTRIBUTES

#endif  // HWY_AVX3

#endif  // per-target include guard
