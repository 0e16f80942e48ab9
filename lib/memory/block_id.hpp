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

/// How a block class cuts a slab, and the index of a block in the class's side arrays. Every look
/// at a block goes through here, so it multiplies by a reciprocal where it would divide.
struct block_numbering {
    uint32_t units_per_block = 1;  ///< with guard, if any
    uint32_t blocks_per_slab = units_per_slab;
    /// 2^32 / units_per_block, rounded up. A place in a slab is below 2^15 and so is the size of a
    /// block: the error stays below a quarter of a unit.
    uint64_t reciprocal = uint64_t{1} << 32;

    block_numbering() = default;
    explicit block_numbering(uint32_t units)
        : units_per_block(units),
          blocks_per_slab(units_per_slab / units),
          reciprocal(((uint64_t{1} << 32) + units - 1) / units) {}

    uint32_t in_slab(block_id id) const {
        return static_cast<uint32_t>(id % units_per_slab * reciprocal >> 32);
    }
    uint64_t index(uint32_t slab, uint32_t block) const {
        return static_cast<uint64_t>(slab) * blocks_per_slab + block;
    }
    uint64_t index(block_id id) const { return index(id / units_per_slab, in_slab(id)); }
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

/// Explicit positions along a lane's table, whose first sealed_blocks are of a class of their own.
struct lane_positions {
    position_store open;
    position_store sealed;
    uint32_t sealed_blocks = 0;

    const position_store& of_block(uint32_t index) const {
        return index < sealed_blocks ? sealed : open;
    }
    uint32_t& of(const block_id* blocks, uint32_t slot, uint32_t kv_head) const {
        const uint32_t index = slot / open.block_tokens;
        return of_block(index).of(blocks[index], kv_head)[slot % open.block_tokens];
    }
};

}  // namespace kvrt
