// Channels of stored rows as f32, for passes in which a thread has a row of its own, plain or of a
// record whose metadata are those of the whole row. The numbers are bit for bit those that
// format/rows.hpp reads.
//
// Lanes of a warp have neighbouring slots: where the words of 16 slots lie side by side they load
// one word each, of rows in one piece 16 bytes of plain elements, or words of codes.
#pragma once

#include "kernels/codes.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t read_channels = 8;  ///< at once

/// One row. `type` is that of plain elements.
template <class Cx, coding codes, number type>
class row_reader {
  public:
    KVRT_DEVICE row_reader(const operand_place& operand, const std::byte* block, uint32_t slot,
                           uint32_t head)
        : operand_(operand), row_(block + operand.at(slot, head, 0)) {
        static_assert(shape_of(codes).group == 0);
        if constexpr (codes != coding::plain) {
            scale_ = scale_of_group<Cx>(codes, record().meta(0), static_scale<Cx>(operand, head));
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
    KVRT_DEVICE stored_record<Cx> record() const {
        return {row_, operand_.word_stride, false, shape_of(codes), operand_.dim};
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

    KVRT_DEVICE float number_of(uint32_t code) const {
        return scaled_number<Cx, numbers_of(codes)>(code & 0xffu, scale_);
    }

    KVRT_DEVICE void read_codes(uint32_t first, uint32_t count, float (&out)[read_channels]) const {
        if (first % 4 == 0) {
            KVRT_UNROLL
            for (uint32_t i = 0; i < read_channels; i += 4) {
                if (i >= count) continue;
                const uint32_t four = record().four_codes(first + i);
                KVRT_UNROLL
                for (uint32_t c = 0; c < 4; ++c) out[i + c] = number_of(four >> 8 * c);
            }
            return;
        }
        KVRT_UNROLL
        for (uint32_t i = 0; i < read_channels; ++i) {
            if (i >= count) continue;
            const uint32_t channel = first + i;
            out[i] = number_of(record().four_codes(channel / 4 * 4) >> 8 * (channel % 4));
        }
    }

    const operand_place& operand_;
    const std::byte* row_;
    group_scale scale_ = {1.0f, 0.0f};
};

}  // namespace kvrt::kernels
