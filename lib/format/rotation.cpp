// Sums and differences in the order of the matrix's factors, two factors in one go over the row.
// Loops over four numbers are what compilers turn into vectors of any instruction set.
#include "format/rotation.hpp"

#include <cmath>

namespace kvrt {

namespace {

struct four {
    float at[4];
};

four load(const float* from) { return {{from[0], from[1], from[2], from[3]}}; }

void store_sum(const four& a, const four& b, float* to) {
    for (int i = 0; i < 4; ++i) to[i] = a.at[i] + b.at[i];
}
void store_difference(const four& a, const four& b, float* to) {
    for (int i = 0; i < 4; ++i) to[i] = a.at[i] - b.at[i];
}

/// Of each four numbers: neighbours, then those two apart.
void add_within(float* row, uint32_t dim) {
    for (uint32_t i = 0; i < dim; i += 4) {
        const float a = row[i] + row[i + 1], b = row[i] - row[i + 1];
        const float c = row[i + 2] + row[i + 3], d = row[i + 2] - row[i + 3];
        row[i] = a + c;
        row[i + 1] = b + d;
        row[i + 2] = a - c;
        row[i + 3] = b - d;
    }
}

/// Numbers `half` apart, a multiple of 4.
void add_across(float* row, uint32_t dim, uint32_t half) {
    for (uint32_t at = 0; at < dim; at += 2 * half) {
        for (uint32_t i = at; i < at + half; i += 4) {
            const four a = load(row + i), b = load(row + i + half);
            store_sum(a, b, row + i);
            store_difference(a, b, row + i + half);
        }
    }
}

/// Numbers `half` apart, then those twice as far.
void add_across_twice(float* row, uint32_t dim, uint32_t half) {
    for (uint32_t at = 0; at < dim; at += 4 * half) {
        for (uint32_t i = at; i < at + half; i += 4) {
            const four w = load(row + i), x = load(row + i + half);
            const four y = load(row + i + 2 * half), z = load(row + i + 3 * half);
            four near, near_off, far, far_off;
            store_sum(w, x, near.at);
            store_difference(w, x, near_off.at);
            store_sum(y, z, far.at);
            store_difference(y, z, far_off.at);
            store_sum(near, far, row + i);
            store_sum(near_off, far_off, row + i + half);
            store_difference(near, far, row + i + 2 * half);
            store_difference(near_off, far_off, row + i + 3 * half);
        }
    }
}

}  // namespace

void rotate_row(float* row, uint32_t dim) {
    const uint32_t block = dim & (~dim + 1);
    add_within(row, dim);
    uint32_t half = 4;
    for (; 4 * half <= block; half *= 4) add_across_twice(row, dim, half);
    if (2 * half <= block) add_across(row, dim, half);
    const float scale = 1.0f / std::sqrt(static_cast<float>(block));
    for (uint32_t i = 0; i < dim; ++i) row[i] *= scale;
}

}  // namespace kvrt
