#include "retention/unit_keys.hpp"

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "retention/unit_keys.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>

#include "retention/visit-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

// 1 / |k| of lanes [first, first + vector_slots) below `slots`; 0 for keys of 0 and other lanes.
template <element type>
HWY_INLINE floats inverse_norms(const std::byte* tile, uint32_t dim, uint32_t first, uint32_t slots,
                                tile_prefetch& coming) {
    const float_tag d;
    floats even = hn::Zero(d), odd = hn::Zero(d);
    for (uint32_t i = 0; i < dim; i += 2) {
        if (first == 0) coming.advance(2 * slot_group * element_bytes(type));
        const floats a = load_lanes<type>(tile, i, first);
        const floats b = load_lanes<type>(tile, i + 1, first);
        even = hn::MulAdd(a, a, even);
        odd = hn::MulAdd(b, b, odd);
    }
    const floats square = hn::Add(even, odd);
    const auto nothing = hn::Eq(square, hn::Zero(d));
    const floats inverse = hn::Div(hn::Set(d, 1.0f), hn::Sqrt(square));
    return hn::IfThenElseZero(hn::AndNot(nothing, hn::FirstN(d, slots - first)), inverse);
}

// ---- Sums ---------------------------------------------------------------------------------------

struct unit_sum_kernel {
    uint32_t dim;
    float* lanes;  // [dim][16]

    template <element type>
    void tile(const std::byte* tile, uint32_t, uint32_t slots, tile_prefetch coming) const {
        const float_tag d;
        for (uint32_t first = 0; first < slots; first += vector_slots) {
            // A key that is not finite has no direction, and leaves the sum to the others.
            const floats inverse = inverse_norms<type>(tile, dim, first, slots, coming);
            const auto summed = hn::Gt(inverse, hn::Zero(d));
            const floats by = hn::IfThenElseZero(summed, inverse);
            for (uint32_t i = 0; i < dim; ++i) {
                float* sum = lanes + i * slot_group + first;
                const floats key = hn::IfThenElseZero(summed, load_lanes<type>(tile, i, first));
                hn::Store(hn::MulAdd(key, by, hn::Load(d, sum)), d, sum);
            }
        }
    }
};

void sum_part(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot, double* sums) {
    const uint32_t dim = rows.key_dim();
    alignas(64) float lanes[widest_row * slot_group];
    std::fill(lanes, lanes + dim * slot_group, 0.0f);
    visit_tiles(operand_role::keys, rows, first_slot, end_slot, unit_sum_kernel{dim, lanes});
    for (uint32_t i = 0; i < dim; ++i) {
        sums[i] = 0.0;
        for (uint32_t s = 0; s < slot_group; ++s) sums[i] += double{lanes[i * slot_group + s]};
    }
}

// ---- Scores -------------------------------------------------------------------------------------

// out = scale * (direction u) + offset where u is not 0.
struct projection_kernel {
    uint32_t dim;
    const float* direction;
    float scale, offset;
    float* out;

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t slots, tile_prefetch coming) const {
        const float_tag d;
        for (uint32_t first = 0; first < slots; first += vector_slots) {
            floats even = hn::Zero(d), odd = hn::Zero(d), square = hn::Zero(d), other = square;
            for (uint32_t i = 0; i < dim; i += 2) {
                if (first == 0) coming.advance(2 * slot_group * element_bytes(type));
                const floats a = load_lanes<type>(tile, i, first);
                const floats b = load_lanes<type>(tile, i + 1, first);
                even = hn::MulAdd(hn::Set(d, direction[i]), a, even);
                odd = hn::MulAdd(hn::Set(d, direction[i + 1]), b, odd);
                square = hn::MulAdd(a, a, square);
                other = hn::MulAdd(b, b, other);
            }
            square = hn::Add(square, other);
            const floats cosine = hn::Div(hn::Add(even, odd), hn::Sqrt(square));
            const floats score = hn::MulAdd(cosine, hn::Set(d, scale), hn::Set(d, offset));
            const auto nothing = hn::Eq(square, hn::Zero(d));
            store_lanes(hn::IfThenZeroElse(nothing, score), first, slots, out + slot);
        }
    }
};

void project(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
             const float* direction, float scale, float offset, float* out) {
    visit_tiles(operand_role::keys, rows, first_slot, end_slot,
                projection_kernel{rows.key_dim(), direction, scale, offset, out});
}

// ---- All against all ----------------------------------------------------------------------------

struct unit_copy_kernel {
    uint32_t dim;
    float* units;
    float* row_sum;

