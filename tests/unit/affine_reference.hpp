// affine4 by its formulas, for tests: constants, rotation and codes in double, without a line of
// the library's.
#pragma once

#include "format_reference.hpp"

namespace format_test {

/// How a layer's keys are rotated.
struct rope_facts {
    uint32_t style = KV_ROPE_NONE;
    uint32_t dimensions = 0;
    double factor = 1.0;
    std::vector<double> frequencies;  // [dimensions / 2]

    rope_facts() = default;
    rope_facts(uint32_t rope_style, uint32_t rotated, double theta, double attention_factor)
        : style(rope_style), dimensions(rotated), factor(attention_factor) {
        for (uint32_t b = 0; b < rotated / 2; ++b) {
            frequencies.push_back(std::pow(theta, -2.0 * b / rotated));
        }
    }
    kv_rope describe() const {
        kv_rope rope = KV_INIT(kv_rope);
        rope.style = style;
        rope.dimensions = dimensions;
        rope.attention_factor = factor;
        rope.inverse_frequencies = frequencies.data();
        return rope;
    }
    uint32_t first_of(uint32_t band) const {
        return style == KV_ROPE_INTERLEAVED ? 2 * band : band;
    }
    uint32_t second_of(uint32_t band) const {
        return style == KV_ROPE_INTERLEAVED ? 2 * band + 1 : band + dimensions / 2;
    }

    /// Turned by `direction` times the position; the factor goes with it.
    std::vector<double> turned(std::vector<double> row, uint64_t position, int direction) const {
        for (uint32_t b = 0; b < dimensions / 2; ++b) {
            const long double angle = static_cast<long double>(position) *
                                      static_cast<long double>(frequencies[b]) * direction;
            const double cosine = static_cast<double>(std::cos(angle));
            const double sine = static_cast<double>(std::sin(angle));
            const double gain = direction > 0 ? factor : 1.0 / factor;
            double& first = row[first_of(b)];
            double& second = row[second_of(b)];
            const double real = first * cosine - second * sine;
            second = gain * (first * sine + second * cosine);
            first = gain * real;
        }
        return row;
    }
    /// Of variances before rotation those behind it, at all angles alike.
    std::vector<double> mixed(std::vector<double> variances) const {
        for (uint32_t b = 0; b < dimensions / 2; ++b) {
            const double both = variances[first_of(b)] + variances[second_of(b)];
            variances[first_of(b)] = variances[second_of(b)] = factor * factor * both / 2;
        }
        return variances;
    }
};

/// Means of one head before rotation, scales behind it.
struct channel_facts {
    std::vector<float> means, scales;

    /// Unlike in both.
    channel_facts(uint32_t dim, std::mt19937& random) {
        std::normal_distribution<float> normal;
        for (uint32_t i = 0; i < dim; ++i) {
            means.push_back(i % 9 == 0 ? 8.0f * normal(random) : normal(random));
            scales.push_back(std::exp2(normal(random)));
        }
    }
    /// What the mean is at a position.
    std::vector<double> mean_at(const rope_facts& rope, uint64_t position) const {
        return rope.turned({means.begin(), means.end()}, position, 1);
    }
    std::vector<double> levelled(const std::vector<double>& row, const rope_facts& rope,
                                 uint64_t position) const {
        std::vector<double> out = mean_at(rope, position);
        for (std::size_t i = 0; i < row.size(); ++i) out[i] = (row[i] - out[i]) / double{scales[i]};
        return out;
    }
    std::vector<double> raised(const std::vector<double>& row, const rope_facts& rope,
                               uint64_t position) const {
        std::vector<double> out = mean_at(rope, position);
        for (std::size_t i = 0; i < row.size(); ++i) out[i] += row[i] * double{scales[i]};
        return out;
    }
    /// A key as the model would hand it over: around the mean of its position.
    std::vector<float> key(const rope_facts& rope, uint64_t position, std::mt19937& random) const {
        std::normal_distribution<double> normal;
        std::vector<double> row(means.size());
        for (double& x : row) x = normal(random);
        row = raised(row, rope, position);
        return {row.begin(), row.end()};
    }
};

/// What the record holds is what one of q4_1 does, of the levelled row behind Hadamard's matrix.
inline std::vector<double> decode_affine(const std::byte* record, const channel_facts& channels,
                                         const rope_facts& rope, uint64_t position) {
    const uint32_t dim = static_cast<uint32_t>(channels.means.size());
    const std::vector<double> codes = decode(facts_of(KV_FORMAT_Q4_1), record, dim, 1.0);
    return channels.raised(hadamard(codes), rope, position);
}

}  // namespace format_test
