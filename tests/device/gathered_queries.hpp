// Statistics of queries that sequences of twin pools have gathered.
#pragma once

#include "twin_pools.hpp"

namespace kvrt::cuda {

/// What a sequence has gathered in a layer of 4 query heads with 32 bands.
struct gathered {
    std::vector<float> arrays[6];
    kv_query_statistics statistics = KV_INIT(kv_query_statistics);

    gathered(kv_pool* pool, kv_seq sequence, uint32_t layer) {
        for (std::vector<float>& array : arrays) array.assign(4 * 32, -1.0f);
        statistics.layer = layer;
        statistics.query_heads = 4;
        statistics.bands = 32;
        statistics.mean_real = arrays[0].data();
        statistics.mean_imaginary = arrays[1].data();
        statistics.mean_magnitude = arrays[2].data();
        statistics.variance_real = arrays[3].data();
        statistics.variance_imaginary = arrays[4].data();
        statistics.covariance = arrays[5].data();
        const kv_status verdict = kv_seq_get_statistics(pool, sequence, &statistics);
        REQUIRE_MESSAGE(verdict == KV_OK, std::string(message_buffer()));
    }
};

/// How far the two pools' are apart in a layer; far, where they are of other numbers of tokens.
inline double worst_of_gathered(const twin_pools_on& pools, const twin_sequence& sequence,
                                uint32_t layer, uint64_t tokens) {
    const gathered device(pools.pools[0], sequence.of[0], layer);
    const gathered cpu(pools.pools[1], sequence.of[1], layer);
    if (device.statistics.tokens != tokens || cpu.statistics.tokens != tokens) return 1.0;
    double worst = 0.0;
    for (uint32_t array = 0; array < 6; ++array) {
        for (std::size_t i = 0; i < cpu.arrays[array].size(); ++i) {
            worst = std::max(
                worst, std::abs(double{device.arrays[array][i]} - double{cpu.arrays[array][i]}));
        }
    }
    return worst;
}

}  // namespace kvrt::cuda
