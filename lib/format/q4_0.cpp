// q4_0, as llama.cpp stores it: groups of 32 channels, d = m / -8 in f16 where m is the number with
// the largest magnitude, x = d * (q - 8).
#include "format/formats.hpp"
#include "format/packed_codes.hpp"
#include "format/record.hpp"

namespace kvrt {

namespace {

constexpr uint32_t group = 32;

uint32_t encode(const float* row, uint32_t dim, const row_constants&, std::byte* record) {
    std::byte* meta = record + dim / 2;
    uint32_t saturated = 0;
    for (uint32_t at = 0; at < dim; at += group, meta += 2) {
        const uint32_t count = std::min(group, dim - at);
        const group_reach reach = reach_of(row + at, count);
        uint8_t codes[group] = {};
        if (reach.finite) {
            // Of two equal magnitudes the first one decides, as there.
            float extreme = 0.0f;
            for (uint32_t i = 0; i < count; ++i) {
                if (std::fabs(row[at + i]) > std::fabs(extreme)) extreme = row[at + i];
            }
            const float step = std::clamp(extreme / -8.0f, -largest_f16, largest_f16);
            const float inverse = reciprocal_of(step);
            store_f16(meta, step);
            for (uint32_t i = 0; i < count; ++i) {
                const float code = row[at + i] * inverse + 8.5f;
                saturated += code < 0.0f || code >= 17.0f ? 1 : 0;
                codes[i] = static_cast<uint8_t>(std::clamp(code, 0.0f, 15.0f));
            }
        } else {
            store_f16(meta, NAN);
        }
        store_nibbles(codes, count, record + at / 2);
    }
    return saturated;
}

void decode(const std::byte* record, uint32_t dim, const row_constants&, float* row) {
    const std::byte* meta = record + dim / 2;
    for (uint32_t at = 0; at < dim; at += group, meta += 2) {
        const uint32_t count = std::min(group, dim - at);
        const float step = load_f16(meta);
        uint8_t codes[group];
        load_nibbles(record + at / 2, count, codes);
        for (uint32_t i = 0; i < count; ++i) {
            row[at + i] = static_cast<float>(int{codes[i]} - 8) * step;
        }
    }
}

}  // namespace

const format_description q4_0_format = {
    .id = KV_FORMAT_Q4_0,
    .name = "q4_0",
    .kind = format_class::token_local,
    .code_bits = 4,
    .group = group,
    .group_bytes = 2,
    .inline_form = true,
    .reading = {code_kind::nibbles, group_kind::f16_step, 8.0f, 1.0f},
    .encode = encode,
    .decode = decode};

}  // namespace kvrt
