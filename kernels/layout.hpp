// What kernels are told of a lane: where the words of a block lie (format/tile.hpp), how they stand
// for numbers, and which blocks a sequence has. Plain structs, passed by value; pointers are the
// device's. describe.hpp makes them from the library's own descriptions.
#pragma once

#include "kernels/context.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t slots_of_group = 16;
inline constexpr uint32_t block_unit_bytes = 64;  ///< a block id counts these
inline constexpr uint32_t most_dim = 256;         ///< channels of a head; a multiple of 8
inline constexpr uint32_t no_sequence = 0xffffffffu;

/// How a row is stored. All but plain and tiles are records: codes, then metadata, in words of 4
/// bytes (format/packed_codes.hpp). What formats store alike has one name here.
enum class coding : uint32_t {
    plain,       ///< elements
    int8_token,  ///< signed bytes, f32 step
    int4_token,  ///< nibbles, f16 step, f16 least; also turbo4's values
    fp8_token,   ///< e4m3, f32 step
    fp8_e4m3,    ///< static step of the head
    fp8_e5m2,
    q8_0,           ///< signed bytes, an f16 step for 32 channels
    q4_0,           ///< nibbles, the same
    q4_1,           ///< nibbles, f16 step and f16 least for 32 channels; also kivi4's values
    nvfp4,          ///< e2m1, an e4m3 step for 16 channels, times that of the head
    mxfp4,          ///< e2m1, an e8m0 step for 32 channels
    turbo4_keys,    ///< levels of a normal distribution, f16 factor
    turbo3_keys,    ///< the same in 3 bits
    turbo3_values,  ///< as int4_token in 3 bits
    affine4,        ///< q4_1 of what is left of keys that were levelled
    kivi2_values,   ///< as q4_1 in 2 bits
    kivi4_tile,     ///< from here on tiles: keys
    kivi2_tile,
    kvarn4_key_tile,
    kvarn2_key_tile,
    kvarn4_value_tile,
    kvarn2_value_tile,
};

/// Tiles lie in one piece per head, at `offset`, and have no words. They are sealed, not written.
KVRT_BOTH constexpr bool is_tile(coding codes) { return codes >= coding::kivi4_tile; }

/// Keys whose encoders take twice as many registers as the others': kernels that write them are
/// compiled apart.
KVRT_BOTH constexpr bool is_elaborate(coding codes) {
    return codes == coding::turbo4_keys || codes == coding::turbo3_keys || codes == coding::affine4;
}

/// How keys are turned by their position (format/position_rotation.hpp).
struct turning_place {
    uint32_t pairs = 0;
    bool interleaved = false;
    float gain = 1.0f;
    const float* table = nullptr;
};

/// Keys or values of a block. Strides in bytes; a block is smaller than 2 MiB.
struct operand_place {
    coding codes = coding::plain;
    number type = number::f16;  ///< of plain elements
    uint32_t dim = 0;
    uint32_t words = 0;  ///< of a row
    uint32_t word_bytes = 2;
    uint32_t offset = 0;
    uint32_t group_stride = 0;  ///< between groups of 16 slots
    uint32_t slot_stride = 0;   ///< within a group
    uint32_t head_stride = 0;
    uint32_t word_stride = 0;              ///< word_bytes where rows lie in one piece
    bool inline_form = false;              ///< metadata in front of the codes of each group
    bool rotated = false;                  ///< in the basis of format/rotation.hpp
    uint32_t tile_tokens = 0;              ///< of tiles: rows, those of a block
    const float* scales = nullptr;         ///< [kv_heads] of static formats
    const float* channel_means = nullptr;  ///< [kv_heads][dim] of affine4, with what follows
    const float* channel_scales = nullptr;
    turning_place turning;

    KVRT_DEVICE uint32_t at(uint32_t slot, uint32_t head, uint32_t word) const {
        return offset + slot / slots_of_group * group_stride + slot % slots_of_group * slot_stride +
               head * head_stride + word * word_stride;
    }
    KVRT_BOTH bool by_rows() const { return word_stride == word_bytes; }
    KVRT_BOTH uint32_t row_bytes() const { return words * word_bytes; }
};

struct block_place {
    uint32_t block_tokens = 16;  ///< a multiple of 16
    uint32_t kv_heads = 0;
    uint32_t block_bytes = 0;  ///< a multiple of 64
    operand_place keys;
    operand_place values;
};

/// Block ids of a lane: [sequences][stride]; shifted to the left by `shift` they count units.
struct block_tables {
    const uint32_t* ids = nullptr;
    uint64_t stride = 0;
    uint32_t shift = 0;

    KVRT_DEVICE const uint32_t* of(uint32_t sequence) const {
        return ids + uint64_t{sequence} * stride;
    }
};

KVRT_DEVICE std::byte* block_at(std::byte* arena, uint32_t id) {
    return arena + uint64_t{id} * block_unit_bytes;
}
KVRT_DEVICE const std::byte* block_at(const std::byte* arena, uint32_t id) {
    return arena + uint64_t{id} * block_unit_bytes;
}

/// Explicit positions of slots, beside the arena (memory/block_id.hpp). Without base there are
/// none.
struct position_place {
    uint32_t* base = nullptr;
    uint64_t reciprocal = 0;
    uint32_t units_per_slab = 1;
    uint32_t blocks_per_slab = 1;
    uint32_t block_stride = 0;
    uint32_t block_tokens = 16;

    KVRT_DEVICE uint32_t* of(uint32_t id, uint32_t head) const {
        const uint32_t in_slab = static_cast<uint32_t>(id % units_per_slab * reciprocal >> 32);
        const uint64_t index = uint64_t{id / units_per_slab} * blocks_per_slab + in_slab;
        return base + index * block_stride + head * block_tokens;
    }
};

/// [rows, heads, dim] in the caller's memory; strides in elements.
struct tensor_place {
    std::byte* data = nullptr;
    int64_t row_stride = 0, head_stride = 0, dim_stride = 1;
};

}  // namespace kvrt::kernels
