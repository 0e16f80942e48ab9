// Where the elements of a block lie. A block holds `block_tokens` slots of one lane.
//
//   native:  per KV head: its key tile, then its value tile, each starting on 64 bytes.
//            keys dim-major in groups of 16 slots: [slot / 16][dim][slot % 16], so that one vector
//            register holds the scores of 16 slots; values row-major: [slot][dim].
//   HND:     all keys [kv_head][slot][dim], then all values likewise.
//   NHD:     all keys [slot][kv_head][dim], then all values likewise.
//
// All three are the same affine map with different strides. What they arrange are words: elements
// of plain formats, words of 4 bytes of the others' records (format.hpp), of which a native key
// tile is the transpose: word w of 16 slots side by side. HND and NHD hold records in their foreign
// form, where a format has one, in words of 2 bytes.
//
// A sealed tile of a tile-local format has neither words nor strides of slots: it lies in one piece
// per KV head, in all three orders, and its codec alone reads it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/format.hpp"

namespace kvrt {

inline constexpr uint32_t slot_group = 16;

enum class tile_order : uint32_t { native = 0, hnd = 1, nhd = 2 };

/// One operand (keys or values) of a block. Strides in words, offset in bytes from the block.
struct operand_layout {
    const format_description* format = nullptr;
    element type = element::f16;  ///< of plain formats
    uint32_t dim = 0;             ///< channels of a row
    uint32_t words = 0;           ///< of a row; dim for plain formats
    uint32_t word_bytes = 2;
    int64_t offset = 0;
    int64_t group_stride = 0;  ///< between groups of 16 slots
    int64_t slot_stride = 0;   ///< within a group
    int64_t head_stride = 0;
    int64_t word_stride = 0;
    uint32_t tile_bytes = 0;   ///< of tile-local formats, whose words are 0
    uint32_t tile_tokens = 0;  ///< rows of such a tile: those of a block

    // Constants of the lane, owned by the model's geometry; null where the format needs none.
    const float* scales = nullptr;         ///< [kv_heads]
    const float* channel_means = nullptr;  ///< [kv_heads][dim]
    const float* channel_scales = nullptr;
    const position_rotation* turning = nullptr;
    bool rotated = false;      ///< records hold rows in the basis of rotation.hpp
    bool inline_form = false;  ///< records lie in their foreign form

    /// Takes over what another layout of the same rows is stored with.
    void share_constants(const operand_layout& other) {
        scales = other.scales;
        channel_means = other.channel_means;
        channel_scales = other.channel_scales;
        turning = other.turning;
        rotated = other.rotated;
    }

    bool plain() const { return format->kind == format_class::plain; }
    bool tiled() const { return format->kind == format_class::tile_local; }
    uint32_t row_bytes() const { return words * word_bytes; }
    /// Where the format needs positions, the row's own is to be filled in.
    row_constants constants(uint32_t head) const {
        row_constants made;
        made.turning = turning;
        if (scales != nullptr) made.scale = scales[head];
        if (channel_means != nullptr) {
            made.channel_mean = channel_means + std::size_t{head} * dim;
            made.channel_scale = channel_scales + std::size_t{head} * dim;
        }
        return made;
    }

    /// Bytes from the block's start to a head's tile.
    int64_t tile_at(uint32_t head) const {
        return offset + int64_t{word_bytes} * head * head_stride;
    }

    /// Rows [first, first + count) of a head's tile, in the basis they are stored in.
    void open_tile(const std::byte* block, uint32_t head, uint32_t first, uint32_t count,
                   float* rows) const {
        format->tile.open(block + tile_at(head), tile_tokens, dim, first, count, rows);
    }

    /// Bytes from the block's start to [slot, head, word].
    int64_t at(uint32_t slot, uint32_t head, uint32_t word) const {
        return offset + static_cast<int64_t>(word_bytes) *
                            (slot / slot_group * group_stride + slot % slot_group * slot_stride +
                             head * head_stride + word * word_stride);
    }
};

/// How decode attention may multiply codes: as floats everywhere, with the 8-bit dot products of a
/// processor that has them, in its matrix unit.
enum class code_arithmetic { floats, dot_products, matrices };

struct tile_layout {
    tile_order order = tile_order::native;
    uint32_t block_tokens = 16;
    uint32_t kv_heads = 0;
    operand_layout keys;
    operand_layout values;
    uint32_t block_bytes = 0;                                ///< a multiple of 64
    code_arithmetic arithmetic = code_arithmetic::matrices;  ///< the most there may be; for tests
};

/// Lays out a block. block_tokens is a multiple of 16 (and of what a tile-local format asks), dims
/// are multiples of 8.
tile_layout make_tile_layout(tile_order order, uint32_t block_tokens, uint32_t kv_heads,
                             uint32_t key_dim, uint32_t value_dim,
                             const format_description& key_format,
                             const format_description& value_format);

/// The same for plain formats, by their elements.
inline tile_layout make_tile_layout(tile_order order, uint32_t block_tokens, uint32_t kv_heads,
                                    uint32_t key_dim, uint32_t value_dim, element key_type,
                                    element value_type) {
    return make_tile_layout(order, block_tokens, kv_heads, key_dim, value_dim,
                            *find_format(static_cast<uint32_t>(key_type), operand_role::keys),
                            *find_format(static_cast<uint32_t>(value_type), operand_role::values));
}

}  // namespace kvrt
