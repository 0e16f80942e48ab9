// What becomes of running softmaxes: parts of several warps, joined in order in shared memory;
// partial softmaxes of pieces; output.
#pragma once

#include "kernels/attend_softmax.hpp"

namespace kvrt::kernels {

/// A part: of 16 vectors the largest logit, the sum of weights, and weighted values, in f32.
template <class tiles>
struct warp_part {
    static constexpr uint32_t row_floats = tiles::channels + 2;
    static constexpr uint32_t floats = 16 * row_floats;
    static constexpr uint32_t bytes = floats * sizeof(float);
};

/// By the warp that has it.
template <class Cx, class tiles>
KVRT_DEVICE void leave_part(const operand_place& values, const running_softmax<tiles>& state,
                            float* part) {
    constexpr uint32_t row_floats = warp_part<tiles>::row_floats;
    float* const mine = part + Cx::lane() / 4 * row_floats;
    float least[2], steps[2];
    KVRT_UNROLL
    for (uint32_t half = 0; half < 2; ++half) {
        float sum = state.sum[half];
        least[half] = tiles::has_least ? state.least[half] : 0.0f;
        KVRT_UNROLL
        for (uint32_t bits = 1; bits < 4; bits *= 2) {
            sum += Cx::shuffle_xor(sum, bits);
            if constexpr (tiles::has_least) least[half] += Cx::shuffle_xor(least[half], bits);
        }
        // What is weighted by steps is relative to heaviest; nothing, where that is -infinity.
        steps[half] = tiles::coded ? Cx::exp2(state.heaviest[half] - state.largest[half]) : 1.0f;
        if (Cx::lane() % 4 != 0) continue;
        mine[half * 8 * row_floats] = state.largest[half];
        mine[half * 8 * row_floats + 1] = sum;
    }
    KVRT_UNROLL
    for (uint32_t tile = 0; tile < tiles::channels / 8; ++tile) {
        KVRT_UNROLL
        for (uint32_t i = 0; i < 2; ++i) {
            const uint32_t channel = tiles::channel_of(values, tile, Cx::lane() % 4 * 2 + i);
            if (channel >= values.dim) continue;
            KVRT_UNROLL
            for (uint32_t half = 0; half < 2; ++half) {
                float out = state.out[tile][half * 2 + i];
                if constexpr (tiles::coded) {
                    out = out == 0.0f ? least[half] : out * steps[half] + least[half];
                }
                mine[half * 8 * row_floats + 2 + channel] = out;
            }
        }
    }
}

/// One vector of some parts, joined in their order.
template <class Cx>
struct joined_vector {
    const float* first;  ///< its row in the first part
    uint32_t stride;     ///< floats between parts
    uint32_t parts;
    float largest, sum;

    KVRT_DEVICE joined_vector(const float* first_row, uint32_t stride_floats, uint32_t count)
        : first(first_row),
          stride(stride_floats),
          parts(count),
          largest(minus_infinity<Cx>()),
          sum(0.0f) {
        for (uint32_t p = 0; p < parts; ++p) {
            const float here = first[p * stride];
            largest = here > largest ? here : largest;
        }
        for (uint32_t p = 0; p < parts; ++p) {
            if (!nothing(p)) sum = Cx::multiply_add(factor(p), first[p * stride + 1], sum);
        }
    }
    KVRT_DEVICE float value(uint32_t channel) const {
        float value = 0.0f;
        for (uint32_t p = 0; p < parts; ++p) {
            if (nothing(p)) continue;
            value = Cx::multiply_add(factor(p), first[p * stride + 2 + channel], value);
        }
        return value;
    }

