// The statistics file: means of every layer's queries, with the geometry and rotation they hold
// for.
//
// Little-endian, no padding beyond what is listed:
//   header   "KVRTQST1", u32 version = 2, u32 layers, u64 bytes of the whole file
//   a layer  u32 query_heads, u32 key_dim, u32 bands, u32 rope style, u32 rotated dimensions,
//            u32 flags: 1 covariances are known, u64 tokens, f64 attention factor,
//            f64 inverse_frequencies[dimensions / 2],
//            f32 mean_real, mean_imaginary, mean_magnitude, variance_real, variance_imaginary,
//            covariance, each [query_heads][bands]
//   trailer  u64 XXH3-64 of all bytes before it
// The size follows from the geometry alone, so nothing in a file decides how much is read. A layer
// with no statistics (it has a window, say) has tokens = 0 and zeroes; so have covariances that are
// not known. Version 1 had none, and 0 for the flags: it is read as well.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/rope.hpp"
#include "retention/query_statistics.hpp"

namespace kvrt {

/// One layer's part. Arrays are [query_heads][bands], dense, in the caller's memory: to be read,
/// all of them; to be written, covariances only where they are known.
struct layer_statistics {
    uint32_t query_heads = 0;
    uint32_t key_dim = 0;
    const rope_description* rope = nullptr;
    uint64_t tokens = 0;
    query_moments<float> moments;
    bool has_covariances = false;  ///< of what was read
};

uint64_t statistics_bytes(const layer_statistics* layers, uint32_t layer_count);

/// Writes statistics_bytes() bytes. Arrays may be null where tokens is 0.
void encode_statistics(const layer_statistics* layers, uint32_t layer_count, std::byte* out);

/// Checks everything, then fills tokens and arrays of every layer, with covariances of 0 where the
/// file has none; geometry and rope say what is expected. CORRUPT, with a message and nothing
/// filled, when anything does not match.
[[nodiscard]] status decode_statistics(const std::byte* data, uint64_t bytes,
                                       layer_statistics* layers, uint32_t layer_count);

/// The same on files. save replaces the file as a whole or not at all. IO when the system refuses.
[[nodiscard]] status save_statistics(const layer_statistics* layers, uint32_t layer_count,
                                     const char* path);
[[nodiscard]] status load_statistics(const char* path, layer_statistics* layers,
                                     uint32_t layer_count);

}  // namespace kvrt
