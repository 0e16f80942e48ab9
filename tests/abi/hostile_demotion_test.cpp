// Wrong input about demotion: what a layer may say, what a message answers, and layers of a version
// that knew nothing of it.
#include <cstddef>
#include <functional>

#include "abi/world.hpp"

using namespace abi;

namespace {

const target nothing;

/// Both layers that store demote, from f16 to int8_token.
struct demoting_model : small_model {
    kv_storage key_storage = KV_INIT(kv_storage), value_storage = KV_INIT(kv_storage);
    std::vector<float> numbers = std::vector<float>(kv_heads * key_dim, 0.5f);

    demoting_model() {
        for (kv_layer& layer : layers) {
            if ((layer.flags & KV_LAYER_SHARED) != 0) continue;
            layer.demoted_key_format = KV_FORMAT_INT8_TOKEN;
            layer.demote_after = 16;
        }
    }
};

/// kv_plan must say what kv_pool_create says, which leaves NULL behind where it fails.
kv_status create(const kv_model& model, const kv_pool_config& config = small_config()) {
    kv_pool* pool = reinterpret_cast<kv_pool*>(uintptr_t{64});
    const kv_status verdict = kv_pool_create(&config, &model, &pool);
    const std::string message = last_error();
    kv_plan_report report = KV_INIT(kv_plan_report);
    CHECK(kv_plan(&config, &model, &report) == verdict);
    CHECK(last_error() == message);
    if (verdict == KV_OK) kv_pool_release(pool);
    if (verdict != KV_OK) CHECK(pool == nullptr);
    return verdict;
}

struct attack {
    kv_status expected;
    const char* wrong;  ///< what the message names
    const char* right;  ///< and what it says would do
    void (*change)(demoting_model&, kv_layer&);
};

void try_attacks(const std::vector<attack>& attacks) {
    for (const attack& a : attacks) {
        for (const uint32_t at : {0u, 1u}) {  // also one with a window
            CAPTURE(at);
            demoting_model model;
            a.change(model, model.layers[at]);
            const kv_model description = model.describe();
            const std::string layer = "layer " + std::to_string(at) + ": ";
            for (const char* word : {layer.c_str(), a.wrong, a.right}) {
                refuses(nothing, a.expected, word, a.wrong, [&] { return create(description); });
            }
        }
    }
}

using m = demoting_model;
using l = kv_layer;

TEST_CASE("demotion: what it is from, and what to") {
    try_attacks({
        {KV_UNSUPPORTED, "key_format int8_token", "f32, f16 or bf16",
         [](m&, l& o) { o.key_format = KV_FORMAT_INT8_TOKEN; }},
        {KV_UNSUPPORTED, "value_format q4_0", "f32, f16 or bf16",
         [](m&, l& o) { o.value_format = KV_FORMAT_Q4_0; }},
        {KV_UNSUPPORTED, "value_format kivi4", "f32, f16 or bf16",
         [](m&, l& o) { o.value_format = KV_FORMAT_KIVI4; }},
        {KV_UNSUPPORTED, "key_format kvarn2", "f32, f16 or bf16",
         [](m&, l& o) { o.key_format = KV_FORMAT_KVARN2; }},
        {KV_UNSUPPORTED, "demoted_key_format is kivi4", "token-local",
         [](m&, l& o) { o.demoted_key_format = KV_FORMAT_KIVI4; }},
        {KV_UNSUPPORTED, "demoted_key_format is kvarn4", "token-local",
         [](m&, l& o) { o.demoted_key_format = KV_FORMAT_KVARN4; }},
        {KV_UNSUPPORTED, "demoted_value_format is kvarn2", "token-local",
         [](m&, l& o) { o.demoted_value_format = KV_FORMAT_KVARN2; }},
        {KV_UNSUPPORTED, "demoted_key_format is affine4", "not affine4",
         [](m&, l& o) { o.demoted_key_format = KV_FORMAT_AFFINE4; }},
        {KV_UNSUPPORTED, "demoted_key_format is affine4", "not affine4",
         [](m&, l& o) {
             o.demoted_key_format = KV_FORMAT_AFFINE4;
             o.demoted_value_format = KV_FORMAT_Q4_1;
         }},
        {KV_UNSUPPORTED, "demoted_value_format is affine4", "name another",
         [](m&, l& o) { o.demoted_value_format = KV_FORMAT_AFFINE4; }},
        {KV_UNSUPPORTED, "demoted_key_format is 21", "kv_capabilities",
         [](m&, l& o) { o.demoted_key_format = KV_FORMAT_AFFINE4 + 1; }},
        {KV_UNSUPPORTED, "demoted_key_format is 4294967295", "kv_capabilities",
         [](m&, l& o) { o.demoted_key_format = UINT32_MAX; }},
        {KV_UNSUPPORTED, "demoted_value_format is 99", "kv_capabilities",
         [](m&, l& o) { o.demoted_value_format = 99; }},
    });
}

TEST_CASE("demotion is to every format whose rows stand for themselves") {
    for (uint32_t format = KV_FORMAT_FP8_E4M3; format < KV_FORMAT_AFFINE4; ++format) {
        CAPTURE(format);
        const bool in_tiles = format >= KV_FORMAT_KIVI4 && format <= KV_FORMAT_KVARN2;
        const bool as_values = !in_tiles || format <= KV_FORMAT_KIVI2;
        for (const bool values : {false, true}) {
            demoting_model model;
            model.key_storage.flags = KV_STORAGE_SCALE_ONE;
            kv_layer& layer = model.layers[0];
            layer.demoted_key_format = values ? uint32_t{KV_FORMAT_F16} : format;
            layer.demoted_value_format = values ? format : uint32_t{KV_FORMAT_F16};
            layer.demoted_key_storage = layer.demoted_value_storage = &model.key_storage;
            const kv_status verdict = create(model.describe());
            CHECK((verdict == KV_OK) == (values ? as_values : !in_tiles));
        }
    }
}

TEST_CASE("demotion that saves nothing is refused") {
    try_attacks({
        {KV_INVALID, "demoted_key_format f16 and demoted_value_format f16 save nothing", "smaller",
         [](m&, l& o) { o.demoted_key_format = KV_FORMAT_F16; }},
        {KV_INVALID, "save nothing: blocks take 12288 bytes, and 6144 before", "smaller",
         [](m&, l& o) { o.demoted_key_format = KV_FORMAT_F32; }},
        {KV_INVALID, "demoted_key_format bf16 and", "smaller",
         [](m&, l& o) { o.demoted_key_format = KV_FORMAT_BF16; }},
        // Keys in f32 take more than values in int4_token save.
        {KV_INVALID, "demoted_key_format f32 and demoted_value_format int4_token", "smaller",
         [](m&, l& o) {
             o.demoted_key_format = KV_FORMAT_F32;
             o.demoted_value_format = KV_FORMAT_INT4_TOKEN;
         }},
    });
}

TEST_CASE("demotion: fields without a demoted format, and beyond their range") {
    try_attacks({
        {KV_INVALID, "demote_after without demoted_key_format", "name key_format there",
         [](m&, l& o) { o.demoted_key_format = 0; }},
        {KV_INVALID, "demoted_value_format without demoted_key_format", "name key_format there",
         [](m&, l& o) {
             o.demoted_key_format = o.demote_after = 0;
             o.demoted_value_format = KV_FORMAT_INT8_TOKEN;
         }},
        {KV_INVALID, "demoted_key_storage without demoted_key_format", "name key_format there",
         [](m& model, l& o) {
             o.demoted_key_format = o.demote_after = 0;
             o.demoted_key_storage = &model.key_storage;
         }},
        {KV_INVALID, "demoted_value_storage without demoted_key_format", "name key_format there",
         [](m& model, l& o) {
             o.demoted_key_format = o.demote_after = 0;
             o.demoted_value_storage = &model.value_storage;
         }},
        {KV_INVALID, "demote_after is 1073741825", "at most 1073741824",
         [](m&, l& o) { o.demote_after = (1u << 30) + 1; }},
        {KV_INVALID, "demote_after is 4294967295", "at most 1073741824",
         [](m&, l& o) { o.demote_after = UINT32_MAX; }},
    });
    // The largest is taken.
    for (const uint32_t after : {1u << 30, 1u}) {
        demoting_model model;
        model.layers[0].demote_after = model.layers[1].demote_after = after;
        const kv_model description = model.describe();
        ACCEPTS(create(description));
    }
    // And so is demotion under pressure alone, where there can be any.
    demoting_model model;
    model.layers[1].demote_after = 0;
    const kv_model description = model.describe();
    kv_pool_config config = small_config();
    config.pressure_percent = 90;
    ACCEPTS(create(description, config));
    for (const char* word : {"layer 1: demote_after 0 is demotion under pressure alone",
                             "set config.pressure_percent, or demote_after"}) {
        REFUSES(nothing, KV_INVALID, word, create(description));
    }
}

TEST_CASE("demotion: storages") {
    try_attacks({
        {KV_UNSUPPORTED, "demoted_key_storage: f16", "not stored rotated",
         [](m& model, l& o) {
             o.key_format = KV_FORMAT_F32;
             o.demoted_key_format = KV_FORMAT_F16;
             model.key_storage.flags = KV_STORAGE_ROTATE;
             o.demoted_key_storage = &model.key_storage;
         }},
        {KV_UNSUPPORTED, "demoted_value_storage: f16", "not stored rotated",
         [](m& model, l& o) {
             o.demoted_value_format = KV_FORMAT_F16;
             model.value_storage.flags = KV_STORAGE_ROTATE;
             o.demoted_value_storage = &model.value_storage;
         }},
        // Rows are written rotated because their demoted form is; key_storage is of neither.
        {KV_UNSUPPORTED, " key_storage: f16", "not stored rotated",
         [](m& model, l& o) {
             model.key_storage.flags = KV_STORAGE_ROTATE;
             o.key_storage = &model.key_storage;
         }},
        {KV_INVALID, "demoted_key_storage: fp8_e4m3 needs static scales", "KV_STORAGE_SCALE_ONE",
         [](m&, l& o) { o.demoted_key_format = KV_FORMAT_FP8_E4M3; }},
        {KV_INVALID, "demoted_value_storage: fp8_e5m2 needs static scales", "KV_STORAGE_SCALE_ONE",
         [](m&, l& o) { o.demoted_value_format = KV_FORMAT_FP8_E5M2; }},
        // key_storage is not the demoted format's.
        {KV_INVALID, "demoted_key_storage: fp8_e4m3 needs static scales", "KV_STORAGE_SCALE_ONE",
         [](m& model, l& o) {
             o.demoted_key_format = KV_FORMAT_FP8_E4M3;
             o.demoted_value_format = KV_FORMAT_F16;
             model.key_storage.flags = KV_STORAGE_SCALE_ONE;
             o.key_storage = &model.key_storage;
         }},
        {KV_INVALID, "demoted_key_storage: scales[1] is 0", "positive",
         [](m& model, l& o) {
             o.demoted_key_format = KV_FORMAT_FP8_E4M3;
             o.demoted_value_format = KV_FORMAT_F16;
             model.numbers[1] = 0.0f;
             model.key_storage.scales = model.numbers.data();
             model.key_storage.scale_count = kv_heads;
             o.demoted_key_storage = &model.key_storage;
         }},
        {KV_INVALID, "demoted_key_storage: scale_count is 3", "each of 2 KV heads",
         [](m& model, l& o) {
             model.key_storage.scales = model.numbers.data();
             model.key_storage.scale_count = 3;
             o.demoted_key_storage = &model.key_storage;
         }},
        {KV_INVALID, "demoted_key_storage: int8_token", "no use for channel_means",
         [](m& model, l& o) {
             model.key_storage.channel_means = model.numbers.data();
             model.key_storage.channel_scales = model.numbers.data();
             model.key_storage.channel_heads = kv_heads;
             model.key_storage.channel_dim = key_dim;
             o.demoted_key_storage = &model.key_storage;
         }},
    });
    const auto with = [](const kv_storage* wrong, bool values) {
        demoting_model model;
        (values ? model.layers[0].demoted_value_storage : model.layers[0].demoted_key_storage) =
            wrong;
        return create(model.describe());
    };
    refuses_wrong_headers(nothing, "demoted_key_storage", KV_INIT(kv_storage),
                          [&](const kv_storage* wrong) { return with(wrong, false); });
    refuses_wrong_headers(nothing, "demoted_value_storage", KV_INIT(kv_storage),
                          [&](const kv_storage* wrong) { return with(wrong, true); });
}

TEST_CASE("demotion: the reserved field") {
    for (const uint32_t wrong : {1u, UINT32_MAX}) {
        demoting_model model;
        model.layers[1].reserved1 = wrong;
        const kv_model description = model.describe();
        REFUSES(nothing, KV_UNSUPPORTED, ("reserved1 is " + std::to_string(wrong)).c_str(),
                create(description));
    }
}

/// 100 tokens in one step; what its report says of demotion.
kv_step_report fill(kv_pool* pool) {
    kv_seq seq = 0;
    REQUIRE(kv_seq_create(pool, nullptr, &seq) == KV_OK);
    kv_step* step = nullptr;
    REQUIRE(kv_step_begin(pool, &step) == KV_OK);
    REQUIRE(kv_seq_append(step, seq, nullptr, 100, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    const tensors t(100);
    REQUIRE(kv_write(step, 0, &t.keys, &t.values) == KV_OK);
    REQUIRE(kv_write(step, 1, &t.keys, &t.values) == KV_OK);
    kv_step_report report = KV_INIT(kv_step_report);
    REQUIRE(kv_step_end(step, &report) == KV_OK);
    REQUIRE(kv_pool_check(pool) == KV_OK);
    return report;
}

TEST_CASE("layers of earlier versions, whose structs end before demotion, demote nothing") {
    // Up to value_storage, and as they were released, up to rope; what lies behind is not read.
    demoting_model model;
    const kv_pool_config config = small_config();
    for (const uint32_t size : {static_cast<uint32_t>(offsetof(kv_layer, demoted_key_format)),
                                static_cast<uint32_t>(offsetof(kv_layer, key_storage))}) {
        CAPTURE(size);
        std::vector<uint64_t> words((3 * size + sizeof(kv_layer)) / 8 + 1);
        std::memset(words.data(), 0xee, words.size() * 8);
        unsigned char* bytes = reinterpret_cast<unsigned char*>(words.data());
        for (uint32_t i = 0; i < 3; ++i) {
            kv_layer layer = model.layers[i];
            layer.struct_size = size;
            std::memcpy(bytes + i * size, &layer, size);
        }
        kv_model earlier = model.describe();
        earlier.layers = reinterpret_cast<const kv_layer*>(bytes);
        kv_pool* pool = nullptr;
        ACCEPTS(kv_pool_create(&config, &earlier, &pool));
        const kv_step_report report = fill(pool);
        CHECK(report.demoted_blocks == 0);
        CHECK(report.demoted_bytes == 0);
        kv_pool_release(pool);
    }
    // The same layers with all their fields: 84 and, in the window, 36 - 16 tokens are old.
    const kv_model description = model.describe();
    kv_pool* pool = nullptr;
    ACCEPTS(kv_pool_create(&config, &description, &pool));
    const kv_step_report report = fill(pool);
    CHECK(report.demoted_blocks > 5);
    CHECK(report.demoted_bytes == report.demoted_blocks * (6144 - 16 * 2 * (68 + 36)));
    kv_pool_release(pool);
}

TEST_CASE("a step's report that ends before demotion is filled up to there") {
    demoting_model model;
    const kv_model description = model.describe();
    const kv_pool_config config = small_config();
    kv_pool* pool = nullptr;
    REQUIRE(kv_pool_create(&config, &description, &pool) == KV_OK);
    kv_seq seq = 0;
    REQUIRE(kv_seq_create(pool, nullptr, &seq) == KV_OK);
    kv_step* step = nullptr;
    REQUIRE(kv_step_begin(pool, &step) == KV_OK);
    REQUIRE(kv_seq_append(step, seq, nullptr, 100, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    const tensors t(100);
    for (const uint32_t layer : {0u, 1u}) {
        REQUIRE(kv_write(step, layer, &t.keys, &t.values) == KV_OK);
    }
    resized<kv_step_report> earlier(KV_INIT(kv_step_report),
                                    offsetof(kv_step_report, demoted_blocks));
    earlier.get()->demoted_blocks = 0xabcd;
    REQUIRE(kv_step_end(step, earlier.get()) == KV_OK);
    CHECK(earlier.get()->accepted_tokens == 100);
    CHECK(earlier.get()->demoted_blocks == 0xabcd);
    kv_pool_release(pool);
}

}  // namespace
