// How keys or values are stored. A *record* is what one token leaves of one KV head: codes, then
// the metadata of their groups, in words of 4 bytes. Formats of plain elements have none: their
// records are the elements.
//
// Each format describes itself in a file of its own; format.cpp lists them. A format is token-local
// when a record depends on nothing but the token's own vector and constants of the lane: such
// records are moved, shared and evicted one by one, byte for byte. It is tile-local when the tokens
// of a block share metadata: its rows stay raw (f16) until their block is full, and are sealed into
// a tile then. A token that leaves its tile is decoded, and coded anew where it goes.
//
// Keys and values of one name may be stored differently (KIVI: keys by channel, values by token):
// a description belongs to a role.
//
// Codes of fewer than 8 bits are packed as packed_codes.hpp says. Groups are cut from the front;
// the last may be shorter.
#pragma once

#include <cstddef>
#include <cstdint>

#include "format/element.hpp"
#include "format/position_rotation.hpp"
#include "kvrt/kvrt.h"

namespace kvrt {

inline constexpr uint32_t record_word = 4;
inline constexpr uint32_t widest_row = 256;  ///< dimensions of a head
inline constexpr uint32_t most_record_bytes = 2 * widest_row;
inline constexpr uint32_t most_tile_tokens = 128;

/// What a row is stored with, besides its own numbers: constants of the lane, the same for its
/// lifetime, and where the token stands, which never changes either.
struct row_constants {
    float scale = 1.0f;                    ///< static scale of this head (fp8), or of the layer
    const float* channel_mean = nullptr;   ///< [dim] of this head (affine formats), before rotation
    const float* channel_scale = nullptr;  ///< the same, behind it
    const position_rotation* turning = nullptr;  ///< formats that need positions: how keys turn
    uint32_t position = 0;                       ///< theirs too: where the row's token stands
};

/// Encodes a row of `dim` finite or other numbers; returns how many of them saturated.
using encode_record = uint32_t (*)(const float* row, uint32_t dim, const row_constants& constants,
                                   std::byte* record);
using decode_record = void (*)(const std::byte* record, uint32_t dim,
                               const row_constants& constants, float* row);

enum class operand_role { keys, values };

enum class format_class { plain, token_local, tile_local };

/// Codes that stand for numbers c, so that x = step * (c - zero) + least, with what a group's
/// metadata say of step and least. Such a format tells kernels how to read its records; `none`
/// leaves them to decode(). All but those of fp8 are whole: products with them need no floating
/// point. e2m1 stands for twice its number, normal_* for normal_levels.hpp.
enum class code_kind {
    none,
    signed_bytes,
    nibbles,
    e2m1_nibbles,
    e4m3_bytes,
    e5m2_bytes,
    two_bits,
    three_bits,
    normal_nibbles,
    normal_three_bits,
};

/// Codes of 4, 3 or 2 bits that stand for themselves.
constexpr code_kind whole_codes(uint32_t bits) {
    return bits == 4 ? code_kind::nibbles : bits == 3 ? code_kind::three_bits : code_kind::two_bits;
}

enum class group_kind { none, f16_step, f16_step_least, f32_step, e4m3_step, e8m0_step };

struct code_reading {
    code_kind codes = code_kind::none;
    group_kind groups = group_kind::none;
    float zero = 0.0f;  ///< the code of 0, where least does not say it
    float unit = 1.0f;  ///< step = unit * what is stored
};

/// How kernels read a tile of whole codes, which lie in its front, those of a row in whole words;
/// `none` leaves it to open(). All metadata are f16. With c a row's code:
///
///   keys    codes [slot / 16][word][slot % 16], then for each channel_tokens tokens step[dim],
///           least[dim]; where there are factors they follow, [tokens]:
///           x = (step[channel] * c + least[channel]) * factor[token]
///   values  codes [slot][word], factor[dim], step[tokens], least[tokens]:
///           x = (step[token] * c + least[token]) * factor[channel]
struct tile_reading {
    code_kind codes = code_kind::none;
    uint32_t channel_tokens = 0;  ///< of keys; 0: all tokens of the tile
    bool token_factors = false;   ///< of keys
};

/// The rows of one KV head in a sealed block. Allocates nothing.
struct tile_codec {
    uint32_t token_multiple = 0;                                 ///< of tokens in a tile
    uint32_t (*bytes)(uint32_t tokens, uint32_t dim) = nullptr;  ///< a multiple of 64
    /// rows are [tokens][dim].
    void (*seal)(const float* rows, uint32_t tokens, uint32_t dim, std::byte* tile) = nullptr;
    /// Rows [first, first + count) of a tile as [count][dim].
    void (*open)(const std::byte* tile, uint32_t tokens, uint32_t dim, uint32_t first,
                 uint32_t count, float* rows) = nullptr;
    tile_reading reading = {};
};

struct format_description {
    uint32_t id = 0;  ///< KV_FORMAT_*
    const char* name = nullptr;
    format_class kind = format_class::plain;
    element plain_type = element::f32;  ///< of plain ones
    uint32_t code_bits = 0;             ///< per channel
    uint32_t group = 0;                 ///< channels that share metadata; 0: the whole row
    uint32_t group_bytes = 0;           ///< of metadata per group
    bool takes_scales = false;          ///< static ones have a meaning
    bool needs_scales = false;          ///< and must be given
    bool always_rotated = false;        ///< rows come in the basis of rotation.hpp, asked or not
    bool needs_channels = false;        ///< a mean and a scale per head and channel
    bool needs_positions = false;       ///< and how keys are turned by them
    bool inline_form = false;           ///< groups have a foreign form: metadata, then codes
    code_reading reading = {};
    encode_record encode = nullptr;  ///< not of plain ones
    decode_record decode = nullptr;
    tile_codec tile = {};  ///< of tile-local ones, which have neither records nor groups

    bool plain() const { return kind == format_class::plain; }
    uint32_t group_of(uint32_t dim) const { return group == 0 || group > dim ? dim : group; }
    uint32_t groups(uint32_t dim) const { return (dim + group_of(dim) - 1) / group_of(dim); }
    uint32_t code_bytes(uint32_t dim) const { return dim * code_bits / 8; }
};

/// NULL for an id that this library does not store in that role. KV_FORMAT_DEFAULT is f16.
const format_description* find_format(uint32_t id, operand_role role);

/// Bytes of a row: of a record padded to record_word, or of plain elements.
uint32_t record_bytes(const format_description& format, uint32_t dim);

/// The foreign form of a record has the metadata of each group in front of its codes, and no
/// padding.
uint32_t inline_bytes(const format_description& format, uint32_t dim);
void to_inline(const format_description& format, uint32_t dim, const std::byte* record,
               std::byte* row);
void from_inline(const format_description& format, uint32_t dim, const std::byte* row,
                 std::byte* record);

}  // namespace kvrt
