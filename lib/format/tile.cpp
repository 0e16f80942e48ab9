#include "format/tile.hpp"

#include <initializer_list>

#include "base/checked.hpp"

namespace kvrt {

namespace {

operand_layout operand_of(const format_description& format, uint32_t dim, uint32_t block_tokens,
                          tile_order order) {
    operand_layout operand;
    operand.format = &format;
    operand.type = format.plain_type;
    operand.dim = dim;
    operand.rotated = format.always_rotated;
    if (operand.tiled()) {
        operand.word_bytes = record_word;
        operand.tile_bytes = format.tile.bytes(block_tokens, dim);
        operand.tile_tokens = block_tokens;
        return operand;
    }
    operand.inline_form = format.inline_form && order != tile_order::native;
    if (operand.inline_form) {
        operand.word_bytes = 2;
        operand.words = inline_bytes(format, dim) / 2;
    } else {
        operand.word_bytes = operand.plain() ? element_bytes(format.plain_type) : record_word;
        operand.words = record_bytes(format, dim) / operand.word_bytes;
    }
    return operand;
}

uint32_t bytes_of_head(const operand_layout& operand, uint32_t block_tokens) {
    return operand.tiled() ? operand.tile_bytes : block_tokens * operand.row_bytes();
}

}  // namespace

tile_layout make_tile_layout(tile_order order, uint32_t block_tokens, uint32_t kv_heads,
                             uint32_t key_dim, uint32_t value_dim,
                             const format_description& key_format,
                             const format_description& value_format) {
    tile_layout layout;
    layout.order = order;
    layout.block_tokens = block_tokens;
    layout.kv_heads = kv_heads;
    layout.keys = operand_of(key_format, key_dim, block_tokens, order);
    layout.values = operand_of(value_format, value_dim, block_tokens, order);
    operand_layout& keys = layout.keys;
    operand_layout& values = layout.values;

    if (order == tile_order::native) {
        const uint32_t key_tile = round_up(bytes_of_head(keys, block_tokens), 64u);
        const uint32_t value_tile = round_up(bytes_of_head(values, block_tokens), 64u);
        const uint32_t head_bytes = key_tile + value_tile;
        keys.group_stride = int64_t{slot_group} * keys.words;
        keys.slot_stride = 1;
        keys.word_stride = slot_group;
        keys.head_stride = head_bytes / keys.word_bytes;
        values.offset = key_tile;
        values.slot_stride = values.words;
        values.group_stride = int64_t{slot_group} * values.words;
        values.word_stride = 1;
        values.head_stride = head_bytes / values.word_bytes;
        layout.block_bytes = head_bytes * kv_heads;
        return layout;
    }
    for (operand_layout* operand : {&keys, &values}) {
        if (operand->tiled()) {
            operand->head_stride = operand->tile_bytes / operand->word_bytes;
            continue;
        }
        const bool by_head = order == tile_order::hnd;
        operand->word_stride = 1;
        operand->slot_stride = by_head ? operand->words : int64_t{kv_heads} * operand->words;
        operand->head_stride = by_head ? int64_t{block_tokens} * operand->words : operand->words;
        operand->group_stride = slot_group * operand->slot_stride;
    }
    values.offset = round_up(kv_heads * bytes_of_head(keys, block_tokens), 64u);
    layout.block_bytes = static_cast<uint32_t>(values.offset) +
                         round_up(kv_heads * bytes_of_head(values, block_tokens), 64u);
    return layout;
}

}  // namespace kvrt
