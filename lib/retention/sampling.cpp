#include "retention/sampling.hpp"

#include <xxhash.h>

#include <algorithm>
#include <cmath>

namespace kvrt {

uint64_t draw_bits(const random_key& key, draw_purpose purpose, uint64_t place) {
    const uint64_t owner = uint64_t{key.layer} << 32 | key.head;
    const uint64_t counter[4] = {key.round, owner, place, static_cast<uint64_t>(purpose)};
    return XXH3_64bits_withSeed(counter, sizeof counter, key.seed);
}

void sample_scores(const random_key& key, const slot_positions& positions,
                   const slot_ranges& candidates, float* scores) {
    for (const slot_range& range : candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) {
            const float score = scores[slot];
            if (score != score) continue;
            const uint64_t bits = draw_bits(key, draw_purpose::sampling, positions.at(slot));
            // -log of a uniform number inside (0, 1) is exponential, -log of that Gumbel.
            const double uniform = (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
            const double weight = std::max(double{score}, 0.0) / -std::log(uniform);
            scores[slot] = static_cast<float>(std::log(weight));
        }
    }
}

}  // namespace kvrt
