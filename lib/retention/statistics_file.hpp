// The statistics file: means of every layer's queries, with the geometry and rotation they hold
// for.
//
// Little-endian, no padding beyond what is listed:
//   header   "KVRTQST1", u32 version = 1, u32 layers, u64 bytes of the whole file
//   a layer  u32 query_heads, u32 key_dim, u32 bands, u32 rope style, u32 rotated dimensions,
//            u32 0, u64 tokens, f64 attention factor, f64 inverse_frequencies[dimensions / 2],
//            f32 mean_real, mean_imaginary, mean_magnitude, each [query_heads][bands]
//   trailer  u64 XXH3-64 of all bytes before it
// The size follows from the geometry alone, so nothing in a file decides how much is read. A layer
// with no statistics (it has a window, say) has tokens = 0 and zeroes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/rope.hpp"

namespace kvrt {

/// One layer's part. Arrays are [query_heads][bands], dense, in the caller's memory.
struct layer_statistics {
    uint32_t query_heads = 0;
    uint32_t key_dim = 0;
    const rope_description* rope = nullptr;
    uint64_t tokens = 0;
    float* mean_real = nullptr;
    float* mean_imaginary = nullptr;
    float* mean_magnitude = nullptr;
};

uint64_t statistics_bytes(const layer_statistics* layers, uint32_t layer_count);

/// Writes statistics_bytes() bytes. Arrays may be null where tokens is 0.
void encode_statistics(const layer_statistics* layers, uint32_t layer_count, std::byte* out);

/// Checks everything, then fills tokens and arrays of every layer; geometry and rope say what is
/// expected. CORRUPT, with a message and nothing filled, when anything does not match.
[[nodiscard]] status decode_statistics(const std::byte* data, uint64_t bytes,
                                       layer_statistics* layers, uint32_t layer_count);

/// The same on files. save replaces the file as a whole or not at all. IO when the system refuses.
[[nodiscard]] status save_statistics(const layer_statistics* layers, uint32_t layer_count,
                                     const char* path);
[[nodiscard]] status load_statistics(const char* path, layer_statistics* layers,
                                     uint32_t layer_count);

}  // namespace kvrt