    template <element type>
    void tile(const std::byte* tile, uint32_t slot, uint32_t slots, tile_prefetch coming) const {
        const float_tag d;
        float* copy = units + uint64_t{slot} * dim;
        for (uint32_t first = 0; first < slot_group; first += vector_slots) {
            const uint32_t asked_slots = HWY_MAX(slots, first);
            const auto asked = hn::FirstN(d, asked_slots - first);
            const floats inverse = inverse_norms<type>(tile, dim, first, asked_slots, coming);
            const auto copied = hn::And(asked, hn::Gt(inverse, hn::Zero(d)));
            const floats by = hn::IfThenElseZero(copied, inverse);
            floats odd = hn::Zero(d);
            for (uint32_t i = 0; i < dim; ++i) {
                const floats channel = load_lanes<type>(tile, i, first);
                odd = hn::MulAdd(channel, hn::Zero(d), odd);  // NaN of what is not finite
                const floats key = hn::IfThenElseZero(copied, channel);
                hn::Store(hn::Mul(key, by), d, copy + i * slot_group + first);
            }
            if (first < slots) store_lanes(odd, first, slots, row_sum + slot);
        }
    }
};

void copy_units(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot, float* units,
                float* row_sum) {
    visit_tiles(operand_role::keys, rows, first_slot, end_slot,
                unit_copy_kernel{rows.key_dim(), units, row_sum});
}

// Two vectors of rows against four columns at a time. Long sums are of sums of 1024 columns.
constexpr uint32_t columns_at_once = 4;
constexpr uint32_t columns_per_sum = 1024;

struct row_vectors {
    const float* at;  // lane of the first dimension
    uint32_t row;
};

struct comparison {
    floats sum, part, cosine;
    hn::Vec<hn::RebindToSigned<float_tag>> latest;
};

// product[column][row] of two vectors of rows and four columns. By name and in a function of its
// own, since arrays, or more registers in use, would not leave these where they belong.
HWY_NOINLINE void multiply_columns(const float* first, const float* second, const float* columns,
                                   uint32_t dim, float* product) {
    const float_tag d;
    floats a0 = hn::Zero(d), a1 = a0, a2 = a0, a3 = a0, b0 = a0, b1 = a0, b2 = a0, b3 = a0;
    for (uint32_t i = 0; i < dim * slot_group; i += slot_group) {
        const floats a = hn::Load(d, first + i);
        const floats b = hn::Load(d, second + i);
        const auto times = [&](uint32_t c, floats& of_a, floats& of_b) HWY_ATTR {
            const floats other = hn::Set(d, columns[i + c]);
            of_a = hn::MulAdd(other, a, of_a);
            of_b = hn::MulAdd(other, b, of_b);
        };
        times(0, a0, b0);
        times(1, a1, b1);
        times(2, a2, b2);
        times(3, a3, b3);
    }
    const floats products[2 * columns_at_once] = {a0, b0, a1, b1, a2, b2, a3, b3};
    for (const floats& of : products) {
        hn::Store(of, d, product);
        product += vector_slots;
    }
}

HWY_INLINE void compare_columns(const float* units, uint32_t dim, const row_vectors (&rows)[2],
                                uint32_t column, uint32_t columns, float threshold,
                                comparison (&found)[2]) {
    const float_tag d;
    const hn::RebindToSigned<float_tag> di;
    const float* places =
        units + uint64_t{column} / slot_group * slot_group * dim + column % slot_group;
    alignas(64) float product[columns_at_once][2][vector_slots];
    multiply_columns(rows[0].at, rows[1].at, places, dim, &product[0][0][0]);
    for (uint32_t half = 0; half < 2; ++half) {
        const auto row = hn::Iota(di, static_cast<int32_t>(rows[half].row));
        for (uint32_t c = 0; c < columns; ++c) {
            const auto index = hn::Set(di, static_cast<int32_t>(column + c));
            const auto itself = hn::RebindMask(d, hn::Eq(row, index));
            const floats cosine = hn::IfThenZeroElse(itself, hn::Load(d, product[c][half]));
            found[half].part = hn::Add(found[half].part, cosine);
            const auto alike = hn::AndNot(itself, hn::Gt(cosine, hn::Set(d, threshold)));
            found[half].cosine = hn::IfThenElse(alike, cosine, found[half].cosine);
            found[half].latest =
                hn::IfThenElse(hn::RebindMask(di, alike), index, found[half].latest);
        }
    }
}

