// Sums of un-rotated queries. Rows are taken 16 at a time: the angles of their positions are worked
// out once for all heads, reduced to fractions of a turn in double, and each band of a head sums
// its rows in a register before it joins the pending sum.

#include "retention/query_statistics.hpp"

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "retention/query_statistics.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "format/vector-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

using float_tag = hn::CappedTag<float, 16>;
using floats = hn::Vec<float_tag>;
constexpr uint32_t vector_lanes = static_cast<uint32_t>(hn::MaxLanes(float_tag()));

constexpr uint32_t widest_row = 256;
constexpr uint32_t rows_at_once = 16;
constexpr uint32_t padding = 16;  // a vector may reach over the end of what it needs

// cos and sin of every band's angle at one position, both divided by the attention factor.
struct rotation_row {
    float cosine[max_rotated_bands];
    float sine[max_rotated_bands];
};
static_assert(max_rotated_bands % 16 == 0);

// cos and sin of 2 pi x, |x| <= 1/2: quarter turns are taken off, the rest is within pi / 4, where
// Taylor polynomials of degree 9 and 8 are exact to f32.
HWY_INLINE void turn_to_cos_sin(floats turn, floats& cosine, floats& sine) {
    const float_tag d;
    const hn::RebindToSigned<float_tag> di;
    const floats quarter = hn::Round(hn::Mul(turn, hn::Set(d, 4.0f)));
    const floats rest = hn::NegMulAdd(quarter, hn::Set(d, 0.25f), turn);
    const floats x = hn::Mul(rest, hn::Set(d, 6.283185307179586f));
    const floats xx = hn::Mul(x, x);
    floats s = hn::Set(d, 1.0f / 362880.0f);
    s = hn::MulAdd(s, xx, hn::Set(d, -1.0f / 5040.0f));
    s = hn::MulAdd(s, xx, hn::Set(d, 1.0f / 120.0f));
    s = hn::MulAdd(s, xx, hn::Set(d, -1.0f / 6.0f));
    s = hn::MulAdd(hn::Mul(s, xx), x, x);
    floats c = hn::Set(d, 1.0f / 40320.0f);
    c = hn::MulAdd(c, xx, hn::Set(d, -1.0f / 720.0f));
    c = hn::MulAdd(c, xx, hn::Set(d, 1.0f / 24.0f));
    c = hn::MulAdd(c, xx, hn::Set(d, -0.5f));
    c = hn::MulAdd(c, xx, hn::Set(d, 1.0f));
    const auto count = hn::ConvertTo(di, quarter);
    const auto one = hn::Set(di, 1);
    const auto odd = hn::RebindMask(d, hn::Eq(hn::And(count, one), one));
    // Bit 1 of the count (of count + 1 for the cosine), moved to the sign.
    const auto sine_sign = hn::BitCast(d, hn::ShiftLeft<30>(hn::And(count, hn::Set(di, 2))));
    const auto cosine_sign =
        hn::BitCast(d, hn::ShiftLeft<30>(hn::And(hn::Add(count, one), hn::Set(di, 2))));
    sine = hn::Xor(hn::IfThenElse(odd, c, s), sine_sign);
    cosine = hn::Xor(hn::IfThenElse(odd, s, c), cosine_sign);
}

void find_rotation(const rope_description& rope, const double* turns_per_position,
                   uint64_t position, rotation_row& out) {
    const float_tag d;
    const uint32_t bands = rope.rotated_bands();
    const floats inverse = hn::Set(d, static_cast<float>(1.0 / rope.attention_factor));
    alignas(64) float turns[max_rotated_bands] = {};
    constexpr double to_integer = 0x1.8p52;  // adding and taking it off rounds to an integer
    for (uint32_t band = 0; band < bands; ++band) {
        const double turn = turns_per_position[band] * static_cast<double>(position);
        turns[band] = static_cast<float>(turn - ((turn + to_integer) - to_integer));
    }
    for (uint32_t band = 0; band < bands; band += vector_lanes) {
        floats cosine, sine;
        turn_to_cos_sin(hn::LoadU(d, turns + band), cosine, sine);
        hn::StoreU(hn::Mul(cosine, inverse), d, out.cosine + band);
        hn::StoreU(hn::Mul(sine, inverse), d, out.sine + band);
    }
}

