// Records in a warp's shared memory: their shape by coding, codes packed, and the way from there to
// a block, where their words may lie side by side with those of other slots, or with each group's
// metadata in front (format/format.hpp).
#pragma once

#include "kernels/row.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t most_record_bytes = most_dim + 32;
/// Of a warp: a record, then codes that are not packed yet, a byte each.
inline constexpr uint32_t warp_record_bytes = most_record_bytes + most_dim;

/// Groups of channels that share metadata; 0: the whole row.
struct record_shape {
    uint32_t code_bits;
    uint32_t group;
    uint32_t meta_bytes;  ///< of a group

    KVRT_BOTH constexpr uint32_t group_of(uint32_t dim) const {
        return group == 0 || dim < group ? dim : group;
    }
    /// Lanes of a group, a power of two.
    KVRT_BOTH constexpr uint32_t group_lanes() const {
        return group == 0 ? warp_lanes : group / lane_channels;
    }
    KVRT_BOTH constexpr uint32_t code_bytes(uint32_t dim) const { return dim * code_bits / 8; }
    KVRT_BOTH constexpr uint32_t groups(uint32_t dim) const {
        return (dim + group_of(dim) - 1) / group_of(dim);
    }
    KVRT_BOTH constexpr uint32_t bytes(uint32_t dim) const {
        return code_bytes(dim) + groups(dim) * meta_bytes;
    }
};

/// Not of plain rows and tiles.
KVRT_BOTH constexpr record_shape shape_of(coding codes) {
    switch (codes) {
        case coding::int8_token:
        case coding::fp8_token:
            return {8, 0, 4};
        case coding::int4_token:
            return {4, 0, 4};
        case coding::q8_0:
            return {8, 32, 2};
        case coding::q4_0:
            return {4, 32, 2};
        case coding::q4_1:
        case coding::affine4:
            return {4, 32, 4};
        case coding::kivi2_values:
            return {2, 32, 4};
        case coding::nvfp4:
            return {4, 16, 1};
        case coding::mxfp4:
            return {4, 32, 1};
        case coding::turbo4_keys:
            return {4, 0, 2};
        case coding::turbo3_keys:
            return {3, 0, 2};
        case coding::turbo3_values:
            return {3, 0, 4};
        default:
            return {8, 0, 0};
    }
}

template <class Cx>
KVRT_DEVICE float static_scale(const operand_place& operand, uint32_t head) {
    return operand.scales != nullptr ? Cx::template load_constant<float>(operand.scales + head)
                                     : 1.0f;
}

template <class Cx>
KVRT_DEVICE uint32_t byte_at(const std::byte* address) {
    return Cx::template load<uint8_t>(address);
}

// ---- Packing ----------------------------------------------------------------------------------

/// Byte `byte` of the packed codes of a row, of 2 or 3 bits. codes: [dim], a byte each.
template <class Cx>
KVRT_DEVICE uint32_t packed_byte(const record_shape& shape, uint32_t dim, const std::byte* codes,
                                 uint32_t byte) {
    uint32_t bits = 0;
    if (byte >= dim / 4) {  // the third bits
        const std::byte* const at = codes + byte - dim / 4;
        for (uint32_t k = 0; k < 8; ++k) {
            bits |= (byte_at<Cx>(at + k * (dim / 8)) >> 2 & 1u) << k;
        }
        return bits;
    }
    const uint32_t first = byte * 4 / shape.group_of(dim) * shape.group_of(dim);
    const uint32_t left = dim - first;
    const uint32_t count = left < shape.group_of(dim) ? left : shape.group_of(dim);
    const std::byte* const at = codes + first + byte - first / 4;
    for (uint32_t k = 0; k < 4; ++k) {
        bits |= (byte_at<Cx>(at + k * (count / 4)) & 3u) << (2 * k);
    }
    return bits;
}

