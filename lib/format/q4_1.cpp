// q4_1, as llama.cpp stores it: groups of 32 channels, m = min and d = (max - min) / 15 in f16,
// x = d * q + m.
#include "format/affine_codes.hpp"
#include "format/formats.hpp"

namespace kvrt {

namespace {

constexpr uint32_t group = 32;

uint32_t encode(const float* row, uint32_t dim, const row_constants&, std::byte* record) {
    return encode_affine_groups<4>(row, dim, group, record);
}

void decode(const std::byte* record, uint32_t dim, const row_constants&, float* row) {
    decode_affine_groups<4>(record, dim, group, row);
}

}  // namespace

const format_description q4_1_format = {.id = KV_FORMAT_Q4_1,
                                        .name = "q4_1",
                                        .kind = format_class::token_local,
                                        .code_bits = 4,
                                        .group = group,
                                        .group_bytes = 4,
                                        .inline_form = true,
                                        .reading = affine_reading<4>,
                                        .encode = encode,
                                        .decode = decode};

}  // namespace kvrt
