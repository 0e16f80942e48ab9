// kv_plan against a pool: sequences are admitted until the pool says AGAIN, and counted.
#include "abi/world.hpp"

using namespace abi;

namespace {

struct planned {
    kv_pool_config config = small_config();
    kv_plan_report plan = KV_INIT(kv_plan_report);

    planned(const small_model& model, uint64_t arena_slabs, uint64_t tokens) {
        config.arena_bytes = arena_slabs << 21;
        config.max_sequences = 1024;
        config.max_tokens_per_sequence = 1u << 16;
        config.max_step_sequences = 4;
        config.max_step_tokens = 1u << 16;
        plan.tokens_per_sequence = tokens;
        const kv_model description = model.describe();
        REQUIRE(kv_plan(&config, &description, &plan) == KV_OK);
    }
};

/// Adds `tokens` to a sequence in chunks, so that windows slide on the way. AGAIN cancels.
kv_status add(kv_pool* pool, kv_seq seq, uint64_t tokens, uint32_t chunk) {
    for (uint64_t done = 0; done < tokens;) {
        const uint32_t count = static_cast<uint32_t>(std::min<uint64_t>(chunk, tokens - done));
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(pool, &step) == KV_OK);
        REQUIRE(kv_seq_append(step, seq, nullptr, count, nullptr) == KV_OK);
        const kv_status verdict = kv_step_reserve(step, nullptr);
        if (verdict != KV_OK) {
            REQUIRE(kv_step_cancel(step) == KV_OK);
            return verdict;
        }
        // The host's kernels wrote: nothing to do here.
        kv_tables tables = KV_INIT(kv_tables);
        REQUIRE(kv_step_export(step, 0, &tables) == KV_OK);
        REQUIRE(kv_step_export(step, 1, &tables) == KV_OK);
        REQUIRE(kv_step_end(step, nullptr) == KV_OK);
        done += count;
    }
    return KV_OK;
}

/// How many sequences of `tokens` tokens the pool holds.
uint64_t admit(kv_pool* pool, uint64_t tokens, uint32_t chunk, kv_seq_info& one) {
    for (uint64_t held = 0;; ++held) {
        kv_seq seq = 0;
        REQUIRE(kv_seq_create(pool, nullptr, &seq) == KV_OK);
        const kv_status verdict = add(pool, seq, tokens, chunk);
        if (verdict != KV_OK) {
            CHECK((verdict == KV_AGAIN || (held == 0 && verdict == KV_TOO_LARGE)));
            return held;
        }
        one = KV_INIT(kv_seq_info);
        REQUIRE(kv_seq_get_info(pool, seq, &one) == KV_OK);
    }
}

TEST_CASE("full layers: the plan says exactly how many sequences fit, and their bytes") {
    small_model model;
    model.layers[1].window = 0;
    model.layers[1].window_sinks = 0;
    for (const uint64_t tokens : {1u, 16u, 17u, 100u, 1000u, 5000u}) {
        CAPTURE(tokens);
        const planned p(model, 4, tokens);
        const kv_model description = model.describe();
        kv_pool* pool = nullptr;
        REQUIRE(kv_pool_create(&p.config, &description, &pool) == KV_OK);
        kv_seq_info one = KV_INIT(kv_seq_info);
        if (p.plan.sequences_that_fit < 1024) {
            CHECK(admit(pool, tokens, 1u << 16, one) == p.plan.sequences_that_fit);
        } else {
            kv_seq seq = 0;
            REQUIRE(kv_seq_create(pool, nullptr, &seq) == KV_OK);
            REQUIRE(add(pool, seq, tokens, 1u << 16) == KV_OK);
            REQUIRE(kv_seq_get_info(pool, seq, &one) == KV_OK);
        }
        CHECK(one.bytes == p.plan.bytes_per_sequence);
        CHECK(one.bytes == 2 * ((tokens + 15) / 16) * 6144);
        CHECK(p.plan.bytes_per_token == 2 * 2 * (64 + 32) * 2);
        kv_pool_stats stats = KV_INIT(kv_pool_stats);
        REQUIRE(kv_pool_get_stats(pool, &stats) == KV_OK);
        CHECK(p.plan.metadata_bytes == stats.metadata_bytes);
        kv_pool_release(pool);
    }
}

