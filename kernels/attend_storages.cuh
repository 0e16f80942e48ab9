// The storages that attention kernels are compiled for, as <storage>_<most channels>: f16 and bf16,
// codes in bytes and in nibbles, keys in bytes with values in nibbles, and all others, which are
// opened. Included by .cu files only.
#pragma once

#include "kernels/attend_codes.hpp"
#include "kernels/attend_opened.hpp"
#include "kernels/cuda_context.cuh"

namespace kvrt::kernels {

template <uint32_t channels>
using f16_tiles = half_tiles<cuda_context, number::f16, channels>;
template <uint32_t channels>
using bf16_tiles = half_tiles<cuda_context, number::bf16, channels>;
template <uint32_t channels>
using byte_tiles = code_tiles<cuda_context, false, false, channels>;
template <uint32_t channels>
using nibble_tiles = code_tiles<cuda_context, true, true, channels>;
template <uint32_t channels>
using byte_nibble_tiles = code_tiles<cuda_context, false, true, channels>;
template <uint32_t channels>
using any_tiles = opened_tiles<cuda_context, channels>;

}  // namespace kvrt::kernels

/// kernel(name, tiles) for each of them.
#define KVRT_FOR_CHANNELS(kernel, storage, tiles)                     \
    kernel(storage##_64, tiles<64>) kernel(storage##_128, tiles<128>) \
        kernel(storage##_256, tiles<256>)
#define KVRT_FOR_STORAGES(kernel)                               \
    KVRT_FOR_CHANNELS(kernel, f16, f16_tiles)                   \
    KVRT_FOR_CHANNELS(kernel, bf16, bf16_tiles)                 \
    KVRT_FOR_CHANNELS(kernel, bytes, byte_tiles)                \
    KVRT_FOR_CHANNELS(kernel, nibbles, nibble_tiles)            \
    KVRT_FOR_CHANNELS(kernel, bytes_nibbles, byte_nibble_tiles) \
    KVRT_FOR_CHANNELS(kernel, opened, any_tiles)
