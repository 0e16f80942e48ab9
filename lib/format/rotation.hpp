// An orthonormal change of a row's basis that spreads outliers over its channels: Hadamard's matrix
// in blocks of the largest power of two that divides the row's length, divided by the root of that.
// It is symmetric, so it is its own inverse, and dot products of two rotated rows are those of the
// rows.
#pragma once

#include <cstdint>

namespace kvrt {

/// In place; dim is a multiple of 8.
void rotate_row(float* row, uint32_t dim);

}  // namespace kvrt