/// Four such bytes of codes of 4 bits.
template <class Cx>
KVRT_DEVICE uint32_t packed_nibbles(const record_shape& shape, uint32_t dim, const std::byte* codes,
                                    uint32_t word) {
    const uint32_t first = word * 8 / shape.group_of(dim) * shape.group_of(dim);
    const uint32_t left = dim - first;
    const uint32_t count = left < shape.group_of(dim) ? left : shape.group_of(dim);
    const std::byte* const at = codes + first + word * 4 - first / 2;
    return Cx::template load<uint32_t>(at) | Cx::template load<uint32_t>(at + count / 2) << 4;
}

/// From codes in registers to a record in the warp's shared memory. `meta` is that of the lane's
/// group. The record is complete for all lanes.
template <class Cx>
KVRT_DEVICE void make_record(const record_shape& shape, uint32_t dim,
                             const uint32_t (&codes)[lane_channels], uint32_t meta,
                             std::byte* record) {
    const uint32_t lane = Cx::lane();
    const bool active = lane_is_active<Cx>(dim);
    std::byte* const unpacked = record + most_record_bytes;
    if (active) {
        word2 bytes = {0, 0};
        KVRT_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            bytes.x |= codes[i] << (8 * i);
            bytes.y |= codes[4 + i] << (8 * i);
        }
        Cx::store((shape.code_bits == 8 ? record : unpacked) + lane * lane_channels, bytes);
        if (lane % shape.group_lanes() == 0) {
            std::byte* const at =
                record + shape.code_bytes(dim) + lane / shape.group_lanes() * shape.meta_bytes;
            for (uint32_t k = 0; k < shape.meta_bytes; ++k) {
                Cx::store(at + k, static_cast<uint8_t>(meta >> (8 * k)));
            }
        }
    }
    Cx::warp_barrier();
    if (shape.code_bits == 8) return;
    if (shape.code_bits == 4) {
        for (uint32_t word = lane; word < dim / 8; word += warp_lanes) {
            Cx::store(record + word * 4, packed_nibbles<Cx>(shape, dim, unpacked, word));
        }
    } else {
        for (uint32_t byte = lane; byte < shape.code_bytes(dim); byte += warp_lanes) {
            Cx::store(record + byte,
                      static_cast<uint8_t>(packed_byte<Cx>(shape, dim, unpacked, byte)));
        }
    }
    Cx::warp_barrier();
}

// ---- From shared memory to blocks -------------------------------------------------------------

/// Where pair `pair` of a row in its foreign form lies in the record, in bytes.
KVRT_BOTH constexpr uint32_t foreign_pair(const record_shape& shape, uint32_t dim, uint32_t pair) {
    const uint32_t group_bytes = shape.meta_bytes + shape.code_bytes(shape.group_of(dim));
    const uint32_t group = pair * 2 / group_bytes, in_group = pair * 2 % group_bytes;
    if (in_group < shape.meta_bytes) {
        return shape.code_bytes(dim) + group * shape.meta_bytes + in_group;
    }
    return group * shape.code_bytes(shape.group_of(dim)) + in_group - shape.meta_bytes;
}

/// A complete record to the row at `target`.
template <class Cx>
KVRT_DEVICE void put_record(const operand_place& operand, const std::byte* record,
                            std::byte* target) {
    const record_shape shape = shape_of(operand.codes);
    if (operand.inline_form) {
        for (uint32_t pair = Cx::lane(); pair < operand.words; pair += warp_lanes) {
            const std::byte* const from = record + foreign_pair(shape, operand.dim, pair);
            Cx::store(target + pair * operand.word_stride, Cx::template load<uint16_t>(from));
        }
        return;
    }
    const uint32_t bytes = shape.bytes(operand.dim);
    for (uint32_t word = Cx::lane(); word < operand.words; word += warp_lanes) {
        uint32_t bits = Cx::template load<uint32_t>(record + word * 4);
        const uint32_t kept = bytes - word * 4;  // the rest is padding, 0
        if (kept < 4) bits &= (1u << (8 * kept)) - 1;
        Cx::store(target + word * operand.word_stride, bits);
    }
}

}  // namespace kvrt::kernels
