#include "geometry.hpp"

#include <algorithm>
#include <cmath>
#include <random>

#include "mismatch.hpp"

namespace property {

std::vector<lane_spec> lane_specs(const pool_spec& spec) {
    std::vector<lane_spec> lanes;
    for (uint32_t i = 0; i < spec.layers.size(); ++i) {
        const layer_spec& layer = spec.layers[i];
        if (layer.shared_layer >= 0) continue;
        const uint32_t heads = layer.lane_per_head ? 1 : layer.kv_heads;
        for (uint32_t first = 0; first < layer.kv_heads; first += heads) {
            lanes.push_back({i, first, heads});
        }
    }
    return lanes;
}

uint32_t lane_of(const pool_spec& spec, uint32_t layer, uint32_t kv_head) {
    const int32_t shared = spec.layers[layer].shared_layer;
    const uint32_t owner = shared < 0 ? layer : static_cast<uint32_t>(shared);
    const std::vector<lane_spec> lanes = lane_specs(spec);
    const auto found = std::find_if(lanes.begin(), lanes.end(), [&](const lane_spec& lane) {
        return lane.layer == owner && kv_head < lane.first_head + lane.kv_heads;
    });
    return static_cast<uint32_t>(found - lanes.begin());
}

uint32_t format_bytes(uint32_t format) { return format == KV_FORMAT_F32 ? 4 : 2; }

uint64_t block_bytes(const pool_spec& spec, uint32_t lane) {
    const lane_spec stored = lane_specs(spec)[lane];
    const layer_spec& layer = spec.layers[stored.layer];
    const auto padded = [](uint64_t bytes) { return (bytes + 63) / 64 * 64; };
    const uint64_t keys =
        uint64_t{spec.block_tokens} * layer.key_dim * format_bytes(layer.key_format);
    const uint64_t values =
        uint64_t{spec.block_tokens} * layer.value_dim * format_bytes(layer.value_format);
    if (spec.layout == KV_LAYOUT_NATIVE) return stored.kv_heads * (padded(keys) + padded(values));
    return padded(stored.kv_heads * keys) + padded(stored.kv_heads * values);
}

bool evictable(const pool_spec& spec, uint32_t lane) {
    for (uint32_t layer = 0; layer < spec.layers.size(); ++layer) {
        for (uint32_t head = 0;
             spec.layers[layer].window != 0 && head < spec.layers[layer].kv_heads; ++head) {
            if (lane_of(spec, layer, head) == lane) return false;
        }
    }
    return true;
}

float round_to_format(double value, uint32_t format) {
    if (format == KV_FORMAT_F32) return static_cast<float>(value);
    if (value == 0.0) return static_cast<float>(value);
    const int mantissa_bits = format == KV_FORMAT_F16 ? 10 : 7;
    const int smallest_exponent = format == KV_FORMAT_F16 ? -14 : -126;
    const int exponent = std::max(std::ilogb(value), smallest_exponent);
    const double unit = std::ldexp(1.0, exponent - mantissa_bits);
    return static_cast<float>(std::nearbyint(value / unit) * unit);
}

std::vector<kv_layer> layers_of(const pool_spec& spec, std::vector<kv_rope>& ropes) {
    std::vector<kv_layer> layers(spec.layers.size());
    ropes.resize(spec.layers.size());
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const layer_spec& source = spec.layers[i];
        kv_rope& rope = ropes[i] = KV_INIT(kv_rope);
        rope.style = source.rope_style;
        rope.dimensions = source.rope_dimensions;
        rope.theta = rope_theta;
        rope.attention_factor = source.attention_factor;
        kv_layer& layer = layers[i] = KV_INIT(kv_layer);
        layer.flags = source.shared_layer >= 0 ? uint32_t{KV_LAYER_SHARED}
                      : source.lane_per_head   ? uint32_t{KV_LAYER_LANE_PER_HEAD}
                                               : 0u;
        layer.shared_layer =
            source.shared_layer >= 0 ? static_cast<uint32_t>(source.shared_layer) : 0u;
        layer.query_heads = source.query_heads;
        layer.kv_heads = source.kv_heads;
        layer.key_dim = source.key_dim;
        layer.value_dim = source.value_dim;
        layer.key_format = source.key_format;
        layer.value_format = source.value_format;
        layer.window = source.window;
        layer.window_sinks = source.window_sinks;
        layer.logit_softcap = source.softcap;
        layer.sink_logits = source.sink_logits.empty() ? nullptr : source.sink_logits.data();
        layer.alibi_slopes = source.alibi_slopes.empty() ? nullptr : source.alibi_slopes.data();
        layer.rope = &rope;
    }
    return layers;
}

