// The geometry of a model, checked, as data: what kv_model says, resolved into layers, lanes and
// block classes. A new architecture is a new description, not a new branch.
//
//   layer   what attends: heads, scale, window, biases. A layer that shares another's cache points
//           to the owner's lanes and stores nothing.
//   lane    what stores: one per owning layer, or one for each of its KV heads; has a block class
//           and a tile layout. With a tile-local format, or where older blocks are demoted to a
//           smaller one, it has two of each: blocks are written in one, and sealed into the other
//           when they are full, or old. Lanes of a layer follow each other, by KV head.
//   class   all lanes whose blocks have the same number of bytes.
#pragma once

#include <array>

#include "base/host_memory.hpp"
#include "format/tile.hpp"
#include "memory/blocks.hpp"
#include "model/layer_array.hpp"
#include "model/rope.hpp"

namespace kvrt {

inline constexpr uint32_t max_heads = 1024;
inline constexpr uint32_t max_lanes = 8191;  ///< of a model
inline constexpr uint32_t min_head_dim = 32;
inline constexpr uint32_t max_head_dim = 256;
inline constexpr uint32_t head_dim_multiple = 8;
inline constexpr uint32_t max_demote_after = 1u << 30;
inline constexpr uint32_t never_demoted = ~uint32_t{0};

/// Where a KV head of a layer is stored.
struct head_place {
    uint32_t lane = 0;
    uint32_t head = 0;  ///< in the lane
};

struct layer_geometry {
    uint32_t first_lane = 0;
    uint32_t lanes = 1;  ///< 1, or kv_heads: one each
    bool stores = true;  ///< false: attends over another layer's lanes
    uint32_t query_heads = 0;
    uint32_t kv_heads = 0;
    uint32_t window = 0;
    uint32_t window_sinks = 0;
    float scale = 1.0f;
    float softcap = 0.0f;
    const float* sink_logits = nullptr;   ///< [query_heads], owned by model_geometry
    const float* alibi_slopes = nullptr;  ///< [query_heads], owned by model_geometry
    bool rope_known = false;              ///< the host described it (style NONE counts)
    rope_description rope;
    bool cache_positions = false;  ///< queries and keys come before rotation, and are stored so
    const position_rotation* slot_turning = nullptr;  ///< what attention turns them by then

    uint32_t end_lane() const { return first_lane + lanes; }
    uint32_t group() const { return query_heads / kv_heads; }
    /// Attention has something to rotate.
    bool slot_rotated() const { return cache_positions && rope.rotated_bands() != 0; }
    const rope_description& stored_rope() const { return cache_positions ? not_rotated : rope; }
    head_place place_of(uint32_t kv_head) const {
        return lanes == 1 ? head_place{first_lane, kv_head} : head_place{first_lane + kv_head, 0};
    }
};

struct lane_geometry {
    uint32_t layer = 0;
    uint32_t class_index = 0;
    uint32_t kv_heads = 0;
    uint32_t first_head = 0;  ///< the layer's KV head that is this lane's head 0
    uint32_t window = 0;
    uint32_t window_sinks = 0;
    /// Of 2 * the layer's kv_heads: saturated keys, then values, by KV head of the layer.
    uint32_t first_counter = 0;
    /// Policies may choose its survivors: no reader of this lane masks by a window, whose edge
    /// would differ from head to head once sets of survivors do.
    bool evictable = true;
    uint64_t key_identity = 0;  ///< model/identity.hpp
    uint64_t value_identity = 0;
    tile_layout layout;  ///< as rows are written
    bool seals = false;  ///< what follows differs from how rows are written
    tile_layout sealed_layout;
    uint32_t sealed_class_index = 0;
    /// Sealing is demotion to a token-local format: of blocks behind the newest so many slots.
    bool demotes = false;
    uint32_t demote_after = 0;  ///< never_demoted: only when asked
};

struct model_geometry {
    uint32_t block_tokens = 16;
    host_array<layer_geometry> layers;
    host_array<lane_geometry> lanes;
    std::array<block_store::class_description, max_block_classes> classes = {};
    uint32_t class_count = 0;
    uint32_t counters = 0;                   ///< of all layers that store
    host_array<float> head_values;           ///< sink logits, ALiBi slopes, constants of operands
    host_array<position_rotation> turnings;  ///< of keys that are turned here; each once
    host_array<float> turning_tables;

    uint32_t blocks_for(uint32_t slots) const { return ceil_divide(slots, block_tokens); }
};

/// Checks and resolves a model. Messages name the layer and the field.
status describe_model(const kv_model* model, uint32_t block_tokens, tile_order order,
                      host_allocator& allocator, model_geometry& out);

}  // namespace kvrt
