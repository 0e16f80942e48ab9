// Formats with metadata per token and head.
//
//   fp8_token   e4m3 codes, s = amax / 448 in f32, x = s * code
//   int8_token  signed codes, s = amax / 127 in f32, x = s * q
//   int4_token  4-bit codes, s = (max - min) / 15 and m = min in f16, x = s * q + m (QServe's KV4)
#include "format/affine_codes.hpp"
#include "format/formats.hpp"
#include "format/small_float.hpp"

namespace kvrt {

namespace {

/// Stores the scale, NaN for a row that is not finite, and returns the factor to codes.
float store_scale(const group_reach& reach, float largest_code, std::byte* meta) {
    float scale = reach.finite ? reach.magnitude() / largest_code : NAN;
    // Rounded up, the scale of the largest magnitudes would bring them back as infinity.
    if (std::isinf(scale * largest_code)) scale = std::nextafter(scale, 0.0f);
    store_number(meta, scale);
    return reciprocal_of(scale);
}

uint32_t encode_fp8(const float* row, uint32_t dim, const row_constants&, std::byte* record) {
    const group_reach reach = reach_of(row, dim);
    const float inverse = store_scale(reach, largest_e4m3, record + dim);
    for (uint32_t i = 0; i < dim; ++i) {
        record[i] = static_cast<std::byte>(reach.finite ? f32_to_e4m3(row[i] * inverse) : 0);
    }
    return 0;
}

void decode_fp8(const std::byte* record, uint32_t dim, const row_constants&, float* row) {
    const float scale = load_number<float>(record + dim);
    for (uint32_t i = 0; i < dim; ++i) {
        row[i] = scale * e4m3_to_f32(static_cast<uint8_t>(record[i]));
    }
}

uint32_t encode_int8(const float* row, uint32_t dim, const row_constants&, std::byte* record) {
    const group_reach reach = reach_of(row, dim);
    const float inverse = store_scale(reach, 127.0f, record + dim);
    int8_t* codes = reinterpret_cast<int8_t*>(record);
    for (uint32_t i = 0; i < dim; ++i) {
        const float code = reach.finite ? std::round(row[i] * inverse) : 0.0f;
        codes[i] = static_cast<int8_t>(std::clamp(code, -127.0f, 127.0f));
    }
    return 0;
}

void decode_int8(const std::byte* record, uint32_t dim, const row_constants&, float* row) {
    const float scale = load_number<float>(record + dim);
    const int8_t* codes = reinterpret_cast<const int8_t*>(record);
    for (uint32_t i = 0; i < dim; ++i) row[i] = scale * static_cast<float>(codes[i]);
}

uint32_t encode_int4(const float* row, uint32_t dim, const row_constants&, std::byte* record) {
    return encode_affine_groups<4>(row, dim, dim, record);
}

void decode_int4(const std::byte* record, uint32_t dim, const row_constants&, float* row) {
    decode_affine_groups<4>(record, dim, dim, row);
}

}  // namespace

const format_description fp8_token_format = {
    .id = KV_FORMAT_FP8_TOKEN,
    .name = "fp8_token",
    .kind = format_class::token_local,
    .code_bits = 8,
    .group_bytes = 4,
    .reading = {code_kind::e4m3_bytes, group_kind::f32_step, 0.0f, 1.0f},
    .encode = encode_fp8,
    .decode = decode_fp8};
const format_description int8_token_format = {
    .id = KV_FORMAT_INT8_TOKEN,
    .name = "int8_token",
    .kind = format_class::token_local,
    .code_bits = 8,
    .group_bytes = 4,
    .reading = {code_kind::signed_bytes, group_kind::f32_step, 0.0f, 1.0f},
    .encode = encode_int8,
    .decode = decode_int8};
const format_description int4_token_format = {.id = KV_FORMAT_INT4_TOKEN,
                                              .name = "int4_token",
                                              .kind = format_class::token_local,
                                              .code_bits = 4,
                                              .group_bytes = 4,
                                              .reading = affine_reading<4>,
                                              .encode = encode_int4,
                                              .decode = decode_int4};

}  // namespace kvrt
