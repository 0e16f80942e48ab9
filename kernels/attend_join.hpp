// The partial softmaxes of a row's pieces, joined in ascending order of slots: one warp a query
// head.
#pragma once

#include "kernels/attend.hpp"
#include "kernels/write.hpp"

namespace kvrt::kernels {

inline uint32_t join_blocks(const attend_parameters& call) {
    const uint32_t vectors = call.sequence_count * call.most_rows * call.query_heads;
    return (vectors + attend_warps - 1) / attend_warps;
}

/// The kernel. Launch with join_blocks(call) blocks of attend_threads threads. Sequences whose
/// table is no_sequence are left out.
template <class Cx>
KVRT_DEVICE void join_pieces(const attend_parameters& call) {
    constexpr float ln_2 = 0.693147180559945309417f, log2_e = 1.44269504088896340736f;
    const uint32_t unit = Cx::block() * attend_warps + Cx::warp();
    const uint32_t head = unit % call.query_heads;
    const uint32_t row = unit / call.query_heads % call.most_rows;
    const uint32_t index = unit / call.query_heads / call.most_rows;
    if (index >= call.sequence_count) return;
    const attend_sequence* const listed = call.sequences + index;
    const uint32_t rows = Cx::template load_constant<uint32_t>(&listed->rows);
    if (Cx::template load_constant<uint32_t>(&listed->table) == no_sequence || row >= rows) return;
    const uint32_t tensor_row = Cx::template load_constant<uint32_t>(&listed->first_row) + row;
    const uint32_t first = Cx::template load_constant<uint32_t>(&listed->first_partial) + row;
    const uint32_t pieces = Cx::template load_constant<uint32_t>(&listed->pieces);

    const float nothing = Cx::bits_to_f32(0xff800000u);
    const float sink = call.sink_logits == nullptr
                           ? nothing
                           : Cx::template load_constant<float>(call.sink_logits + head) * log2_e;
    float largest = sink;
    for (uint32_t p = 0; p < pieces; ++p) {
        const uint64_t at = (uint64_t{first} + uint64_t{p} * rows) * call.query_heads + head;
        const float here = Cx::template load<float>(call.partials.largest + at);
        largest = here > largest ? here : largest;
    }
    float total = sink == nothing ? 0.0f : Cx::exp2(sink - largest);
    constexpr uint32_t each = most_dim / warp_lanes;
    const uint32_t dim = call.place.values.dim;
    float values[each] = {};
    for (uint32_t p = 0; p < pieces; ++p) {
        const uint64_t at = (uint64_t{first} + uint64_t{p} * rows) * call.query_heads + head;
        const float here = Cx::template load<float>(call.partials.largest + at);
        const float sum = Cx::template load<float>(call.partials.sum + at);
        if (here == nothing && sum == 0.0f) continue;
        const float factor = Cx::exp2(here == nothing ? here : here - largest);
        total = Cx::multiply_add(factor, sum, total);
        KVRT_UNROLL
        for (uint32_t i = 0; i < each; ++i) {
            const uint32_t channel = Cx::lane() + i * warp_lanes;
            if (channel >= dim) continue;
            values[i] = Cx::multiply_add(
                factor, Cx::template load_once<float>(call.partials.values + at * dim + channel),
                values[i]);
        }
    }
    const float inverse = total != 0.0f ? 1.0f / total : 1.0f;
    KVRT_UNROLL
    for (uint32_t i = 0; i < each; ++i) {
        const uint32_t channel = Cx::lane() + i * warp_lanes;
        if (channel >= dim) continue;
        const int64_t element = int64_t{tensor_row} * call.out.row_stride +
                                int64_t{head} * call.out.head_stride +
                                int64_t{channel} * call.out.dim_stride;
        std::byte* const to = call.out.data + element * int64_t{number_bytes(call.out_type)};
        const float value = values[i] * inverse;
        if (call.out_type == number::f32) {
            Cx::store(to, value);
        } else {
            Cx::store(to, to_half_width<Cx>(value, call.out_type));
        }
    }
    if (call.log_sum_exp != nullptr && Cx::lane() == 0) {
        Cx::store(call.log_sum_exp + uint64_t{tensor_row} * call.row_heads + head,
                  total != 0.0f ? (largest + Cx::log2(total)) * ln_2 : nothing);
    }
}

}  // namespace kvrt::kernels
