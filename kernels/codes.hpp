// Codes and metadata of stored rows, read where they lie, 4 or 8 channels at a time: the decoder of
// all records and of the codes of tiles, for whoever has a row (read.hpp), a warp (decode.hpp) or
// 16 slots (attend_opened.hpp). The numbers are bit for bit those of the library's (lib/format/).
#pragma once

#include "kernels/encode_turbo.hpp"
#include "kernels/record.hpp"
#include "kernels/small_float.hpp"

namespace kvrt::kernels {

template <class Cx>
KVRT_DEVICE float low_f16(uint32_t bits) {
    return Cx::f16_to_f32(static_cast<uint16_t>(bits));
}
template <class Cx>
KVRT_DEVICE float high_f16(uint32_t bits) {
    return Cx::f16_to_f32(static_cast<uint16_t>(bits >> 16));
}

// ---- Words --------------------------------------------------------------------------------------

/// One record: words of 4 bytes, or in its foreign form of 2, `stride` bytes apart.
template <class Cx>
struct stored_record {
    const std::byte* row;
    uint32_t stride;
    bool foreign;
    record_shape shape;
    uint32_t dim;

    /// Codes of four channels from a multiple of 4 on, a byte each.
    KVRT_DEVICE uint32_t four_codes(uint32_t channel) const {
        if (shape.code_bits == 8) return word(channel);
        const uint32_t first = shape.group == 0 ? 0 : channel / shape.group * shape.group;
        const uint32_t left = dim - first, at = channel - first;
        const uint32_t count = shape.group == 0 || left < shape.group ? left : shape.group;
        if (shape.code_bits == 4) {
            const bool upper = at >= count / 2;
            const uint32_t bits = word(first / 2 + (upper ? at - count / 2 : at));
            return (upper ? bits >> 4 : bits) & 0x0f0f0f0fu;
        }
        // Quarters of a group lie in the pairs of bits of a byte; third bits in eighths of the row.
        const uint32_t part = count / 4, eighth = dim / 8;
        if (part % 4 == 0 && (shape.code_bits == 2 || eighth % 4 == 0)) {
            const uint32_t quarter = at / part;
            const uint32_t low = word(first / 4 + at - quarter * part) >> (2 * quarter);
            if (shape.code_bits == 2) return low & 0x03030303u;
            const uint32_t bit = channel / eighth;
            const uint32_t third = word(dim / 4 + channel - bit * eighth) >> bit;
            return (low & 0x03030303u) | (third & 0x01010101u) << 2;
        }
        uint32_t codes = 0;
        for (uint32_t i = 0; i < 4; ++i) {
            uint32_t code = byte(first / 4 + (at + i) % part) >> ((at + i) / part * 2) & 3u;
            if (shape.code_bits == 3) {
                const uint32_t third = byte(dim / 4 + (channel + i) % eighth);
                code |= (third >> ((channel + i) / eighth) & 1u) << 2;
            }
            codes |= code << (8 * i);
        }
        return codes;
    }

    /// Metadata of a channel's group.
    KVRT_DEVICE uint32_t meta(uint32_t channel) const {
        if (shape.meta_bytes == 0) return 0;
        const uint32_t group = shape.group == 0 ? 0 : channel / shape.group;
        const uint32_t at = shape.code_bytes(dim) + group * shape.meta_bytes;
        if (foreign) return shape.meta_bytes == 2 ? pair(at) : pair(at) | pair(at + 2) << 16;
        if (at % shape.meta_bytes == 0) {
            const uint32_t bits = word(at / 4 * 4) >> (8 * (at % 4));
            return shape.meta_bytes == 4 ? bits : bits & ((1u << (8 * shape.meta_bytes)) - 1);
        }
        uint32_t bits = 0;
        for (uint32_t k = 0; k < shape.meta_bytes; ++k) bits |= byte(at + k) << (8 * k);
        return bits;
    }

