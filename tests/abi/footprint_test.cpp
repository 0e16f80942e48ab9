// kv_pool_policy_footprint: worked by hand, and as a bound that sequences under their policies keep
// to, in open steps too, whatever their layers, chunks and triggers.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "abi/world.hpp"

using namespace abi;

namespace {

kv_layer make_layer(uint32_t heads, uint32_t flags = 0, uint32_t format = KV_FORMAT_DEFAULT) {
    kv_layer layer = KV_INIT(kv_layer);
    layer.flags = flags;
    layer.query_heads = heads;
    layer.kv_heads = heads;
    layer.key_dim = key_dim;
    layer.value_dim = value_dim;
    layer.key_format = format;
    return layer;
}

kv_layer make_window(uint32_t window, uint32_t sinks) {
    kv_layer layer = make_layer(2);
    layer.window = window;
    layer.window_sinks = sinks;
    return layer;
}

/// Of f16, and of int8_token once so many tokens are newer; 0: under pressure alone.
kv_layer make_demoting(uint32_t demote_after, uint32_t flags = 0) {
    kv_layer layer = make_layer(2, flags);
    layer.demoted_key_format = KV_FORMAT_INT8_TOKEN;
    layer.demote_after = demote_after;
    return layer;
}

/// A pool of some layers, and one sequence that goes through it.
struct driven {
    std::vector<kv_layer> layers;
    kv_pool* pool = nullptr;
    kv_seq seq = 0;
    uint64_t most_blocks = 0, most_bytes = 0, most_retained = 0, rounds = 0, demoted = 0;

    driven(const std::vector<kv_layer>& of, uint32_t block_tokens) : layers(of) {
        kv_model model = KV_INIT(kv_model);
        model.layers = layers.data();
        model.layer_count = static_cast<uint32_t>(layers.size());
        kv_pool_config config = small_config();
        config.arena_bytes = uint64_t{32} << 20;
        config.block_tokens = block_tokens;
        config.max_tokens_per_sequence = 1024;
        config.pressure_percent = 100;  // never reached
        REQUIRE(kv_pool_create(&config, &model, &pool) == KV_OK);
    }
    driven(const driven&) = delete;
    driven& operator=(const driven&) = delete;
    ~driven() { kv_pool_release(pool); }

    kv_policy_footprint footprint(const kv_policy& policy, uint64_t step_tokens,
                                  uint64_t tokens) const {
        kv_policy_footprint result = KV_INIT(kv_policy_footprint);
        result.step_tokens = step_tokens;
        result.tokens = tokens;
        REQUIRE(kv_pool_policy_footprint(pool, &policy, &result) == KV_OK);
        return result;
    }

    void look() {
        kv_seq_info info = KV_INIT(kv_seq_info);
        REQUIRE(kv_seq_get_info(pool, seq, &info) == KV_OK);
        most_blocks = std::max(most_blocks, info.blocks);
        most_bytes = std::max(most_bytes, info.bytes);
    }

    /// Keys of head 0 are short: by KEY_NORM they stay where heads compete.
    void write(kv_step* step, uint32_t rows, uint32_t seed) const {
        std::vector<float> numbers(uint64_t{rows} * 8 * key_dim);
        uint32_t state = seed * 2654435761u + 1;
        for (uint64_t i = 0; i < numbers.size(); ++i) {
            state = state * 1664525u + 1013904223u;
            numbers[i] = static_cast<float>(state >> 8) / 16777216.0f - 0.5f;
        }
        for (uint32_t layer = 0; layer < layers.size(); ++layer) {
            if ((layers[layer].flags & KV_LAYER_SHARED) != 0) continue;
            const uint64_t heads = layers[layer].kv_heads;
            std::vector<float> keys = numbers;
            for (uint64_t i = 0; i < uint64_t{rows} * heads * key_dim; ++i) {
                if (i / key_dim % heads == 0) keys[i] *= 0.01f;
            }
            kv_tensor k = KV_INIT(kv_tensor), v = KV_INIT(kv_tensor);
            k.data = keys.data();
            v.data = numbers.data();
            k.dtype = v.dtype = KV_DTYPE_F32;
            k.rows = v.rows = rows;
            k.heads = v.heads = heads;
            k.dim = key_dim;
            v.dim = value_dim;
            REQUIRE(kv_write(step, layer, &k, &v) == KV_OK);
        }
    }

