// Codes of formats with metadata per group of channels: q8_0, q4_0, and those with a step and a
// least number in f16, of which a group may be the whole row (format/affine_codes.hpp).
#pragma once

#include "kernels/encode_token.hpp"

namespace kvrt::kernels {

inline constexpr float largest_f16 = 65504.0f;

KVRT_BOTH constexpr float clamp_f16(float x) {
    const float above = x < -largest_f16 ? -largest_f16 : x;
    return largest_f16 < above ? largest_f16 : above;
}

/// A whole number from 0 to `last`, from one that was rounded by adding 0.5.
KVRT_BOTH constexpr uint32_t bounded_code(float code, float last) {
    return static_cast<uint32_t>(code < 0.0f ? 0.0f : last < code ? last : code);
}

/// q4_1, int4_token and their kin, of codes up to last_code.
template <class Cx>
KVRT_DEVICE encoded_row encode_affine(float last_code, uint32_t lanes, bool active,
                                      const float (&row)[lane_channels],
                                      uint32_t (&codes)[lane_channels]) {
    encoded_row done;
    const row_reach reach = reach_of_group<Cx>(row, active, lanes);
    const float least = clamp_f16(reach.least);
    float step = (reach.largest - reach.least) / last_code;
    step = largest_f16 < step ? largest_f16 : step;
    const float inverse = reciprocal_of<Cx>(step);
    done.meta = reach.finite ? static_cast<uint32_t>(Cx::f32_to_f16(step)) |
                                   static_cast<uint32_t>(Cx::f32_to_f16(least)) << 16
                             : f16_nan << 16 | f16_nan;
    const bool lost = step == 0.0f && least != reach.least;  // without a step no code says it
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        const float code = (row[i] - least) * inverse + 0.5f;
        const bool beyond = code < 0.0f || code >= last_code + 2.0f;
        if (active && reach.finite) done.saturated += (beyond ? 1u : 0u) + (lost ? 1u : 0u);
        codes[i] = reach.finite ? bounded_code(code, last_code) : 0;
    }
    return done;
}

template <class Cx>
KVRT_DEVICE encoded_row encode_q8_0(bool active, const float (&row)[lane_channels],
                                    uint32_t (&codes)[lane_channels]) {
    encoded_row done;
    const row_reach reach = reach_of_group<Cx>(row, active, 32 / lane_channels);
    float step = reach_magnitude<Cx>(reach) / 127.0f;
    step = largest_f16 < step ? largest_f16 : step;
    const float inverse = reciprocal_of<Cx>(step);
    done.meta = reach.finite ? Cx::f32_to_f16(step) : f16_nan;
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        const float code = Cx::nearest_away(row[i] * inverse);
        if (active && reach.finite && magnitude_of<Cx>(code) > 127.0f) ++done.saturated;
        codes[i] = reach.finite ? signed_code<Cx>(code) : 0;
    }
    return done;
}

/// The number with the largest magnitude decides; of two, the first.
template <class Cx>
KVRT_DEVICE encoded_row encode_q4_0(bool active, const float (&row)[lane_channels],
                                    uint32_t (&codes)[lane_channels]) {
    encoded_row done;
    constexpr uint32_t lanes = 32 / lane_channels;
    bool finite = true;
    float extreme = 0.0f;
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        if (!active) continue;
        finite = finite && is_finite<Cx>(row[i]);
        if (magnitude_of<Cx>(row[i]) > magnitude_of<Cx>(extreme)) extreme = row[i];
    }
    finite = (Cx::ballot(!finite) & group_mask<Cx>(lanes)) == 0;
    KVRT_UNROLL
    for (uint32_t bits = 1; bits < lanes; bits *= 2) {
        const float other = Cx::shuffle_xor(extreme, bits);
        const float mine = magnitude_of<Cx>(extreme), theirs = magnitude_of<Cx>(other);
        if (theirs > mine || (theirs == mine && (Cx::lane() & bits) != 0)) extreme = other;
    }
    const float step = clamp_f16(extreme / -8.0f);
    const float inverse = reciprocal_of<Cx>(step);
    done.meta = finite ? Cx::f32_to_f16(step) : f16_nan;
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        const float code = row[i] * inverse + 8.5f;
        if (active && finite && (code < 0.0f || code >= 17.0f)) ++done.saturated;
        codes[i] = finite ? bounded_code(code, 15.0f) : 0;
    }
    return done;
}

}  // namespace kvrt::kernels
