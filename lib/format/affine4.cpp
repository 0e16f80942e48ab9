// affine4, keys alone. A key is turned back to before its rotation, u, and levelled by constants of
// its head: n = (u - mean) / scale per channel. What is left is spread by Hadamard's matrix
// (rotation.hpp) and stored as q4_1 does, in groups of 32 with d = (max - min) / 15 and m = min.
// Reading goes the other way. The constants belong to the model, so a record still depends on its
// token alone, and is as fine as one with metadata per channel: what q4_1 spends on large means
// and unlike spreads is taken off before.
#include "format/affine_codes.hpp"
#include "format/formats.hpp"
#include "format/position_rotation.hpp"
#include "format/rotation.hpp"

namespace kvrt {

namespace {

constexpr uint32_t group = 32;

uint32_t encode(const float* row, uint32_t dim, const row_constants& constants, std::byte* record) {
    alignas(64) float levelled[widest_row];
    std::copy_n(row, dim, levelled);
    turn_row_back(*constants.turning, constants.position, levelled);
    for (uint32_t i = 0; i < dim; ++i) {
        levelled[i] = (levelled[i] - constants.channel_mean[i]) / constants.channel_scale[i];
    }
    rotate_row(levelled, dim);
    return encode_affine_groups<4>(levelled, dim, group, record);
}

void decode(const std::byte* record, uint32_t dim, const row_constants& constants, float* row) {
    decode_affine_groups<4>(record, dim, group, row);
    rotate_row(row, dim);
    for (uint32_t i = 0; i < dim; ++i) {
        row[i] = row[i] * constants.channel_scale[i] + constants.channel_mean[i];
    }
    turn_row(*constants.turning, constants.position, row);
}

}  // namespace

const format_description affine4_format = {.id = KV_FORMAT_AFFINE4,
                                           .name = "affine4",
                                           .kind = format_class::token_local,
                                           .code_bits = 4,
                                           .group = group,
                                           .group_bytes = 4,
                                           .needs_channels = true,
                                           .needs_positions = true,
                                           .encode = encode,
                                           .decode = decode};

}  // namespace kvrt
