// What the mean of affine keys (affine4.cpp) adds to scores: q . R(p) mean, for the query heads of
// a KV head at the positions of a run's slots. Include it per target.
//
// With q and mean of pair b as complex numbers, (a, c) = gain (q conj mean) taken apart, and f[b]
// its frequency,
//
//   q . R(p) mean = sum over pairs: a cos(p f) + c sin(p f), and a constant of the other channels.
//
// (a, c) are prepared once per query head, and turned to where slots are near: to the middle of a
// window of 64 consecutive positions, whose sums come in mirrored halves; or, where slots lie
// apart, to a multiple of 256, from which the rotation's table has the rest
// (position_rotation.hpp).

// Per-target include guard.
#if defined(KVRT_ATTENTION_MEANS_INL_HPP) == defined(HWY_TARGET_TOGGLE)
#ifdef KVRT_ATTENTION_MEANS_INL_HPP
#undef KVRT_ATTENTION_MEANS_INL_HPP
#else
#define KVRT_ATTENTION_MEANS_INL_HPP
#endif

#include <hwy/highway.h>

#include <algorithm>

#include "attention/amx-inl.hpp"
#include "attention/kernels.hpp"
#include "attention/operands-inl.hpp"
#include "base/checked.hpp"
#include "format/rotation.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

/// A query head's products with the mean of its KV head: a and c of all pairs, each padded by
/// zeros to whole registers, then the constant.
struct mean_query {
    uint32_t padded;
    const float* a;
    const float* c;

    mean_query(const std::byte* at, uint32_t pairs)
        : padded(round_up(pairs, widest_register)),
          a(reinterpret_cast<const float*>(at)),
          c(a + padded) {}
    float constant() const { return c[padded]; }
};

/// Of consecutive query heads, so many bytes apart.
struct mean_queries {
    const std::byte* first;
    uint32_t bytes;
    uint32_t pairs;
    bool beside_amx;  ///< whose unit is to stay awake meanwhile

    mean_query of(uint32_t head) const { return {first + uint64_t{head} * bytes, pairs}; }
};

/// Takes a query head of a KV head apart: into its products with the mean, and what is multiplied
/// with codes.
inline void level_query(const float* query, const operand_layout& keys, uint32_t kv_head,
                        std::byte* out, float* levelled) {
    const row_constants constants = keys.constants(kv_head);
    for (uint32_t i = 0; i < keys.dim; ++i) levelled[i] = query[i] * constants.channel_scale[i];
    rotate_row(levelled, keys.dim);
    const position_rotation& turning = *keys.turning;
    const float* mean = constants.channel_mean;
    const uint32_t pairs = turning.pairs, padded = round_up(pairs, widest_register);
    float* a = reinterpret_cast<float*>(out);
    float* c = a + padded;
    std::fill_n(a, 2 * padded, 0.0f);
    for (uint32_t b = 0; b < pairs; ++b) {
        const uint32_t first = turning.interleaved ? 2 * b : b;
        const uint32_t second = turning.interleaved ? first + 1 : b + pairs;
        a[b] = turning.gain * (query[first] * mean[first] + query[second] * mean[second]);
        c[b] = turning.gain * (query[second] * mean[first] - query[first] * mean[second]);
    }
    double rest = 0.0;
    for (uint32_t i = 2 * pairs; i < keys.dim; ++i) rest += double{query[i]} * double{mean[i]};
    c[padded] = static_cast<float>(rest);
}

#if HWY_TARGET != HWY_SCALAR

HWY_INLINE void stay_awake_beside([[maybe_unused]] const mean_queries& queries) {
#if HWY_TARGET == HWY_AVX3
    if (queries.beside_amx) stay_awake();
#endif
}

/// (a, c) of some heads, turned.
template <uint32_t heads>
struct turned_means {
    alignas(64) float a[heads][most_turned_pairs];
    alignas(64) float c[heads][most_turned_pairs];
};

