// Phases and weights: the part of TriAttention that is small and wants precision. The pass over the
// keys is in score_keys.cpp, which reads the weights in this order, per KV head:
//
//   norm  [bands][group]                     c (mean|q| - |mean q|); c = 1 where not rotated
//   dot   [variants][rotated bands][group][2] c W, real part for the band's first dimension
//         ... then [unrotated dims][group]   within each variant
#include "retention/triattention.hpp"

#include <algorithm>
#include <cmath>
#include <complex>

namespace kvrt {

uint64_t triattention_phase_count(const triattention_shape& shape, const rope_description& rope) {
    return uint64_t{2} * shape.variants() * rope.rotated_bands();
}

void triattention_phases(const triattention_shape& shape, const rope_description& rope,
                         uint64_t next_position, double* phases) {
    const uint32_t bands = rope.rotated_bands();
    const uint32_t offsets = shape.offsets();
    for (uint32_t band = 0; band < bands; ++band) {
        const double frequency = rope.inverse_frequencies[band];
        const std::complex<double> start =
            std::polar(1.0, frequency * static_cast<double>(next_position));
        // The step for offset 2^k by squaring: as exact as the angle itself, which carries the
        // rounding of the frequency times 2^k.
        std::complex<double> step = std::polar(1.0, frequency);
        std::complex<double> sum = 0.0;
        for (uint32_t k = 0; k < offsets; ++k, step *= step) {
            const std::complex<double> phase = start * step;
            sum += phase;
            if (shape.maximum) {
                phases[2 * (k * bands + band)] = phase.real();
                phases[2 * (k * bands + band) + 1] = phase.imag();
            }
        }
        if (!shape.maximum) {
            phases[2 * band] = sum.real() / offsets;
            phases[2 * band + 1] = sum.imag() / offsets;
        }
    }
}

uint64_t triattention_weight_count(const triattention_shape& shape, const rope_description& rope) {
    return uint64_t{shape.group} *
           (rope.bands(shape.key_dim) + uint64_t{shape.variants()} * shape.key_dim);
}

void triattention_weights(const triattention_shape& shape, const rope_description& rope,
                          const double* phases, const query_means& means, float* weights) {
    const uint32_t bands = rope.bands(shape.key_dim);
    const uint32_t rotated = rope.rotated_bands();
    const double factor = rope.attention_factor;
    for (uint32_t band = 0; band < bands; ++band) {
        for (uint32_t h = 0; h < shape.group; ++h) {
            const uint64_t i = uint64_t{h} * bands + band;
            const double mean = std::hypot(double{means.real[i]}, double{means.imaginary[i]});
            const double spread = std::max(0.0, double{means.magnitude[i]} - mean);
            *weights++ = static_cast<float>(band < rotated ? factor * spread : spread);
        }
    }
    for (uint32_t variant = 0; variant < shape.variants(); ++variant) {
        for (uint32_t band = 0; band < bands; ++band) {
            for (uint32_t h = 0; h < shape.group; ++h) {
                const uint64_t i = uint64_t{h} * bands + band;
                if (band >= rotated) {
                    *weights++ = means.real[i];
                    continue;
                }
                const double* phase = phases + 2 * (uint64_t{variant} * rotated + band);
                const std::complex<double> weight =
                    std::complex<double>(means.real[i], means.imaginary[i]) *
                    std::complex<double>(phase[0], phase[1]);
                *weights++ = static_cast<float>(factor * weight.real());
                *weights++ = static_cast<float>(factor * weight.imag());
            }
        }
    }
}

}  // namespace kvrt
