#include "format/rotation.hpp"

#include <cmath>

namespace kvrt {

void rotate_row(float* row, uint32_t dim) {
    const uint32_t block = dim & (~dim + 1);
    for (uint32_t half = 1; half < block; half *= 2) {
        for (uint32_t at = 0; at < dim; at += 2 * half) {
            for (uint32_t i = at; i < at + half; ++i) {
                const float sum = row[i] + row[i + half];
                row[i + half] = row[i] - row[i + half];
                row[i] = sum;
            }
        }
    }
    const float scale = 1.0f / std::sqrt(static_cast<float>(block));
    for (uint32_t i = 0; i < dim; ++i) row[i] *= scale;
}

}  // namespace kvrt
