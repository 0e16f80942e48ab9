// Channels of stored rows as f32, for passes in which a thread has a row of its own. The numbers
// are bit for bit those that format/rows.hpp reads.
//
// Lanes of a warp have neighbouring slots: where the words of 16 slots lie side by side they load
// one word each, of rows in one piece 16 bytes of plain elements, or words of codes.
#pragma once

#include "kernels/layout.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t read_channels = 8;  ///< at once

/// As small_float.hpp's e4m3_to_f32, without branches on the exponent; of NaN without the sign.
template <class Cx>
KVRT_DEVICE float read_e4m3(uint32_t bits) {
    if ((bits & 0x7fu) == 0x7fu) return Cx::bits_to_f32(0x7fc00000u);
    // The same exponent and mantissa stand for 2^-8 of it in f16.
    const uint32_t half = (bits & 0x80u) << 8 | (bits & 0x7fu) << 7;
    return Cx::f16_to_f32(static_cast<uint16_t>(half)) * 256.0f;
}

/// One row. `type` is that of plain elements.
template <class Cx, coding codes, number type>
class row_reader {
  public:
    KVRT_DEVICE row_reader(const operand_place& operand, const std::byte* block, uint32_t slot,
                           uint32_t head)
        : operand_(operand), row_(block + operand.at(slot, head, 0)) {
        if constexpr (codes == coding::int8_token || codes == coding::fp8_token) {
            step_ = Cx::bits_to_f32(word(operand.dim / 4));
        } else if constexpr (codes == coding::int4_token) {
            const uint32_t meta = word(operand.dim / 8);
            step_ = Cx::f16_to_f32(static_cast<uint16_t>(meta));
            least_ = Cx::f16_to_f32(static_cast<uint16_t>(meta >> 16));
        } else if constexpr (codes != coding::plain) {
            if (operand.scales != nullptr) {
                step_ = Cx::template load_constant<float>(operand.scales + head);
            }
        }
    }

    /// Channels [first, first + count) of at most 8; quickest are 8 from a multiple of 8 on.
    KVRT_DEVICE void read(uint32_t first, uint32_t count, float (&out)[read_channels]) const {
        if constexpr (codes == coding::plain) {
            read_elements(first, count, out);
        } else {
            read_codes(first, count, out);
        }
    }

  private:
    KVRT_DEVICE uint32_t word(uint32_t index) const {
        return Cx::template load_constant<uint32_t>(row_ + index * operand_.word_stride);
    }

    static KVRT_DEVICE float element_of(uint32_t bits) {
        if constexpr (type == number::f32) return Cx::bits_to_f32(bits);
        if constexpr (type == number::f16) return Cx::f16_to_f32(static_cast<uint16_t>(bits));
        return Cx::bf16_to_f32(static_cast<uint16_t>(bits));
    }

    KVRT_DEVICE void read_elements(uint32_t first, uint32_t count,
                                   float (&out)[read_channels]) const {
        const std::byte* const at = row_ + first * operand_.word_stride;
        const bool pieces = operand_.by_rows() && count == read_channels &&
                            reinterpret_cast<uintptr_t>(at) % sizeof(word4) == 0;
        if (pieces) {
            KVRT_UNROLL
            for (uint32_t i = 0; i < read_channels; i += sizeof(word4) / number_bytes(type)) {
                const word4 piece = Cx::template load_constant<word4>(at + i * number_bytes(type));
                const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
                KVRT_UNROLL
                for (uint32_t w = 0; w < 4; ++w) {
                    if constexpr (type == number::f32) {
                        out[i + w] = element_of(words[w]);
                    } else {
                        out[2 * w] = element_of(words[w] & 0xffffu);
                        out[2 * w + 1] = element_of(words[w] >> 16);
                    }
                }
            }
            return;
        }
        KVRT_UNROLL
        for (uint32_t i = 0; i < read_channels; ++i) {
            if (i >= count) continue;
            if constexpr (type == number::f32) {
                out[i] = Cx::template load_constant<float>(at + i * operand_.word_stride);
            } else {
                out[i] =
                    element_of(Cx::template load_constant<uint16_t>(at + i * operand_.word_stride));
            }
        }
    }

    /// A byte each for the four channels from a multiple of 4 on. Nibbles of the row's second half
    /// lie above those of the first; half a row is a multiple of 4 too.
    KVRT_DEVICE uint32_t four_codes(uint32_t channel) const {
        if constexpr (codes != coding::int4_token) return word(channel / 4);
        const bool second = channel >= operand_.dim / 2;
        const uint32_t bits = word(channel / 4 - (second ? operand_.dim / 8 : 0));
        return (second ? bits >> 4 : bits) & 0x0f0f0f0fu;
    }

    KVRT_DEVICE float number_of(uint32_t code) const {
        if constexpr (codes == coding::int8_token) {
            return step_ * static_cast<float>(static_cast<int8_t>(code));
        }
        if constexpr (codes == coding::int4_token) {
            return static_cast<float>(code) * step_ + least_;
        }
        if constexpr (codes == coding::fp8_e5m2) {
            return step_ * Cx::f16_to_f32(static_cast<uint16_t>(code << 8));
        }
        return step_ * read_e4m3<Cx>(code);
    }

    KVRT_DEVICE void read_codes(uint32_t first, uint32_t count, float (&out)[read_channels]) const {
        if (first % 4 == 0) {
            KVRT_UNROLL
            for (uint32_t i = 0; i < read_channels; i += 4) {
                if (i >= count) continue;
                const uint32_t four = four_codes(first + i);
                KVRT_UNROLL
                for (uint32_t c = 0; c < 4; ++c) out[i + c] = number_of(four >> 8 * c & 0xffu);
            }
            return;
        }
        KVRT_UNROLL
        for (uint32_t i = 0; i < read_channels; ++i) {
            if (i >= count) continue;
            const uint32_t channel = first + i;
            out[i] = number_of(four_codes(channel / 4 * 4) >> 8 * (channel % 4) & 0xffu);
        }
    }

    const operand_place& operand_;
    const std::byte* row_;
    float step_ = 1.0f, least_ = 0.0f;
};

}  // namespace kvrt::kernels
