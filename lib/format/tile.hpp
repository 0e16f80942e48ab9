// Where the elements of a block lie. A block holds `block_tokens` slots of one lane.
//
//   native:  per KV head: its key tile, then its value tile, each starting on 64 bytes.
//            keys dim-major in groups of 16 slots: [slot / 16][dim][slot % 16], so that one vector
//            register holds the scores of 16 slots; values row-major: [slot][dim].
//   HND:     all keys [kv_head][slot][dim], then all values likewise.
//   NHD:     all keys [slot][kv_head][dim], then all values likewise.
//
// All three are the same affine map with different strides.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/element.hpp"

namespace kvrt {

inline constexpr uint32_t slot_group = 16;

enum class tile_order : uint32_t { native = 0, hnd = 1, nhd = 2 };

/// One operand (keys or values) of a block. Strides in elements, offset in bytes from the block.
struct operand_layout {
    element type = element::f16;
    uint32_t dim = 0;
    int64_t offset = 0;
    int64_t group_stride = 0;  ///< between groups of 16 slots
    int64_t slot_stride = 0;   ///< within a group
    int64_t head_stride = 0;
    int64_t dim_stride = 0;

    /// Bytes from the block's start to [slot, head, dim].
    int64_t at(uint32_t slot, uint32_t head, uint32_t dimension) const {
        return offset + static_cast<int64_t>(element_bytes(type)) *
                            (slot / slot_group * group_stride + slot % slot_group * slot_stride +
                             head * head_stride + dimension * dim_stride);
    }
};

struct tile_layout {
    tile_order order = tile_order::native;
    uint32_t block_tokens = 16;
    uint32_t kv_heads = 0;
    operand_layout keys;
    operand_layout values;
    uint32_t block_bytes = 0;  ///< a multiple of 64
};

/// Lays out a block. block_tokens is a multiple of 16, dims are multiples of 8.
tile_layout make_tile_layout(tile_order order, uint32_t block_tokens, uint32_t kv_heads,
                             uint32_t key_dim, uint32_t value_dim, element key_type,
                             element value_type);

}  // namespace kvrt
