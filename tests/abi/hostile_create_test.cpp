// Wrong input to the calls that need no pool, and to those that make one.
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <functional>
#include <limits>

#include "abi/world.hpp"

using namespace abi;

namespace {

const target nothing;

TEST_CASE("kv_struct_init takes NULL and sizes below the header") {
    kv_struct_init(nullptr, 64);
    unsigned char bytes[32];
    std::memset(bytes, 0x5a, sizeof bytes);
    kv_struct_init(bytes, 0);
    kv_struct_init(bytes, 15);
    for (const unsigned char byte : bytes) CHECK(byte == 0x5a);
    kv_struct_init(bytes, 16);
    kv_struct_header header;
    std::memcpy(&header, bytes, sizeof header);
    CHECK(header.struct_size == 16);
    CHECK(header.flags == 0);
    CHECK(header.next == nullptr);
    CHECK(bytes[16] == 0x5a);

    kv_policy by_call;
    std::memset(static_cast<void*>(&by_call), 0x5a, sizeof by_call);
    kv_struct_init(&by_call, sizeof by_call);
    const kv_policy by_macro = KV_INIT(kv_policy);
    CHECK(std::memcmp(&by_call, &by_macro, sizeof by_macro) == 0);
}

TEST_CASE("kv_last_error cuts to the buffer and says the full length") {
    CHECK(kv_pool_check(nullptr) == KV_INVALID);
    const std::string whole = last_error();
    CHECK(whole.find("pool") != std::string::npos);
    CHECK(kv_last_error(nullptr, 100) == whole.size());
    char small[6] = {'x', 'x', 'x', 'x', 'x', 'x'};
    CHECK(kv_last_error(small, 0) == whole.size());
    CHECK(small[0] == 'x');
    CHECK(kv_last_error(small, 1) == whole.size());
    CHECK(small[0] == '\0');
    CHECK(small[1] == 'x');
    CHECK(kv_last_error(small, 5) == whole.size());
    CHECK(std::string(small) == whole.substr(0, 4));
    CHECK(small[5] == 'x');
}

TEST_CASE("a long message is cut, not overrun") {
    live_pool pool;
    const std::string path(100000, 'x');
    CHECK(kv_pool_load_statistics(pool, path.c_str()) < 0);
    CHECK(last_error().size() < 1024);
    CHECK_FALSE(last_error().empty());
}

TEST_CASE("kv_capabilities") {
    REFUSES(nothing, KV_INVALID, "out_report", kv_capabilities(nullptr));
    refuses_wrong_headers(nothing, "out_report", KV_INIT(kv_capabilities_report),
                          [](kv_capabilities_report* report) { return kv_capabilities(report); });
    kv_capabilities_report report = KV_INIT(kv_capabilities_report);
    ACCEPTS(kv_capabilities(&report));
    CHECK(report.formats == (1u << (KV_FORMAT_AFFINE4 + 1)) - 1 - (1u << KV_FORMAT_DEFAULT));
    CHECK(report.devices == 1u << KV_DEVICE_CPU);
    CHECK(report.layouts == 7);
    CHECK(report.scorers == (1u << (KV_SCORER_BLEND + 1)) - 1 - (1u << KV_SCORER_NONE));
    CHECK(report.selections == (1u << (KV_SELECT_PER_LAYER + 1)) - 1 - (1u << KV_SELECT_DEFAULT));
    CHECK(report.min_head_dim == 32);
    CHECK(report.max_head_dim == 256);
    CHECK(report.head_dim_multiple == 8);
    CHECK(report.max_layers == 1024);
    CHECK(std::strlen(report.simd_target) > 0);
    CHECK(std::strlen(report.simd_target) < sizeof report.simd_target);
}

/// kv_pool_create must leave NULL behind, kv_plan must agree with it.
kv_status create(const kv_pool_config* config, const kv_model* model) {
    kv_pool* pool = reinterpret_cast<kv_pool*>(uintptr_t{64});
    const kv_status verdict = kv_pool_create(config, model, &pool);
    if (verdict == KV_OK) {
        kv_pool_release(pool);
        return verdict;
    }
    CHECK(pool == nullptr);
    const std::string message = last_error();
    if (message.find("arena_bytes is 0:") != std::string::npos) return verdict;  // a plan may ask
    kv_plan_report report = KV_INIT(kv_plan_report);
    const kv_plan_report before = report;
    CHECK(kv_plan(config, model, &report) == verdict);
    CHECK(last_error() == message);
    CHECK(std::memcmp(&report, &before, sizeof report) == 0);
    return verdict;
}

kv_status create_with(const std::function<void(kv_pool_config&)>& change) {
    const small_model model;
    const kv_model description = model.describe();
    kv_pool_config config = small_config();
    change(config);
    return create(&config, &description);
}

kv_status create_with_layers(const std::function<void(small_model&)>& change) {
    small_model model;
    change(model);
    const kv_model description = model.describe();
    const kv_pool_config config = small_config();
    return create(&config, &description);
}

TEST_CASE("kv_pool_create: NULL and wrong headers") {
    const small_model model;
    const kv_model description = model.describe();
    const kv_pool_config config = small_config();
    REFUSES(nothing, KV_INVALID, "out_pool", kv_pool_create(&config, &description, nullptr));
    REFUSES(nothing, KV_INVALID, "config", create(nullptr, &description));
    REFUSES(nothing, KV_INVALID, "model", create(&config, nullptr));
    refuses_wrong_headers(nothing, "config", config,
                          [&](const kv_pool_config* wrong) { return create(wrong, &description); });
    refuses_wrong_headers(nothing, "model", description,
                          [&](const kv_model* wrong) { return create(&config, wrong); });
    refuses_wrong_headers(nothing, "layers", model.layers[0], [&](const kv_layer* wrong) {
        kv_model one = description;
        one.layers = wrong;
        one.layer_count = 1;
        return create(&config, &one);
    });
    refuses_wrong_headers(nothing, "rope", model.rope, [&](const kv_rope* wrong) {
        kv_layer layer = model.layers[0];
        layer.rope = wrong;
        kv_model one = description;
        one.layers = &layer;
        one.layer_count = 1;
        return create(&config, &one);
    });
    refuses_wrong_headers(nothing, "hooks", KV_INIT(kv_hooks), [&](const kv_hooks* wrong) {
        kv_pool_config other = config;
        other.hooks = wrong;
        return create(&other, &description);
    });
    kv_pool_release(nullptr);
    CHECK(create(&config, &description) == KV_OK);
}

TEST_CASE("kv_pool_create: every field of the config") {
    struct attack {
        kv_status expected;
        const char* word;
        void (*change)(kv_pool_config&);
    };
    using c = kv_pool_config;
    const attack attacks[] = {
        {KV_INVALID, "arena_bytes", [](c& o) { o.arena_bytes = 0; }},
        {KV_INVALID, "arena_bytes", [](c& o) { o.arena_bytes = (2 << 20) - 1; }},
        {KV_TOO_LARGE, "arena_bytes", [](c& o) { o.arena_bytes = (uint64_t{128} << 30) + 1; }},
        {KV_TOO_LARGE, "arena_bytes", [](c& o) { o.arena_bytes = UINT64_MAX; }},
        {KV_UNSUPPORTED, "device", [](c& o) { o.device = 3; }},
        {KV_UNSUPPORTED, "device", [](c& o) { o.device = UINT32_MAX; }},
        {KV_UNSUPPORTED, "layout", [](c& o) { o.layout = 3; }},
        {KV_UNSUPPORTED, "layout", [](c& o) { o.layout = UINT32_MAX; }},
        {KV_INVALID, "block_tokens", [](c& o) { o.block_tokens = 1; }},
        {KV_INVALID, "block_tokens", [](c& o) { o.block_tokens = 48; }},
        {KV_INVALID, "block_tokens", [](c& o) { o.block_tokens = 256; }},
        {KV_INVALID, "block_tokens", [](c& o) { o.block_tokens = UINT32_MAX; }},
        {KV_INVALID, "max_sequences", [](c& o) { o.max_sequences = 65537; }},
        {KV_INVALID, "max_sequences", [](c& o) { o.max_sequences = UINT32_MAX; }},
        {KV_INVALID, "max_observed_sequences",
         [](c& o) { o.max_observed_sequences = o.max_sequences + 1; }},
        {KV_INVALID, "max_observed_sequences", [](c& o) { o.max_observed_sequences = UINT32_MAX; }},
        {KV_INVALID, "max_tokens_per_sequence",
         [](c& o) { o.max_tokens_per_sequence = (1u << 26) + 1; }},
        {KV_INVALID, "max_tokens_per_sequence",
         [](c& o) { o.max_tokens_per_sequence = UINT32_MAX; }},
        {KV_INVALID, "max_step_sequences", [](c& o) { o.max_step_sequences = 9; }},
        {KV_INVALID, "max_step_sequences", [](c& o) { o.max_step_sequences = UINT32_MAX; }},
        {KV_INVALID, "max_step_tokens", [](c& o) { o.max_step_tokens = UINT32_MAX; }},
        {KV_INVALID, "pressure_percent", [](c& o) { o.pressure_percent = 101; }},
        {KV_INVALID, "pressure_percent", [](c& o) { o.pressure_percent = UINT32_MAX; }},
        {KV_INVALID, "threads", [](c& o) { o.threads = 257; }},
        {KV_INVALID, "threads", [](c& o) { o.threads = UINT32_MAX; }},
    };
    for (const attack& a : attacks) {
        CAPTURE(a.word);
        refuses(nothing, a.expected, a.word, "config", [&] { return create_with(a.change); });
    }
}

TEST_CASE("kv_pool_create: limits whose metadata nobody can hold") {
    // 65536 sequences of 2^26 tokens over 128 layers: block tables of 128 TiB.
    small_model model;
    model.layers.assign(128, model.layers[0]);
    const kv_model description = model.describe();
    kv_pool_config config = small_config();
    config.max_sequences = 65536;
    config.max_tokens_per_sequence = 1u << 26;
    REFUSES(nothing, KV_TOO_LARGE, "max_sequences", create(&config, &description));
}

TEST_CASE("kv_pool_create: the host's allocator refuses") {
    kv_hooks hooks = KV_INIT(kv_hooks);
    hooks.allocate = [](void*, size_t, size_t) -> void* { return nullptr; };
    REFUSES(nothing, KV_INVALID, "allocate",
            create_with([&](kv_pool_config& o) { o.hooks = &hooks; }));
    hooks.release = [](void*, void*, size_t, size_t) {};
    const small_model model;
    const kv_model description = model.describe();
    kv_pool_config config = small_config();
    config.hooks = &hooks;
    kv_pool* pool = nullptr;
    REFUSES(nothing, KV_NO_MEMORY, "allocator", kv_pool_create(&config, &description, &pool));
    hooks.allocate = nullptr;
    REFUSES(nothing, KV_INVALID, "release",
            create_with([&](kv_pool_config& o) { o.hooks = &hooks; }));
}

TEST_CASE("kv_pool_create: every field of a layer") {
    struct attack {
        kv_status expected;
        const char* word;
        void (*change)(small_model&);
    };
    using m = small_model;
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const attack attacks[] = {
        {KV_INVALID, "query_heads", [](m& o) { o.layers[0].query_heads = 0; }},
        {KV_INVALID, "kv_heads", [](m& o) { o.layers[0].kv_heads = 0; }},
        {KV_INVALID, "query_heads", [](m& o) { o.layers[0].query_heads = 5; }},
        {KV_INVALID, "query_heads", [](m& o) { o.layers[0].query_heads = 1026; }},
        {KV_INVALID, "query_heads", [](m& o) { o.layers[0].query_heads = UINT32_MAX; }},
        {KV_INVALID, "kv_heads", [](m& o) { o.layers[0].kv_heads = 8; }},
        {KV_UNSUPPORTED, "key_dim", [](m& o) { o.layers[0].key_dim = 0; }},
        {KV_UNSUPPORTED, "key_dim", [](m& o) { o.layers[0].key_dim = 24; }},
        {KV_UNSUPPORTED, "key_dim", [](m& o) { o.layers[0].key_dim = 60; }},
        {KV_UNSUPPORTED, "key_dim", [](m& o) { o.layers[0].key_dim = 264; }},
        {KV_UNSUPPORTED, "key_dim", [](m& o) { o.layers[0].key_dim = UINT32_MAX; }},
        {KV_UNSUPPORTED, "value_dim", [](m& o) { o.layers[0].value_dim = 16; }},
        {KV_UNSUPPORTED, "value_dim", [](m& o) { o.layers[0].value_dim = 65; }},
        {KV_UNSUPPORTED, "value_dim", [](m& o) { o.layers[0].value_dim = UINT32_MAX - 7; }},
        {KV_UNSUPPORTED, "key_format",
         [](m& o) { o.layers[0].key_format = KV_FORMAT_AFFINE4 + 1; }},
        {KV_UNSUPPORTED, "value_format",
         [](m& o) { o.layers[0].value_format = KV_FORMAT_AFFINE4 + 1; }},
        {KV_UNSUPPORTED, "block_tokens is 16",
         [](m& o) { o.layers[0].key_format = KV_FORMAT_KIVI4; }},
        {KV_UNSUPPORTED, "value_format kvarn2",
         [](m& o) { o.layers[0].value_format = KV_FORMAT_KVARN2; }},
        {KV_INVALID, "key_storage", [](m& o) { o.layers[0].key_format = KV_FORMAT_FP8_E4M3; }},
        {KV_INVALID, "value_storage", [](m& o) { o.layers[1].value_format = KV_FORMAT_FP8_E5M2; }},
        {KV_UNSUPPORTED, "value_format", [](m& o) { o.layers[0].value_format = UINT32_MAX; }},
        {KV_INVALID, "shared_layer", [](m& o) { o.layers[2].shared_layer = 2; }},
        {KV_INVALID, "shared_layer", [](m& o) { o.layers[2].shared_layer = UINT32_MAX; }},
        {KV_INVALID, "shared_layer", [](m& o) { o.layers[0].flags = KV_LAYER_SHARED; }},
        {KV_INVALID, "KV_LAYER_LANE_PER_HEAD",
         [](m& o) { o.layers[2].flags |= KV_LAYER_LANE_PER_HEAD; }},
        {KV_UNSUPPORTED, "flags", [](m& o) { o.layers[0].flags = KV_LAYER_CACHE_POSITIONS << 1; }},
        {KV_INVALID, "KV_LAYER_CACHE_POSITIONS needs kv_rope",
         [](m& o) {
             o.layers[0].flags = KV_LAYER_CACHE_POSITIONS;
             o.layers[0].rope = nullptr;
         }},
        {KV_INVALID, "KV_LAYER_CACHE_POSITIONS with KV_LAYER_SHARED",
         [](m& o) { o.layers[2].flags |= KV_LAYER_CACHE_POSITIONS; }},
        {KV_INVALID, "shared_layer",
         [](m& o) {
             o.layers.push_back(o.layers[2]);
             o.layers[3].shared_layer = 2;
         }},
        {KV_INVALID, "shared_layer", [](m& o) { o.layers[2].kv_heads = 4; }},
        {KV_INVALID, "shared_layer", [](m& o) { o.layers[2].key_dim = 72; }},
        {KV_INVALID, "shared_layer", [](m& o) { o.layers[2].value_dim = 40; }},
        {KV_INVALID, "shared_layer", [](m& o) { o.layers[2].shared_layer = 1; }},
        {KV_INVALID, "window",
         [](m& o) {
             o.layers[2].shared_layer = 1;
             o.layers[2].window = 33;
         }},
        {KV_INVALID, "window",
         [](m& o) {
             o.layers[2].shared_layer = 1;
             o.layers[2].window = 32;
             o.layers[2].window_sinks = 5;
         }},
        {KV_INVALID, "window_sinks", [](m& o) { o.layers[0].window_sinks = 1; }},
        {KV_INVALID, "window", [](m& o) { o.layers[1].window = UINT32_MAX; }},
        {KV_INVALID, "window_sinks", [](m& o) { o.layers[1].window_sinks = UINT32_MAX; }},
        {KV_INVALID, "softmax_scale", [](m& o) { o.layers[0].softmax_scale = -1.0f; }},
        {KV_INVALID, "softmax_scale", [](m& o) { o.layers[0].softmax_scale = NAN; }},
        {KV_INVALID, "softmax_scale", [](m& o) { o.layers[0].softmax_scale = infinity; }},
        {KV_INVALID, "logit_softcap", [](m& o) { o.layers[0].logit_softcap = -30.0f; }},
        {KV_INVALID, "logit_softcap", [](m& o) { o.layers[0].logit_softcap = NAN; }},
        {KV_INVALID, "sink_logits[2]",
         [](m& o) {
             o.head_values[2] = NAN;
             o.layers[1].sink_logits = o.head_values.data();
         }},
        {KV_INVALID, "alibi_slopes[3]",
         [](m& o) {
             o.head_values[3] = infinity;
             o.layers[2].alibi_slopes = o.head_values.data();
         }},
        {KV_INVALID, "struct_size", [](m& o) { o.layers[1].struct_size = 80; }},
        {KV_INVALID, "style", [](m& o) { o.rope.style = 3; }},
        {KV_INVALID, "dimensions", [](m& o) { o.rope.dimensions = 3; }},
        {KV_INVALID, "dimensions", [](m& o) { o.rope.dimensions = 66; }},
        {KV_INVALID, "dimensions", [](m& o) { o.rope.dimensions = UINT32_MAX - 1; }},
        {KV_INVALID, "attention_factor", [](m& o) { o.rope.attention_factor = -1.0; }},
        {KV_INVALID, "attention_factor", [](m& o) { o.rope.attention_factor = NAN; }},
        {KV_INVALID, "inverse_frequencies[5]", [](m& o) { o.frequencies[5] = NAN; }},
        {KV_INVALID, "theta",
         [](m& o) {
             o.rope.inverse_frequencies = nullptr;
             o.rope.theta = NAN;
         }},
        {KV_INVALID, "theta",
         [](m& o) {
             o.rope.inverse_frequencies = nullptr;
             o.rope.theta = 0.5;
         }},
        {KV_INVALID, "layer_count", [](m& o) { o.layers.clear(); }},
        {KV_INVALID, "layer_count", [](m& o) { o.layers.resize(1025, o.layers[0]); }},
    };
    for (const attack& a : attacks) {
        CAPTURE(a.word);
        refuses(nothing, a.expected, a.word, "layers",
                [&] { return create_with_layers(a.change); });
    }
}

TEST_CASE("kv_pool_create: a model without layers, and one of too many sizes of blocks") {
    const kv_pool_config config = small_config();
    kv_model model = KV_INIT(kv_model);
    model.layer_count = 1;
    REFUSES(nothing, KV_INVALID, "layers", create(&config, &model));
    REFUSES(nothing, KV_UNSUPPORTED, "sizes of blocks", create_with_layers([](small_model& o) {
                o.layers.resize(1);
                for (uint32_t dim = 72; dim < 72 + 8 * 16; dim += 8) {
                    o.layers.push_back(o.layers[0]);
                    o.layers.back().key_dim = dim;
                    o.layers.back().rope = nullptr;
                }
            }));
    REFUSES(nothing, KV_UNSUPPORTED, "slab", create_with_layers([](small_model& o) {
                o.layers[0].query_heads = 1024;
                o.layers[0].kv_heads = 1024;
            }));
}

TEST_CASE("layers of odd struct sizes are read where they lie") {
    // Sizes of other versions need not be multiples of a pointer's alignment.
    const small_model model;
    const kv_pool_config config = small_config();
    for (const uint32_t size : {57u, 60u, 66u}) {
        CAPTURE(size);
        std::vector<unsigned char> bytes(size * 2 + sizeof(kv_layer));
        for (uint32_t i = 0; i < 2; ++i) {
            kv_layer layer = model.layers[0];
            layer.struct_size = size;
            std::memcpy(bytes.data() + i * size, &layer, size);
        }
        kv_model odd = KV_INIT(kv_model);
        odd.layers = reinterpret_cast<const kv_layer*>(bytes.data());
        odd.layer_count = 2;
        CHECK(create(&config, &odd) == KV_OK);
    }
}

TEST_CASE("kv_plan") {
    const small_model model;
    const kv_model description = model.describe();
    const kv_pool_config config = small_config();
    REFUSES(nothing, KV_INVALID, "report", kv_plan(&config, &description, nullptr));
    refuses_wrong_headers(nothing, "report", KV_INIT(kv_plan_report), [&](kv_plan_report* wrong) {
        return kv_plan(&config, &description, wrong);
    });
    kv_plan_report report = KV_INIT(kv_plan_report);
    report.sequences = UINT64_MAX;
    REFUSES(nothing, KV_TOO_LARGE, "sequences", kv_plan(&config, &description, &report));
    report.sequences = 1;
    report.tokens_per_sequence = UINT64_MAX;
    REFUSES(nothing, KV_TOO_LARGE, "tokens_per_sequence", kv_plan(&config, &description, &report));
}

TEST_CASE("kv_pool_create: every field of a storage") {
    struct attack {
        kv_status expected;
        const char* word;
        void (*change)(kv_storage&);
    };
    static const float good[] = {0.5f, 3.0f};
    static const float bad[][2] = {{1.0f, 0.0f}, {-1.0f, 1.0f}, {1.0f, INFINITY}, {NAN, 1.0f}};
    using s = kv_storage;
    const attack attacks[] = {
        {KV_UNSUPPORTED, "flags", [](s& o) { o.flags = 1u << 2; }},
        {KV_UNSUPPORTED, "next", [](s& o) { o.next = good; }},
        {KV_UNSUPPORTED, "reserved0", [](s& o) { o.reserved0 = 1; }},
        {KV_INVALID, "scale_count", [](s& o) { o.scales = nullptr; }},
        {KV_INVALID, "scale_count", [](s& o) { o.scale_count = 0; }},
        {KV_INVALID, "scale_count", [](s& o) { o.scale_count = 3; }},
        {KV_INVALID, "scale_count", [](s& o) { o.scale_count = UINT32_MAX; }},
        {KV_INVALID, "SCALE_ONE", [](s& o) { o.flags = KV_STORAGE_SCALE_ONE; }},
        {KV_INVALID, "scales[1]", [](s& o) { o.scales = bad[0]; }},
        {KV_INVALID, "scales[0]", [](s& o) { o.scales = bad[1]; }},
        {KV_INVALID, "scales[1]", [](s& o) { o.scales = bad[2]; }},
        {KV_INVALID, "scales[0]", [](s& o) { o.scales = bad[3]; }},
    };
    const kv_pool_config config = small_config();
    for (const attack& a : attacks) {
        CAPTURE(a.word);
        small_model model;
        kv_storage storage = KV_INIT(kv_storage);
        storage.scales = good;
        storage.scale_count = 2;
        a.change(storage);
        model.layers[1].key_format = KV_FORMAT_FP8_E4M3;
        model.layers[1].key_storage = &storage;
        const kv_model description = model.describe();
        refuses(nothing, a.expected, a.word, "storage",
                [&] { return create(&config, &description); });
    }
    small_model model;
    kv_storage rotated = KV_INIT(kv_storage);
    rotated.flags = KV_STORAGE_ROTATE;
    model.layers[0].key_storage = &rotated;
    const kv_model description = model.describe();
    REFUSES(nothing, KV_UNSUPPORTED, "rotated", create(&config, &description));
}

/// Constants of a layer's channels, one of them wrong; until the next call.
const float* flawed_by(std::size_t at, float number) {
    static std::vector<float> numbers;
    numbers.assign(kv_heads * key_dim, 0.5f);
    numbers[at] = number;
    return numbers.data();
}

TEST_CASE("kv_pool_create: constants of channels") {
    const std::vector<float> good(kv_heads * key_dim, 0.5f);
    struct attack {
        kv_status expected;
        const char* word;
        void (*change)(small_model&, kv_storage&);
    };
    using m = small_model;
    using s = kv_storage;
    const attack attacks[] = {
        {KV_INVALID, "channel_means", [](m&, s& o) { o.channel_means = nullptr; }},
        {KV_INVALID, "channel_scales", [](m&, s& o) { o.channel_scales = nullptr; }},
        {KV_INVALID, "channel_heads", [](m&, s& o) { o.channel_heads = 0; }},
        {KV_INVALID, "channel_dim", [](m&, s& o) { o.channel_dim = 0; }},
        {KV_INVALID, "[4294967295, 64]", [](m&, s& o) { o.channel_heads = UINT32_MAX; }},
        {KV_INVALID, "[1, 64]", [](m&, s& o) { o.channel_heads = 1; }},
        {KV_INVALID, "[2, 32]", [](m&, s& o) { o.channel_dim = 32; }},
        {KV_INVALID, "[2, 4294967295]", [](m&, s& o) { o.channel_dim = UINT32_MAX; }},
        {KV_INVALID, "channel_means[0]", [](m&, s& o) { o.channel_means = flawed_by(0, NAN); }},
        {KV_INVALID, "channel_means[127]",
         [](m&, s& o) { o.channel_means = flawed_by(127, INFINITY); }},
        {KV_INVALID, "channel_scales[5]", [](m&, s& o) { o.channel_scales = flawed_by(5, 0.0f); }},
        {KV_INVALID, "channel_scales[6]", [](m&, s& o) { o.channel_scales = flawed_by(6, -1.0f); }},
        {KV_INVALID, "channel_scales[7]", [](m&, s& o) { o.channel_scales = flawed_by(7, NAN); }},
        {KV_INVALID, "kv_seq_fit_affine", [](m&, s& o) { o = KV_INIT(kv_storage); }},
        {KV_INVALID, "kv_seq_fit_affine", [](m& o, s&) { o.layers[0].key_storage = nullptr; }},
        {KV_INVALID, "no use", [](m& o, s&) { o.layers[0].key_format = KV_FORMAT_Q4_1; }},
        {KV_INVALID, "no use", [](m& o, s&) { o.layers[0].key_format = KV_FORMAT_F16; }},
        {KV_INVALID, "value_storage",
         [](m& o, s&) { o.layers[0].value_storage = o.layers[0].key_storage; }},
        {KV_INVALID, "KV_ROPE_NONE", [](m& o, s&) { o.layers[0].rope = nullptr; }},
        {KV_INVALID, "attention_factor", [](m& o, s&) { o.rope.attention_factor = 1e-300; }},
        {KV_INVALID, "attention_factor", [](m& o, s&) { o.rope.attention_factor = 1e300; }},
        {KV_UNSUPPORTED, "keys alone", [](m& o, s&) { o.layers[0].value_format = 0; }},
        {KV_UNSUPPORTED, "keys alone",
         [](m& o, s&) { o.layers[1].value_format = KV_FORMAT_AFFINE4; }},
        {KV_UNSUPPORTED, "rotated", [](m&, s& o) { o.flags = KV_STORAGE_ROTATE; }},
    };
    const kv_pool_config config = small_config();
    const auto make = [&](const attack* a, const auto& check) {
        small_model model;
        kv_storage storage = KV_INIT(kv_storage);
        storage.channel_means = storage.channel_scales = good.data();
        storage.channel_heads = kv_heads;
        storage.channel_dim = key_dim;
        model.layers[0].key_format = KV_FORMAT_AFFINE4;
        model.layers[0].value_format = KV_FORMAT_F16;
        model.layers[0].key_storage = &storage;
        if (a != nullptr) a->change(model, storage);
        const kv_model description = model.describe();
        check(description);
    };
    for (const attack& a : attacks) {
        CAPTURE(a.word);
        make(&a, [&](const kv_model& description) {
            refuses(nothing, a.expected, a.word, "channels",
                    [&] { return create(&config, &description); });
        });
    }
    make(nullptr, [&](const kv_model& description) {
        kv_pool* pool = nullptr;
        ACCEPTS(kv_pool_create(&config, &description, &pool));
        kv_pool_release(pool);
        // A program built before there were constants has a shorter struct: they are missing.
        const_cast<kv_storage*>(description.layers[0].key_storage)->struct_size =
            offsetof(kv_storage, channel_means);
        REFUSES(nothing, KV_INVALID, "kv_seq_fit_affine", create(&config, &description));
    });
}

}  // namespace