  private:
    /// Two bytes of a record in its foreign form, each group's metadata in front of its codes.
    KVRT_DEVICE uint32_t pair(uint32_t at) const {
        const uint32_t codes = shape.code_bytes(dim);
        const uint32_t group_codes = shape.code_bytes(shape.group_of(dim));
        const uint32_t group_bytes = shape.meta_bytes + group_codes;
        const uint32_t to =
            at < codes
                ? at / group_codes * group_bytes + shape.meta_bytes + at % group_codes
                : (at - codes) / shape.meta_bytes * group_bytes + (at - codes) % shape.meta_bytes;
        return Cx::template load_constant<uint16_t>(row + to / 2 * stride);
    }
    /// Four bytes from a multiple of 4 on; in the foreign form, of codes.
    KVRT_DEVICE uint32_t word(uint32_t at) const {
        if (foreign) return pair(at) | pair(at + 2) << 16;
        return Cx::template load_constant<uint32_t>(row + at / 4 * stride);
    }
    KVRT_DEVICE uint32_t byte(uint32_t at) const {
        return word(at / 4 * 4) >> (8 * (at % 4)) & 0xffu;
    }
};

// ---- Numbers ------------------------------------------------------------------------------------

/// What codes stand for, without the step and the least number of their group.
enum class code_numbers : uint32_t { whole, nibble, byte, e4m3, e5m2, e2m1, level4, level3 };

/// Not of plain rows. A `nibble` is 8 for 0.
KVRT_BOTH constexpr code_numbers numbers_of(coding codes) {
    switch (codes) {
        case coding::int8_token:
        case coding::q8_0:
            return code_numbers::byte;
        case coding::fp8_token:
        case coding::fp8_e4m3:
            return code_numbers::e4m3;
        case coding::fp8_e5m2:
            return code_numbers::e5m2;
        case coding::q4_0:
            return code_numbers::nibble;
        case coding::nvfp4:
        case coding::mxfp4:
            return code_numbers::e2m1;
        case coding::turbo4_keys:
            return code_numbers::level4;
        case coding::turbo3_keys:
            return code_numbers::level3;
        default:
            return code_numbers::whole;
    }
}

/// A code of TurboQuant's keys as a number, without the row's factor.
template <uint32_t bits>
KVRT_DEVICE float level_of_code(uint32_t code) {
    constexpr uint32_t half = 1u << (bits - 1);
    const double size = level_size<bits>(code < half ? half - 1 - code : code - half);
    return static_cast<float>(turbo_levels<bits>::unit * (code < half ? -size : size));
}

template <class Cx, code_numbers numbers>
KVRT_DEVICE float number_of_code(uint32_t code) {
    if constexpr (numbers == code_numbers::byte) {
        return static_cast<float>(static_cast<int8_t>(code));
    } else if constexpr (numbers == code_numbers::e4m3) {
        return e4m3_to_f32<Cx>(code);
    } else if constexpr (numbers == code_numbers::e5m2) {
        return e5m2_to_f32<Cx>(code);
    } else if constexpr (numbers == code_numbers::e2m1) {
        return e2m1_doubled<Cx>(code);
    } else if constexpr (numbers == code_numbers::level4) {
        return level_of_code<4>(code);
    } else if constexpr (numbers == code_numbers::level3) {
        return level_of_code<3>(code);
    } else {
        const float whole = static_cast<float>(static_cast<int32_t>(code));
        return numbers == code_numbers::nibble ? whole - 8.0f : whole;
    }
}

/// Number of a code = step * number_of_code; of whole ones, plus least.
struct group_scale {
    float step, least;
};

/// `meta` is that of the group, `scale` the static one.
template <class Cx>
KVRT_DEVICE group_scale scale_of_group(coding codes, uint32_t meta, float scale) {
    switch (codes) {
        case coding::fp8_e4m3:
        case coding::fp8_e5m2:
            return {scale, 0.0f};
        case coding::fp8_token:
        case coding::int8_token:
            return {Cx::bits_to_f32(meta), 0.0f};
        case coding::nvfp4:
            return {0.5f * (scale * e4m3_to_f32<Cx>(meta)), 0.0f};
        case coding::mxfp4:
            return {0.5f * e8m0_to_f32<Cx>(meta), 0.0f};
        default:
            return {low_f16<Cx>(meta), high_f16<Cx>(meta)};
    }
}

template <class Cx, code_numbers numbers>
KVRT_DEVICE float scaled_number(uint32_t code, const group_scale& scale) {
    const float number = number_of_code<Cx, numbers>(code) * scale.step;
    return numbers == code_numbers::whole ? number + scale.least : number;
}

template <class Cx, code_numbers numbers>
KVRT_DEVICE void scale_codes(const uint32_t (&codes)[2], const group_scale& scale,
                             float (&row)[lane_channels]) {
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        row[i] = scaled_number<Cx, numbers>(codes[i / 4] >> (8 * (i % 4)) & 0xffu, scale);
    }
}

/// Channels [first, first + 8) of the record at `source`, first being a multiple of 8; affine4's
/// before they are brought back.
template <class Cx>
KVRT_DEVICE void open_record(const operand_place& operand, const std::byte* source, uint32_t head,
                             uint32_t first, float (&row)[lane_channels]) {
    const coding codes = operand.codes;
    const stored_record<Cx> record{source, operand.word_stride, operand.inline_form,
                                   shape_of(codes), operand.dim};
    const uint32_t eight[2] = {record.four_codes(first), record.four_codes(first + 4)};
    const group_scale scale =
        scale_of_group<Cx>(codes, record.meta(first), static_scale<Cx>(operand, head));
    switch (numbers_of(codes)) {
        case code_numbers::byte:
            return scale_codes<Cx, code_numbers::byte>(eight, scale, row);
        case code_numbers::e4m3:
            return scale_codes<Cx, code_numbers::e4m3>(eight, scale, row);
        case code_numbers::e5m2:
            return scale_codes<Cx, code_numbers::e5m2>(eight, scale, row);
        case code_numbers::nibble:
            return scale_codes<Cx, code_numbers::nibble>(eight, scale, row);
        case code_numbers::e2m1:
            return scale_codes<Cx, code_numbers::e2m1>(eight, scale, row);
        case code_numbers::level4:
            return scale_codes<Cx, code_numbers::level4>(eight, scale, row);
        case code_numbers::level3:
            return scale_codes<Cx, code_numbers::level3>(eight, scale, row);
        default:
            return scale_codes<Cx, code_numbers::whole>(eight, scale, row);
    }
}

}  // namespace kvrt::kernels