  private:
    KVRT_DEVICE bool nothing(uint32_t p) const {
        return first[p * stride] == minus_infinity<Cx>() && first[p * stride + 1] == 0.0f;
    }
    KVRT_DEVICE float factor(uint32_t p) const { return weight_of<Cx>(first[p * stride], largest); }
};

/// Leaves a vector of some parts as a partial softmax.
template <class Cx>
KVRT_DEVICE void store_partial(const attend_parameters& call, uint64_t partial, uint32_t head,
                               const joined_vector<Cx>& joined) {
    const uint32_t dim = call.place.values.dim;
    const uint64_t at = partial * call.query_heads + head;
    for (uint32_t channel = Cx::lane(); channel < dim; channel += warp_lanes) {
        Cx::store(call.partials.values + at * dim + channel, joined.value(channel));
    }
    if (Cx::lane() != 0) return;
    Cx::store(call.partials.largest + at, joined.largest);
    Cx::store(call.partials.sum + at, joined.sum);
}

// ---- Results ------------------------------------------------------------------------------------

/// What finishes a row of one query head: values times `factor` are its output.
struct finished_row {
    float factor;
    float log_sum;  ///< of all exp(logit), the sink's among them
};

template <class Cx>
KVRT_DEVICE finished_row finish_row(const attend_parameters& call, uint32_t head, float largest,
                                    float sum) {
    const float nothing = minus_infinity<Cx>();
    const float sink = call.sink_logits == nullptr
                           ? nothing
                           : Cx::template load_constant<float>(call.sink_logits + head) * log2_of_e;
    const float most = sink > largest ? sink : largest;
    const float factor = weight_of<Cx>(largest, most);
    const float total = factor * sum + (sink == nothing ? 0.0f : Cx::exp2(sink - most));
    return {total != 0.0f ? factor / total : 1.0f,
            total != 0.0f ? (most + Cx::log2(total)) * ln_of_2 : nothing};
}

template <class Cx>
KVRT_DEVICE void store_out(const attend_parameters& call, uint32_t row, uint32_t head,
                           uint32_t channel, float value) {
    const int64_t element = int64_t{row} * call.out.row_stride +
                            int64_t{head} * call.out.head_stride +
                            int64_t{channel} * call.out.dim_stride;
    std::byte* const to = call.out.data + element * int64_t{number_bytes(call.out_type)};
    if (call.out_type == number::f32) {
        Cx::store(to, value);
    } else {
        Cx::store(to, to_half_width<Cx>(value, call.out_type));
    }
}

/// 8 channels a lane, in the basis of the values, which is another.
template <class Cx>
KVRT_DEVICE void store_rotated(const attend_parameters& call, uint32_t row, uint32_t head,
                               float (&values)[lane_channels]) {
    const uint32_t dim = call.place.values.dim, first = Cx::lane() * lane_channels;
    rotate_channels<Cx>(dim, values);
    KVRT_UNROLL
    for (uint32_t i = 0; i < lane_channels; ++i) {
        if (first < dim) store_out<Cx>(call, row, head, first + i, values[i]);
    }
}

template <class Cx>
KVRT_DEVICE void store_log_sum(const attend_parameters& call, uint32_t row, uint32_t head,
                               float log_sum) {
    if (call.log_sum_exp == nullptr) return;
    Cx::store(call.log_sum_exp + uint64_t{row} * call.row_heads + head, log_sum);
}

/// The same beside kept weights, of a row of a listed sequence.
template <class Cx>
KVRT_DEVICE void keep_log_sum(const attend_parameters& call, uint32_t index, uint32_t row,
                              uint32_t head, float log_sum) {
    if (call.kept.weights == nullptr) return;
    const attend_sequence sequence = load_sequence<Cx>(call.sequences + index);
    const uint32_t first_kept = sequence.rows - sequence.kept_rows;
    if (row < first_kept) return;
    const uint64_t groups = (sequence.slots + slots_of_group - 1) / slots_of_group;
    const uint64_t at = sequence.kept + groups * sequence.kept_rows + (row - first_kept);
    Cx::store(call.kept.largest + at * call.query_heads + head, log_sum);
}

}  // namespace kvrt::kernels
