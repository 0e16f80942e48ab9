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

/// How a row is stored. All but plain are records: codes, then metadata, in words of 4 bytes.
enum class coding : uint32_t {
    plain,       ///< elements
    int8_token,  ///< signed bytes, f32 step
    int4_token,  ///< nibbles, f16 step, f16 least
    fp8_token,   ///< e4m3, f32 step
    fp8_e4m3,    ///< static step of the head
    fp8_e5m2,
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
    uint32_t word_stride = 0;       ///< word_bytes where rows lie in one piece
    const float* scales = nullptr;  ///< [kv_heads] of static formats

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

/// Block ids of a lane: [sequences][stride].
struct block_tables {
    const uint32_t* ids = nullptr;
    uint64_t stride = 0;

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
