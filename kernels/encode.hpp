// A row of one head in a warp's registers to its place in a block, coded as its operand says. The
// bytes are those of the library's encoders (lib/format/), but for the payload of NaNs in plain f16
// and bf16.
//
// Plain rows go from registers; codes meet in the warp's shared memory, where they are packed.
#pragma once

#include "kernels/encode_fp4.hpp"
#include "kernels/encode_groups.hpp"
#include "kernels/encode_turbo.hpp"
#include "kernels/level.hpp"
#include "kernels/record.hpp"

namespace kvrt::kernels {

/// Codes of the lane's channels. Changes the row where its basis is another. What is_elaborate is
/// known to those alone that say `elaborate`.
template <class Cx, bool elaborate>
KVRT_DEVICE encoded_row encode_channels(const operand_place& operand, uint32_t head,
                                        uint32_t position, float (&row)[lane_channels],
                                        uint32_t (&codes)[lane_channels]) {
    const bool active = lane_is_active<Cx>(operand.dim);
    if constexpr (elaborate) {
        if (operand.codes == coding::turbo4_keys) {
            return encode_turbo<Cx, 4>(operand.dim, active, row, codes);
        }
        if (operand.codes == coding::turbo3_keys) {
            return encode_turbo<Cx, 3>(operand.dim, active, row, codes);
        }
        if (operand.codes == coding::affine4) level_channels<Cx>(operand, head, position, row);
    }
    switch (operand.codes) {
        case coding::fp8_e4m3:
        case coding::fp8_e5m2:
            return encode_static<Cx>(operand, static_scale<Cx>(operand, head), active, row, codes);
        case coding::int8_token:
        case coding::fp8_token:
            return encode_token<Cx>(operand.codes == coding::int8_token, active, row, codes);
        case coding::q8_0:
            return encode_q8_0<Cx>(active, row, codes);
        case coding::q4_0:
            return encode_q4_0<Cx>(active, row, codes);
        case coding::nvfp4:
            return encode_nvfp4<Cx>(static_scale<Cx>(operand, head), active, row, codes);
        case coding::mxfp4:
            return encode_mxfp4<Cx>(active, row, codes);
        default:
            break;
    }
    const record_shape shape = shape_of(operand.codes);
    const float last_code = static_cast<float>((1u << shape.code_bits) - 1);
    return encode_affine<Cx>(last_code, shape.group_lanes(), active, row, codes);
}

/// The row, in the basis it is stored in, to `target`, that of its word 0. Returns how many of this
/// lane's channels saturated. `record` is warp_record_bytes of this warp's own.
template <class Cx, bool elaborate>
KVRT_DEVICE uint32_t store_row(const operand_place& operand, uint32_t head, uint32_t position,
                               float (&row)[lane_channels], std::byte* target, std::byte* record) {
    if (operand.codes == coding::plain) {
        const uint32_t first = Cx::lane() * lane_channels;
        if (first >= operand.dim) return 0;
        store_channels<Cx>(operand.type, target + first * operand.word_stride, operand.word_stride,
                           row);
        return 0;
    }
    uint32_t codes[lane_channels] = {};
    const encoded_row done = encode_channels<Cx, elaborate>(operand, head, position, row, codes);
    make_record<Cx>(shape_of(operand.codes), operand.dim, codes, done.meta, record);
    put_record<Cx>(operand, record, target);
    return done.saturated;
}

}  // namespace kvrt::kernels
