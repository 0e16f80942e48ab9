// Joining the partial softmaxes of a row's pieces, in ascending order of slots, and writing out.

#include "attention/kernels.hpp"
#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "attention/join.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/softmax-inl.hpp"
#include "format/rotation.hpp"
#include "format/vector-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

constexpr uint32_t widest_value = 256;

void store_row(const tensor_view& out, uint32_t row, uint32_t head, const float* values,
               uint32_t dim) {
    std::byte* target = out.at(row, head, 0);
    const std::byte* source = reinterpret_cast<const std::byte*>(values);
    if (out.dim_stride != 1) {
        for (uint32_t i = 0; i < dim; ++i) store_element(out.at(row, head, i), out.type, values[i]);
        return;
    }
    switch (out.type) {
        case element::f32:
            convert_run<element::f32, element::f32>(source, target, dim);
            break;
        case element::f16:
            convert_run<element::f32, element::f16>(source, target, dim);
            break;
        default:
            convert_run<element::f32, element::bf16>(source, target, dim);
    }
}

float join_head(const attend_call& call, const partial_softmax& first, uint64_t stride,
                uint32_t pieces, uint32_t index, uint32_t row, uint32_t head) {
    const attend_layer& layer = *call.layer;
    const uint32_t dim = layer.layout.values.dim;
    constexpr float nothing = -std::numeric_limits<float>::infinity();
    const float sink = layer.sink_logits != nullptr ? layer.sink_logits[head] : nothing;
    float largest = sink;
    for (uint32_t p = 0; p < pieces; ++p) {
        const float here = first.largest[p * stride + index];
        if (!(here <= largest)) largest = here;  // NaN wins
    }
    alignas(64) float values[widest_value] = {};
    float total = sink == nothing ? 0.0f : std::exp(sink - largest);
    const hn::CappedTag<float, 8> d;
    for (uint32_t p = 0; p < pieces; ++p) {
        const float here = first.largest[p * stride + index];
        if (here == nothing) continue;
        const float factor = std::exp(here - largest);
        total += factor * first.sum[p * stride + index];
        const float* part = first.values + p * stride + uint64_t{index} * dim;
        const auto by = hn::Set(d, factor);
        for (uint32_t i = 0; i < dim; i += static_cast<uint32_t>(hn::Lanes(d))) {
            hn::Store(hn::MulAdd(by, hn::LoadU(d, part + i), hn::Load(d, values + i)), d,
                      values + i);
        }
    }
    if (total != 0.0f) scale_run(values, dim, 1.0f / total);
    if (layer.layout.values.rotated) rotate_row(values, dim);
    store_row(call.out, row, head, values, dim);
    const float log_sum = total != 0.0f ? largest + std::log(total) : nothing;
    if (call.log_sum_exp != nullptr) call.log_sum_at(row, head) = log_sum;
    return log_sum;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(join_head);

float join_pieces(const attend_call& call, const partial_softmax& first, uint64_t stride,
                  uint32_t pieces, uint32_t index, uint32_t row, uint32_t head) {
    return HWY_DYNAMIC_DISPATCH(join_head)(call, first, stride, pieces, index, row, head);
}

}  // namespace kvrt
#endif