kv_pool* create_pool(const pool_spec& spec, const kv_hooks* hooks) {
    std::vector<kv_rope> ropes;
    const std::vector<kv_layer> layers = layers_of(spec, ropes);
    kv_model model = KV_INIT(kv_model);
    model.layers = layers.data();
    model.layer_count = static_cast<uint32_t>(layers.size());
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.flags = spec.flags;
    config.arena_bytes = uint64_t{spec.slabs} << 21;
    config.layout = spec.layout;
    config.block_tokens = spec.block_tokens;
    config.max_sequences = spec.max_sequences;
    config.max_tokens_per_sequence = spec.max_tokens;
    config.max_step_sequences = spec.max_step_sequences;
    config.max_step_tokens = spec.max_step_tokens;
    config.threads = spec.threads;
    config.hooks = hooks;
    config.max_observed_sequences = spec.max_observed_sequences;
    kv_pool* pool = nullptr;
    require_ok(kv_pool_create(&config, &model, &pool), "kv_pool_create");
    return pool;
}

namespace {

layer_spec plain(uint32_t query_heads, uint32_t kv_heads, uint32_t key_dim, uint32_t value_dim,
                 uint32_t key_format, uint32_t value_format) {
    layer_spec layer;
    layer.query_heads = query_heads;
    layer.kv_heads = kv_heads;
    layer.key_dim = key_dim;
    layer.value_dim = value_dim;
    layer.key_format = key_format;
    layer.value_format = value_format;
    return layer;
}

layer_spec windowed(layer_spec layer, uint32_t window, uint32_t sinks) {
    layer.window = window;
    layer.window_sinks = sinks;
    return layer;
}

layer_spec shared(layer_spec layer, int32_t owner) {
    layer.shared_layer = owner;
    return layer;
}

layer_spec biased(layer_spec layer, bool alibi, bool sinks, float softcap) {
    layer.softcap = softcap;
    for (uint32_t head = 0; head < layer.query_heads; ++head) {
        if (alibi) layer.alibi_slopes.push_back(std::ldexp(1.0f, -2 - static_cast<int>(head)));
        if (sinks) layer.sink_logits.push_back(0.5f * static_cast<float>(head) - 0.75f);
    }
    return layer;
}

layer_spec rotated(layer_spec layer, uint32_t style, uint32_t dimensions, double factor) {
    layer.rope_style = style;
    layer.rope_dimensions = dimensions;
    layer.attention_factor = factor;
    return layer;
}

layer_spec per_head(layer_spec layer) {
    layer.lane_per_head = true;
    return layer;
}

}  // namespace