    /// One step, looked at while it is open and when it has ended. Of the rows one may be rejected.
    void go(uint32_t rows, uint32_t accepted) {
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(pool, &step) == KV_OK);
        REQUIRE(kv_seq_append(step, seq, nullptr, rows, nullptr) == KV_OK);
        for (uint32_t layer = 0; layer < layers.size(); ++layer) {
            kv_seq_layer_info info = KV_INIT(kv_seq_layer_info);
            REQUIRE(kv_seq_get_layer_info(pool, seq, layer, &info) == KV_OK);
            if (layers[layer].window == 0) {
                most_retained = std::max(most_retained, info.retained + rows);
            }
        }
        REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
        look();
        kv_seq_info info = KV_INIT(kv_seq_info);
        REQUIRE(kv_seq_get_info(pool, seq, &info) == KV_OK);
        write(step, rows, static_cast<uint32_t>(info.accepted));
        REQUIRE(kv_step_accept(step, seq, accepted) == KV_OK);
        kv_step_report report = KV_INIT(kv_step_report);
        REQUIRE(kv_step_end(step, &report) == KV_OK);
        rounds += report.compactions + report.compactions_skipped;
        demoted += report.demoted_blocks;
        look();
    }

    /// A prompt in chunks, then tokens one by one, with drafts now and then, then a long turn.
    void run(const kv_policy& policy, uint32_t chunk, uint32_t tokens) {
        kv_seq_config config = KV_INIT(kv_seq_config);
        config.policy = &policy;
        REQUIRE(kv_seq_create(pool, &config, &seq) == KV_OK);
        uint32_t done = 0;
        for (uint32_t step = 0; done < tokens; ++step) {
            const bool prompt = done < 100 || step % 40 == 0;
            const uint32_t rows = prompt ? chunk : std::min(chunk, step % 7 == 0 ? 3u : 1u);
            const uint32_t accepted = rows - (rows > 1 && !prompt ? 1 : 0);
            go(rows, accepted);
            done += accepted;
        }
        REQUIRE(kv_pool_check(pool) == KV_OK);
    }
};

kv_policy make_policy(uint32_t scorer, uint32_t budget, uint32_t every, uint32_t slack) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = scorer;
    policy.budget = budget;
    policy.every = every;
    policy.slack = slack;
    policy.seed = 1;
    return policy;
}

struct footprint_case {
    const char* name;
    std::vector<kv_layer> layers;
    kv_policy policy;
    uint32_t block_tokens = 16;
    bool even = true;   ///< all layers and heads keep the same number
    bool tight = true;  ///< and it is reached, to the token
};