/// By a position, and from there to the middle of a window that begins there. Vectors may reach
/// beyond the pairs: into what follows in the table, times zeros.
template <uint32_t heads>
void turn_means(const position_rotation& turning, const mean_queries& queries, uint32_t position,
                bool to_middle, turned_means<heads>& out) {
    const hn::CappedTag<float, widest_register> d;
    const float* factors[turning_digits + 1];
    uint32_t count = 0;
    if (to_middle) factors[count++] = turning.to_middle();
    const float* table = turning.table;
    for (; position != 0; position /= turning_digit_values) {
        const uint32_t digit = position % turning_digit_values;
        if (digit != 0) factors[count++] = table + uint64_t{2} * digit * turning.pairs;
        table += uint64_t{2} * turning_digit_values * turning.pairs;
    }
    stay_awake_beside(queries);
    for (uint32_t b = 0; b < turning.pairs; b += static_cast<uint32_t>(hn::Lanes(d))) {
        auto cosine = hn::Set(d, 1.0f), sine = hn::Zero(d);
        for (uint32_t i = 0; i < count; ++i) {
            const auto by_cosine = hn::LoadU(d, factors[i] + b);
            const auto by_sine = hn::LoadU(d, factors[i] + turning.pairs + b);
            const auto before = cosine;
            cosine = hn::NegMulAdd(sine, by_sine, hn::Mul(before, by_cosine));
            sine = hn::MulAdd(sine, by_cosine, hn::Mul(before, by_sine));
        }
        for (uint32_t h = 0; h < heads; ++h) {
            const mean_query query = queries.of(h);
            const auto a = hn::LoadU(d, query.a + b), c = hn::LoadU(d, query.c + b);
            hn::Store(hn::MulAdd(a, cosine, hn::Mul(c, sine)), d, out.a[h] + b);
            hn::Store(hn::NegMulAdd(a, sine, hn::Mul(c, cosine)), d, out.c[h] + b);
        }
    }
}

/// sums[h][i] of heads [from, from + some) at the i-th position of the window.
template <uint32_t some, uint32_t heads>
HWY_INLINE void sum_window(const position_rotation& turning, const turned_means<heads>& turned,
                           const mean_queries& queries, uint32_t from,
                           float (*sums)[window_positions]) {
    const hn::CappedTag<float, widest_register> d;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(d));
    for (uint32_t part = 0; part < half_window; part += 2 * lanes) {
        const float* cosines = turning.from_middle() + part;
        const float* sines = cosines + turning.pairs * half_window;
        hn::Vec<decltype(d)> even[some][2], odd[some][2];
        for (uint32_t h = 0; h < some; ++h) {
            even[h][0] = even[h][1] = hn::Set(d, queries.of(from + h).constant());
            odd[h][0] = odd[h][1] = hn::Zero(d);
        }
        for (uint32_t b = 0; b < turning.pairs; ++b) {
            if (b % 16 == 0) stay_awake_beside(queries);
            const hn::Vec<decltype(d)> cosine[2] = {
                hn::LoadU(d, cosines + b * half_window),
                hn::LoadU(d, cosines + b * half_window + lanes)};
            const hn::Vec<decltype(d)> sine[2] = {hn::LoadU(d, sines + b * half_window),
                                                  hn::LoadU(d, sines + b * half_window + lanes)};
            HWY_UNROLL(4)
            for (uint32_t h = 0; h < some; ++h) {
                const auto a = hn::Set(d, turned.a[from + h][b]);
                const auto c = hn::Set(d, turned.c[from + h][b]);
                HWY_UNROLL(2)
                for (uint32_t v = 0; v < 2; ++v) {
                    even[h][v] = hn::MulAdd(cosine[v], a, even[h][v]);
                    odd[h][v] = hn::MulAdd(sine[v], c, odd[h][v]);
                }
            }
        }
        for (uint32_t h = 0; h < some; ++h) {
            for (uint32_t v = 0; v < 2; ++v) {
                const uint32_t n = part + v * lanes;
                float* middle = sums[from + h] + half_window;
                hn::StoreU(hn::Add(even[h][v], odd[h][v]), d, middle + n);
                hn::StoreU(hn::Reverse(d, hn::Sub(even[h][v], odd[h][v])), d, middle - n - lanes);
            }
        }
    }
}

/// scores[h][i] += query h . R(positions[i]) mean, of slots in one window.
template <uint32_t heads>
HWY_NOINLINE void add_window(const position_rotation& turning, const mean_queries& queries,
                             const uint32_t* positions, uint32_t count, float* scores) {
    const hn::CappedTag<float, widest_register> d;
    const hn::RebindToSigned<decltype(d)> di;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(d));
    constexpr uint32_t together = HWY_MIN(heads, lanes == widest_register ? 4 : 2);  // registers
    turned_means<heads> turned;
    alignas(64) float sums[heads][window_positions];
    turn_means<heads>(turning, queries, positions[0], true, turned);
    uint32_t h = 0;
    for (; h + together <= heads; h += together) {
        sum_window<together>(turning, turned, queries, h, sums);
    }
    for (; h < heads; ++h) sum_window<1>(turning, turned, queries, h, sums);
    alignas(64) int32_t places[window_positions];
    for (uint32_t i = 0; i < count; ++i) {
        places[i] = static_cast<int32_t>(positions[i] - positions[0]);
    }
    const bool consecutive = positions[count - 1] - positions[0] == count - 1;
    for (h = 0; h < heads; ++h) {
        float* to = scores + h * run_slots;
        uint32_t i = 0;
        for (; i + lanes <= count; i += lanes) {
            const auto sum = consecutive ? hn::Load(d, sums[h] + i)
                                         : hn::GatherIndex(d, sums[h], hn::Load(di, places + i));
            hn::StoreU(hn::Add(hn::LoadU(d, to + i), sum), d, to + i);
        }
        for (; i < count; ++i) to[i] += sums[h][places[i]];
    }
}

