// affine4, keys alone. A key at position p is levelled by constants of its head: what its mean is
// there, turned by p as rotary embedding does, is taken off, and each channel divided by its scale:
// n = (key - R(p) mean) / scale. What is left is spread by Hadamard's matrix H (rotation.hpp) and
// stored as q4_1 does, in groups of 32 with d = (max - min) / 15 and m = min. So
//
//   key = R(p) mean + scale (.) H code,   q . key = q . R(p) mean + (H (scale (.) q)) . code:
//
// a query is brought to the codes' basis once, and the position shows in a term without codes. The
// constants belong to the model, so a record still depends on its token alone, and is as fine as
// one with metadata per channel: what q4_1 spends on large means and unlike spreads is taken off
// before.
#include "format/affine_codes.hpp"
#include "format/formats.hpp"
#include "format/position_rotation.hpp"
#include "format/rotation.hpp"

namespace kvrt {

namespace {

constexpr uint32_t group = 32;

/// The mean where the row's token stands.
void turn_mean(uint32_t dim, const row_constants& constants, float* mean) {
    std::copy_n(constants.channel_mean, dim, mean);
    turn_row(*constants.turning, constants.position, mean);
}

uint32_t encode(const float* row, uint32_t dim, const row_constants& constants, std::byte* record) {
    alignas(64) float mean[widest_row], levelled[widest_row];
    turn_mean(dim, constants, mean);
    for (uint32_t i = 0; i < dim; ++i) {
        levelled[i] = (row[i] - mean[i]) / constants.channel_scale[i];
    }
    rotate_row(levelled, dim);
    return encode_affine_groups<4>(levelled, dim, group, record);
}

void decode(const std::byte* record, uint32_t dim, const row_constants& constants, float* row) {
    alignas(64) float mean[widest_row];
    turn_mean(dim, constants, mean);
    decode_affine_groups<4>(record, dim, group, row);
    rotate_row(row, dim);
    for (uint32_t i = 0; i < dim; ++i) row[i] = row[i] * constants.channel_scale[i] + mean[i];
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
                                           .reading = affine_reading<4>,
                                           .encode = encode,
                                           .decode = decode};

}  // namespace kvrt
