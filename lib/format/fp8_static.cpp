// 8-bit floating point with static scales: code = x / s, x = s * code, s per head or layer and
// constant. What is beyond the largest number saturates, and is counted.
#include "format/formats.hpp"
#include "format/record.hpp"
#include "format/small_float.hpp"

namespace kvrt {

namespace {

template <uint8_t (*to_code)(float)>
uint32_t encode(const float* row, uint32_t dim, float largest, const row_constants& constants,
                std::byte* record) {
    uint32_t saturated = 0;
    for (uint32_t i = 0; i < dim; ++i) {
        const float scaled = row[i] / constants.scale;
        saturated += std::fabs(scaled) > largest ? 1 : 0;
        record[i] = static_cast<std::byte>(to_code(scaled));
    }
    return saturated;
}

template <float (*from_code)(uint8_t)>
void decode(const std::byte* record, uint32_t dim, const row_constants& constants, float* row) {
    for (uint32_t i = 0; i < dim; ++i) {
        row[i] = constants.scale * from_code(static_cast<uint8_t>(record[i]));
    }
}

uint32_t encode_e4m3(const float* row, uint32_t dim, const row_constants& constants,
                     std::byte* record) {
    return encode<f32_to_e4m3>(row, dim, largest_e4m3, constants, record);
}

uint32_t encode_e5m2(const float* row, uint32_t dim, const row_constants& constants,
                     std::byte* record) {
    return encode<f32_to_e5m2>(row, dim, largest_e5m2, constants, record);
}

}  // namespace

const format_description fp8_e4m3_format = {
    .id = KV_FORMAT_FP8_E4M3,
    .name = "fp8_e4m3",
    .kind = format_class::token_local,
    .code_bits = 8,
    .takes_scales = true,
    .needs_scales = true,
    .reading = {code_kind::e4m3_bytes, group_kind::none, 0.0f, 1.0f},
    .encode = encode_e4m3,
    .decode = decode<e4m3_to_f32>};
const format_description fp8_e5m2_format = {
    .id = KV_FORMAT_FP8_E5M2,
    .name = "fp8_e5m2",
    .kind = format_class::token_local,
    .code_bits = 8,
    .takes_scales = true,
    .needs_scales = true,
    .reading = {code_kind::e5m2_bytes, group_kind::none, 0.0f, 1.0f},
    .encode = encode_e5m2,
    .decode = decode<e5m2_to_f32>};

}  // namespace kvrt