/// The sums of as many vectors as one has lanes, in their order.
template <class tag>
HWY_INLINE hn::Vec<tag> sums_of(tag d, hn::Vec<tag>* vectors) {
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(tag()));
    HWY_UNROLL(4)
    for (uint32_t count = lanes / 2; count != 0; count /= 2) {
        HWY_UNROLL(8)
        for (uint32_t i = 0; i < count; ++i) {
            vectors[i] = hn::Add(hn::ConcatEven(d, vectors[2 * i + 1], vectors[2 * i]),
                                 hn::ConcatOdd(d, vectors[2 * i + 1], vectors[2 * i]));
        }
    }
    return vectors[0];
}

/// The same wherever slots stand, 4 at once.
template <uint32_t heads>
HWY_NOINLINE void add_rows(const position_rotation& turning, const mean_queries& queries,
                           const uint32_t* positions, uint32_t count, float* scores) {
    const hn::CappedTag<float, widest_register> d;
    constexpr uint32_t lanes = static_cast<uint32_t>(hn::MaxLanes(d));
    constexpr uint32_t together = HWY_MIN(heads, lanes / 4);
    turned_means<heads> turned;
    for (uint32_t slot = 0; slot < count;) {
        // Slots up to `end` have the upper digits in common.
        const uint32_t upper = positions[slot] / turning_digit_values;
        uint32_t end = slot + 1;
        while (end < count && positions[end] / turning_digit_values == upper) ++end;
        turn_means<heads>(turning, queries, upper * turning_digit_values, false, turned);
        for (; slot < end; slot += 4) {
            stay_awake_beside(queries);
            const uint32_t here = HWY_MIN(4, end - slot);
            const float* rows[4];
            for (uint32_t s = 0; s < 4; ++s) {
                const uint32_t digit =
                    positions[slot + HWY_MIN(s, here - 1)] % turning_digit_values;
                rows[s] = turning.table + uint64_t{2} * digit * turning.pairs;
            }
            for (uint32_t from = 0; from < heads; from += together) {
                hn::Vec<decltype(d)> sums[lanes];
                for (uint32_t i = 0; i < lanes; ++i) sums[i] = hn::Zero(d);
                const auto add = [&](const float(*by)[most_turned_pairs], uint32_t offset) {
                    for (uint32_t b = 0; b < turning.pairs; b += lanes) {
                        hn::Vec<decltype(d)> row[4];
                        HWY_UNROLL(4)
                        for (uint32_t s = 0; s < 4; ++s)
                            row[s] = hn::LoadU(d, rows[s] + offset + b);
                        HWY_UNROLL(4)
                        for (uint32_t h = 0; h < together; ++h) {
                            // Where no head is left, the last is summed again.
                            const auto one = hn::Load(d, by[HWY_MIN(from + h, heads - 1)] + b);
                            HWY_UNROLL(4)
                            for (uint32_t s = 0; s < 4; ++s) {
                                sums[4 * h + s] = hn::MulAdd(row[s], one, sums[4 * h + s]);
                            }
                        }
                    }
                };
                add(turned.a, 0);
                add(turned.c, turning.pairs);
                alignas(64) float totals[lanes];
                hn::Store(sums_of(d, sums), d, totals);
                for (uint32_t h = 0; h < HWY_MIN(together, heads - from); ++h) {
                    const float constant = queries.of(from + h).constant();
                    float* to = scores + (from + h) * run_slots + slot;
                    for (uint32_t s = 0; s < here; ++s) to[s] += totals[4 * h + s] + constant;
                }
            }
        }
        slot = end;
    }
}

/// Slots in a window from which on it pays: it costs about as much as they do one by one.
inline constexpr uint32_t many_in_window = 16;

template <uint32_t heads>
void add_means(const position_rotation& turning, const mean_queries& queries,
               const uint32_t* positions, uint32_t count, float* scores) {
    const auto are_many = [&](uint32_t slot) {
        return slot + many_in_window <= count &&
               positions[slot + many_in_window - 1] - positions[slot] < window_positions;
    };
    for (uint32_t slot = 0, end = 0; slot < count; slot = end) {
        if (are_many(slot)) {
            while (end < count && positions[end] - positions[slot] < window_positions) ++end;
            add_window<heads>(turning, queries, positions + slot, end - slot, scores + slot);
        } else {
            while (end < count && !are_many(end)) ++end;
            add_rows<heads>(turning, queries, positions + slot, end - slot, scores + slot);
        }
    }
}

#endif  // HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