// One row of one head as f32: all real parts, all imaginary parts, then what is not rotated.
void load_row(const rope_description& rope, uint32_t key_dim, const tensor_view& queries,
              int64_t row, uint32_t head, float* out) {
    std::byte* source = queries.at(row, head, 0);
    alignas(64) float plain[widest_row];
    float* dense = rope.style == KV_ROPE_INTERLEAVED ? plain : out;
    std::byte* dense_bytes = reinterpret_cast<std::byte*>(dense);
    if (queries.dim_stride != 1) {
        for (uint32_t i = 0; i < key_dim; ++i) {
            dense[i] = load_element(queries.at(row, head, i), queries.type);
        }
    } else if (queries.type == element::f32) {
        convert_run<element::f32, element::f32>(source, dense_bytes, key_dim);
    } else if (queries.type == element::f16) {
        convert_run<element::f16, element::f32>(source, dense_bytes, key_dim);
    } else {
        convert_run<element::bf16, element::f32>(source, dense_bytes, key_dim);
    }
    if (dense == out) return;
    const uint32_t bands = rope.rotated_bands();
    for (uint32_t band = 0; band < bands; ++band) {
        out[band] = plain[2 * band];
        out[bands + band] = plain[2 * band + 1];
    }
    for (uint32_t i = 2 * bands; i < key_dim; ++i) out[i] = plain[i];
}

// Adds the first lanes of a vector that are below `count` to target.
HWY_INLINE void add_lanes(floats value, uint32_t count, float* target) {
    const float_tag d;
    if (count >= vector_lanes) {
        hn::StoreU(hn::Add(hn::LoadU(d, target), value), d, target);
        return;
    }
    alignas(64) float lanes[vector_lanes];
    hn::Store(value, d, lanes);
    for (uint32_t i = 0; i < count; ++i) target[i] += lanes[i];
}

using row_buffer = float[widest_row + padding];

void add_head(const rope_description& rope, uint32_t key_dim, const row_buffer* rows,
              const rotation_row* rotations, uint32_t row_count, const query_sums<float>& sums) {
    const float_tag d;
    const uint32_t rotated = rope.rotated_bands();
    const floats inverse = hn::Set(d, static_cast<float>(1.0 / rope.attention_factor));
    for (uint32_t band = 0; band < rotated; band += vector_lanes) {
        floats re = hn::Zero(d), im = re, size = re, re_square = re, im_square = re, product = re;
        for (uint32_t r = 0; r < row_count; ++r) {
            const floats a = hn::LoadU(d, rows[r] + band);
            const floats b = hn::LoadU(d, rows[r] + rotated + band);
            const floats cosine = hn::LoadU(d, rotations[r].cosine + band);
            const floats sine = hn::LoadU(d, rotations[r].sine + band);
            const floats x = hn::MulAdd(a, cosine, hn::Mul(b, sine));
            const floats y = hn::MulSub(b, cosine, hn::Mul(a, sine));
            re = hn::Add(re, x);
            im = hn::Add(im, y);
            re_square = hn::MulAdd(x, x, re_square);
            im_square = hn::MulAdd(y, y, im_square);
            product = hn::MulAdd(x, y, product);
            size = hn::Add(size, hn::Sqrt(hn::MulAdd(a, a, hn::Mul(b, b))));
        }
        const uint32_t count = HWY_MIN(vector_lanes, rotated - band);
        add_lanes(re, count, sums.real + band);
        add_lanes(im, count, sums.imaginary + band);
        add_lanes(hn::Mul(size, inverse), count, sums.magnitude + band);
        add_lanes(re_square, count, sums.real_square + band);
        add_lanes(im_square, count, sums.imaginary_square + band);
        add_lanes(product, count, sums.product + band);
    }
    const uint32_t bands = rope.bands(key_dim);
    for (uint32_t band = rotated; band < bands; band += vector_lanes) {
        floats re = hn::Zero(d), size = re, square = re;
        for (uint32_t r = 0; r < row_count; ++r) {
            const floats a = hn::LoadU(d, rows[r] + rotated + band);
            re = hn::Add(re, a);
            size = hn::Add(size, hn::Abs(a));
            square = hn::MulAdd(a, a, square);
        }
        const uint32_t count = HWY_MIN(vector_lanes, bands - band);
        add_lanes(re, count, sums.real + band);
        add_lanes(size, count, sums.magnitude + band);
        add_lanes(square, count, sums.real_square + band);
    }
}

