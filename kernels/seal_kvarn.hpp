// Sealing as KVarN does (format/kvarn.cpp): x = (code * step + least) * factor, with a step and a
// least number for each channel of keys and each token of values, and the factors of the others.
#pragma once

#include "kernels/level_columns.hpp"

namespace kvrt::kernels {

/// In shared memory.
struct kvarn_tile {
    levelled_matrix matrix;
    float column_inverses[most_dim];  // NaN of tokens that are not finite
    float least[most_dim], step_inverses[most_dim];
};

/// Stores a column's factor, and returns what divides by it.
template <class Cx>
KVRT_DEVICE float store_factor(float factor, std::byte* address) {
    const uint16_t bits = Cx::f32_to_f16(factor);
    store_f16_bits<Cx>(address, bits);
    return 1.0f / Cx::f16_to_f32(bits);
}

template <class Cx>
KVRT_DEVICE void seal_kvarn_keys(const raw_rows& rows, const tile_shape& shape, std::byte* tile,
                                 kvarn_tile& shared) {
    const float last_code = last_code_of(shape);
    const levelled_matrix& matrix = shared.matrix;
    for (uint32_t t = Cx::thread(); t < shape.tokens; t += Cx::threads()) {
        if (matrix.is_finite[t] != 0) continue;
        shared.column_inverses[t] = Cx::bits_to_f32(0x7fc00000u);
        store_f16_bits<Cx>(tile + shape.token_factors() + t * 2, f16_nan);
    }
    for (uint32_t k = Cx::thread(); k < matrix.finite_count; k += Cx::threads()) {
        const uint32_t t = matrix.finite[k];
        shared.column_inverses[t] =
            store_factor<Cx>(matrix.best[k], tile + shape.token_factors() + t * 2);
    }
    Cx::barrier();
    for (uint32_t i = Cx::thread(); i < shape.dim; i += Cx::threads()) {
        float least = 0.0f, largest = 0.0f;
        for (uint32_t k = 0; k < matrix.finite_count; ++k) {
            const uint32_t t = matrix.finite[k];
            const float x = rows.at<Cx>(t, i) * shared.column_inverses[t];
            if (k == 0) least = largest = x;
            least = x < least ? x : least;
            largest = largest < x ? x : largest;
        }
        const stored_affine made = affine_over<Cx>(least, largest, last_code);
        store_f16_bits<Cx>(tile + shape.channel_steps(0) + i * 2, made.step_bits);
        store_f16_bits<Cx>(tile + shape.channel_leasts(0) + i * 2, made.least_bits);
        shared.least[i] = made.least;
        shared.step_inverses[i] = made.inverse();
    }
    Cx::barrier();
    store_tile_codes<Cx>(shape, tile, [&](uint32_t slot, uint32_t channel) {
        return nearest_code(rows.at<Cx>(slot, channel) * shared.column_inverses[slot],
                            shared.least[channel], shared.step_inverses[channel], last_code);
    });
}

template <class Cx>
KVRT_DEVICE void seal_kvarn_values(const raw_rows& rows, const tile_shape& shape, std::byte* tile,
                                   kvarn_tile& shared) {
    const float last_code = last_code_of(shape);
    const levelled_matrix& matrix = shared.matrix;
    for (uint32_t i = Cx::thread(); i < shape.dim; i += Cx::threads()) {
        const float factor = matrix.finite_count != 0 ? matrix.best[i] : 1.0f;
        shared.column_inverses[i] =
            store_factor<Cx>(factor, tile + shape.channel_factors() + i * 2);
    }
    Cx::barrier();
    for (uint32_t t = Cx::warp(); t < shape.tokens; t += Cx::threads() / warp_lanes) {
        const bool active = lane_is_active<Cx>(shape.dim);
        const uint32_t first = Cx::lane() * lane_channels;
        float row[lane_channels] = {};
        for (uint32_t i = 0; i < lane_channels && active; ++i) {
            row[i] = rows.at<Cx>(t, first + i) * shared.column_inverses[first + i];
        }
        const row_reach reach = reach_of_group<Cx>(row, active, warp_lanes);
        if (Cx::lane() != 0) continue;
        const stored_affine made = matrix.is_finite[t] != 0
                                       ? affine_over<Cx>(reach.least, reach.largest, last_code)
                                       : affine_of_nan<Cx>();
        store_f16_bits<Cx>(tile + shape.token_steps() + t * 2, made.step_bits);
        store_f16_bits<Cx>(tile + shape.token_leasts() + t * 2, made.least_bits);
        shared.least[t] = made.least;
        shared.step_inverses[t] = made.inverse();
    }
    Cx::barrier();
    store_tile_codes<Cx>(shape, tile, [&](uint32_t slot, uint32_t channel) {
        return nearest_code(rows.at<Cx>(slot, channel) * shared.column_inverses[channel],
                            shared.least[slot], shared.step_inverses[slot], last_code);
    });
}

template <class Cx>
KVRT_DEVICE void seal_kvarn(const raw_rows& rows, const tile_shape& shape, std::byte* tile,
                            kvarn_tile& shared) {
    fill_tile_end<Cx>(shape, tile);
    find_finite<Cx>(rows, shape, shared.matrix);
    if (shared.matrix.finite_count != 0) level_columns<Cx>(rows, shape, shared.matrix);
    if (shape.values()) {
        seal_kvarn_values<Cx>(rows, shape, tile, shared);
    } else {
        seal_kvarn_keys<Cx>(rows, shape, tile, shared);
    }
}

}  // namespace kvrt::kernels