TEST_CASE("blocks of several sizes: slabs belong to one size, and the plan knows") {
    small_model model;
    model.layers[1].window = 0;
    model.layers[1].window_sinks = 0;
    model.layers[1].kv_heads = 4;
    for (const uint64_t tokens : {100u, 3000u}) {
        CAPTURE(tokens);
        const planned p(model, 5, tokens);
        const kv_model description = model.describe();
        kv_pool* pool = nullptr;
        REQUIRE(kv_pool_create(&p.config, &description, &pool) == KV_OK);
        kv_seq_info one = KV_INIT(kv_seq_info);
        CHECK(admit(pool, tokens, 1u << 16, one) == p.plan.sequences_that_fit);
        CHECK(one.bytes == p.plan.bytes_per_sequence);
        kv_pool_release(pool);
    }
}

TEST_CASE("windows: what is held between steps is never more than planned") {
    const small_model model;
    for (const uint64_t tokens : {10u, 31u, 32u, 40u, 48u, 49u, 100u, 1000u}) {
        CAPTURE(tokens);
        const planned p(model, 2, tokens);
        const kv_model description = model.describe();
        kv_pool* pool = nullptr;
        REQUIRE(kv_pool_create(&p.config, &description, &pool) == KV_OK);
        uint64_t most = 0;
        for (const uint32_t chunk : {1u, 7u, 16u, 33u, 4096u}) {
            kv_seq seq = 0;
            REQUIRE(kv_seq_create(pool, nullptr, &seq) == KV_OK);
            REQUIRE(add(pool, seq, tokens, chunk) == KV_OK);
            kv_seq_info info = KV_INIT(kv_seq_info);
            REQUIRE(kv_seq_get_info(pool, seq, &info) == KV_OK);
            CHECK(info.bytes <= p.plan.bytes_per_sequence);
            most = std::max(most, info.bytes);
            REQUIRE(kv_seq_release(pool, seq) == KV_OK);
        }
        CHECK(most + 6144 >= p.plan.bytes_per_sequence);  // nor much less
        kv_pool_release(pool);
    }
}

TEST_CASE("what one sequence alone can retain, and the arena that a number of them needs") {
    small_model model;
    model.layers[1].window = 0;
    model.layers[1].window_sinks = 0;
    const planned p(model, 2, 100);
    // 682 blocks over two lanes: 341 each.
    CHECK(p.plan.tokens_that_fit == 341 * 16);
    const kv_model description = model.describe();
    kv_pool* pool = nullptr;
    REQUIRE(kv_pool_create(&p.config, &description, &pool) == KV_OK);
    kv_seq seq = 0;
    REQUIRE(kv_seq_create(pool, nullptr, &seq) == KV_OK);
    CHECK(add(pool, seq, 341 * 16, 1u << 16) == KV_OK);
    CHECK(add(pool, seq, 1, 1) < 0);
    kv_pool_release(pool);

    kv_plan_report exact = KV_INIT(kv_plan_report);
    exact.sequences = 50;
    exact.tokens_per_sequence = 1000;
    REQUIRE(kv_plan(&p.config, &description, &exact) == KV_OK);
    kv_pool_config config = p.config;
    config.arena_bytes = exact.arena_bytes_needed;
    kv_plan_report again = KV_INIT(kv_plan_report);
    again.tokens_per_sequence = 1000;
    REQUIRE(kv_plan(&config, &description, &again) == KV_OK);
    CHECK(again.sequences_that_fit >= 50);
    config.arena_bytes -= 1;
    again = KV_INIT(kv_plan_report);
    again.tokens_per_sequence = 1000;
    REQUIRE(kv_plan(&config, &description, &again) == KV_OK);
    CHECK(again.sequences_that_fit < 50);
    // In: zero means the config's limits.
    again = KV_INIT(kv_plan_report);
    REQUIRE(kv_plan(&config, &description, &again) == KV_OK);
    CHECK(again.sequences == 1024);
    CHECK(again.tokens_per_sequence == 1u << 16);
}