std::vector<footprint_case> footprint_cases() {
    const kv_layer full = make_layer(2), apart = make_layer(2, KV_LAYER_LANE_PER_HEAD);
    const kv_layer kivi = make_layer(2, 0, KV_FORMAT_KIVI4);
    const std::vector<kv_layer> plain = {full, full};
    const std::vector<kv_layer> uneven = {make_layer(8, 0, KV_FORMAT_F32), full, full, full};
    std::vector<footprint_case> cases = {
        {"every", plain, make_policy(KV_SCORER_STREAMING, 40, 24, 0)},
        {"slack", plain, make_policy(KV_SCORER_STREAMING, 40, 0, 24)},
        {"every and slack", plain, make_policy(KV_SCORER_RANDOM, 40, 24, 9)},
        {"windows",
         {full, make_window(20, 0), make_window(37, 5)},
         make_policy(KV_SCORER_KEY_NORM, 40, 24, 0)},
        {"lanes per head", {apart, apart}, make_policy(KV_SCORER_KEY_NORM, 40, 24, 0)},
        {"tiles", {kivi, full}, make_policy(KV_SCORER_RANDOM, 72, 24, 0), 32, true, false},
    };
    footprint_case prompt = {"a prompt above the budget", plain,
                             make_policy(KV_SCORER_KEY_NORM, 40, 0, 24)};
    prompt.policy.flags = KV_POLICY_PROTECT_PROMPT;
    prompt.policy.prompt_tokens = 90;
    prompt.policy.recent = 8;
    cases.push_back(prompt);
    prompt.name = "a prompt on top of the budget";
    prompt.policy.flags |= KV_POLICY_PROMPT_ON_TOP;
    cases.push_back(prompt);

    footprint_case adaptive = {
        "ADAPTIVE", {apart, apart}, make_policy(KV_SCORER_KEY_NORM, 40, 24, 0), 16, false, false};
    adaptive.policy.allocator = KV_ALLOCATE_ADAPTIVE;
    cases.push_back(adaptive);
    adaptive.name = "ADAPTIVE, slack";
    adaptive.policy.every = 0;
    adaptive.policy.slack = 24;
    cases.push_back(adaptive);

    footprint_case pyramid = {"PYRAMID, large blocks in its base",
                              uneven,
                              make_policy(KV_SCORER_KEY_NORM, 64, 24, 0),
                              16,
                              false,
                              false};
    pyramid.policy.allocator = KV_ALLOCATE_PYRAMID;
    cases.push_back(pyramid);
    pyramid.name = "PYRAMID, a prompt above its top";
    pyramid.policy.flags = KV_POLICY_PROTECT_PROMPT;
    pyramid.policy.prompt_tokens = 50;
    cases.push_back(pyramid);
    pyramid.name = "PYRAMID, slack";
    pyramid.policy.flags = 0;
    pyramid.policy.every = 0;
    pyramid.policy.slack = 24;
    cases.push_back(pyramid);

    // Head 0 keeps what the budget allows, head 1 little: the one is not to wait for the other.
    footprint_case threshold = {
        "THRESHOLD", {apart, apart}, make_policy(KV_SCORER_KEY_NORM, 40, 0, 24), 16, true, false};
    threshold.policy.allocator = KV_ALLOCATE_THRESHOLD;
    threshold.policy.threshold = -1.8f;
    cases.push_back(threshold);

    const kv_layer demoting = make_demoting(40), undemoted = make_demoting(0);
    const kv_layer demoting_apart = make_demoting(24, KV_LAYER_LANE_PER_HEAD);
    for (const uint32_t scorer : {KV_SCORER_RANDOM, KV_SCORER_STREAMING}) {
        cases.push_back(
            {"demotion", {demoting, full}, make_policy(scorer, 72, 24, 0), 16, true, false});
    }
    cases.push_back(
        {"demotion under pressure", {undemoted, full}, make_policy(KV_SCORER_RANDOM, 40, 24, 0)});
    footprint_case competing = {"demotion, ADAPTIVE",
                                {demoting_apart, demoting_apart},
                                make_policy(KV_SCORER_KEY_NORM, 72, 24, 0),
                                16,
                                false,
                                false};
    competing.policy.allocator = KV_ALLOCATE_ADAPTIVE;
    cases.push_back(competing);
    return cases;
}

TEST_CASE("a policy's footprint is that of the arithmetic on paper") {
    // Layers 0 and 2 have lanes per head, layer 1 a window. Layer 0 is left whole.
    const kv_layer apart = make_layer(2, KV_LAYER_LANE_PER_HEAD);
    kv_layer shared = make_layer(2, KV_LAYER_SHARED);
    const driven world({apart, make_window(32, 4), apart, shared}, 16);
    kv_policy policy = make_policy(KV_SCORER_KEY_NORM, 40, 8, 0);
    policy.skip_layers = 1;
    policy.sinks = 4;
    policy.recent = 8;
    kv_policy_footprint taken = world.footprint(policy, 5, 200);
    CHECK(taken.tokens_after_round == 40);
    // 7 tokens may have come since the last round without another being due, and 5 in a step.
    CHECK(taken.tokens_steady == 52);
    // Layer 0: 200 tokens are 13 blocks, of each head. Layer 1: a block of sinks; then the 31 seen
    // tokens before a step and its 5, whose first block may begin with 15 unseen ones: 51 tokens,
    // 4 blocks. Layer 2: 52 tokens are 4 blocks, of each head.
    CHECK(taken.blocks_steady == 26 + 5 + 8);
    const uint64_t head_block = 16 * (key_dim + value_dim) * 2;  // of f16
    CHECK(taken.bytes_steady == 26 * head_block + 5 * 2 * head_block + 8 * head_block);

    // Heads that compete: the sum is the same, and the last block of each may be a part.
    policy.allocator = KV_ALLOCATE_ADAPTIVE;
    taken = world.footprint(policy, 5, 200);
    CHECK(taken.tokens_steady == 52);
    CHECK(taken.blocks_steady == 26 + 5 + 2 * 5);

    // Without a length windows are full, and whole layers as long as the others.
    taken = world.footprint(policy, 0, 0);
    CHECK(taken.tokens_steady == 48);
    CHECK(taken.blocks_steady == 2 * 3 + 4 + 2 * 4);

    // What guards hold, and what comes on top.
    policy = make_policy(KV_SCORER_KEY_NORM, 40, 0, 10);
    policy.flags = KV_POLICY_PROTECT_PROMPT;
    policy.prompt_tokens = 100;
    policy.sinks = 4;
    policy.recent = 8;
    taken = world.footprint(policy, 1, 0);
    CHECK(taken.tokens_after_round == 108);
    CHECK(taken.tokens_steady == 108 + 10 + 1);
    policy.flags |= KV_POLICY_PROMPT_ON_TOP;
    CHECK(world.footprint(policy, 1, 0).tokens_after_round == 140);
}

