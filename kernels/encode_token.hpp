// Codes of formats whose metadata are per token and head, or static: int8_token, fp8_token, fp8
// (format/token_scaled.cpp, fp8_static.cpp).
#pragma once

#include "kernels/row.hpp"
#include "kernels/small_float.hpp"

namespace kvrt::kernels {

/// What encoding leaves of a row besides its codes, by lane.
struct encoded_row {
    uint32_t meta = 0;       ///< of the lane's group
    uint32_t saturated = 0;  ///< of the lane's channels
};

inline constexpr uint32_t f16_nan = 0x7e00;

/// A step of |row| / largest_code. Rounded up, that of the largest magnitudes would bring them back
/// as infinity.
template <class Cx>
KVRT_DEVICE float token_step(const row_reach& reach, float largest_code) {
    if (!reach.finite) return Cx::bits_to_f32(0x7fc00000u);
    const float step = reach_magnitude<Cx>(reach) / largest_code;
    const bool infinite = Cx::f32_to_bits(step * largest_code) == 0x7f800000u;
    return infinite ? Cx::bits_to_f32(Cx::f32_to_bits(step) - 1) : step;
}

/// From a scaled number, to its nearest whole one.
template <class Cx>
KVRT_DEVICE uint32_t signed_code(float whole) {
    float code = whole < -127.0f ? -127.0f : whole;
    code = 127.0f < code ? 127.0f : code;
    return static_cast<uint32_t>(static_cast<int32_t>(code)) & 0xffu;
}

template <class Cx>
KVRT_DEVICE encoded_row encode_static(const operand_place& operand, float scale, bool active,
                                      const float (&row)[lane_channels],
                                      uint32_t (&codes)[lane_channels]) {
    encoded_row done;
    const bool e4m3 = operand.codes == coding::fp8_e4m3;
    const float largest = e4m3 ? 448.0f : 57344.0f;
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        const float scaled = row[i] / scale;
        if (active && (scaled > largest || scaled < -largest)) ++done.saturated;
        codes[i] = e4m3 ? f32_to_e4m3<Cx>(scaled) : f32_to_e5m2<Cx>(scaled);
    }
    return done;
}

template <class Cx>
KVRT_DEVICE encoded_row encode_token(bool int8, bool active, const float (&row)[lane_channels],
                                     uint32_t (&codes)[lane_channels]) {
    const row_reach reach = reach_of_group<Cx>(row, active, warp_lanes);
    const float step = token_step<Cx>(reach, int8 ? 127.0f : 448.0f);
    const float inverse = reciprocal_of<Cx>(step);
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        codes[i] = !reach.finite ? 0
                   : int8        ? signed_code<Cx>(Cx::nearest_away(row[i] * inverse))
                                 : f32_to_e4m3<Cx>(row[i] * inverse);
    }
    return {Cx::f32_to_bits(step), 0};
}

}  // namespace kvrt::kernels