TEST_CASE("a pool of the arena that was planned holds just that") {
    small_model model;
    model.layers[1].window = 0;
    model.layers[1].window_sinks = 0;
    model.layers[0].key_format = KV_FORMAT_INT8_TOKEN;
    model.layers[0].value_format = KV_FORMAT_INT4_TOKEN;
    const kv_model description = model.describe();
    for (const uint64_t tokens : {999u, 1000u, 1001u, 5000u}) {
        CAPTURE(tokens);
        kv_pool_config config = planned(model, 4, tokens).config;
        config.arena_bytes = 0;
        kv_plan_report plan = KV_INIT(kv_plan_report);
        plan.sequences = 30;
        plan.tokens_per_sequence = tokens;
        REQUIRE(kv_plan(&config, &description, &plan) == KV_OK);
        // Layer 0: 2 heads of 64 + 4 and 16 + 4 bytes; layer 1: 2 heads of 96 halves.
        const uint64_t blocks = (tokens + 15) / 16;
        CHECK(plan.bytes_per_sequence == blocks * 16 * 2 * (88 + 192));
        kv_seq_info one = KV_INIT(kv_seq_info);
        for (const uint64_t missing : {0u, 1u}) {
            CAPTURE(missing);
            config.arena_bytes = plan.arena_bytes_needed - (missing << 21);
            kv_pool* pool = nullptr;
            REQUIRE(kv_pool_create(&config, &description, &pool) == KV_OK);
            kv_pool_stats stats = KV_INIT(kv_pool_stats);
            REQUIRE(kv_pool_get_stats(pool, &stats) == KV_OK);
            const uint64_t held = admit(pool, tokens, 1u << 16, one);
            CHECK((held >= 30) == (missing == 0));
            CHECK(one.bytes == plan.bytes_per_sequence);
            CHECK(one.blocks == plan.blocks_per_sequence);
            if (missing == 0) CHECK(stats.metadata_bytes == plan.metadata_bytes);
            kv_pool_release(pool);
        }
    }
}

TEST_CASE("so many tokens fit in each of a number of sequences, and not one more") {
    small_model model;
    model.layers[1].window = 0;
    model.layers[1].window_sinks = 0;
    model.layers[0].key_format = KV_FORMAT_Q8_0;
    const kv_model description = model.describe();
    for (const uint64_t sequences : {1u, 2u, 3u, 7u}) {
        CAPTURE(sequences);
        const kv_pool_config config = planned(model, 4, 1).config;
        kv_plan_report plan = KV_INIT(kv_plan_report);
        plan.sequences = sequences;
        REQUIRE(kv_plan(&config, &description, &plan) == KV_OK);
        const uint64_t each = plan.tokens_that_fit_each;
        CHECK((sequences != 1 || each == plan.tokens_that_fit));
        for (const uint64_t tokens : {each, each + 1}) {
            CAPTURE(tokens);
            kv_pool* pool = nullptr;
            REQUIRE(kv_pool_create(&config, &description, &pool) == KV_OK);
            kv_seq_info one = KV_INIT(kv_seq_info);
            CHECK((admit(pool, tokens, 1u << 16, one) >= sequences) == (tokens == each));
            kv_pool_release(pool);
        }
    }
}

