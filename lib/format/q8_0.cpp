// q8_0, as llama.cpp stores it: groups of 32 channels, d = amax / 127 in f16, x = d * q.
#include "format/formats.hpp"
#include "format/record.hpp"

namespace kvrt {

namespace {

constexpr uint32_t group = 32;

uint32_t encode(const float* row, uint32_t dim, const row_constants&, std::byte* record) {
    std::byte* meta = record + dim;
    uint32_t saturated = 0;
    for (uint32_t at = 0; at < dim; at += group, meta += 2) {
        const uint32_t count = std::min(group, dim - at);
        const group_reach reach = reach_of(row + at, count);
        int8_t* codes = reinterpret_cast<int8_t*>(record + at);
        if (!reach.finite) {
            store_f16(meta, NAN);
            std::fill_n(codes, count, int8_t{0});
            continue;
        }
        const float step = std::min(reach.magnitude() / 127.0f, largest_f16);
        const float inverse = reciprocal_of(step);
        store_f16(meta, step);
        for (uint32_t i = 0; i < count; ++i) {
            const float code = std::round(row[at + i] * inverse);
            saturated += std::fabs(code) > 127.0f ? 1 : 0;
            codes[i] = static_cast<int8_t>(std::clamp(code, -127.0f, 127.0f));
        }
    }
    return saturated;
}

void decode(const std::byte* record, uint32_t dim, const row_constants&, float* row) {
    const std::byte* meta = record + dim;
    const int8_t* codes = reinterpret_cast<const int8_t*>(record);
    for (uint32_t at = 0; at < dim; at += group, meta += 2) {
        const float step = load_f16(meta);
        const uint32_t end = std::min(at + group, dim);
        for (uint32_t i = at; i < end; ++i) row[i] = static_cast<float>(codes[i]) * step;
    }
}

}  // namespace

const format_description q8_0_format = {
    .id = KV_FORMAT_Q8_0,
    .name = "q8_0",
    .kind = format_class::token_local,
    .code_bits = 8,
    .group = group,
    .group_bytes = 2,
    .inline_form = true,
    .reading = {code_kind::signed_bytes, group_kind::f16_step, 0.0f, 1.0f},
    .encode = encode,
    .decode = decode};

}  // namespace kvrt
