// kv_model_apply_preset: which layers get what, what stays as it was, and what is refused.
#include "abi/world.hpp"

using namespace abi;

namespace {

constexpr uint32_t near_lossless = KV_PRESET_NEAR_LOSSLESS;
constexpr uint32_t balanced = KV_PRESET_BALANCED;
constexpr uint32_t smallest = KV_PRESET_SMALLEST;

/// Ten layers of which eight store: windows of 1,024 and 1,025 tokens in the middle, two that share
/// among the last.
struct ten_layers {
    std::vector<kv_layer> layers;

    ten_layers() {
        kv_layer layer = KV_INIT(kv_layer);
        layer.query_heads = 4;
        layer.kv_heads = 2;
        layer.key_dim = 64;
        layers.assign(10, layer);
        layers[3].window = 1024;
        layers[4].window = 1025;
        for (const uint32_t i : {7u, 9u}) {
            layers[i].flags = KV_LAYER_SHARED;
            layers[i].shared_layer = i - 1;
        }
    }

    kv_status apply(uint32_t preset) {
        return kv_model_apply_preset(layers.data(), static_cast<uint32_t>(layers.size()), preset);
    }
};

bool rotated(const kv_storage* storage) {
    return storage != nullptr && storage->struct_size == sizeof(kv_storage) &&
           storage->flags == KV_STORAGE_ROTATE && storage->next == nullptr &&
           storage->scales == nullptr && storage->scale_count == 0;
}

void is_stored(const kv_layer& layer, uint32_t key_format, uint32_t value_format) {
    CHECK(layer.key_format == key_format);
    CHECK(layer.value_format == value_format);
    CHECK(rotated(layer.key_storage));
    CHECK(rotated(layer.value_storage));
}

void is_spared(const kv_layer& layer, uint32_t format) {
    CHECK(layer.key_format == format);
    CHECK(layer.value_format == format);
    CHECK(layer.key_storage == nullptr);
    CHECK(layer.value_storage == nullptr);
}

TEST_CASE("presets: formats by layer, short windows and the ends spared") {
    struct expected {
        uint32_t preset, keys, values;
        bool ends_spared;
        uint64_t bytes_per_token;
    };
    // 2 heads of 64 dimensions: f16 takes 2 * 256 bytes of a token, int8 2 * 68 of its keys or
    // values, int4 2 * 36. Of eight layers that store, one or five are spared.
    const expected all[] = {
        {near_lossless, KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT8_TOKEN, false, 512 + 7 * 272},
        {balanced, KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT4_TOKEN, true, 5 * 512 + 3 * 208},
        {smallest, KV_FORMAT_INT4_TOKEN, KV_FORMAT_INT4_TOKEN, true, 5 * 512 + 3 * 144},
    };
    for (const expected& one : all) {
        CAPTURE(one.preset);
        ten_layers model;
        const std::vector<kv_layer> before = model.layers;
        ACCEPTS(model.apply(one.preset));
        for (uint32_t i = 0; i < 10; ++i) {
            CAPTURE(i);
            const bool shares = i == 7 || i == 9;
            // Layers 0, 1 and, since 7 and 9 store nothing, 6 and 8.
            const bool end = i == 0 || i == 1 || i == 6 || i == 8;
            kv_layer& layer = model.layers[i];
            if (i == 3 || (end && one.ends_spared)) {
                is_spared(layer, KV_FORMAT_DEFAULT);
            } else if (!shares) {
                is_stored(layer, one.keys, one.values);
            }
            // Nothing else has changed, and nothing at all where no cache is.
            kv_layer rest = layer;
            if (!shares) {
                rest.key_format = rest.value_format = KV_FORMAT_DEFAULT;
                rest.key_storage = rest.value_storage = nullptr;
            }
            CHECK(std::memcmp(&rest, &before[i], sizeof rest) == 0);
        }
        kv_model description = KV_INIT(kv_model);
        description.layers = model.layers.data();
        description.layer_count = 10;
        const kv_pool_config config = small_config();
        kv_plan_report plan = KV_INIT(kv_plan_report);
        REQUIRE(kv_plan(&config, &description, &plan) == KV_OK);
        CHECK(plan.bytes_per_token == one.bytes_per_token);
        kv_pool* pool = nullptr;
        REQUIRE(kv_pool_create(&config, &description, &pool) == KV_OK);
        kv_pool_release(pool);
    }
}

TEST_CASE("presets: one over another is as if it were the first") {
    ten_layers once, twice;
    REQUIRE(once.apply(smallest) == KV_OK);
    for (const uint32_t preset : {near_lossless, balanced, smallest}) {
        REQUIRE(twice.apply(preset) == KV_OK);
    }
    for (uint32_t i = 0; i < 10; ++i) {
        CAPTURE(i);
        const bool spared = i < 2 || i == 3 || i == 6 || i == 8;
        const bool shares = i == 7 || i == 9;
        if (spared) {
            for (const kv_layer* layer : {&once.layers[i], &twice.layers[i]}) {
                CHECK(
                    (layer->key_format == KV_FORMAT_DEFAULT || layer->key_format == KV_FORMAT_F16));
                CHECK(layer->value_format == layer->key_format);
                CHECK(layer->key_storage == nullptr);
            }
        } else if (!shares) {
            CHECK(std::memcmp(&once.layers[i], &twice.layers[i], sizeof(kv_layer)) == 0);
        }
    }
}

TEST_CASE("presets: a spared layer stays in the plain format that it names, in no other") {
    kv_storage scaled = KV_INIT(kv_storage);
    scaled.flags = KV_STORAGE_SCALE_ONE;
    ten_layers model;
    model.layers[0].key_format = KV_FORMAT_BF16;  // and so its values
    model.layers[1].key_format = KV_FORMAT_FP8_E4M3;
    model.layers[1].value_format = KV_FORMAT_F32;
    model.layers[1].key_storage = &scaled;
    model.layers[3].key_format = KV_FORMAT_MXFP4;  // and so its values
    model.layers[6].key_format = KV_FORMAT_F32;
    model.layers[6].value_format = KV_FORMAT_Q4_0;
    model.layers[8].key_format = 63;              // no format
    model.layers[5].key_format = KV_FORMAT_BF16;  // not spared
    model.layers[7].key_format = KV_FORMAT_BF16;  // shares
    REQUIRE(model.apply(balanced) == KV_OK);
    is_spared(model.layers[0], KV_FORMAT_BF16);
    CHECK(model.layers[1].key_format == KV_FORMAT_F16);
    CHECK(model.layers[1].value_format == KV_FORMAT_F32);
    CHECK(model.layers[1].key_storage == nullptr);
    is_spared(model.layers[3], KV_FORMAT_F16);
    CHECK(model.layers[6].key_format == KV_FORMAT_F32);
    CHECK(model.layers[6].value_format == KV_FORMAT_F16);
    is_spared(model.layers[8], KV_FORMAT_F16);
    is_stored(model.layers[5], KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT4_TOKEN);
    CHECK(model.layers[7].key_format == KV_FORMAT_BF16);
}

TEST_CASE("presets: four layers are all ends, of five the middle one is stored") {
    for (const uint32_t count : {1u, 2u, 3u, 4u, 5u}) {
        CAPTURE(count);
        ten_layers model;
        model.layers.resize(count, model.layers[0]);
        for (kv_layer& layer : model.layers) layer.window = 0;
        REQUIRE(model.apply(smallest) == KV_OK);
        for (uint32_t i = 0; i < count; ++i) {
            CHECK((model.layers[i].key_format == KV_FORMAT_INT4_TOKEN) == (count == 5 && i == 2));
        }
        REQUIRE(model.apply(near_lossless) == KV_OK);
        for (const kv_layer& layer : model.layers) {
            CHECK(layer.key_format == KV_FORMAT_INT8_TOKEN);
        }
    }
}

TEST_CASE("presets: layers of another version's size, off their alignment") {
    const ten_layers model;
    for (const uint32_t size : {uint32_t{sizeof(kv_layer)} + 1, uint32_t{sizeof(kv_layer)} + 40}) {
        CAPTURE(size);
        std::vector<unsigned char> bytes(10 * size + 1);
        bytes.back() = 0x5a;
        for (uint32_t i = 0; i < 10; ++i) {
            kv_layer layer = model.layers[i];
            layer.struct_size = size;
            std::memcpy(bytes.data() + i * size, &layer, sizeof layer);
        }
        auto* first = reinterpret_cast<kv_layer*>(bytes.data());
        REQUIRE(kv_model_apply_preset(first, 10, smallest) == KV_OK);
        for (uint32_t i = 0; i < 10; ++i) {
            CAPTURE(i);
            kv_layer layer = KV_INIT(kv_layer);
            std::memcpy(&layer, bytes.data() + i * size, sizeof layer);
            CHECK(layer.struct_size == size);
            CHECK(layer.window == model.layers[i].window);
            CHECK((layer.key_format == KV_FORMAT_INT4_TOKEN) == (i == 2 || i == 4 || i == 5));
            CHECK(rotated(layer.value_storage) == (i == 2 || i == 4 || i == 5));
            for (uint32_t at = sizeof layer; at < size; ++at) CHECK(bytes[i * size + at] == 0);
        }
        CHECK(bytes.back() == 0x5a);
    }
}

TEST_CASE("presets: what is refused changes no layer") {
    const target nothing = {};
    ten_layers model;
    const auto unchanged = [&](const std::vector<kv_layer>& before) {
        return std::memcmp(before.data(), model.layers.data(), 10 * sizeof(kv_layer)) == 0;
    };
    const std::vector<kv_layer> good = model.layers;
    REFUSES(nothing, KV_UNSUPPORTED, "preset 0", model.apply(0));
    REFUSES(nothing, KV_UNSUPPORTED, "preset 4", model.apply(4));
    REFUSES(nothing, KV_UNSUPPORTED, "preset 4294967295", model.apply(UINT32_MAX));
    REFUSES(nothing, KV_INVALID, "layers", kv_model_apply_preset(nullptr, 10, balanced));
    REFUSES(nothing, KV_INVALID, "layer_count",
            kv_model_apply_preset(model.layers.data(), 0, balanced));
    REFUSES(nothing, KV_INVALID, "layer_count",
            kv_model_apply_preset(model.layers.data(), 1025, balanced));
    CHECK(unchanged(good));
    refuses_wrong_headers(nothing, "layers", model.layers[0], [](kv_layer* wrong) {
        const kv_layer before = *wrong;
        const kv_status verdict = kv_model_apply_preset(wrong, 1, KV_PRESET_NEAR_LOSSLESS);
        CHECK(std::memcmp(wrong, &before, sizeof before) == 0);
        return verdict;
    });
    // A struct that ends before it could say how rows are stored.
    const uint32_t cut = offsetof(kv_layer, value_storage);
    resized<kv_layer> old(good[0], cut);
    REFUSES(nothing, KV_INVALID, "too old", kv_model_apply_preset(old.get(), 1, near_lossless));
    CHECK(old.get()->key_format == KV_FORMAT_DEFAULT);

    // The last layer is wrong: the first one is not written either.
    model.layers[9].struct_size -= 8;
    std::vector<kv_layer> before = model.layers;
    REFUSES(nothing, KV_INVALID, "layer 9: struct_size", model.apply(balanced));
    CHECK(unchanged(before));
    model.layers[9] = good[9];
    model.layers[9].reserved0 = 1;
    before = model.layers;
    REFUSES(nothing, KV_UNSUPPORTED, "reserved0", model.apply(balanced));
    CHECK(unchanged(before));
}

}  // namespace
