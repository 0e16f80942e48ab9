#include "retention/scores.hpp"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvrt {

namespace {

constexpr uint32_t lanes = 16;
constexpr double smallest_deviation = 1e-6;
constexpr float infinity = std::numeric_limits<float>::infinity();

struct moments {
    double sum = 0.0;
    uint64_t count = 0;
};

/// Sums value(score) over finite scores of one range. Sixteen partial sums, joined in a fixed
/// order.
template <class callable>
void add_range(const float* scores, const slot_range& range, const callable& value,
               moments& total) {
    double sums[lanes] = {};
    uint32_t counts[lanes] = {};
    const auto add = [&](uint32_t slot, uint32_t lane) {
        const float score = scores[slot];
        const bool finite = std::abs(score) <= std::numeric_limits<float>::max();
        sums[lane] += finite ? value(score) : 0.0;
        counts[lane] += finite ? 1 : 0;
    };
    uint32_t slot = range.first;
    for (; slot + lanes <= range.end; slot += lanes) {
        for (uint32_t lane = 0; lane < lanes; ++lane) add(slot + lane, lane);
    }
    for (uint32_t lane = 0; slot < range.end; ++slot, ++lane) add(slot, lane);
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        total.sum += sums[lane];
        total.count += counts[lane];
    }
}

}  // namespace

void normalise_and_reduce(const float* scores, uint64_t stride, uint32_t heads,
                          const slot_ranges& candidates, float* out) {
    for (uint32_t head = 0; head < heads; ++head) {
        const float* row = scores + head * stride;
        moments first;
        for (const slot_range& range : candidates) {
            add_range(
                row, range, [](float s) { return double{s}; }, first);
        }
        const double mean = first.count == 0 ? 0.0 : first.sum / static_cast<double>(first.count);
        moments second;
        for (const slot_range& range : candidates) {
            const auto square = [mean](float s) { return (s - mean) * (s - mean); };
            add_range(row, range, square, second);
        }
        const double deviation =
            second.count == 0 ? 0.0 : std::sqrt(second.sum / static_cast<double>(second.count));
        const double inverse = 1.0 / std::max(deviation, smallest_deviation);
        for (const slot_range& range : candidates) {
            if (head == 0) {
                for (uint32_t slot = range.first; slot < range.end; ++slot) {
                    out[slot] = static_cast<float>((row[slot] - mean) * inverse);
                }
                continue;
            }
            for (uint32_t slot = range.first; slot < range.end; ++slot) {
                const float z = static_cast<float>((row[slot] - mean) * inverse);
                // Written so that NaN on either side loses.
                out[slot] = out[slot] >= z || z != z ? out[slot] : z;
            }
        }
    }
}

void add_scores(const slot_ranges& candidates, const float* part, float* total) {
    for (const slot_range& range : candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) {
            // +infinity stands for what stays, whatever others say.
            const bool stays = total[slot] == infinity || part[slot] == infinity;
            total[slot] = stays ? infinity : total[slot] + part[slot];
        }
    }
}

void raise_scores(const slot_ranges& candidates, const float* part, float* total) {
    for (const slot_range& range : candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) {
            const float score = part[slot];
            total[slot] = total[slot] >= score || score != score ? total[slot] : score;
        }
    }
}

void fill_scores(const slot_ranges& candidates, float value, float* scores) {
    for (const slot_range& range : candidates) {
        std::fill(scores + range.first, scores + range.end, value);
    }
}

void score_random(const random_key& key, const slot_positions& positions,
                  const slot_ranges& candidates, float* scores) {
    for (const slot_range& range : candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) {
            const uint64_t place = uint64_t{key.layer} << 32 | key.head;
            const uint64_t counter[3] = {key.round, place, positions.at(slot)};
            const uint64_t bits = XXH3_64bits_withSeed(counter, sizeof counter, key.seed);
            scores[slot] = static_cast<float>(bits >> 40) * 0x1p-24f;
        }
    }
}

void score_streaming(const slot_ranges& candidates, float* scores) {
    for (const slot_range& range : candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) {
            scores[slot] = static_cast<float>(slot);
        }
    }
}

}  // namespace kvrt
