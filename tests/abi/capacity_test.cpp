// The figures of kv_plan against arithmetic by hand: published sizes of known models, and a mix of
// formats, windows and shared layers. None of these pools is made.
#include "abi/world.hpp"

using namespace abi;

namespace {

constexpr uint64_t mebibyte = uint64_t{1} << 20;
constexpr uint64_t gibibyte = uint64_t{1} << 30;

/// Layers all alike, in 16-bit elements.
std::vector<kv_layer> layers_of(uint32_t count, uint32_t queries, uint32_t heads, uint32_t dim) {
    kv_layer layer = KV_INIT(kv_layer);
    layer.query_heads = queries;
    layer.kv_heads = heads;
    layer.key_dim = dim;
    layer.key_format = KV_FORMAT_BF16;
    return std::vector<kv_layer>(count, layer);
}

struct question {
    uint64_t arena_bytes = 0;
    uint64_t sequences = 1;
    uint64_t tokens = 131072;
    uint32_t layer = 0;
};

kv_plan_report ask(const std::vector<kv_layer>& layers, const question& asked) {
    kv_model model = KV_INIT(kv_model);
    model.layers = layers.data();
    model.layer_count = static_cast<uint32_t>(layers.size());
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.arena_bytes = asked.arena_bytes;
    config.threads = 1;
    kv_plan_report report = KV_INIT(kv_plan_report);
    report.sequences = asked.sequences;
    report.tokens_per_sequence = asked.tokens;
    report.layer = asked.layer;
    REQUIRE(kv_plan(&config, &model, &report) == KV_OK);
    return report;
}

TEST_CASE("models without windows: bytes per token and of a long sequence") {
    struct known {
        const char* name;
        uint32_t layers, queries, heads, dim;
        uint64_t bytes_per_token, tokens, bytes;
    };
    const known models[] = {
        {"Llama-3.1-70B", 80, 64, 8, 128, 327680, 131072, 40 * gibibyte},
        {"the same with 64 KV heads", 80, 64, 64, 128, 2621440, 131072, 320 * gibibyte},
        {"Llama-3.1-405B", 126, 128, 8, 128, 516096, 131072, 63 * gibibyte},
        {"Llama-3.1-8B", 32, 32, 8, 128, 131072, 8192, gibibyte},
        {"Qwen3-32B", 64, 64, 8, 128, 262144, 32768, 8 * gibibyte},
        {"Qwen3-32B, 128 k", 64, 64, 8, 128, 262144, 131072, 32 * gibibyte},
        {"7B, every head of its own", 32, 32, 32, 128, 524288, 2048, gibibyte},
        {"Falcon-7B, one head for all", 32, 71, 1, 64, 8192, 131072, gibibyte},
        {"GLM-4.5", 92, 96, 8, 128, 376832, 1024, 368 * mebibyte},
    };
    for (const known& model : models) {
        CAPTURE(model.name);
        const kv_plan_report plan =
            ask(layers_of(model.layers, model.queries, model.heads, model.dim),
                {0, 1, model.tokens, 0});
        CHECK(plan.bytes_per_token == model.bytes_per_token);
        CHECK(plan.bytes_per_sequence == model.bytes);
        CHECK(plan.arena_bytes_needed == model.bytes);  // blocks of these sizes fill slabs
        CHECK(plan.bytes_per_block == 16 * model.bytes_per_token);
        CHECK(plan.blocks_per_sequence == model.layers * (model.tokens / 16));
        CHECK(plan.full_bytes_per_token == model.bytes_per_token);
        CHECK(plan.constant_bytes_per_sequence == 0);
        CHECK(plan.layer_bytes_per_block == 16 * model.bytes_per_token / model.layers);
        CHECK(plan.layer_bytes_per_sequence == model.bytes / model.layers);
        // The inverse question: there is no arena for anything to fit in.
        CHECK(plan.sequences_that_fit == 0);
        CHECK(plan.tokens_that_fit == 0);
        CHECK(plan.tokens_that_fit_each == 0);
        CHECK(plan.tokens_by_bytes == 0);
        // No pool has more than 128 GiB.
        CHECK((plan.metadata_bytes == 0) == (model.bytes > 128 * gibibyte));
    }
}

TEST_CASE("models with windows: what grows, and what does not") {
    // A window of w tokens keeps the blocks that w + 15 slots can touch, of 16 slots each.
    std::vector<kv_layer> gemma = layers_of(62, 32, 16, 128);  // Gemma-3-27B
    for (uint32_t i = 0; i < 62; ++i) gemma[i].window = i % 6 == 5 ? 0 : 1024;
    kv_plan_report plan = ask(gemma, {});
    CHECK(plan.full_bytes_per_token == 81920);
    CHECK(plan.bytes_per_token == 62 * 8192);
    CHECK(plan.constant_bytes_per_sequence == 52 * 65 * uint64_t{131072});
    CHECK(plan.constant_bytes_per_sequence == 416 * mebibyte / 64 * 65);
    CHECK(plan.bytes_per_sequence == 10 * gibibyte + 52 * 65 * uint64_t{131072});
    CHECK(plan.blocks_per_sequence == 10 * 8192 + 52 * 65);

    std::vector<kv_layer> oss = layers_of(36, 64, 8, 64);  // gpt-oss-120b
    for (uint32_t i = 0; i < 36; i += 2) oss[i].window = 128;
    plan = ask(oss, {});
    CHECK(plan.full_bytes_per_token == 36864);
    CHECK(plan.bytes_per_sequence == gibibyte / 2 * 9 + 18 * 9 * 32768);

    std::vector<kv_layer> mistral = layers_of(32, 32, 8, 128);  // Mistral-7B v0.1
    for (kv_layer& layer : mistral) layer.window = 4096;
    plan = ask(mistral, {gibibyte, 1, 100, 0});
    CHECK(plan.full_bytes_per_token == 0);
    CHECK(plan.constant_bytes_per_sequence == 512 * mebibyte / 256 * 257);
    CHECK(plan.bytes_per_sequence == 7 * 16 * uint64_t{131072});
    CHECK(plan.tokens_that_fit == (uint64_t{1} << 31) - 1);  // a position's limit: windows slide

    std::vector<kv_layer> hunyuan = layers_of(64, 80, 8, 128);  // Hunyuan-Large: pairs share
    for (uint32_t i = 1; i < 64; i += 2) {
        hunyuan[i].flags = KV_LAYER_SHARED;
        hunyuan[i].shared_layer = i - 1;
    }
    plan = ask(hunyuan, {0, 1, 8192, 1});
    CHECK(plan.bytes_per_token == 131072);
    CHECK(plan.bytes_per_sequence == gibibyte);
    CHECK(plan.layer_bytes_per_block == 0);
    CHECK(plan.layer_bytes_per_sequence == 0);
    CHECK(ask(hunyuan, {0, 1, 8192, 2}).layer_bytes_per_block == 65536);
}

TEST_CASE("8 GiB: tokens by bytes, and in whole blocks") {
    std::vector<kv_layer> layers = layers_of(80, 64, 8, 128);
    kv_plan_report plan = ask(layers, {8 * gibibyte, 4, 4096, 0});
    CHECK(plan.tokens_by_bytes == 26214);  // at 320 KiB
    // 131,072 blocks of 64 KiB over 80 layers: 1,638 each.
    CHECK(plan.tokens_that_fit == 1638 * 16);
    CHECK(plan.tokens_that_fit_each == 409 * 16);
    CHECK(plan.sequences_that_fit == 6);
    CHECK(plan.arena_bytes_needed == 5 * gibibyte);

    kv_storage unscaled = KV_INIT(kv_storage);
    unscaled.flags = KV_STORAGE_SCALE_ONE;
    for (kv_layer& layer : layers) {
        layer.key_format = KV_FORMAT_FP8_E4M3;
        layer.key_storage = layer.value_storage = &unscaled;
    }
    plan = ask(layers, {8 * gibibyte, 4, 4096, 0});
    CHECK(plan.bytes_per_token == 163840);
    CHECK(plan.tokens_by_bytes == 52428);  // at 160 KiB
    CHECK(plan.tokens_that_fit == 3276 * 16);
    CHECK(plan.tokens_that_fit_each == 819 * 16);
    CHECK(plan.sequences_that_fit == 12);
}

/// Six layers of 4 KV heads with keys of 128 and values of 64 dimensions: f16 at both ends, int8
/// keys and int4 values between them, a window with sinks, and one that shares.
std::vector<kv_layer> mixed_layers() {
    std::vector<kv_layer> layers = layers_of(6, 8, 4, 128);
    for (kv_layer& layer : layers) {
        layer.value_dim = 64;
        layer.key_format = KV_FORMAT_F16;
    }
    for (const uint32_t i : {1u, 2u}) {
        layers[i].key_format = KV_FORMAT_INT8_TOKEN;
        layers[i].value_format = KV_FORMAT_INT4_TOKEN;
    }
    layers[3].window = 1024;
    layers[3].window_sinks = 4;
    layers[4].flags = KV_LAYER_SHARED;
    layers[4].shared_layer = 1;
    return layers;
}

TEST_CASE("formats mixed by layer, keys and values apart, with a window and a shared layer") {
    const uint64_t f16 = 4 * (128 + 64) * 2;                   // of a token in a layer: 1,536
    const uint64_t coded = 4 * ((128 + 4) + (32 + 4));         // codes and a word of numbers: 672
    const uint64_t window_blocks = 1 + (1024 + 15 + 15) / 16;  // the sinks' and the window's: 66
    kv_plan_report plan = ask(mixed_layers(), {0, 3, 5000, 1});
    CHECK(plan.bytes_per_token == 3 * f16 + 2 * coded);
    CHECK(plan.bytes_per_block == 16 * (3 * f16 + 2 * coded));
    CHECK(plan.full_bytes_per_token == 2 * f16 + 2 * coded);
    CHECK(plan.constant_bytes_per_sequence == window_blocks * 16 * f16);
    CHECK(plan.blocks_per_sequence == 4 * 313 + window_blocks);  // 5,000 tokens are 313 blocks
    CHECK(plan.bytes_per_sequence == 5008 * (2 * f16 + 2 * coded) + window_blocks * 16 * f16);
    // Blocks of 24,576 bytes, 85 in a slab: 3 * (2 * 313 + 66) take 25 of them. Blocks of 10,752
    // bytes, 195 in a slab: 3 * 2 * 313 take 10.
    CHECK(plan.arena_bytes_needed == 35 * 2 * mebibyte);
    CHECK(plan.metadata_bytes != 0);
    const uint64_t of_layer[6] = {f16, coded, coded, f16, 0, f16};
    for (uint32_t i = 0; i < 6; ++i) {
        CAPTURE(i);
        plan = ask(mixed_layers(), {0, 3, 5000, i});
        CHECK(plan.layer_bytes_per_block == 16 * of_layer[i]);
        CHECK(plan.layer_bytes_per_sequence == (i == 3 ? window_blocks : 313) * 16 * of_layer[i]);
    }
    // Short of its window it holds what the others hold.
    plan = ask(mixed_layers(), {0, 1, 100, 3});
    CHECK(plan.layer_bytes_per_sequence == 7 * 16 * f16);
    CHECK(plan.bytes_per_sequence == 7 * 16 * (3 * f16 + 2 * coded));
    // In 10 slabs, of 1,000 tokens (63 blocks in each layer, whose window is not yet full): three
    // sequences are 567 blocks of f16 in 7 slabs and 378 others in 2, four would take 9 and 3.
    plan = ask(mixed_layers(), {20 * mebibyte, 3, 1000, 0});
    CHECK(plan.sequences_that_fit == 3);
}

TEST_CASE("a sum that no 64 bits hold is refused, and a layer that is not there") {
    std::vector<kv_layer> layers = layers_of(80, 64, 64, 128);
    kv_model model = KV_INIT(kv_model);
    model.layers = layers.data();
    model.layer_count = 80;
    kv_pool_config config = KV_INIT(kv_pool_config);
    kv_plan_report report = KV_INIT(kv_plan_report);
    report.sequences = uint64_t{1} << 24;
    report.tokens_per_sequence = (uint64_t{1} << 31) - 1;
    const kv_plan_report before = report;
    REFUSES(target{}, KV_TOO_LARGE, "2^64", kv_plan(&config, &model, &report));
    CHECK(std::memcmp(&report, &before, sizeof report) == 0);
    report.layer = 80;
    REFUSES(target{}, KV_INVALID, "layer 80 of a model of 80", kv_plan(&config, &model, &report));
    report.layer = UINT32_MAX;
    REFUSES(target{}, KV_INVALID, "layer 4294967295", kv_plan(&config, &model, &report));
    report = KV_INIT(kv_plan_report);
    report.reserved0 = 1;
    REFUSES(target{}, KV_UNSUPPORTED, "reserved0", kv_plan(&config, &model, &report));
    for (const uint64_t wrong : {uint64_t{1}, 2 * mebibyte - 1}) {
        config.arena_bytes = wrong;
        report = KV_INIT(kv_plan_report);
        REFUSES(target{}, KV_INVALID, "arena_bytes", kv_plan(&config, &model, &report));
    }
    config.arena_bytes = 128 * gibibyte + 1;
    REFUSES(target{}, KV_TOO_LARGE, "arena_bytes", kv_plan(&config, &model, &report));
}

}  // namespace
