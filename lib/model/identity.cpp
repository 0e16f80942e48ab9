#include "model/identity.hpp"

#include <xxhash.h>

namespace kvrt {

namespace {

/// Counts up when what is hashed changes.
constexpr uint32_t version = 1;

struct hasher {
    XXH3_state_t state;

    hasher() { XXH3_64bits_reset(&state); }

    template <class number>
    void put(const number& value) {
        XXH3_64bits_update(&state, &value, sizeof value);
    }
    /// Whether there are any, then the numbers.
    void put_floats(const float* values, uint64_t count) {
        put(values != nullptr ? count : uint64_t{0});
        if (values != nullptr) XXH3_64bits_update(&state, values, count * sizeof(float));
    }
};

}  // namespace

uint64_t operand_identity(const operand_layout& operand, uint32_t kv_heads,
                          const stored_rotation& stored, const operand_layout* written) {
    const rope_description& rope = stored.rope;
    hasher hash;
    for (const uint32_t field : {version, operand.format->id, kv_heads, operand.dim,
                                 operand.tile_tokens, operand.rotated ? 1u : 0u}) {
        hash.put(field);
    }
    const uint64_t channels = uint64_t{kv_heads} * operand.dim;
    hash.put_floats(operand.scales, kv_heads);
    hash.put_floats(operand.channel_means, channels);
    hash.put_floats(operand.channel_scales, channels);
    if (operand.format->needs_positions) {
        hash.put(rope.style);
        hash.put(rope.dimensions);
        hash.put(rope.attention_factor);
        for (uint32_t band = 0; band < rope.rotated_bands(); ++band) {
            hash.put(rope.inverse_frequencies[band]);
        }
    }
    if (written != nullptr) hash.put(written->format->id);
    if (stored.by_slot) hash.put(uint32_t{KV_LAYER_CACHE_POSITIONS});
    return XXH3_64bits_digest(&hash.state);
}

}  // namespace kvrt
