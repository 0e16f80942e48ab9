// What pools with policies do in tests, on the fake driver and on a GPU.
#pragma once

#include "round_pools.hpp"
#include "twin_cases.hpp"

namespace kvrt::cuda {

/// Each as a subcase: who scores, and which set.
inline kv_policy policy_for_rounds() {
    kv_policy policy = policy_of(KV_SCORER_STREAMING);
    SUBCASE("STREAMING") {}
    SUBCASE("RANDOM, beside a protected prompt") {
        policy = policy_of(KV_SCORER_RANDOM);
        policy.prompt_tokens = 18;
        policy.flags = KV_POLICY_PROTECT_PROMPT;
    }
    SUBCASE("KEY_NORM, by slack, the first layer left whole") {
        policy = policy_of(KV_SCORER_KEY_NORM);
        policy.every = 0;
        policy.slack = 10;
        policy.skip_layers = 1;
    }
    SUBCASE("TRIATTENTION") { policy = policy_of(KV_SCORER_TRIATTENTION); }
    SUBCASE("TRIATTENTION, one set for the heads of a layer") {
        policy = policy_of(KV_SCORER_TRIATTENTION);
        policy.selection = KV_SELECT_PER_LAYER;
    }
    SUBCASE("RANDOM, one set for the heads of a layer") {
        policy = policy_of(KV_SCORER_RANDOM);
        policy.selection = KV_SELECT_PER_LAYER;
    }
    SUBCASE("TRIATTENTION, the greatest over offsets, in a pyramid, the prompt on top") {
        policy = policy_of(KV_SCORER_TRIATTENTION);
        policy.flags = KV_POLICY_OFFSETS_MAX | KV_POLICY_PROTECT_PROMPT | KV_POLICY_PROMPT_ON_TOP;
        policy.prompt_tokens = 10;
        policy.offset_max = 64;
        policy.allocator = KV_ALLOCATE_PYRAMID;
        policy.steepness = 2;
    }
    SUBCASE("KEYDIFF, one set for the heads of a layer") {
        policy = policy_of(KV_SCORER_KEYDIFF);
        policy.selection = KV_SELECT_PER_LAYER;
    }
    SUBCASE("VASE_SKETCH") { policy = policy_of(KV_SCORER_VASE_SKETCH); }
    SUBCASE("VASE_SKETCH, drawn, beside the best of two parts of a prompt") {
        policy = policy_of(KV_SCORER_VASE_SKETCH);
        policy.flags = KV_POLICY_SAMPLE;
        policy.prompt_tokens = 40;
        policy.segments = 2;
        policy.segment_quota = 3;
    }
    SUBCASE("EXPECTED_ATTENTION, one set for the heads of a layer") {
        policy = policy_of(KV_SCORER_EXPECTED_ATTENTION);
        policy.selection = KV_SELECT_PER_LAYER;
    }
    SUBCASE("TRIATTENTION by the queries that kv_attend has seen") {
        policy = policy_of(KV_SCORER_TRIATTENTION);
        policy.flags = KV_POLICY_STATISTICS_ONLINE;
    }
    SUBCASE("EXPECTED_ATTENTION by the queries that kv_attend has seen") {
        policy = policy_of(KV_SCORER_EXPECTED_ATTENTION);
        policy.flags = KV_POLICY_STATISTICS_ONLINE;
    }
    return policy;
}

/// Sets that lanes of several kinds have in common.
inline kv_policy policy_for_sets() {
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    SUBCASE("UNION") { policy.selection = KV_SELECT_UNION; }
    SUBCASE("PER_HEAD") { policy.selection = KV_SELECT_PER_HEAD; }
    SUBCASE("UNION, of keys' norms, with values' ranges and quotas") {
        policy = policy_of(KV_SCORER_KEY_NORM);
        policy.selection = KV_SELECT_UNION;
        policy.value_reserve = 7;
        policy.prompt_tokens = 50;
        policy.segments = 3;
        policy.segment_quota = 4;
    }
    SUBCASE("PER_HEAD, drawn, with values' ranges, the first layer left whole") {
        policy = policy_of(KV_SCORER_RANDOM);
        policy.selection = KV_SELECT_PER_HEAD;
        policy.value_reserve = 100;  // more than there are places
        policy.skip_layers = 1;
    }
    return policy;
}

/// What stays whatever its score.
inline kv_policy policy_for_quotas() {
    kv_policy policy = policy_of(KV_SCORER_KEY_NORM);
    policy.prompt_tokens = 60;
    SUBCASE("a set for each head") {
        policy.segments = 5;
        policy.segment_quota = 3;
        policy.value_reserve = 9;
    }
    SUBCASE("a set for each layer, whose ranges are the widest of all heads") {
        policy.selection = KV_SELECT_PER_LAYER;
        policy.value_reserve = 12;
    }
    SUBCASE("more segments than there are places for their quota, some of them empty") {
        policy.segments = 12;
        policy.segment_quota = 40;
    }
    return policy;
}

/// A decode step of three sequences, captured in the first place of a step.
struct decode_graph {
    round_pools_on& pools;
    std::vector<layer_tensors> tensors;

