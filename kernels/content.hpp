// What scorers of content share: rows of slots as f32, of any format but those that depend on
// positions, and the slots of a block of threads. A thread has a slot, and sums over its channels
// in the order in which the CPU does for tiles.
//
// Unlike read.hpp's, these rows are opened by what the launch says: one kernel for all formats,
// whose branches are the same for all threads.
#pragma once

#include "kernels/decode.hpp"
#include "kernels/score.hpp"

namespace kvrt::kernels {

/// Are rows stored so opened here in the basis that they were written in?
KVRT_BOTH bool opens_rows(const operand_place& operand) {
    return !operand.rotated && operand.codes != coding::affine4;
}

/// The row of a slot, 8 channels at a time.
template <class Cx>
struct opened_row {
    const operand_place& operand;
    const std::byte* block;
    uint32_t slot;
    uint32_t head;

    KVRT_DEVICE opened_row(const block_place& place, const operand_place& rows,
                           const std::byte* arena, const uint32_t* table, uint32_t slot_of_lane,
                           uint32_t kv_head)
        : operand(rows),
          block(block_of_slot<Cx>(arena, table, slot_of_lane, place.block_tokens)),
          slot(slot_of_lane % place.block_tokens),
          head(kv_head) {}

    /// Channels [first, first + 8), first being a multiple of 8.
    KVRT_DEVICE void read(uint32_t first, float (&out)[lane_channels]) const {
        open_channels<Cx>(operand, block, slot, head, first, out);
    }
    /// From any channel on; those beyond the row are 0.
    KVRT_DEVICE void read_from(uint32_t first, float (&out)[lane_channels]) const {
        const uint32_t shift = first % lane_channels;
        KVRT_UNROLL
        for (uint32_t k = 0; k < lane_channels; ++k) out[k] = 0.0f;
        KVRT_ROLLED
        for (uint32_t g = 0; g < (shift == 0 ? 1u : 2u); ++g) {
            const uint32_t channel = first - shift + g * lane_channels;
            if (channel >= operand.dim) break;
            float eight[lane_channels];
            read(channel, eight);
            if (shift == 0) {
                KVRT_UNROLL
                for (uint32_t k = 0; k < lane_channels; ++k) out[k] = eight[k];
                return;
            }
            KVRT_UNROLL
            for (uint32_t k = 0; k < lane_channels; ++k) {
                KVRT_UNROLL
                for (uint32_t i = 0; i < lane_channels; ++i) {
                    if (k + shift == g * lane_channels + i) out[k] = eight[i];
                }
            }
        }
    }
};

/// The square of a row's norm.
template <class Cx>
KVRT_DEVICE float square_of_row(const opened_row<Cx>& row) {
    float even = 0.0f, odd = 0.0f;
    KVRT_ROLLED
    for (uint32_t first = 0; first < row.operand.dim; first += lane_channels) {
        float x[lane_channels];
        row.read(first, x);
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; i += 2) {
            even = Cx::multiply_add(x[i], x[i], even);
            odd = Cx::multiply_add(x[i + 1], x[i + 1], odd);
        }
    }
    return even + odd;
}

/// e^x of x up to 88, bit for bit as attention/softmax-inl.hpp's: 0 below -87.3, NaN stays NaN.
template <class Cx>
KVRT_DEVICE float natural_exp(float x) {
    if (!(x >= -87.3f)) return x != x ? x : 0.0f;
    constexpr float to_integer = 0x1.8p23f;  // adding and taking it off rounds to an integer
    const float n = (x * 1.44269504f + to_integer) - to_integer;
    float r = Cx::multiply_add(-n, 0.693359375f, x);
    r = Cx::multiply_add(-n, -2.12194440e-4f, r);
    float p = 1.0f / 720.0f;
    p = Cx::multiply_add(p, r, 1.0f / 120.0f);
    p = Cx::multiply_add(p, r, 1.0f / 24.0f);
    p = Cx::multiply_add(p, r, 1.0f / 6.0f);
    p = Cx::multiply_add(p, r, 0.5f);
    p = Cx::multiply_add(p, r, 1.0f);
    p = Cx::multiply_add(p, r, 1.0f);
    return p * Cx::bits_to_f32(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}

}  // namespace kvrt::kernels
