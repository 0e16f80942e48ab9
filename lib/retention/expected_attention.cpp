// Phases and weights of Expected Attention. The pass over the keys is in expected_logits.cpp, which
// reads the weights in this order, per KV head:
//
//   per rotated band  [group][2 or 5]  of a, b; with covariances also of a a, b b, a b
//   per other band    [group][1 or 2]  of a; of a a
#include "retention/expected_attention.hpp"

#include <cmath>
#include <complex>

namespace kvrt {

namespace {

/// Mean of exp(i w t) over `count` whole t from `first` on: that of the middle, times the quotient
/// of sines, whose limit where a step is a whole turn is 1 or -1.
std::complex<double> mean_phase(double frequency, uint64_t first, uint32_t count) {
    const double half = frequency / 2.0, steps = static_cast<double>(count);
    const double middle = static_cast<double>(first) + (steps - 1.0) / 2.0;
    const double below = std::sin(half);
    const double quotient = std::abs(below) < 1e-12 ? std::cos(half * steps) / std::cos(half)
                                                    : std::sin(half * steps) / (steps * below);
    return std::polar(1.0, frequency * middle) * quotient;
}

}  // namespace

uint64_t expected_phase_count(const rope_description& rope) {
    return uint64_t{4} * rope.rotated_bands();
}

void expected_phases(const expected_shape& shape, const rope_description& rope,
                     uint64_t next_position, double* phases) {
    for (uint32_t band = 0; band < rope.rotated_bands(); ++band) {
        for (const double times : {1.0, 2.0}) {
            const std::complex<double> mean =
                mean_phase(times * rope.inverse_frequencies[band], next_position, shape.positions);
            *phases++ = mean.real();
            *phases++ = mean.imag();
        }
    }
}

uint64_t expected_weight_count(const expected_shape& shape, const rope_description& rope,
                               bool with_covariances) {
    const uint64_t rotated = rope.rotated_bands(), others = rope.bands(shape.key_dim) - rotated;
    return shape.group * (with_covariances ? 5 * rotated + 2 * others : 2 * rotated + others);
}

void expected_weights(const expected_shape& shape, const rope_description& rope,
                      const double* phases, const query_means& means,
                      const query_covariances& covariances, float* weights) {
    const uint32_t bands = rope.bands(shape.key_dim), rotated = rope.rotated_bands();
    const double factor = rope.attention_factor;
    const double dot_scale = 1.0 / std::sqrt(static_cast<double>(shape.key_dim));
    const double square_scale = 0.5 / static_cast<double>(shape.key_dim);
    const auto put = [&](double weight) { *weights++ = static_cast<float>(weight); };
    for (uint32_t band = 0; band < bands; ++band) {
        for (uint32_t h = 0; h < shape.group; ++h) {
            const uint64_t i = uint64_t{h} * bands + band;
            if (band >= rotated) {
                put(dot_scale * means.real[i]);
                if (covariances.given()) put(square_scale * covariances.real[i]);
                continue;
            }
            const std::complex<double> phase(phases[4 * band], phases[4 * band + 1]);
            const std::complex<double> mean =
                factor * std::complex<double>(means.real[i], means.imaginary[i]) * phase;
            put(dot_scale * mean.real());
            put(dot_scale * mean.imag());
            if (!covariances.given()) continue;
            // A turn leaves half the trace alone, and turns what remains by twice its angle.
            const double first = covariances.real[i], second = covariances.imaginary[i];
            double round = (first + second) / 2.0;
            std::complex<double> skew((first - second) / 2.0, covariances.cross[i]);
            if (shape.turning == covariance_turning::mean_rotation) {
                round *= std::norm(phase);
                skew *= phase * phase;
            } else {
                skew *= std::complex<double>(phases[4 * band + 2], phases[4 * band + 3]);
            }
            const double scale = square_scale * factor * factor;
            put(scale * (round + skew.real()));
            put(scale * (round - skew.real()));
            put(scale * 2.0 * skew.imag());
        }
    }
}

}  // namespace kvrt