void compare_rows(const float* units, uint32_t slots, uint32_t dim, uint32_t first_row,
                  uint32_t end_row, float threshold, float* row_sum, uint32_t* latest,
                  float* latest_cosine) {
    const float_tag d;
    const hn::RebindToSigned<float_tag> di;
    for (uint32_t first = first_row; first < end_row; first += 2 * vector_slots) {
        row_vectors rows[2];
        comparison found[2];
        for (uint32_t half = 0; half < 2; ++half) {
            // Where there are no rows for the second vector it repeats the first one's.
            const uint32_t row = first + half * vector_slots;
            rows[half].row = row < end_row ? row : first;
            rows[half].at = units + uint64_t{rows[half].row} / slot_group * slot_group * dim +
                            rows[half].row % slot_group;
            found[half] = {hn::Zero(d), hn::Zero(d), hn::Zero(d), hn::Set(di, -1)};
        }
        for (uint32_t column = 0; column < slots; column += columns_at_once) {
            const uint32_t columns = HWY_MIN(columns_at_once, slots - column);
            compare_columns(units, dim, rows, column, columns, threshold, found);
            if ((column + columns_at_once) % columns_per_sum != 0) continue;
            for (comparison& half : found) {
                half.sum = hn::Add(half.sum, half.part);
                half.part = hn::Zero(d);
            }
        }
        for (uint32_t half = 0; half < 2; ++half) {
            const uint32_t row = first + half * vector_slots;
            if (row >= end_row) break;
            const uint32_t count = HWY_MIN(vector_slots, end_row - row);
            alignas(64) float odd[vector_slots] = {};
            std::copy_n(row_sum + row, count, odd);
            const floats sum = hn::Add(found[half].sum, found[half].part);
            store_lanes(hn::Add(sum, hn::Load(d, odd)), 0, count, row_sum + row);
            store_lanes(found[half].cosine, 0, count, latest_cosine + row);
            alignas(64) int32_t indices[vector_slots];
            hn::Store(found[half].latest, di, indices);
            for (uint32_t i = 0; i < count; ++i)
                latest[row + i] = static_cast<uint32_t>(indices[i]);
        }
    }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(sum_part);
HWY_EXPORT(project);
HWY_EXPORT(copy_units);
HWY_EXPORT(compare_rows);

void sum_unit_keys(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot, double* sums) {
    HWY_DYNAMIC_DISPATCH(sum_part)(rows, first_slot, end_slot, sums);
}

void join_parts(const double* parts, uint32_t count, uint32_t dim, double* total) {
    for (uint32_t i = 0; i < dim; ++i) {
        double sum = 0.0;
        for (uint32_t part = 0; part < count; ++part) sum += parts[uint64_t{part} * dim + i];
        total[i] = sum;
    }
}

void score_keydiff(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                   const double* total, float* scores) {
    const uint32_t dim = rows.key_dim();
    double square = 0.0;
    for (uint32_t i = 0; i < dim; ++i) square += total[i] * total[i];
    const double inverse = square > 0.0 ? 1.0 / std::sqrt(square) : 0.0;
    float direction[widest_row];
    for (uint32_t i = 0; i < dim; ++i) direction[i] = static_cast<float>(total[i] * inverse);
    HWY_DYNAMIC_DISPATCH(project)(rows, first_slot, end_slot, direction, -1.0f, 0.0f, scores);
}

void score_linear_redundancy(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot,
                             const double* total, uint32_t slots, float* redundancy) {
    const uint32_t dim = rows.key_dim();
    float direction[widest_row];
    for (uint32_t i = 0; i < dim; ++i) direction[i] = static_cast<float>(total[i] / slots);
    HWY_DYNAMIC_DISPATCH(project)
    (rows, first_slot, end_slot, direction, 1.0f, -1.0f / static_cast<float>(slots), redundancy);
}

uint64_t unit_copy_count(uint32_t slots, uint32_t dim) {
    return (uint64_t{slots} + slot_group - 1) / slot_group * slot_group * dim;
}

void copy_unit_keys(const stored_rows& rows, uint32_t first_slot, uint32_t end_slot, float* units,
                    float* row_sum) {
    HWY_DYNAMIC_DISPATCH(copy_units)(rows, first_slot, end_slot, units, row_sum);
}

void compare_unit_keys(const float* units, uint32_t slots, uint32_t dim, uint32_t first_row,
                       uint32_t end_row, float threshold, float* row_sum, uint32_t* latest,
                       float* latest_cosine) {
    HWY_DYNAMIC_DISPATCH(compare_rows)
    (units, slots, dim, first_row, end_row, threshold, row_sum, latest, latest_cosine);
}

void join_redundancy(uint32_t slots, const float* row_sum, const uint32_t* latest,
                     const float* latest_cosine, float* redundancy) {
    if (redundancy != row_sum) std::copy(row_sum, row_sum + slots, redundancy);
    for (uint32_t row = 0; row < slots; ++row) {
        if (latest[row] != no_slot) redundancy[latest[row]] -= latest_cosine[row];
    }
    const float share = 1.0f / static_cast<float>(slots);
    for (uint32_t slot = 0; slot < slots; ++slot) redundancy[slot] *= share;
}

}  // namespace kvrt
#endif
