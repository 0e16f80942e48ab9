// Storage formats that are plain elements, and tensors in the caller's memory.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvrt/kvrt.h"

namespace kvrt {

/// One element type, whether a format of stored blocks or the dtype of a caller's tensor.
enum class element : uint32_t { f32 = 1, f16 = 2, bf16 = 3 };

static_assert(int{KV_FORMAT_F32} == int{KV_DTYPE_F32} && int{KV_FORMAT_F16} == int{KV_DTYPE_F16} &&
              int{KV_FORMAT_BF16} == int{KV_DTYPE_BF16});

constexpr uint32_t element_bytes(element type) { return type == element::f32 ? 4 : 2; }

/// [rows, heads, dim] in the caller's memory; strides in elements.
struct tensor_view {
    std::byte* data = nullptr;
    element type = element::f32;
    int64_t row_stride = 0, head_stride = 0, dim_stride = 1;

    std::byte* at(int64_t row, int64_t head, int64_t dim) const {
        return data + (row * row_stride + head * head_stride + dim * dim_stride) *
                          static_cast<int64_t>(element_bytes(type));
    }
};

/// Scalar conversions: round to nearest even, NaN stays NaN. The reference for the SIMD ones.
float f16_to_f32(uint16_t bits);
uint16_t f32_to_f16(float value);

inline float bf16_to_f32(uint16_t bits) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

inline uint16_t f32_to_bf16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float load_element(const std::byte* address, element type) {
    if (type == element::f32) {
        float value;
        std::memcpy(&value, address, sizeof value);
        return value;
    }
    uint16_t bits;
    std::memcpy(&bits, address, sizeof bits);
    return type == element::f16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

inline void store_element(std::byte* address, element type, float value) {
    if (type == element::f32) {
        std::memcpy(address, &value, sizeof value);
        return;
    }
    const uint16_t bits = type == element::f16 ? f32_to_f16(value) : f32_to_bf16(value);
    std::memcpy(address, &bits, sizeof bits);
}

}  // namespace kvrt
