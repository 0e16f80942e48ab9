// The storages that attention kernels are compiled for, as <storage>_<most channels>: f16 and bf16,
// codes in bytes and in nibbles, and keys in bytes with values in nibbles. Included by .cu files
// only.
#pragma once

#include "kernels/attend_codes.hpp"
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

}  // namespace kvrt::kernels

/// kernel(name, tiles) for each of them.
#define KVRT_FOR_STORAGES(kernel)                                                                 \
    kernel(f16_64, f16_tiles<64>) kernel(f16_128, f16_tiles<128>) kernel(f16_256, f16_tiles<256>) \
        kernel(bf16_64, bf16_tiles<64>) kernel(bf16_128, bf16_tiles<128>)                         \
            kernel(bf16_256, bf16_tiles<256>) kernel(bytes_64, byte_tiles<64>)                    \
                kernel(bytes_128, byte_tiles<128>) kernel(bytes_256, byte_tiles<256>)             \
                    kernel(nibbles_64, nibble_tiles<64>) kernel(nibbles_128, nibble_tiles<128>)   \
                        kernel(nibbles_256, nibble_tiles<256>)                                    \
                            kernel(bytes_nibbles_64, byte_nibble_tiles<64>)                       \
                                kernel(bytes_nibbles_128, byte_nibble_tiles<128>)                 \
                                    kernel(bytes_nibbles_256, byte_nibble_tiles<256>)