TEST_CASE("tile-local formats: sealed blocks, and one that is still raw") {
    // Two layers of 2 KV heads with 128 dimensions, in blocks of 32 tokens. Sealed, a head's keys
    // take 32 * 64 bytes of codes and 128 * 4 of numbers, a token's values 64 and 4 * 4; raw, keys
    // are halves.
    const uint64_t sealed = 2 * (32 * 64 + 128 * 4 + 32 * (64 + 4 * 4));
    const uint64_t raw = 2 * (32 * 128 * 2 + 32 * (64 + 4 * 4));
    kv_layer layer = KV_INIT(kv_layer);
    layer.query_heads = layer.kv_heads = 2;
    layer.key_dim = 128;
    layer.key_format = KV_FORMAT_KIVI4;
    const kv_layer layers[2] = {layer, layer};
    kv_model model = KV_INIT(kv_model);
    model.layers = layers;
    model.layer_count = 2;
    kv_pool_config config = small_config();
    config.block_tokens = 32;
    for (const uint64_t tokens : {1u, 31u, 32u, 33u, 96u, 100u, 256u}) {
        CAPTURE(tokens);
        config.arena_bytes = 0;
        kv_plan_report plan = KV_INIT(kv_plan_report);
        plan.sequences = 3;
        plan.tokens_per_sequence = tokens;
        plan.layer = 1;
        REQUIRE(kv_plan(&config, &model, &plan) == KV_OK);
        CHECK(plan.bytes_per_token == 2 * 320);
        CHECK(plan.bytes_per_block == 2 * sealed);
        CHECK(plan.full_bytes_per_token == 2 * 320);
        CHECK(plan.constant_bytes_per_sequence == 2 * raw);
        CHECK(plan.blocks_per_sequence == 2 * (tokens / 32 + 1));
        CHECK(plan.bytes_per_sequence == 2 * (tokens / 32 * sealed + raw));
        CHECK(plan.layer_bytes_per_block == sealed);
        CHECK(plan.layer_bytes_per_sequence == tokens / 32 * sealed + raw);
        // Slabs of 97 raw blocks and of 204 sealed ones.
        CHECK(plan.arena_bytes_needed == (tokens < 32 ? 1u : 2u) << 21);
        config.arena_bytes = plan.arena_bytes_needed;
        kv_pool* pool = nullptr;
        REQUIRE(kv_pool_create(&config, &model, &pool) == KV_OK);
        for (uint32_t i = 0; i < 3; ++i) {
            kv_seq seq = 0;
            REQUIRE(kv_seq_create(pool, nullptr, &seq) == KV_OK);
            REQUIRE(add(pool, seq, tokens, 7) == KV_OK);
            kv_seq_info info = KV_INIT(kv_seq_info);
            REQUIRE(kv_seq_get_info(pool, seq, &info) == KV_OK);
            // Just full, nothing is raw: that block was needed on the way.
            CHECK(info.bytes + (tokens % 32 == 0 ? 2 * raw : 0) == plan.bytes_per_sequence);
        }
        kv_pool_release(pool);
    }
}

/// Two layers of 2 KV heads, f16 at first: 64 and 32 channels, in blocks of 16 tokens.
constexpr uint64_t raw_block = 2 * 16 * (128 + 64);
/// Keys in int8_token, with 4 bytes of scale, values in int4_token, with 2 of scale and 2 of least.
constexpr uint64_t demoted_block = 2 * 16 * (64 + 4 + 16 + 4);

struct demoting_model : small_model {
    explicit demoting_model(uint32_t demote_after) {
        layers.resize(2);
        for (kv_layer& layer : layers) {
            layer.window = layer.window_sinks = 0;
            layer.demoted_key_format = KV_FORMAT_INT8_TOKEN;
            layer.demoted_value_format = KV_FORMAT_INT4_TOKEN;
            layer.demote_after = demote_after;
        }
    }
};