TEST_CASE("a footprint that no sequence of the pool can have is refused") {
    // Sequences retain up to 1024 tokens: 1015 of a budget, 7 before the next round, 2 of a step.
    const driven world({make_layer(2), make_layer(2, KV_LAYER_LANE_PER_HEAD)}, 16);
    const kv_policy fits = make_policy(KV_SCORER_KEY_NORM, 1015, 8, 0);
    CHECK(world.footprint(fits, 2, 0).tokens_steady == 1024);
    const auto refuses = [&](kv_policy policy, uint64_t step_tokens) {
        kv_policy_footprint taken = KV_INIT(kv_policy_footprint);
        taken.step_tokens = step_tokens;
        CHECK(kv_pool_policy_footprint(world.pool, &policy, &taken) == KV_TOO_LARGE);
        CHECK(last_error().find("max_tokens_per_sequence = 1024") != std::string::npos);
        CHECK(taken.tokens_steady == 0);
        CHECK(taken.bytes_steady == 0);
    };
    refuses(fits, 3);
    refuses(fits, 0x7fffffff);
    constexpr uint32_t most = 0xffffffff;
    for (const uint32_t absurd : {1025u, 0x7fffffffu, most}) {
        CAPTURE(absurd);
        for (uint32_t kv_policy::*const guard :
             {&kv_policy::budget, &kv_policy::every, &kv_policy::sinks, &kv_policy::recent}) {
            kv_policy policy = make_policy(KV_SCORER_KEY_NORM, 40, 8, 0);
            policy.*guard = absurd;
            refuses(policy, 1);
        }
        refuses(make_policy(KV_SCORER_KEY_NORM, 40, 0, absurd), 1);
        kv_policy policy = make_policy(KV_SCORER_KEY_NORM, absurd, absurd, absurd);
        policy.prompt_tokens = policy.sinks = policy.recent = absurd;
        policy.flags = KV_POLICY_PROTECT_PROMPT;
        refuses(policy, 1);
        policy.flags |= KV_POLICY_PROMPT_ON_TOP;
        refuses(policy, 1);
        policy.allocator = KV_ALLOCATE_PYRAMID;
        policy.steepness = 4096;
        refuses(policy, 1);
    }
}

TEST_CASE("a footprint counts what windows and whole layers hold against the longest sequence") {
    // Before a step a window of w holds the w - 1 tokens that its first query sees, in blocks of 16
    // whose first may begin with 15 unseen ones: with a step of 3, w + 17. Its 4 sinks take a
    // block.
    kv_policy policy = make_policy(KV_SCORER_KEY_NORM, 40, 8, 0);
    const auto asks = [&](const driven& world, uint64_t step_tokens, uint64_t tokens) {
        kv_policy_footprint taken = KV_INIT(kv_policy_footprint);
        taken.step_tokens = step_tokens;
        taken.tokens = tokens;
        return kv_pool_policy_footprint(world.pool, &policy, &taken);
    };
    const driven fits({make_layer(2), make_window(991, 4)}, 16);
    const driven too_wide({make_layer(2), make_window(992, 4)}, 16);
    CHECK(asks(fits, 3, 0) == KV_OK);
    CHECK(asks(fits, 4, 0) == KV_TOO_LARGE);
    CHECK(asks(too_wide, 3, 0) == KV_TOO_LARGE);
    CHECK(last_error().find("layer 1 has a window of 992") != std::string::npos);
    CHECK(asks(too_wide, 3, 5000) == KV_TOO_LARGE);
    CHECK(asks(too_wide, 3, 1024) == KV_OK);  // a sequence that ends before its window is full
    policy.skip_layers = 1;
    const driven whole({make_layer(2), make_layer(2)}, 16);
    CHECK(asks(whole, 3, 1024) == KV_OK);
    CHECK(asks(whole, 3, 1025) == KV_TOO_LARGE);
    CHECK(last_error().find("layer 0 is left whole") != std::string::npos);
}

