// 4-bit floating point (e2m1) with a scale per group.
//
//   nvfp4  groups of 16, s = e4m3(amax / 6 / g), x = g * s * code; g is the static scale, 1 if none
//   mxfp4  groups of 32, s = e8m0 = 2^(floor(log2 amax) - 2), x = s * code (OCP MX 1.0, 6.3)
#include "format/formats.hpp"
#include "format/packed_codes.hpp"
#include "format/record.hpp"
#include "format/small_float.hpp"

namespace kvrt {

namespace {

constexpr uint32_t nv_group = 16;
constexpr uint32_t mx_group = 32;

/// Codes of a group. `inverse` is 0 where all codes are: in a group too small to count, or not
/// finite.
uint32_t encode_group(const float* row, uint32_t count, float inverse, std::byte* bytes) {
    uint8_t codes[mx_group];
    uint32_t saturated = 0;
    for (uint32_t i = 0; i < count; ++i) {
        const float scaled = inverse != 0.0f ? row[i] * inverse : 0.0f;
        // A power of two leaves up to 8; beyond that the scale itself was too small.
        saturated += std::fabs(scaled) > 8.0f ? 1 : 0;
        codes[i] = f32_to_e2m1(scaled);
    }
    store_nibbles(codes, count, bytes);
    return saturated;
}

void decode_group(const std::byte* bytes, uint32_t count, float half_scale, float* row) {
    uint8_t codes[mx_group];
    load_nibbles(bytes, count, codes);
    for (uint32_t i = 0; i < count; ++i) {
        row[i] = half_scale * static_cast<float>(e2m1_doubled[codes[i]]);
    }
}

uint32_t encode_nv(const float* row, uint32_t dim, const row_constants& constants,
                   std::byte* record) {
    std::byte* meta = record + dim / 2;
    uint32_t saturated = 0;
    for (uint32_t at = 0; at < dim; at += nv_group, ++meta) {
        const uint32_t count = std::min(nv_group, dim - at);
        const group_reach reach = reach_of(row + at, count);
        const float wanted = reach.magnitude() / largest_e2m1 / constants.scale;
        const uint8_t scale = f32_to_e4m3(reach.finite ? wanted : NAN);
        *meta = static_cast<std::byte>(scale);
        const float exact = constants.scale * e4m3_to_f32(scale);
        const float inverse = reach.finite ? reciprocal_of(exact) : 0.0f;
        saturated += encode_group(row + at, count, inverse, record + at / 2);
    }
    return saturated;
}

void decode_nv(const std::byte* record, uint32_t dim, const row_constants& constants, float* row) {
    const std::byte* meta = record + dim / 2;
    for (uint32_t at = 0; at < dim; at += nv_group, ++meta) {
        const float scale = constants.scale * e4m3_to_f32(static_cast<uint8_t>(*meta));
        decode_group(record + at / 2, std::min(nv_group, dim - at), 0.5f * scale, row + at);
    }
}

uint8_t mx_scale(const group_reach& reach) {
    if (!reach.finite) return 255;
    const float magnitude = reach.magnitude();
    if (magnitude == 0.0f) return 0;
    return static_cast<uint8_t>(std::clamp(std::ilogb(magnitude) - 2 + 127, 0, 254));
}

uint32_t encode_mx(const float* row, uint32_t dim, const row_constants&, std::byte* record) {
    std::byte* meta = record + dim / 2;
    uint32_t saturated = 0;
    for (uint32_t at = 0; at < dim; at += mx_group, ++meta) {
        const uint32_t count = std::min(mx_group, dim - at);
        const group_reach reach = reach_of(row + at, count);
        const uint8_t scale = mx_scale(reach);
        *meta = static_cast<std::byte>(scale);
        const float inverse = reach.finite ? std::ldexp(1.0f, 127 - int{scale}) : 0.0f;
        saturated += encode_group(row + at, count, inverse, record + at / 2);
    }
    return saturated;
}

void decode_mx(const std::byte* record, uint32_t dim, const row_constants&, float* row) {
    const std::byte* meta = record + dim / 2;
    for (uint32_t at = 0; at < dim; at += mx_group, ++meta) {
        const float scale = e8m0_to_f32(static_cast<uint8_t>(*meta));
        decode_group(record + at / 2, std::min(mx_group, dim - at), 0.5f * scale, row + at);
    }
}

}  // namespace

const format_description nvfp4_format = {
    .id = KV_FORMAT_NVFP4,
    .name = "nvfp4",
    .kind = format_class::token_local,
    .code_bits = 4,
    .group = nv_group,
    .group_bytes = 1,
    .takes_scales = true,
    .reading = {code_kind::e2m1_nibbles, group_kind::e4m3_step, 0.0f, 0.5f},
    .encode = encode_nv,
    .decode = decode_nv};
const format_description mxfp4_format = {
    .id = KV_FORMAT_MXFP4,
    .name = "mxfp4",
    .kind = format_class::token_local,
    .code_bits = 4,
    .group = mx_group,
    .group_bytes = 1,
    .reading = {code_kind::e2m1_nibbles, group_kind::e8m0_step, 0.0f, 0.5f},
    .encode = encode_mx,
    .decode = decode_mx};

}  // namespace kvrt
