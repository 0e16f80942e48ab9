// The partial softmaxes of a row's pieces, joined in ascending order of slots: one warp a query
// head.
#pragma once

#include "kernels/attend_parts.hpp"

namespace kvrt::kernels {

inline uint32_t join_blocks(const attend_parameters& call) {
    const uint32_t vectors = call.sequence_count * call.most_rows * call.query_heads;
    return (vectors + attend_warps - 1) / attend_warps;
}

/// The kernel. Launch with join_blocks(call) blocks of attend_threads threads. Sequences whose
/// table is no_sequence, and those without pieces, are left out.
template <class Cx>
KVRT_DEVICE void join_pieces(const attend_parameters& call) {
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

    if (pieces == 0) return;

    const float nothing = minus_infinity<Cx>();
    float largest = nothing;
    for (uint32_t p = 0; p < pieces; ++p) {
        const uint64_t at = (uint64_t{first} + uint64_t{p} * rows) * call.query_heads + head;
        const float here = Cx::template load<float>(call.partials.largest + at);
        largest = here > largest ? here : largest;
    }
    float total = 0.0f;
    // Of values in another basis a lane has 8 channels that follow each other, else every 32nd.
    const bool rotated = call.place.values.rotated;
    const uint32_t dim = call.place.values.dim;
    const auto channel_at = [&](uint32_t i) {
        return rotated ? Cx::lane() * lane_channels + i : Cx::lane() + i * warp_lanes;
    };
    static_assert(most_dim == warp_lanes * lane_channels);
    float values[lane_channels] = {};
    for (uint32_t p = 0; p < pieces; ++p) {
        const uint64_t at = (uint64_t{first} + uint64_t{p} * rows) * call.query_heads + head;
        const float here = Cx::template load<float>(call.partials.largest + at);
        const float sum = Cx::template load<float>(call.partials.sum + at);
        if (here == nothing && sum == 0.0f) continue;
        const float factor = weight_of<Cx>(here, largest);
        total = Cx::multiply_add(factor, sum, total);
        KVRT_UNROLL
        for (uint32_t i = 0; i < lane_channels; ++i) {
            const uint32_t channel = channel_at(i);
            if (channel >= dim) continue;
            values[i] = Cx::multiply_add(
                factor, Cx::template load_once<float>(call.partials.values + at * dim + channel),
                values[i]);
        }
    }
    const finished_row finished = finish_row<Cx>(call, head, largest, total);
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) values[i] *= finished.factor;
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels && !rotated; ++i) {
        const uint32_t channel = channel_at(i);
        if (channel < dim) store_out<Cx>(call, tensor_row, head, channel, values[i]);
    }
    if (rotated) store_rotated<Cx>(call, tensor_row, head, values);
    if (Cx::lane() != 0) return;
    store_log_sum<Cx>(call, tensor_row, head, finished.log_sum);
    keep_log_sum<Cx>(call, index, row, head, finished.log_sum);
}

}  // namespace kvrt::kernels
