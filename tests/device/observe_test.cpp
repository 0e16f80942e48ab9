// Observed attention of a CUDA pool, and rounds that go by it: kernels keep weights and add them
// up, late, and a CPU pool says what each slot has got, which stay, and where.
#include "observing_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

TEST_CASE("rounds on the device go by what attention gave there, as those on the CPU") {
    kv_policy policy = policy_of(KV_SCORER_H2O);
    policy.recent = 16;
    observing_pools pools;
    bool looks = true;
    SUBCASE("H2O, of every fourth token, decaying") { policy.decay = 0.4f; }
    SUBCASE("H2O, of every token, and nobody waits") {
        policy.decay = 0.4f;
        policy.observe_every = 1;
        looks = false;
    }
    SUBCASE("SCISSORHANDS") {
        policy.scorer = KV_SCORER_SCISSORHANDS;
        policy.window = 8;
        pools.two_levels = true;
    }
    SUBCASE("TOVA, one set for the heads of a layer") {
        policy.scorer = KV_SCORER_TOVA;
        pools.head_step = 0.0;
    }
    SUBCASE("SNAPKV, the greatest of neighbours") {
        policy.scorer = KV_SCORER_SNAPKV;
        policy.window = 8;
        policy.pool_width = 3;
        policy.flags = KV_POLICY_POOL_MAX;
    }
    SUBCASE("SNAPKV, drawn, one set for the heads of a layer") {
        policy.scorer = KV_SCORER_SNAPKV;
        policy.window = 8;
        policy.flags = KV_POLICY_SAMPLE;
        policy.selection = KV_SELECT_PER_LAYER;
    }
    SUBCASE("VASE_ATTENTION") {
        policy.scorer = KV_SCORER_VASE_ATTENTION;
        policy.window = 8;
    }
    SUBCASE("RKV") { policy.scorer = KV_SCORER_RKV; }
    SUBCASE("BLEND") { policy.scorer = KV_SCORER_BLEND; }
    SUBCASE("BLEND, one set for all layers' heads, by shares of its own") {
        policy.scorer = KV_SCORER_BLEND;
        policy.selection = KV_SELECT_UNION;
        policy.decay = 0.4f;
        policy.prior_share = 0.4f;
        policy.redundancy = 0.2f;
        policy.pool_width = 1;
        pools.head_step = 0.0;
    }
    give_moments(pools, {0u, 2u, 3u});
    drive(pools, policy, 13, looks);
    CHECK(pools.differences == 0);
    CHECK(pools.worst_sum < 4e-3);
    CHECK(pools.rounds >= 5);
    CHECK(pools.compared_positions > 500);
    CHECK(pools.compared_outputs > 50);
    CHECK((pools.compared_sums > 1000) == looks);
    if (!looks) CHECK(pools.host.fake.synchronisations() == 0);
}

TEST_CASE("all that queries have paid since a prompt, without rounds, and one behind it") {
    observing_pools pools;
    kv_policy policy = policy_of(KV_SCORER_H2O);
    policy.every = 0;
    drive(pools, policy, 8, true);
    policy = policy_of(KV_SCORER_SNAPKV);
    policy.prompt_tokens = 90;
    policy.flags = KV_POLICY_AT_PROMPT_END;
    policy.recent = 64;
    policy.budget = 75;
    twin_sequence sequence = pools.create(&policy);
    pools.step({{&sequence, 90, 90}});
    CHECK(pools.rounds == 1);
    pools.compare(sequence);
    pools.compare_sums(sequence);
    CHECK(pools.differences == 0);
}

TEST_CASE("a round without what it goes by says so, and a captured attention is refused") {
    observing_pools pools;
    kv_policy policy = policy_of(KV_SCORER_H2O);
    policy.every = 0;
    policy.observe_every = 1;
    twin_sequence sequence = pools.create(&policy);
    pools.attend_flags = KV_ATTEND_NO_STATISTICS;
    pools.step({{&sequence, 70, 70}});
    CHECK(pools.compress(sequence, nullptr) == KV_OK);
    CHECK(pools.rounds == 0);
    kv_step* steps[2];
    const std::vector<twin_append> items = {{&sequence, 1, 1}};
    pools.begin(items, steps);
    twin_tensor rows = pools.make_tensor(1, 4, 64), out = pools.make_tensor(1, 4, 64);
    twin_tensor keys = pools.make_tensor(1, 2, 64);
    pools.write(steps, 0, keys, keys);
    pools.host.fake.begin_capture(pools.host.stream);
    kv_attend_options options = KV_INIT(kv_attend_options);
    CHECK(kv_attend(steps[0], 0, &rows.on_device, &out.on_device, &options) == KV_UNSUPPORTED);
    CHECK(message_has("KV_ATTEND_NO_STATISTICS"));
    options.flags = KV_ATTEND_NO_STATISTICS;
    CHECK(kv_attend(steps[0], 0, &rows.on_device, &out.on_device, &options) == KV_OK);
    pools.host.fake.end_capture(pools.host.stream);
    pools.cancel(steps);
}

TEST_CASE("what is observed wrongly is found by the comparison with the CPU pool") {
    observing_pools pools;
    kv_policy policy = policy_of(KV_SCORER_H2O);
    policy.recent = 16;
    policy.decay = 0.4f;
    policy.observe_every = 1;
    uint32_t number = 0;
    SUBCASE("weights of another query head") {
        pools.faults.observe = [&](kernels::observe_parameters& call) {
            if (++number == 20) call.kept.weights += 16;
        };
    }
    SUBCASE("sums that begin anew") {
        pools.faults.observe = [&](kernels::observe_parameters& call) {
            if (++number == 20) call.items[0].before = kernels::no_sums;
        };
    }
    SUBCASE("sums that stay behind where their slots have moved") {
        pools.faults.compact = [&](kernels::compact_parameters& call) {
            if (++number == 1) call.sums_stride = 0;
        };
    }
    SUBCASE("scores of another array") {
        pools.faults.pool = [&](kernels::pool_parameters& call) {
            if (++number == 1) call.sums += 512;
        };
    }
    SUBCASE("another share of the prior") {
        policy.scorer = KV_SCORER_BLEND;
        pools.faults.blend = [&](kernels::blend_parameters& call) {
            if (++number == 1) call.prior_share = 0.9f;
        };
    }
    SUBCASE("key differences of another head") {
        policy.scorer = KV_SCORER_BLEND;
        pools.faults.blend = [&](kernels::blend_parameters& call) {
            if (++number == 1) call.unlike += call.parts_stride;
        };
    }
    SUBCASE("draws by what other slots score") {
        policy.scorer = KV_SCORER_SNAPKV;
        policy.decay = 0.0f;
        policy.window = 8;
        policy.flags = KV_POLICY_SAMPLE;
        pools.faults.sample = [&](kernels::sample_parameters& call) {
            if (++number == 1) call.scores += 16;
        };
    }
    give_moments(pools, {0u, 2u, 3u});
    drive(pools, policy, 6, true);
    CHECK(number != 0);
    CHECK(pools.differences + pools.host.fake.violations.size() != 0);
    pools.host.fake.violations.clear();
}
