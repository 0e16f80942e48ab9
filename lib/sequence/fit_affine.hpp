// The channel constants of affine formats, from keys that a sequence holds: stored as they are, of
// whatever format, turned back to before rotation.
#pragma once

#include "sequence/cache.hpp"

namespace kvrt {

inline constexpr uint64_t least_fit_tokens = 64;

/// What a fit takes, and where it leaves its result.
struct affine_fit {
    uint32_t layer = 0;        ///< one that stores
    position_range positions;  ///< of the tokens that count; those not retained are passed over
    float* means = nullptr;    ///< [kv_heads][key_dim]
    float* scales = nullptr;   ///< the same
    uint64_t tokens_used = 0;  ///< of the head with the fewest
    uint64_t identity = 0;     ///< of keys stored as affine4 with these constants
};

/// Where the keys of a lane are for the host, instead of in the arena.
struct fit_rows {
    const std::byte* bytes = nullptr;
    const block_id* blocks = nullptr;     ///< [blocks], places in bytes
    const uint32_t* positions = nullptr;  ///< [kv heads of the lane][slots]
};

/// Means before rotation, and square roots of standard deviations behind it, where keys are stored
/// so: both channels of a rotary pair have that of the two together (none is below 1/64 of the root
/// mean square of the head's). INVALID: keys that are not finite. LIMIT: fewer than
/// least_fit_tokens tokens; nothing but tokens_used is written then. Allocates nothing.
status fit_affine(cache& store, const sequence& source, affine_fit& fit);
/// The same of rows that were brought from a device: [lanes of the layer].
status fit_affine(cache& store, const sequence& source, const fit_rows* lanes, affine_fit& fit);

}  // namespace kvrt