void add_rows(const rope_description& rope, uint32_t key_dim, const tensor_view& queries,
              uint32_t first_row, uint32_t rows, uint64_t first_position, uint32_t first_head,
              uint32_t heads, const query_sums<float>& pending) {
    rotation_row rotations[rows_at_once];
    alignas(64) row_buffer buffer[rows_at_once] = {};
    const uint32_t bands = rope.bands(key_dim);
    double turns_per_position[max_rotated_bands];
    for (uint32_t band = 0; band < rope.rotated_bands(); ++band) {
        turns_per_position[band] = rope.inverse_frequencies[band] * 0.15915494309189535;
    }
    for (uint32_t row = 0; row < rows; row += rows_at_once) {
        const uint32_t count = HWY_MIN(rows_at_once, rows - row);
        for (uint32_t r = 0; r < count; ++r) {
            find_rotation(rope, turns_per_position, first_position + row + r, rotations[r]);
        }
        for (uint32_t head = first_head; head < first_head + heads; ++head) {
            for (uint32_t r = 0; r < count; ++r) {
                load_row(rope, key_dim, queries, int64_t{first_row} + row + r, head, buffer[r]);
            }
            const uint64_t place = uint64_t{head} * bands;
            add_head(rope, key_dim, buffer, rotations, count,
                     {pending.real + place, pending.imaginary + place, pending.magnitude + place,
                      pending.real_square + place, pending.imaginary_square + place,
                      pending.product + place});
        }
    }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(add_rows);

void add_queries(const rope_description& rope, uint32_t key_dim, const tensor_view& queries,
                 uint32_t first_row, uint32_t rows, uint64_t first_position, uint32_t first_head,
                 uint32_t heads, const query_sums<float>& pending) {
    HWY_DYNAMIC_DISPATCH(add_rows)
    (rope, key_dim, queries, first_row, rows, first_position, first_head, heads, pending);
}

bool commit_queries(const query_sums<float>& pending, uint64_t length,
                    const query_sums<double>& total) {
    float* const parts[] = {pending.real,        pending.imaginary,        pending.magnitude,
                            pending.real_square, pending.imaginary_square, pending.product};
    double* const totals[] = {total.real,        total.imaginary,        total.magnitude,
                              total.real_square, total.imaginary_square, total.product};
    bool finite = true;
    for (const float* part : parts) {
        for (uint64_t i = 0; i < length; ++i) finite = finite && std::isfinite(part[i]);
    }
    for (uint32_t which = 0; which < query_sum_arrays; ++which) {
        for (uint64_t i = 0; i < length; ++i) {
            if (finite) totals[which][i] += double{parts[which][i]};
            parts[which][i] = 0.0f;
        }
    }
    return finite;
}

void query_moments_of(const query_sums<double>& total, uint64_t length, uint64_t tokens,
                      const query_moments<float>& out) {
    const double inverse = 1.0 / static_cast<double>(tokens);
    for (uint64_t i = 0; i < length; ++i) {
        const double real = total.real[i] * inverse, imaginary = total.imaginary[i] * inverse;
        out.mean_real[i] = static_cast<float>(real);
        out.mean_imaginary[i] = static_cast<float>(imaginary);
        out.mean_magnitude[i] = static_cast<float>(total.magnitude[i] * inverse);
        if (!out.has_covariances()) continue;
        const double first = std::max(0.0, total.real_square[i] * inverse - real * real);
        const double second =
            std::max(0.0, total.imaginary_square[i] * inverse - imaginary * imaginary);
        const double most = std::sqrt(first * second);
        const double both = total.product[i] * inverse - real * imaginary;
        out.variance_real[i] = static_cast<float>(first);
        out.variance_imaginary[i] = static_cast<float>(second);
        out.covariance[i] = static_cast<float>(std::clamp(both, -most, most));
    }
}

}  // namespace kvrt
#endif
