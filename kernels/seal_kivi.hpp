// Sealing keys as KIVI does (format/kivi.cpp): a step and a least number for each channel of 32
// tokens. A thread has a channel of such a group, then words of codes.
#pragma once

#include "kernels/seal_tile.hpp"

namespace kvrt::kernels {

/// In shared memory.
struct kivi_groups {
    static constexpr uint32_t most = most_tile_tokens / kivi_group * most_dim;
    float least[most], inverse[most];  // [group][dim]
};

template <class Cx>
KVRT_DEVICE void seal_kivi(const raw_rows& rows, const tile_shape& shape, std::byte* tile,
                           kivi_groups& groups) {
    const uint32_t dim = shape.dim;
    const float last_code = last_code_of(shape);
    for (uint32_t i = Cx::thread(); i < shape.tokens / kivi_group * dim; i += Cx::threads()) {
        const uint32_t first = i / dim * kivi_group, channel = i % dim;
        float least = rows.at<Cx>(first, channel), largest = least;
        bool finite = true;
        for (uint32_t t = 0; t < kivi_group; ++t) {
            const float x = rows.at<Cx>(first + t, channel);
            least = x < least ? x : least;
            largest = x > largest ? x : largest;
            finite = finite && is_finite<Cx>(x);
        }
        const stored_affine made =
            finite ? affine_over<Cx>(least, largest, last_code) : affine_of_nan<Cx>();
        store_f16_bits<Cx>(tile + shape.channel_steps(first) + channel * 2, made.step_bits);
        store_f16_bits<Cx>(tile + shape.channel_leasts(first) + channel * 2, made.least_bits);
        groups.least[i] = made.least;
        groups.inverse[i] = made.inverse();
    }
    fill_tile_end<Cx>(shape, tile);
    Cx::barrier();
    store_tile_codes<Cx>(shape, tile, [&](uint32_t slot, uint32_t channel) {
        const uint32_t at = slot / kivi_group * dim + channel;
        return nearest_code(rows.at<Cx>(slot, channel), groups.least[at], groups.inverse[at],
                            last_code);
    });
}

}  // namespace kvrt::kernels
