#include "model/rope.hpp"

#include <cmath>

#include "base/sized_struct.hpp"

namespace kvrt {

status describe_rope(const kv_rope* rope, uint32_t key_dim, uint32_t layer, rope_description& out) {
    out = rope_description();
    if (rope == nullptr) return KV_OK;
    kv_rope given;
    KVRT_TRY(adopt(rope, 0, "rope (kv_rope)", given));
    if (given.style == KV_ROPE_NONE) return KV_OK;
    if (given.style != KV_ROPE_HALF && given.style != KV_ROPE_INTERLEAVED) {
        return fail(KV_INVALID, "layer {}: rope style {} is none of KV_ROPE_*", layer, given.style);
    }
    const uint32_t dimensions = given.dimensions == 0 ? key_dim : given.dimensions;
    if (dimensions % 2 != 0 || dimensions > key_dim || dimensions / 2 > max_rotated_bands) {
        return fail(KV_INVALID, "layer {}: rope dimensions {} must be even and at most key_dim {}",
                    layer, dimensions, key_dim);
    }
    const double factor = given.attention_factor == 0.0 ? 1.0 : given.attention_factor;
    if (!std::isfinite(factor) || factor < 0.0) {
        return fail(KV_INVALID, "layer {}: rope attention_factor {} must be positive", layer,
                    factor);
    }
    const double theta = given.theta == 0.0 ? 10000.0 : given.theta;
    if (given.inverse_frequencies == nullptr && !(std::isfinite(theta) && theta >= 1.0)) {
        return fail(KV_INVALID, "layer {}: rope theta {} must be at least 1", layer, theta);
    }
    for (uint32_t band = 0; band < dimensions / 2; ++band) {
        const double frequency = given.inverse_frequencies != nullptr
                                     ? given.inverse_frequencies[band]
                                     : std::pow(theta, -2.0 * band / dimensions);
        if (!std::isfinite(frequency)) {
            return fail(KV_INVALID, "layer {}: rope inverse_frequencies[{}] is not finite", layer,
                        band);
        }
        out.inverse_frequencies[band] = frequency;
    }
    out.style = given.style;
    out.dimensions = dimensions;
    out.attention_factor = factor;
    return KV_OK;
}

namespace {

bool nearly_equal(double a, double b) {
    return std::abs(a - b) <= 1e-6 * std::fmax(std::abs(a), std::abs(b));
}

}  // namespace

bool same_rotation(const rope_description& a, const rope_description& b) {
    if (a.style != b.style || a.dimensions != b.dimensions ||
        !nearly_equal(a.attention_factor, b.attention_factor)) {
        return false;
    }
    for (uint32_t band = 0; band < a.rotated_bands(); ++band) {
        if (!nearly_equal(a.inverse_frequencies[band], b.inverse_frequencies[band])) return false;
    }
    return true;
}

}  // namespace kvrt
