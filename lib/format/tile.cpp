#include "format/tile.hpp"

#include <initializer_list>

#include "base/checked.hpp"

namespace kvrt {

tile_layout make_tile_layout(tile_order order, uint32_t block_tokens, uint32_t kv_heads,
                             uint32_t key_dim, uint32_t value_dim, element key_type,
                             element value_type) {
    tile_layout layout;
    layout.order = order;
    layout.block_tokens = block_tokens;
    layout.kv_heads = kv_heads;
    layout.keys.type = key_type;
    layout.keys.dim = key_dim;
    layout.values.type = value_type;
    layout.values.dim = value_dim;

    const uint32_t key_tile = round_up(block_tokens * key_dim * element_bytes(key_type), 64u);
    const uint32_t value_tile = round_up(block_tokens * value_dim * element_bytes(value_type), 64u);
    if (order == tile_order::native) {
        const uint32_t head_bytes = key_tile + value_tile;
        layout.keys.group_stride = int64_t{slot_group} * key_dim;
        layout.keys.slot_stride = 1;
        layout.keys.dim_stride = slot_group;
        layout.keys.head_stride = head_bytes / element_bytes(key_type);
        layout.values.offset = key_tile;
        layout.values.slot_stride = value_dim;
        layout.values.group_stride = int64_t{slot_group} * value_dim;
        layout.values.dim_stride = 1;
        layout.values.head_stride = head_bytes / element_bytes(value_type);
        layout.block_bytes = head_bytes * kv_heads;
        return layout;
    }
    for (operand_layout* operand : {&layout.keys, &layout.values}) {
        const bool by_head = order == tile_order::hnd;
        operand->dim_stride = 1;
        operand->slot_stride = by_head ? operand->dim : int64_t{kv_heads} * operand->dim;
        operand->head_stride = by_head ? int64_t{block_tokens} * operand->dim : operand->dim;
        operand->group_stride = slot_group * operand->slot_stride;
    }
    const uint32_t key_bytes =
        round_up(kv_heads * block_tokens * key_dim * element_bytes(key_type), 64u);
    layout.values.offset = key_bytes;
    layout.block_bytes =
        key_bytes + round_up(kv_heads * block_tokens * value_dim * element_bytes(value_type), 64u);
    return layout;
}

}  // namespace kvrt
