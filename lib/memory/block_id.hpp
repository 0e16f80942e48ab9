// A block id is the block's place in the arena, in units of 64 bytes: its address needs no
// division, and an exported table is the table itself, shifted. 32 bits reach 256 GiB.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvrt {

using block_id = uint32_t;

inline constexpr block_id no_block = 0xffffffffu;
inline constexpr uint32_t block_unit = 64;  ///< bytes
inline constexpr uint64_t slab_bytes = uint64_t{2} << 20;
inline constexpr uint32_t units_per_slab = static_cast<uint32_t>(slab_bytes / block_unit);

inline std::byte* block_address(std::byte* arena, block_id id) {
    return arena + static_cast<uint64_t>(id) * block_unit;
}
inline const std::byte* block_address(const std::byte* arena, block_id id) {
    return arena + static_cast<uint64_t>(id) * block_unit;
}

/// How a block class cuts a slab, and the index of a block in the class's side arrays.
struct block_numbering {
    uint32_t units_per_block = 1;   ///< with guard, if any
    uint32_t blocks_per_slab = 1;

    uint32_t in_slab(block_id id) const { return id % units_per_slab / units_per_block; }
    uint64_t index(block_id id) const {
        return static_cast<uint64_t>(id / units_per_slab) * blocks_per_slab + in_slab(id);
    }
};

/// Explicit positions of slots, beside the arena: [block index][kv_head][slot of the block].
/// Only slots that a compaction has placed have them; later ones are consecutive.
struct position_store {
    uint32_t* base = nullptr;
    block_numbering numbering;
    uint32_t block_stride = 0;  ///< entries per block: of the class's lane with the most heads
    uint32_t block_tokens = 0;

    uint32_t* of(block_id id, uint32_t kv_head) const {
        return base + numbering.index(id) * block_stride + kv_head * block_tokens;
    }
};

}  // namespace kvrt
