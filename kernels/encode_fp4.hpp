// Codes of 4-bit floating point with a scale per group: nvfp4, mxfp4 (format/fp4.cpp).
#pragma once

#include "kernels/encode_token.hpp"

namespace kvrt::kernels {

/// `inverse` is 0 where all codes are: in a group too small to count, or not finite.
template <class Cx>
KVRT_DEVICE uint32_t encode_e2m1(float inverse, bool active, const float (&row)[lane_channels],
                                 uint32_t (&codes)[lane_channels]) {
    uint32_t saturated = 0;
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        const float scaled = inverse != 0.0f ? row[i] * inverse : 0.0f;
        // A power of two leaves up to 8; beyond that the scale itself was too small.
        if (active && magnitude_of<Cx>(scaled) > 8.0f) ++saturated;
        codes[i] = f32_to_e2m1<Cx>(scaled);
    }
    return saturated;
}

template <class Cx>
KVRT_DEVICE encoded_row encode_nvfp4(float static_scale, bool active,
                                     const float (&row)[lane_channels],
                                     uint32_t (&codes)[lane_channels]) {
    encoded_row done;
    const row_reach reach = reach_of_group<Cx>(row, active, 16 / lane_channels);
    const float wanted = reach_magnitude<Cx>(reach) / 6.0f / static_scale;
    done.meta = reach.finite ? f32_to_e4m3<Cx>(wanted) : 0x7fu;
    const float exact = static_scale * e4m3_to_f32<Cx>(done.meta);
    const float inverse = reach.finite ? reciprocal_of<Cx>(exact) : 0.0f;
    done.saturated = encode_e2m1<Cx>(inverse, active, row, codes);
    return done;
}

template <class Cx>
KVRT_DEVICE encoded_row encode_mxfp4(bool active, const float (&row)[lane_channels],
                                     uint32_t (&codes)[lane_channels]) {
    encoded_row done;
    const row_reach reach = reach_of_group<Cx>(row, active, 32 / lane_channels);
    // 2^(floor(log2 amax) - 2), as far down as the scale's exponent goes.
    const uint32_t exponent = Cx::f32_to_bits(reach_magnitude<Cx>(reach)) >> 23;
    const uint32_t scale = exponent < 2 ? 0 : exponent - 2;
    done.meta = reach.finite ? scale : 255;
    const float inverse = reach.finite ? Cx::bits_to_f32((254 - scale) << 23) : 0.0f;
    done.saturated = encode_e2m1<Cx>(inverse, active, row, codes);
    return done;
}

}  // namespace kvrt::kernels