    explicit decode_graph(round_pools_on& of) : pools(of) { tensors = make_layers(pools, 3); }
    void capture(kv_step* step) {
        pools.device().begin_capture();
        for (uint32_t l = 0; l < pools.layers(); ++l) {
            const layer_tensors& of = tensors[l];
            kv_attend_options options = KV_INIT(kv_attend_options);
            options.log_sum_exp = static_cast<float*>(of.log_sums.on_device.data);
            REQUIRE(kv_write(step, l, &of.keys.on_device, &of.values.on_device) == KV_OK);
            REQUIRE(kv_attend(step, l, &of.queries.on_device, &of.out.on_device, &options) ==
                    KV_OK);
        }
        pools.device().end_capture();
    }
    void replay(kv_step* (&steps)[2]) {
        for (layer_tensors& of : tensors) {
            for (twin_tensor* each : {&of.keys, &of.values, &of.queries}) {
                pools.draw(*each);
                pools.device().enqueue("inputs", pools.upload(*each));
            }
        }
        pools.device().replay();
        for (uint32_t l = 0; l < pools.layers(); ++l) {
            layer_tensors& of = tensors[l];
            REQUIRE(kv_write(steps[1], l, &of.keys.on_host, &of.values.on_host) == KV_OK);
            for (uint32_t head = 0; head < (l == 3 ? 2 : 1); ++head) {
                kv_cuda_tables tables = KV_INIT(kv_cuda_tables);
                tables.kv_head = head;
                REQUIRE(kv_cuda_step_tables(steps[0], l, &tables) == KV_OK);
                REQUIRE(tables.place == 0);
            }
            kv_attend_options options = KV_INIT(kv_attend_options);
            options.log_sum_exp = of.log_sums.host.data();
            REQUIRE(kv_attend(steps[1], l, &of.queries.on_host, &of.out.on_host, &options) ==
                    KV_OK);
            pools.expect(of.out, pools.bound_of(l));
            pools.expect(of.log_sums, pools.bound_of(l));
        }
    }
};

/// Rounds at the ends of steps whose launches are those of one captured before.
inline void replay_behind_rounds(round_pools_on& pools) {
    pools.give_statistics();
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    policy.budget = 32;
    policy.every = 3;
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 3; ++i) sequences.push_back(pools.create(i == 2 ? nullptr : &policy));
    pools.step({{&sequences[0], 40, 40}, {&sequences[1], 61, 61}, {&sequences[2], 33, 33}});
    decode_graph decode(pools);
    for (uint32_t round = 0; round < 7; ++round) {
        CAPTURE(round);
        kv_step* steps[2];
        const std::vector<twin_append> items = {
            {&sequences[0], 1, 1}, {&sequences[1], 1, 1}, {&sequences[2], 1, 1}};
        pools.begin(items, steps);
        if (round == 0) decode.capture(steps[0]);
        decode.replay(steps);
        pools.end(items, steps);
        pools.compare_reports();
        pools.device().catch_up();
        CHECK(pools.differences == 0);
    }
    CHECK(pools.rounds >= 4);
    for (const twin_sequence& each : sequences) pools.compare(each);
    CHECK(pools.differences == 0);
}

}  // namespace kvrt::cuda
