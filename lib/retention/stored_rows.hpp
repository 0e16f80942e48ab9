// The rows of one KV head of a lane, where they lie: what every pass over keys or values reads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/tile.hpp"
#include "memory/block_id.hpp"
#include "sequence/slots.hpp"

namespace kvrt {

/// Slots below sealed_slots lie in blocks of `sealed`, the others in blocks of `open`, which hold
/// as many tokens. Passes over slots [first_slot, end_slot) cut themselves there; they read whole
/// groups of 16 slots, so first_slot is a multiple of 16, and write only what is asked for.
struct stored_rows {
    const tile_layout* open = nullptr;
    const tile_layout* sealed = nullptr;  ///< may be null while sealed_slots is 0
    uint32_t sealed_slots = 0;            ///< a multiple of a block's tokens
    const std::byte* arena = nullptr;
    const block_id* blocks = nullptr;
    uint32_t kv_head = 0;
    const slot_positions* positions = nullptr;  ///< of this KV head, where the keys' format asks

    uint32_t key_dim() const { return open->keys.dim; }
    uint32_t value_dim() const { return open->values.dim; }
    const operand_layout& operand(operand_role role, const tile_layout& layout) const {
        return role == operand_role::keys ? layout.keys : layout.values;
    }
};

/// Slots that a unit of scoring work takes: sums over slots are cut there, so that they do not
/// depend on who adds what.
inline constexpr uint32_t slots_per_part = 2048;

}  // namespace kvrt
