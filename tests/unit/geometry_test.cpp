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
    CHECK(d.model.layers[1].first_lane == d.model.layers[0].first_lane);
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
        {KV_UNSUPPORTED, "key_format is 200", [](kv_layer& l) { l.key_format = 200; }},
        {KV_UNSUPPORTED, "value_format is 201", [](kv_layer& l) { l.value_format = 201; }},
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

TEST_CASE("static scales: of the layer or of each head, copied; SCALE_ONE where none is meant") {
    float of_keys[] = {0.5f, 3.0f};
    float of_values[] = {0.25f};
    kv_storage key_storage = KV_INIT(kv_storage);
    key_storage.scales = of_keys;
    key_storage.scale_count = 2;
    kv_storage value_storage = KV_INIT(kv_storage);
    value_storage.scales = of_values;
    value_storage.scale_count = 1;
    kv_storage one = KV_INIT(kv_storage);
    one.flags = KV_STORAGE_SCALE_ONE;

    std::vector<kv_layer> layers(3, plain_layer());
    layers[0].key_format = KV_FORMAT_FP8_E4M3;
    layers[0].value_format = KV_FORMAT_FP8_E5M2;
    layers[0].key_storage = &key_storage;
    layers[0].value_storage = &value_storage;
    layers[1].key_format = KV_FORMAT_FP8_E4M3;
    layers[1].key_storage = &one;
    layers[1].value_storage = &one;
    layers[2].key_format = KV_FORMAT_NVFP4;   // takes scales, and 1.0 where there are none
    layers[2].value_format = KV_FORMAT_Q8_0;  // has no use for them
    layers[2].value_storage = &value_storage;
    const described d(layers);
    REQUIRE(d.verdict == KV_OK);
    of_keys[0] = of_keys[1] = of_values[0] = 99.0f;
    key_storage.scales = value_storage.scales = nullptr;
    for (uint32_t head = 0; head < 2; ++head) {
        CAPTURE(head);
        CHECK(d.model.lanes[0].layout.keys.constants(head).scale == (head == 0 ? 0.5f : 3.0f));
        CHECK(d.model.lanes[0].layout.values.constants(head).scale == 0.25f);
        CHECK(d.model.lanes[1].layout.keys.constants(head).scale == 1.0f);
        CHECK(d.model.lanes[1].layout.values.constants(head).scale == 1.0f);
        CHECK(d.model.lanes[2].layout.keys.constants(head).scale == 1.0f);
    }
    CHECK(d.model.lanes[2].layout.values.scales == nullptr);
    for (const lane_geometry& lane : {d.model.lanes[0], d.model.lanes[2]}) {
        CHECK_FALSE(lane.layout.keys.rotated);
        CHECK_FALSE(lane.layout.values.rotated);
    }
}

TEST_CASE("rotation belongs to one operand") {
    kv_storage rotate = KV_INIT(kv_storage);
    rotate.flags = KV_STORAGE_ROTATE;
    kv_layer layer = plain_layer();
    layer.key_format = KV_FORMAT_Q4_0;
    layer.value_format = KV_FORMAT_F16;
    layer.key_storage = &rotate;
    const described d({layer});
    REQUIRE(d.verdict == KV_OK);
    CHECK(d.model.lanes[0].layout.keys.rotated);
    CHECK_FALSE(d.model.lanes[0].layout.values.rotated);
}

TEST_CASE("formats made for rotated rows get them unasked") {
    kv_layer layer = plain_layer();
    layer.key_format = KV_FORMAT_TURBO3;
    layer.value_format = KV_FORMAT_KIVI4;
    const described d({layer});
    REQUIRE(d.verdict == KV_OK);
    CHECK(d.model.lanes[0].layout.keys.rotated);
    CHECK_FALSE(d.model.lanes[0].layout.values.rotated);
}

