// From kv_model to layers, lanes and block classes: what is resolved, and what messages say.
#include "model/geometry.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <string>
#include <vector>

using namespace kvrt;

namespace {

kv_layer plain_layer() {
    kv_layer layer = KV_INIT(kv_layer);
    layer.query_heads = 8;
    layer.kv_heads = 2;
    layer.key_dim = 128;
    return layer;
}

struct described {
    host_allocator allocator;
    model_geometry model;
    status verdict;
    std::string message;

    explicit described(const std::vector<kv_layer>& layers, uint32_t block_tokens = 16,
                       tile_order order = tile_order::native) {
        kv_model description = KV_INIT(kv_model);
        description.layers = layers.data();
        description.layer_count = static_cast<uint32_t>(layers.size());
        verdict = describe_model(&description, block_tokens, order, allocator, model);
        if (verdict < 0) message = message_buffer();
    }
    bool says(const std::string& words) const { return message.find(words) != std::string::npos; }
};

TEST_CASE("defaults: values like keys, f16, scale 1 / sqrt(key_dim), one class for equal blocks") {
    const described d({plain_layer(), plain_layer()});
    REQUIRE(d.verdict == KV_OK);
    REQUIRE(d.model.layers.size() == 2);
    REQUIRE(d.model.lanes.size() == 2);
    CHECK(d.model.class_count == 1);
    const lane_geometry& lane = d.model.lanes[1];
    CHECK(lane.layer == 1);
    CHECK(lane.layout.keys.type == element::f16);
    CHECK(lane.layout.values.type == element::f16);
    CHECK(lane.layout.values.dim == 128);
    CHECK(lane.layout.block_bytes == 16 * 2 * (128 + 128) * 2);
    CHECK(lane.evictable);
    CHECK(d.model.classes[0].block_bytes == lane.layout.block_bytes);
    CHECK(d.model.classes[0].positions_per_block == 2 * 16);
    CHECK(d.model.layers[0].scale == 1.0f / std::sqrt(128.0f));
    CHECK(d.model.layers[0].softcap == 0.0f);
    CHECK(d.model.layers[0].sink_logits == nullptr);
    CHECK_FALSE(d.model.layers[0].rope_known);
    CHECK(d.model.blocks_for(0) == 0);
    CHECK(d.model.blocks_for(1) == 1);
    CHECK(d.model.blocks_for(17) == 2);
}

TEST_CASE("classes: by bytes alone; positions for the lane with the most heads") {
    std::vector<kv_layer> layers(3, plain_layer());
    layers[0].value_format = KV_FORMAT_F32;  // 16 * 2 * (128 * 2 + 128 * 4)
    layers[1].kv_heads = 4;                  // 16 * 4 * (48 * 4 + 96 * 2): the same
    layers[1].key_dim = 48;
    layers[1].value_dim = 96;
    layers[1].key_format = KV_FORMAT_F32;
    layers[1].value_format = KV_FORMAT_BF16;
    const described d(layers);
    REQUIRE(d.verdict == KV_OK);
    CHECK(d.model.lanes[0].layout.block_bytes == 24576);
    CHECK(d.model.lanes[1].layout.block_bytes == 24576);
    CHECK(d.model.class_count == 2);
    CHECK(d.model.lanes[0].class_index == d.model.lanes[1].class_index);
    CHECK(d.model.classes[0].positions_per_block == 4 * 16);
}

TEST_CASE("a layer that shares a cache owns no lane; its window keeps the owner's tokens") {
    std::vector<kv_layer> layers(4, plain_layer());
    layers[1].flags = KV_LAYER_SHARED;
    layers[1].shared_layer = 0;
    layers[1].query_heads = 32;
    layers[1].softmax_scale = 0.5f;
    layers[3].flags = KV_LAYER_SHARED;
    layers[3].shared_layer = 2;
    layers[3].window = 100;
    const described d(layers);
    REQUIRE(d.verdict == KV_OK);
    REQUIRE(d.model.lanes.size() == 2);
    CHECK_FALSE(d.model.layers[1].stores);
    CHECK(d.model.layers[1].lane == d.model.layers[0].lane);
    CHECK(d.model.layers[1].query_heads == 32);
    CHECK(d.model.layers[1].scale == 0.5f);
    CHECK(d.model.lanes[0].evictable);
    // A policy's sets would differ from head to head at the window's edge.
    CHECK_FALSE(d.model.lanes[1].evictable);
    CHECK(d.model.lanes[1].window == 0);
    CHECK(d.model.layers[3].window == 100);
}

TEST_CASE("a narrower window may share a wider one's cache") {
    std::vector<kv_layer> layers(2, plain_layer());
    layers[0].window = 64;
    layers[0].window_sinks = 4;
    layers[1].flags = KV_LAYER_SHARED;
    layers[1].window = 64;
    layers[1].window_sinks = 4;
    CHECK(described(layers).verdict == KV_OK);
    layers[1].window = 32;
    layers[1].window_sinks = 0;
    CHECK(described(layers).verdict == KV_OK);
    layers[1].window = 65;
    const described wider(layers);
    CHECK(wider.verdict == KV_INVALID);
    CHECK(wider.says("layer 1"));
    CHECK(wider.says("window"));
    layers[1].window = 0;
    CHECK(described(layers).verdict == KV_INVALID);
}

TEST_CASE("per-head numbers are copied") {
    std::vector<float> sinks(8, 1.0f);
    std::vector<float> slopes(8, 2.0f);
    std::vector<kv_layer> layers(2, plain_layer());
    layers[0].sink_logits = sinks.data();
    layers[1].alibi_slopes = slopes.data();
    layers[1].sink_logits = sinks.data();
    const described d(layers);
    REQUIRE(d.verdict == KV_OK);
    sinks.assign(8, 9.0f);
    slopes.assign(8, 9.0f);
    for (uint32_t head = 0; head < 8; ++head) {
        CHECK(d.model.layers[0].sink_logits[head] == 1.0f);
        CHECK(d.model.layers[1].sink_logits[head] == 1.0f);
        CHECK(d.model.layers[1].alibi_slopes[head] == 2.0f);
    }
    CHECK(d.model.layers[0].alibi_slopes == nullptr);
}

TEST_CASE("dimensions: 32 to 256 in steps of 8, keys and values apart") {
    for (uint32_t dim = 0; dim <= 300; ++dim) {
        const bool good = dim >= 32 && dim <= 256 && dim % 8 == 0;
        kv_layer layer = plain_layer();
        layer.key_dim = dim;
        layer.value_dim = 64;
        const described keys({layer});
        CHECK((keys.verdict == KV_OK) == good);
        if (!good) CHECK(keys.says("layer 0: key_dim is " + std::to_string(dim)));
        layer = plain_layer();
        layer.value_dim = dim;
        CHECK((described({layer}).verdict == KV_OK) == (good || dim == 0));
    }
}

TEST_CASE("messages name the layer and the field") {
    struct attack {
        status expected;
        const char* words;
        void (*change)(kv_layer&);
    };
    const attack attacks[] = {
        {KV_INVALID, "query_heads 7", [](kv_layer& l) { l.query_heads = 7; }},
        {KV_INVALID, "kv_heads 0", [](kv_layer& l) { l.kv_heads = 0; }},
        {KV_UNSUPPORTED, "key_format is 9", [](kv_layer& l) { l.key_format = 9; }},
        {KV_UNSUPPORTED, "value_format is 9", [](kv_layer& l) { l.value_format = 9; }},
        {KV_INVALID, "softmax_scale", [](kv_layer& l) { l.softmax_scale = -1.0f; }},
        {KV_INVALID, "logit_softcap", [](kv_layer& l) { l.logit_softcap = INFINITY; }},
        {KV_INVALID, "window_sinks is 3", [](kv_layer& l) { l.window_sinks = 3; }},
        {KV_INVALID, "shared_layer 5",
         [](kv_layer& l) {
             l.flags = KV_LAYER_SHARED;
             l.shared_layer = 5;
         }},
    };
    for (const attack& a : attacks) {
        CAPTURE(a.words);
        std::vector<kv_layer> layers(6, plain_layer());
        a.change(layers[5]);
        const described d(layers);
        CHECK(d.verdict == a.expected);
        CHECK(d.says("layer 5"));
        CHECK(d.says(a.words));
    }
}

TEST_CASE("a block must fit a slab, with its guard") {
    kv_layer layer = plain_layer();
    layer.query_heads = 64;
    layer.kv_heads = 64;
    layer.key_format = KV_FORMAT_F32;
    // 16 * 64 * 256 * 4 bytes = 1 MiB, and 128 tokens are 8 times that.
    CHECK(described({layer}).verdict == KV_OK);
    const described large({layer}, 128);
    CHECK(large.verdict == KV_UNSUPPORTED);
    CHECK(large.says("block_tokens"));
    const described exact({layer}, 32);  // 2 MiB leave no room for the guard
    CHECK(exact.verdict == KV_UNSUPPORTED);
}

TEST_CASE("16 sizes of blocks, not 17") {
    std::vector<kv_layer> layers;
    for (uint32_t dim = 32; dim < 32 + 8 * 16; dim += 8) {
        layers.push_back(plain_layer());
        layers.back().key_dim = dim;
        layers.back().value_dim = 32;
    }
    CHECK(described(layers).verdict == KV_OK);
    layers.push_back(plain_layer());
    CHECK(described(layers).verdict == KV_UNSUPPORTED);
}

}  // namespace
