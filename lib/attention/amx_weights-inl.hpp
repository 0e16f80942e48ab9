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
        stay_awake();
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

/// Weights of a span over the largest of their head, for all groups: 0 outside of the span.
struct relative_weights {
    alignas(64) float weights[amx_heads][span_slots];
    float largest[amx_heads] = {};   ///< at least least_largest; NaN where a weight is not finite
    uint32_t largest_at[amx_heads];  ///< its slot
};

/// What lies below keeps fewer bits.
inline constexpr float least_largest = 0x1p-100f;

template <uint32_t heads>
HWY_INLINE void relate_weights(const span_weights& weights, const span_part& part,
                               relative_weights& out) {
    const uint32_t begin = part.first_run() * run_tiles_of_16;
    const uint32_t end = part.end_run() * run_tiles_of_16;
    __m512i peaks[amx_heads];
    each_of<amx_heads>([&](auto h) KVRT_INLINE_LAMBDA { peaks[h] = _mm512_setzero_si512(); });
    for (uint32_t v = part.first; v < part.end; ++v) {
        each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            peaks[h] = larger_magnitude(peaks[h], weights.of(h, v));
        });
    }
    const __m512i all = lanes_together(
        peaks, [](__m512i a, __m512i b) KVRT_INLINE_LAMBDA { return _mm512_max_epi32(a, b); });
    each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
        stay_awake();
        const __m512i peak = _mm512_castps_si512(one_of_four<h>(all));
        const float largest = _mm512_cvtss_f32(_mm512_castsi512_ps(peak));
        const bool finite = largest <= std::numeric_limits<float>::max();
        out.largest[h] = finite ? HWY_MAX(largest, least_largest) : NAN;
        const __m512 factor = _mm512_set1_ps(1.0f / out.largest[h]);
        uint32_t at = 0;
        for (uint32_t v = begin; v < end; ++v) {
            const __m512 weight = part.has(v) ? weights.of(h, v) : _mm512_setzero_ps();
            const __mmask16 here = _mm512_cmpeq_epi32_mask(_mm512_castps_si512(weight), peak);
            if (here != 0 && part.has(v)) {
                at = 16 * v + static_cast<uint32_t>(__builtin_ctz(here));
            }
            _mm512_store_ps(out.weights[h] + 16 * v, _mm512_mul_ps(weight, factor));
        }
        out.largest_at[h] = at;
    });
}

/// How far the products of a group may lie below the largest weight times the largest step, which
/// stand for their largest then: that leaves them 19 bits.
inline constexpr float most_slack = 8.0f;

/// split_weights() without looking at all products; false where they may be too far below their
/// bound, or are not finite, and nothing is written.
template <code_kind kind, uint32_t heads>
HWY_INLINE bool split_relative_weights(const amx_groups& groups, bool has_least,
                                       const relative_weights& relative, uint32_t g,
                                       const span_part& part, amx_weights& out) {
    // As a float, 2^23 + 2^22 beside a number of 23 bits with its sign, has it for its last bits,
    // the two lower digits raised by 0x80, the highest by 0x40.
    constexpr float raise = 0x1p23f + 0x1p22f + 0x8080;
    constexpr float most = 0x1p22f - 0x1p16f;
    const float* steps = groups.step[g];
    __m512i peak = _mm512_setzero_si512();
    for (uint32_t v = part.first; v < part.end; ++v) {
        peak = larger_magnitude(peak, _mm512_load_ps(steps + 16 * v));
    }
    const float largest = magnitude_of(peak);
    bool near = largest >= least_largest && largest <= std::numeric_limits<float>::max();
    for (uint32_t h = 0; h < heads; ++h) {
        near &= std::abs(steps[relative.largest_at[h]]) * most_slack >= largest;
        near &= relative.largest[h] >= least_largest;  // not NaN
    }
    if (!near) return false;
    const __m512 factor = _mm512_set1_ps(most / largest);
    __m512i sums[amx_heads];
    each_of<amx_heads>([&](auto h) KVRT_INLINE_LAMBDA { sums[h] = _mm512_setzero_si512(); });
    for (uint32_t run = part.first_run(); run < part.end_run(); ++run) {
        __m512 step[run_tiles_of_16], least[run_tiles_of_16];
        each_of<run_tiles_of_16>([&](auto i) KVRT_INLINE_LAMBDA {
            const uint32_t v = run * run_tiles_of_16 + i;
            step[i] = least[i] = _mm512_setzero_ps();
            if (!part.has(v)) return;
            step[i] = _mm512_mul_ps(_mm512_load_ps(steps + 16 * v), factor);
            if (has_least) least[i] = _mm512_load_ps(groups.least[g] + 16 * v);
        });
        each_of<heads>([&](auto h) KVRT_INLINE_LAMBDA {
            const float* weights = relative.weights[h] + run * run_slots;
            __m512i numbers[run_tiles_of_16], bytes[amx_parts];
            __m512 sum = _mm512_castsi512_ps(sums[h]);
            each_of<run_tiles_of_16>([&](auto i) KVRT_INLINE_LAMBDA {
                const __m512 weight = _mm512_load_ps(weights + 16 * i);
                numbers[i] =
                    _mm512_castps_si512(_mm512_fmadd_ps(weight, step[i], _mm512_set1_ps(raise)));
                if (has_least) sum = _mm512_fmadd_ps(weight, least[i], sum);
            });
            sums[h] = _mm512_castps_si512(sum);
            pack_digits<0x40>(numbers, bytes);
            each_of<amx_parts>([&](auto digit) KVRT_INLINE_LAMBDA {
                _mm512_store_si512(out.rows[run][h * amx_parts + digit], bytes[digit]);
            });
        });
    }
    const __m128 weight_units = _mm_loadu_ps(relative.largest);
    _mm_store_ps(out.unit, _mm_mul_ps(weight_units, _mm_set1_ps(largest / most * byte_unit<kind>)));
    __m128 offset = _mm_setzero_ps();
    if (has_least) {
        const __m512i all = lanes_together(sums, [](__m512i a, __m512i b) KVRT_INLINE_LAMBDA {
            return _mm512_castps_si512(
                _mm512_add_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b)));
        });
        offset = _mm_mul_ps(_mm512_castps512_ps128(_mm512_castsi512_ps(all)), weight_units);
    }
    _mm_store_ps(out.offset, offset);
    return true;
}

#undef KVRT_INLINE_LAMBDA

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_POP_ATTRIBUTES

#endif  // HWY_AVX3

#endif  // per-target include guard