TEST_CASE("storage that does not fit its format or its heads is refused, by name") {
    static const float good[] = {0.5f, 3.0f, 1.0f};
    static const float bad[][2] = {{1.0f, NAN}, {1.0f, INFINITY}, {1.0f, 0.0f}, {1.0f, -2.0f}};
    struct attack {
        status expected;
        std::string words;
        uint32_t format;
        void (*change)(kv_storage&);
    };
    const attack attacks[] = {
        {KV_INVALID, "needs static scales", KV_FORMAT_FP8_E4M3, [](kv_storage&) {}},
        {KV_INVALID, "needs static scales", KV_FORMAT_FP8_E5M2, [](kv_storage&) {}},
        {KV_INVALID, "scale_count is 3", KV_FORMAT_FP8_E4M3,
         [](kv_storage& s) { s.scales = good, s.scale_count = 3; }},
        {KV_INVALID, "scales and scale_count", KV_FORMAT_FP8_E4M3,
         [](kv_storage& s) { s.scales = good; }},
        {KV_INVALID, "scales and scale_count", KV_FORMAT_FP8_E4M3,
         [](kv_storage& s) { s.scale_count = 1, s.flags = KV_STORAGE_SCALE_ONE; }},
        {KV_INVALID, "SCALE_ONE", KV_FORMAT_FP8_E4M3,
         [](kv_storage& s) { s.scales = good, s.scale_count = 2, s.flags = KV_STORAGE_SCALE_ONE; }},
        {KV_INVALID, "scales[1] is nan", KV_FORMAT_FP8_E4M3,
         [](kv_storage& s) { s.scales = bad[0], s.scale_count = 2; }},
        {KV_INVALID, "scales[1] is inf", KV_FORMAT_NVFP4,
         [](kv_storage& s) { s.scales = bad[1], s.scale_count = 2; }},
        {KV_INVALID, "scales[1] is 0", KV_FORMAT_FP8_E5M2,
         [](kv_storage& s) { s.scales = bad[2], s.scale_count = 2; }},
        {KV_INVALID, "scales[1] is -2", KV_FORMAT_Q8_0,
         [](kv_storage& s) { s.scales = bad[3], s.scale_count = 2; }},
        {KV_UNSUPPORTED, "f16 is not stored rotated", KV_FORMAT_F16,
         [](kv_storage& s) { s.flags = KV_STORAGE_ROTATE; }},
        {KV_UNSUPPORTED, "f32 is not stored rotated", KV_FORMAT_F32,
         [](kv_storage& s) { s.flags = KV_STORAGE_ROTATE; }},
        {KV_UNSUPPORTED, "bf16 is not stored rotated", KV_FORMAT_BF16,
         [](kv_storage& s) { s.flags = KV_STORAGE_ROTATE; }},
        {KV_UNSUPPORTED, "flags", KV_FORMAT_Q8_0, [](kv_storage& s) { s.flags = 1u << 9; }},
        {KV_UNSUPPORTED, "reserved0", KV_FORMAT_Q8_0, [](kv_storage& s) { s.reserved0 = 1; }},
        {KV_INVALID, "struct_size", KV_FORMAT_Q8_0, [](kv_storage& s) { s.struct_size = 3; }},
    };
    for (const attack& a : attacks) {
        for (const bool value : {false, true}) {
            CAPTURE(a.words);
            CAPTURE(value);
            kv_storage storage = KV_INIT(kv_storage);
            a.change(storage);
            std::vector<kv_layer> layers(2, plain_layer());
            (value ? layers[1].value_format : layers[1].key_format) = a.format;
            if (!value) layers[1].value_format = KV_FORMAT_F16;
            (value ? layers[1].value_storage : layers[1].key_storage) = &storage;
            const described d(layers);
            CHECK(d.verdict == a.expected);
            CHECK(d.says(a.words));
            CHECK(d.says(value ? "value_storage" : "key_storage"));
        }
    }
    kv_layer layer = plain_layer();
    layer.key_format = KV_FORMAT_FP8_E4M3;
    CHECK(described({layer}).verdict == KV_INVALID);  // no storage at all
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

TEST_CASE("lanes per head: one for each KV head, with its part of the layer's constants") {
    std::vector<kv_layer> layers(3, plain_layer());
    const std::vector<float> scales = {0.5f, 3.0f};
    kv_storage storage = KV_INIT(kv_storage);
    storage.scales = scales.data();
    storage.scale_count = 2;
    layers[1].flags = KV_LAYER_LANE_PER_HEAD;
    layers[1].key_format = KV_FORMAT_FP8_E4M3;
    layers[1].value_format = KV_FORMAT_FP8_E4M3;
    layers[1].key_storage = layers[1].value_storage = &storage;
    layers[2].flags = KV_LAYER_SHARED;
    layers[2].shared_layer = 1;
    layers[2].window = 50;
    const described d(layers);
    REQUIRE(d.verdict == KV_OK);
    REQUIRE(d.model.lanes.size() == 3);
    CHECK(d.model.layers[1].first_lane == 1);
    CHECK(d.model.layers[1].lanes == 2);
    CHECK(d.model.layers[1].kv_heads == 2);
    CHECK(d.model.layers[2].first_lane == 1);
    CHECK(d.model.layers[2].lanes == 2);
    for (uint32_t head = 0; head < 2; ++head) {
        const lane_geometry& lane = d.model.lanes[1 + head];
        CHECK(lane.layer == 1);
        CHECK(lane.first_head == head);
        CHECK(lane.kv_heads == 1);
        CHECK(lane.layout.kv_heads == 1);
        CHECK_FALSE(lane.evictable);  // layer 2 masks by a window
        CHECK(lane.layout.keys.constants(0).scale == scales[head]);
        CHECK(lane.sealed_layout.values.constants(0).scale == scales[head]);
        CHECK(d.model.layers[1].place_of(head).lane == 1 + head);
        CHECK(d.model.layers[1].place_of(head).head == 0);
        CHECK(d.model.layers[0].place_of(head).lane == 0);
        CHECK(d.model.layers[0].place_of(head).head == head);
    }
    CHECK(d.model.lanes[1].class_index == d.model.lanes[2].class_index);
    CHECK(d.model.lanes[1].layout.block_bytes == 16 * (128 + 128));
    CHECK(d.model.lanes[1].first_counter == d.model.lanes[2].first_counter);
    // Rows mean other numbers where scales differ, and the same where they do not.
    CHECK(d.model.lanes[1].key_identity != d.model.lanes[2].key_identity);
    CHECK(d.model.lanes[1].key_identity == d.model.lanes[1].value_identity);
}

TEST_CASE("lanes per head: not with a shared cache, and not too many") {
    std::vector<kv_layer> layers(2, plain_layer());
    layers[1].flags = KV_LAYER_SHARED | KV_LAYER_LANE_PER_HEAD;
    const described shared(layers);
    CHECK(shared.verdict == KV_INVALID);
    CHECK(shared.says("layer 1"));
    CHECK(shared.says("KV_LAYER_LANE_PER_HEAD"));
    layers.assign(8, plain_layer());
    for (kv_layer& layer : layers) {
        layer.flags = KV_LAYER_LANE_PER_HEAD;
        layer.query_heads = layer.kv_heads = 1024;
    }
    const described many(layers);
    CHECK(many.verdict == KV_UNSUPPORTED);
    CHECK(many.says("layer 7"));
    CHECK(many.says("8191"));
    layers.pop_back();
    CHECK(described(layers).verdict == KV_OK);
}

TEST_CASE("cache positions: attention rotates, storage does not, and sharers follow their owner") {
    kv_rope half = KV_INIT(kv_rope);
    half.style = KV_ROPE_HALF;
    half.attention_factor = 1.25;
    kv_rope none = KV_INIT(kv_rope);
    std::vector<kv_layer> layers(6, plain_layer());
    for (kv_layer& layer : layers) layer.rope = &half;
    layers[1].flags = KV_LAYER_CACHE_POSITIONS;
    layers[2].flags = KV_LAYER_SHARED;
    layers[2].shared_layer = 1;
    layers[2].rope = nullptr;
    layers[3].flags = KV_LAYER_CACHE_POSITIONS | KV_LAYER_LANE_PER_HEAD;
    layers[4].flags = KV_LAYER_CACHE_POSITIONS;
    layers[4].rope = &none;
    layers[5].flags = KV_LAYER_SHARED;
    layers[5].shared_layer = 0;
    const described d(layers);
    REQUIRE(d.verdict == KV_OK);
    const position_rotation* turning = d.model.layers[1].slot_turning;
    REQUIRE(turning != nullptr);
    CHECK(turning->pairs == 64);
    CHECK_FALSE(turning->interleaved);
    CHECK(turning->gain == 1.25f);
    CHECK(turning->inverse_frequencies[32] == doctest::Approx(0.01));
    CHECK(d.model.turnings.size() == 1);
    CHECK(d.model.layers[0].slot_turning == nullptr);
    CHECK(d.model.layers[2].slot_turning == turning);
    CHECK(d.model.layers[2].cache_positions);
    CHECK(d.model.layers[3].slot_turning == turning);
    CHECK(d.model.layers[4].slot_turning == nullptr);  // nothing is rotated there
    CHECK(d.model.layers[5].slot_turning == nullptr);
    CHECK(d.model.layers[0].stored_rope().style == KV_ROPE_HALF);
    CHECK(d.model.layers[1].stored_rope().style == KV_ROPE_NONE);
    // The same bytes are other keys; values are the same.
    CHECK(d.model.lanes[0].key_identity != d.model.lanes[1].key_identity);
    CHECK(d.model.lanes[0].value_identity == d.model.lanes[1].value_identity);
}

TEST_CASE("cache positions: means of affine4 are not turned where keys come before rotation") {
    kv_rope half = KV_INIT(kv_rope);
    half.style = KV_ROPE_HALF;
    const std::vector<float> ones(2 * 128, 1.0f);
    kv_storage storage = KV_INIT(kv_storage);
    storage.channel_means = storage.channel_scales = ones.data();
    storage.channel_heads = 2;
    storage.channel_dim = 128;
    std::vector<kv_layer> layers(2, plain_layer());
    for (kv_layer& layer : layers) {
        layer.rope = &half;
        layer.key_format = KV_FORMAT_AFFINE4;
        layer.value_format = KV_FORMAT_F16;
        layer.key_storage = &storage;
    }
    layers[1].flags = KV_LAYER_CACHE_POSITIONS;
    const described d(layers);
    REQUIRE(d.verdict == KV_OK);
    CHECK(d.model.turnings.size() == 2);
    CHECK(d.model.lanes[0].layout.keys.turning->pairs == 64);
    CHECK(d.model.lanes[1].layout.keys.turning->pairs == 0);
    CHECK(d.model.lanes[1].sealed_layout.keys.turning->pairs == 0);
    CHECK(d.model.layers[1].slot_turning == d.model.lanes[0].layout.keys.turning);
    CHECK(d.model.lanes[0].key_identity != d.model.lanes[1].key_identity);
}

TEST_CASE("cache positions: the rotation must be told, and told once") {
    kv_rope half = KV_INIT(kv_rope), interleaved = KV_INIT(kv_rope);
    half.style = KV_ROPE_HALF;
    interleaved.style = KV_ROPE_INTERLEAVED;
    std::vector<kv_layer> layers(2, plain_layer());
    layers[0].flags = KV_LAYER_CACHE_POSITIONS;
    const described untold(layers);
    CHECK(untold.verdict == KV_INVALID);
    CHECK(untold.says("layer 0: KV_LAYER_CACHE_POSITIONS needs kv_rope"));
    half.attention_factor = 1e-300;
    layers[0].rope = &half;
    const described tiny(layers);
    CHECK(tiny.verdict == KV_INVALID);
    CHECK(tiny.says("attention_factor"));
    half.attention_factor = 1.0;
    layers[1].flags = KV_LAYER_SHARED;
    layers[1].rope = &interleaved;
    const described other(layers);
    CHECK(other.verdict == KV_INVALID);
    CHECK(other.says("layer 1: its rope differs"));
    layers[1].flags |= KV_LAYER_CACHE_POSITIONS;
    const described twice(layers);
    CHECK(twice.verdict == KV_INVALID);
    CHECK(twice.says("say it of shared_layer"));
}