TEST_CASE("demotion: blocks behind the newest tokens in their smaller format, the others raw") {
    const demoting_model model(256);
    const kv_model description = model.describe();
    kv_pool_config config = small_config();
    config.max_tokens_per_sequence = config.max_step_tokens = 2048;
    for (const uint64_t tokens : {1u, 256u, 271u, 272u, 273u, 999u, 1000u, 1008u, 1009u}) {
        CAPTURE(tokens);
        // Of 1000 tokens 744 are old, in 46 full blocks and a part; so 264 are in 17 others.
        const uint64_t old = tokens < 256 ? 0 : (tokens - 256) / 16;
        const uint64_t raw = (tokens - 16 * old + 15) / 16;
        // A block that was just demoted was raw a moment before.
        const uint64_t before = tokens > 256 && tokens % 16 == 0 ? 1 : 0;
        if (tokens == 1000) CHECK((old == 46 && raw == 17 && before == 0));
        config.arena_bytes = 0;
        kv_plan_report plan = KV_INIT(kv_plan_report);
        plan.sequences = 3;
        plan.tokens_per_sequence = tokens;
        plan.layer = 1;
        REQUIRE(kv_plan(&config, &description, &plan) == KV_OK);
        CHECK(plan.bytes_per_token == 2 * demoted_block / 16);
        CHECK(plan.bytes_per_token == 2 * 2 * (68 + 20));
        CHECK(plan.bytes_per_block == 2 * demoted_block);
        CHECK(plan.full_bytes_per_token == 2 * demoted_block / 16);
        // 256 tokens, 15 behind them in a block that is not full, and one more: 17 blocks.
        CHECK(plan.constant_bytes_per_sequence == 2 * 17 * raw_block);
        CHECK(plan.blocks_per_sequence == 2 * (old + raw + before));
        CHECK(plan.bytes_per_sequence == 2 * (old * demoted_block + (raw + before) * raw_block));
        CHECK(plan.layer_bytes_per_block == demoted_block);
        CHECK(2 * plan.layer_bytes_per_sequence == plan.bytes_per_sequence);
        // A slab of 341 raw blocks, and one of 744 demoted ones.
        CHECK(plan.arena_bytes_needed == (old + before == 0 ? 1u : 2u) << 21);

        config.arena_bytes = plan.arena_bytes_needed;
        kv_pool* pool = nullptr;
        REQUIRE(kv_pool_create(&config, &description, &pool) == KV_OK);
        for (uint64_t held = 1; held <= 3; ++held) {
            kv_seq seq = 0;
            REQUIRE(kv_seq_create(pool, nullptr, &seq) == KV_OK);
            REQUIRE(add(pool, seq, tokens, 7) == KV_OK);
            kv_seq_info info = KV_INIT(kv_seq_info);
            REQUIRE(kv_seq_get_info(pool, seq, &info) == KV_OK);
            CHECK(info.bytes + 2 * before * raw_block == plan.bytes_per_sequence);
            CHECK(info.blocks + 2 * before == plan.blocks_per_sequence);
            kv_pool_stats stats = KV_INIT(kv_pool_stats);
            REQUIRE(kv_pool_get_stats(pool, &stats) == KV_OK);
            CHECK(stats.live_bytes == held * info.bytes);
        }
        CHECK(kv_pool_check(pool) == KV_OK);
        kv_pool_release(pool);
    }
}

TEST_CASE("demotion under pressure alone is not planned with: blocks count as they are written") {
    const demoting_model model(0);
    small_model without;
    without.layers.resize(2);
    without.layers[1].window = without.layers[1].window_sinks = 0;
    kv_plan_report plans[2] = {KV_INIT(kv_plan_report), KV_INIT(kv_plan_report)};
    for (const uint32_t i : {0u, 1u}) {
        const kv_model description = i == 0 ? model.describe() : without.describe();
        kv_pool_config config = small_config();
        config.pressure_percent = 90;
        plans[i].sequences = 3;
        plans[i].tokens_per_sequence = 1000;
        REQUIRE(kv_plan(&config, &description, &plans[i]) == KV_OK);
        plans[i].metadata_bytes = 0;  // of one size of blocks more
    }
    CHECK(plans[0].bytes_per_token == 2 * 2 * (128 + 64));
    CHECK(plans[0].bytes_per_sequence == 2 * 63 * raw_block);
    CHECK(plans[0].constant_bytes_per_sequence == 0);
    CHECK(std::memcmp(&plans[0], &plans[1], sizeof plans[0]) == 0);
}

