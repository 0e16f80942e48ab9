// Models and pools that the streams run over, as plain data from which kv_model is built.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kvrt/kvrt.h"

namespace property {

struct layer_spec {
    uint32_t query_heads = 1;
    uint32_t kv_heads = 1;
    uint32_t key_dim = 32;
    uint32_t value_dim = 32;
    uint32_t key_format = KV_FORMAT_F32;
    uint32_t value_format = KV_FORMAT_F32;
    int32_t shared_layer = -1;  // -1: stores by itself
    uint32_t window = 0;
    uint32_t window_sinks = 0;
    float softcap = 0.0f;
    std::vector<float> sink_logits = {};
    std::vector<float> alibi_slopes = {};
    uint32_t rope_style = KV_ROPE_HALF;
    uint32_t rope_dimensions = 0;  // 0: all of key_dim
    double attention_factor = 1.0;
    bool lane_per_head = false;

    uint32_t group() const { return query_heads / kv_heads; }
    uint32_t rotated() const {
        if (rope_style == KV_ROPE_NONE) return 0;
        return rope_dimensions != 0 ? rope_dimensions : key_dim;
    }
    uint32_t bands() const { return key_dim - rotated() / 2; }
};

struct pool_spec {
    std::string name;
    std::vector<layer_spec> layers;
    uint32_t layout = KV_LAYOUT_NATIVE;
    uint32_t block_tokens = 16;
    uint32_t flags = 0;
    uint32_t slabs = 2;
    uint32_t max_sequences = 10;
    uint32_t max_tokens = 256;
    uint32_t max_step_sequences = 6;
    uint32_t max_step_tokens = 96;
    uint32_t threads = 1;
    uint32_t max_observed_sequences = 4;

    bool host_fences() const { return (flags & KV_POOL_HOST_FENCES) != 0; }
};

inline constexpr double rope_theta = 10000.0;

/// KV heads [first_head, first_head + kv_heads) of a layer that stores.
struct lane_spec {
    uint32_t layer = 0;
    uint32_t first_head = 0, kv_heads = 0;
};

/// What has its own block tables, in order: layers that store, or their KV heads.
std::vector<lane_spec> lane_specs(const pool_spec& spec);

/// Lane in which a layer reads a KV head.
uint32_t lane_of(const pool_spec& spec, uint32_t layer, uint32_t kv_head);

/// Bytes of a block, from kvrt.h's description of the layouts.
uint64_t block_bytes(const pool_spec& spec, uint32_t lane);

/// Does a policy choose this lane's survivors? Not where any reader masks by a window.
bool evictable(const pool_spec& spec, uint32_t lane);

/// `value` rounded to nearest even in a storage format.
float round_to_format(double value, uint32_t format);

uint32_t format_bytes(uint32_t format);

/// What kv_model points to: `ropes` and the spec itself have to outlive its use.
std::vector<kv_layer> layers_of(const pool_spec& spec, std::vector<kv_rope>& ropes);

/// Creates the pool; throws property::mismatch when that fails.
kv_pool* create_pool(const pool_spec& spec, const kv_hooks* hooks = nullptr);

/// The geometries of the default streams; the last of them are drawn.
std::vector<pool_spec> stream_specs(uint64_t seed = 1);

}  // namespace property
