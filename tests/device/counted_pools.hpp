// Twin pools whose rounds keep as many slots as scores say, on the fake driver and on a GPU: the
// device counts first, and moves when its counts have come.
#pragma once

#include "round_pools.hpp"

namespace kvrt::cuda {

/// A lane for each head: elements, codes, kinds that differ by head, blocks that are demoted.
struct layers_by_head : twin_model {
    rope_of_tests rotation;
    float scales[2] = {0.02f, 0.05f};
    kv_storage static_scales = KV_INIT(kv_storage);
    kv_storage rotated = KV_INIT(kv_storage);

    layers_by_head() {
        max_observed_sequences = 5;
        arena_bytes = uint64_t{32} << 20;
        static_scales.scales = scales;
        static_scales.scale_count = 2;
        rotated.flags = KV_STORAGE_ROTATE;
        by_head(KV_FORMAT_F16, KV_FORMAT_F16).alibi_slopes = slopes;  // attention reads positions
        by_head(KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT8_TOKEN);
        by_head(KV_FORMAT_FP8_E4M3, KV_FORMAT_F16).key_storage = &static_scales;
        kv_layer& demoting = by_head(KV_FORMAT_BF16, KV_FORMAT_BF16);
        demoting.demoted_key_format = demoting.demoted_value_format = KV_FORMAT_INT4_TOKEN;
        demoting.demoted_key_storage = demoting.demoted_value_storage = &rotated;
        demoting.demote_after = 20;
    }
    kv_layer& by_head(uint32_t keys, uint32_t values) {
        kv_layer& layer = add(keys, values);
        layer.flags = KV_LAYER_LANE_PER_HEAD;
        layer.rope = &rotation.rope;
        return layer;
    }
};

inline const kvrt::sequence& state_of(const round_pools_on& pools, uint32_t pool,
                                      const twin_sequence& sequence) {
    return *pools.pools[pool]->store.sequences.find(sequence.of[pool]);
}

inline kv_status compress_on_device(round_pools_on& pools, const twin_sequence& sequence,
                                    const kv_policy& policy) {
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    return kv_compress(pools.pools[0], sequence.of[0], &options, nullptr);
}

/// The device catches up, and with what a stream of the pool's has.
inline void wait_for_count(round_pools_on& pools, const twin_sequence& sequence) {
    cache& store = pools.pools[0]->store;
    const auto* const count =
        pools.pools[0]->steps.rounds.counted.find(store, state_of(pools, 0, sequence));
    REQUIRE(count != nullptr);
    pools.device().catch_up();
    REQUIRE(store.device.poll() == KV_OK);
    if (!store.device.passed(count->step)) {  // something read back on that stream waits for it
        uint32_t position = 0;
        REQUIRE(read_positions(pools.pools[0]->steps, state_of(pools, 0, sequence), 0, 0, 1,
                               &position) == KV_OK);
        REQUIRE(store.device.poll() == KV_OK);
    }
    REQUIRE(store.device.passed(count->step));
}

/// The device counts while the CPU waits; then both move, and tell the same. Returns how many
/// layers have heads that were left with different numbers.
inline uint32_t compress_counted(round_pools_on& pools, const twin_sequence& sequence,
                                 const kv_policy& policy) {
    const auto returned = [&] { return pools.pools[0]->store.blocks.totals().returned; };
    const uint64_t before = returned();
    CHECK(compress_on_device(pools, sequence, policy) == KV_AGAIN);
    CHECK(std::string(message_buffer()).find("counts") != std::string::npos);
    CHECK(returned() == before);
    wait_for_count(pools, sequence);
    REQUIRE(pools.compress(sequence, &policy) == KV_OK);
    uint32_t uneven = 0;
    for (const layer_geometry& layer : pools.pools[0]->store.model.layers) {
        const lane_state* lanes = state_of(pools, 0, sequence).lanes + layer.first_lane;
        uneven += layer.stores && lanes[0].slots != lanes[layer.lanes - 1].slots ? 1 : 0;
    }
    return uneven;
}

/// All that is not demoted is held, so the host knows how much is, as on the CPU.
inline kv_policy adaptive(uint32_t scorer) {
    kv_policy policy = policy_of(scorer);
    policy.recent = 36;
    policy.budget = 72;
    policy.allocator = KV_ALLOCATE_ADAPTIVE;
    policy.every = 0;
    return policy;
}

/// Each as a subcase: who scores, and what stays whatever the scores.
inline kv_policy policy_for_competing() {
    kv_policy policy = adaptive(KV_SCORER_RANDOM);
    SUBCASE("RANDOM") {}
    SUBCASE("RANDOM, no floors to speak of, beside a protected prompt") {
        policy.floor_share = 1e-6f;
        policy.prompt_tokens = 18;
        policy.flags = KV_POLICY_PROTECT_PROMPT;
    }
    SUBCASE("STREAMING, which scores all heads alike") { policy = adaptive(KV_SCORER_STREAMING); }
    SUBCASE("RANDOM, half of it floors, with values' ranges and quotas, the first layer whole") {
        policy.floor_share = 0.5f;
        policy.value_reserve = 9;
        policy.prompt_tokens = 60;
        policy.segments = 5;
        policy.segment_quota = 3;
        policy.skip_layers = 1;
    }
    SUBCASE("KEY_NORM") { policy = adaptive(KV_SCORER_KEY_NORM); }
    SUBCASE("VASE_SKETCH, drawn") {
        policy = adaptive(KV_SCORER_VASE_SKETCH);
        policy.flags = KV_POLICY_SAMPLE;
    }
    return policy;
}

/// Prompts, chunks, drafts, a fork, a truncation, a pinned range; rounds between steps, of lanes
/// that are no longer as long as each other. Returns as compress_counted does, of all rounds.
inline uint32_t drive_counted(round_pools_on& pools, const kv_policy& policy, uint32_t turns) {
    uint32_t uneven = 0;
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 2; ++i) sequences.push_back(pools.create());
    for (uint32_t i = 0; i < 2; ++i) {
        REQUIRE(kv_seq_pin(pools.pools[i], sequences[1].of[i], 20, 5) == KV_OK);
    }
    pools.step({{&sequences[0], 90, 90}, {&sequences[1], 130, 130}}, true);
    for (uint32_t turn = 0; turn < turns; ++turn) {
        CAPTURE(turn);
        if (turn == 1) sequences.push_back(pools.fork(sequences[0]));
        for (const twin_sequence& each : sequences) uneven += compress_counted(pools, each, policy);
        std::vector<twin_append> items;
        for (twin_sequence& each : sequences) {
            const uint32_t rows = 20 + static_cast<uint32_t>(pools.random() % 30);
            items.push_back({&each, rows, rows - rows % 2});
        }
        pools.step(items, turn % 2 == 0);
        if (turn == 1) pools.truncate(sequences[1], sequences[1].tokens - 3);
        pools.device().run_some(static_cast<uint32_t>(pools.random() % 60));
    }
    for (const twin_sequence& each : sequences) pools.compare(each);
    return uneven;
}

}  // namespace kvrt::cuda