TEST_CASE("demotion in windows: what is held between steps is never more than planned") {
    for (const uint32_t after : {1u, 20u, 60u, 1000u}) {
        demoting_model model(after);
        model.layers[1].window = 64;
        model.layers[1].window_sinks = 4;
        for (const uint64_t tokens : {40u, 64u, 100u, 1000u}) {
            CAPTURE(after);
            CAPTURE(tokens);
            const planned p(model, 2, tokens);
            const kv_model description = model.describe();
            kv_pool* pool = nullptr;
            REQUIRE(kv_pool_create(&p.config, &description, &pool) == KV_OK);
            uint64_t most = 0;
            for (const uint32_t chunk : {1u, 7u, 33u, 4096u}) {
                kv_seq seq = 0;
                REQUIRE(kv_seq_create(pool, nullptr, &seq) == KV_OK);
                REQUIRE(add(pool, seq, tokens, chunk) == KV_OK);
                kv_seq_info info = KV_INIT(kv_seq_info);
                REQUIRE(kv_seq_get_info(pool, seq, &info) == KV_OK);
                CHECK(info.bytes <= p.plan.bytes_per_sequence);
                most = std::max(most, info.bytes);
                REQUIRE(kv_seq_release(pool, seq) == KV_OK);
            }
            // Nor much less: of each layer a block, and one that was raw.
            CHECK(most + 2 * (raw_block + demoted_block) >= p.plan.bytes_per_sequence);
            kv_pool_release(pool);
        }
    }
}

TEST_CASE("a plan counts the metadata that a pool with threads will take") {
    const small_model model;
    const kv_model description = model.describe();
    for (const uint32_t threads : {1u, 2u, 5u}) {
        kv_pool_config config = small_config();
        config.threads = threads;
        kv_plan_report plan = KV_INIT(kv_plan_report);
        REQUIRE(kv_plan(&config, &description, &plan) == KV_OK);
        const live_pool pool(config);
        CHECK(plan.metadata_bytes == pool.stats().metadata_bytes);
    }
}

TEST_CASE("the smallest blocks fill a slab, and all of it comes back") {
    kv_layer layer = KV_INIT(kv_layer);
    layer.query_heads = layer.kv_heads = 1;
    layer.key_dim = 32;
    layer.key_format = KV_FORMAT_Q4_0;
    kv_model model = KV_INIT(kv_model);
    model.layers = &layer;
    model.layer_count = 1;
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.arena_bytes = uint64_t{2} << 20;
    config.max_tokens_per_sequence = 65536;
    config.max_step_tokens = 65536;
    config.threads = 1;
    kv_pool* pool = nullptr;
    REQUIRE(kv_pool_create(&config, &model, &pool) == KV_OK);
    kv_class_stats one = KV_INIT(kv_class_stats);
    kv_seq seq = 0;
    REQUIRE(kv_seq_create(pool, nullptr, &seq) == KV_OK);
    kv_step* step = nullptr;
    const uint32_t blocks = 2 * 1024 * 1024 / 640;
    REQUIRE(kv_step_begin(pool, &step) == KV_OK);
    REQUIRE(kv_seq_append(step, seq, nullptr, blocks * 16, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    REQUIRE(kv_pool_get_class_stats(pool, 0, &one) == KV_OK);
    CHECK(one.block_bytes == 640);
    CHECK(one.blocks_per_slab == blocks);
    CHECK(one.pinned == blocks);
    CHECK(kv_pool_check(pool) == KV_OK);
    REQUIRE(kv_step_cancel(step) == KV_OK);
    CHECK(kv_pool_check(pool) == KV_OK);
    REQUIRE(kv_pool_get_class_stats(pool, 0, &one) == KV_OK);
    CHECK(one.free == one.total);
    kv_pool_release(pool);
}

}  // namespace