TEST_CASE("a pyramid's footprint is that of the arithmetic on paper") {
    // Budgets of 62, 42 and 22 around 42, with 2 beta - 1 to 1 between the first and the last.
    const kv_layer wide = make_layer(8), narrow = make_layer(1);
    const driven world({wide, narrow, narrow}, 16);
    kv_policy policy = make_policy(KV_SCORER_KEY_NORM, 42, 8, 0);
    policy.allocator = KV_ALLOCATE_PYRAMID;
    policy.steepness = 2;  // 63, 42, 21
    const kv_policy_footprint taken = world.footprint(policy, 1, 0);
    CHECK(taken.tokens_after_round == 42);
    CHECK(taken.tokens_steady == 42 + 7 + 1);
    // At their steepest, with 8 tokens and a block more: 87, 66 and 45 tokens.
    const uint64_t head_block = 16 * (key_dim + value_dim) * 2;
    CHECK(taken.blocks_steady == std::max(6 + 5 + 3, 3 * 5));  // or all alike: 66 each
    CHECK(taken.bytes_steady == (8 * 6 + 5 + 3) * head_block);

    // What the last layers hold of a prompt is not taken from the first.
    policy.flags = KV_POLICY_PROTECT_PROMPT;
    policy.prompt_tokens = 30;
    CHECK(world.footprint(policy, 1, 0).tokens_after_round == 45);  // 63, 42 and 30
}

TEST_CASE("the footprint where older blocks are demoted is that of the arithmetic on paper") {
    const driven world({make_demoting(24), make_demoting(0), make_layer(2)}, 16);
    const kv_policy policy = make_policy(KV_SCORER_KEY_NORM, 40, 8, 0);
    const kv_policy_footprint taken = world.footprint(policy, 5, 0);
    CHECK(taken.tokens_steady == 52);
    // Of 52 tokens 28 are old: one block is demoted. 24 more with 15 of a block that is not full
    // and a step's 5 are 44: 3 raw blocks. The other layers have 4 each.
    CHECK(taken.blocks_steady == 4 + 4 + 4);
    const uint64_t raw = 2 * 16 * 2 * (key_dim + value_dim);
    const uint64_t demoted = 2 * 16 * (key_dim + 4 + value_dim + 4);
    CHECK(taken.bytes_steady == demoted + 3 * raw + 8 * raw);
}

TEST_CASE("sequences keep to the footprint of their policy") {
    for (const footprint_case& tried : footprint_cases()) {
        for (const uint32_t chunk : {1u, 5u, 33u}) {
            CAPTURE(tried.name);
            CAPTURE(chunk);
            driven world(tried.layers, tried.block_tokens);
            const kv_policy_footprint taken = world.footprint(tried.policy, chunk, 0);
            world.run(tried.policy, chunk, 420);
            CHECK(world.rounds > 5);
            CHECK(world.most_blocks <= taken.blocks_steady);
            CHECK(world.most_bytes <= taken.bytes_steady);
            if (tried.even) CHECK(world.most_retained <= taken.tokens_steady);
            if (std::string(tried.name) == "demotion") {
                // Nor much less: a block is raw still when one is taken to demote it into, and no
                // token of an open step is demoted.
                CHECK(world.most_blocks + 2 + chunk / 16 >= taken.blocks_steady);
                CHECK(world.demoted > 0);
            }
            if (!tried.tight || chunk != 1) continue;
            CHECK(world.most_retained == taken.tokens_steady);
            CHECK(world.most_blocks == taken.blocks_steady);
            CHECK(world.most_bytes == taken.bytes_steady);
        }
    }
}

TEST_CASE("rounds by slack wait until so much is retained above what they keep") {
    for (const footprint_case& tried : footprint_cases()) {
        if (tried.policy.slack != 24) continue;
        CAPTURE(tried.name);
        driven world(tried.layers, tried.block_tokens);
        world.run(tried.policy, 1, 420);
        // 25 tokens from one to the next, after the first.
        CHECK(world.rounds >= 10);
        CHECK(world.rounds <= 17);
    }
    // A layer that the policy leaves whole does not ask for one.
    driven world({make_layer(2), make_layer(2)}, 16);
    kv_policy policy = make_policy(KV_SCORER_KEY_NORM, 40, 0, 24);
    policy.skip_layers = 1;
    world.run(policy, 1, 420);
    CHECK(world.rounds == (420 - 40) / 25);
}

}  // namespace
