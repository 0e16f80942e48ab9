// How a layer's queries and keys are rotated, resolved from kv_rope.
//
// Bands. A band is a complex number made of two dimensions of a head: (i, i + dimensions / 2) for
// HALF, (2i, 2i + 1) for INTERLEAVED. Each dimension behind the rotated ones is a band of its own,
// real, with frequency 0. So bands = dimensions / 2 + (key_dim - dimensions).
#pragma once

#include <cstdint>

#include "base/status.hpp"

namespace kvrt {

inline constexpr uint32_t max_rotated_bands = 128;

/// Plain data, without owner: it can be copied and compared.
struct rope_description {
    uint32_t style = KV_ROPE_NONE;
    uint32_t dimensions = 0;        ///< rotated, the first ones of a head; even; 0 with NONE
    double attention_factor = 1.0;  ///< on rotated queries and on rotated keys
    double inverse_frequencies[max_rotated_bands] = {};  ///< [dimensions / 2] radians per position

    uint32_t rotated_bands() const { return dimensions / 2; }
    uint32_t bands(uint32_t key_dim) const { return key_dim - dimensions / 2; }
};

/// Of keys that are stored before rotation.
inline constexpr rope_description not_rotated = {};

/// Checks `rope` (NULL: not rotated) and fills in its defaults. `layer` is for messages.
/// INVALID: an unknown style, odd or too many dimensions, a frequency or factor that is not finite,
/// a factor that is not positive, a theta below 1.
[[nodiscard]] status describe_rope(const kv_rope* rope, uint32_t key_dim, uint32_t layer,
                                   rope_description& out);

/// Whether statistics gathered under `a` hold under `b`: the same bands, and numbers equal to one
/// part in a million, since engines compute them in single or double precision.
bool same_rotation(const rope_description& a, const rope_description& b);

}  // namespace kvrt