std::vector<pool_spec> stream_specs(uint64_t seed) {
    const uint32_t f32 = KV_FORMAT_F32, f16 = KV_FORMAT_F16, bf16 = KV_FORMAT_BF16;
    std::vector<pool_spec> specs;
    {
        pool_spec spec;
        spec.name = "heads of their own, f32, native, debug";
        spec.layers = {plain(2, 2, 32, 32, f32, f32), plain(2, 2, 32, 32, f32, f32)};
        spec.flags = KV_POOL_DEBUG;
        spec.slabs = 1;
        spec.max_tokens = 320;
        spec.max_sequences = 32;
        specs.push_back(spec);
    }
    {
        pool_spec spec;
        spec.name = "grouped heads, keys wider than values, f16 and bf16, HND, elastic";
        const layer_spec layer = plain(4, 2, 64, 32, f16, bf16);
        spec.layers = {layer, layer, plain(4, 2, 32, 48, bf16, f16)};
        spec.layout = KV_LAYOUT_HND;
        spec.flags = KV_POOL_ELASTIC;
        spec.slabs = 4;
        specs.push_back(spec);
    }
    {
        pool_spec spec;
        spec.name = "one KV head, windows and sinks, native, debug";
        const layer_spec layer = plain(4, 1, 40, 48, f16, f16);
        spec.layers = {windowed(layer, 24, 4), layer, windowed(layer, 70, 0),
                       windowed(plain(4, 1, 40, 48, f32, bf16), 16, 20)};
        spec.flags = KV_POOL_DEBUG | KV_POOL_ELASTIC;
        spec.slabs = 3;
        specs.push_back(spec);
    }
    {
        pool_spec spec;
        spec.name = "layers that share caches, NHD, blocks of 32, host fences";
        const layer_spec layer = plain(2, 1, 32, 32, bf16, bf16);
        spec.layers = {biased(layer, false, true, 8.0f), shared(plain(4, 1, 32, 32, bf16, bf16), 0),
                       windowed(layer, 40, 2), shared(windowed(layer, 9, 1), 2),
                       plain(2, 1, 32, 32, bf16, bf16)};
        spec.layout = KV_LAYOUT_NHD;
        spec.block_tokens = 32;
        spec.flags = KV_POOL_HOST_FENCES;
        spec.slabs = 1;
        specs.push_back(spec);
    }
    {
        pool_spec spec;
        spec.name = "ALiBi and sink logits, blocks of 32, thread-safe, two threads";
        spec.layers = {biased(plain(4, 2, 32, 40, f16, f16), true, true, 0.0f),
                       biased(plain(4, 2, 32, 40, f16, f32), true, false, 20.0f)};
        spec.block_tokens = 32;
        spec.flags = KV_POOL_THREAD_SAFE;
        spec.threads = 2;
        specs.push_back(spec);
    }
    {
        pool_spec spec;
        spec.name = "three block classes in four slabs, blocks of 64, elastic, debug";
        spec.layers = {plain(2, 2, 128, 32, f32, f32), plain(2, 2, 64, 64, f16, f16),
                       windowed(plain(2, 2, 128, 128, bf16, f32), 50, 3)};
        spec.block_tokens = 64;
        spec.flags = KV_POOL_ELASTIC | KV_POOL_DEBUG;
        spec.slabs = 4;
        specs.push_back(spec);
    }
    {
        pool_spec spec;
        spec.name = "rotations for TriAttention, native";
        spec.layers = {rotated(plain(4, 2, 32, 32, f16, f16), KV_ROPE_HALF, 0, 1.0),
                       rotated(plain(4, 2, 48, 32, f32, f16), KV_ROPE_INTERLEAVED, 32, 1.25),
                       rotated(plain(4, 2, 32, 32, bf16, bf16), KV_ROPE_NONE, 0, 1.0)};
        spec.slabs = 3;
        specs.push_back(spec);
    }
    {
        pool_spec spec;
        spec.name = "a small pool of large blocks, host fences, debug";
        const layer_spec layer = plain(8, 8, 32, 32, f32, f32);
        spec.layers = {layer, layer};
        spec.flags = KV_POOL_HOST_FENCES | KV_POOL_DEBUG;
        spec.slabs = 1;
        spec.max_sequences = 24;
        specs.push_back(spec);
    }
    {
        pool_spec spec;
        spec.name = "lanes per head beside ordinary ones, shared and with windows, debug, elastic";
        const layer_spec layer = plain(4, 2, 32, 48, f16, f32);
        spec.layers = {per_head(layer), layer,
                       shared(biased(plain(2, 2, 32, 48, f16, f32), true, true, 0.0f), 0),
                       windowed(per_head(plain(6, 3, 32, 32, bf16, bf16)), 30, 3),
                       shared(windowed(plain(3, 3, 32, 32, bf16, bf16), 12, 2), 3)};
        spec.flags = KV_POOL_DEBUG | KV_POOL_ELASTIC;
        spec.slabs = 3;
        specs.push_back(spec);
    }
    {
        pool_spec spec;
        spec.name = "lanes per head of four layers, rotations, biases, HND, host fences, threads";
        spec.layers = {
            per_head(rotated(plain(4, 2, 32, 32, f16, f16), KV_ROPE_HALF, 0, 1.0)),
            per_head(rotated(plain(2, 2, 48, 32, f32, f16), KV_ROPE_INTERLEAVED, 32, 1.25)),
            per_head(biased(plain(2, 2, 40, 32, f16, bf16), true, false, 20.0f)),
            rotated(plain(4, 2, 32, 32, f16, f16), KV_ROPE_HALF, 0, 1.0)};
        spec.layout = KV_LAYOUT_HND;
        spec.block_tokens = 32;
        spec.flags = KV_POOL_HOST_FENCES;
        spec.slabs = 4;
        spec.threads = 2;
        specs.push_back(spec);
    }
    // Any of those before, with some of their layers' heads in lanes of their own.
    std::mt19937_64 random(seed);
    for (uint32_t drawn = 0; drawn < 3; ++drawn) {
        pool_spec spec = specs[random() % specs.size()];
        spec.name += ", some lanes per head";
        for (layer_spec& layer : spec.layers) {
            layer.lane_per_head = layer.shared_layer < 0 && random() % 3 != 0;
        }
        specs.push_back(spec);
    }
    return specs;
}

}  // namespace property
