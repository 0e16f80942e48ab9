// Observed attention of a CUDA pool, and rounds that go by it: kernels keep weights and add them
// up, late, and a CPU pool says what each slot has got, which stay, and where.
#include "observed_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

TEST_CASE("rounds on the device go by what attention gave there, as those on the CPU") {
    observing_pools pools;
    const observed_policy chosen = policy_for_observed(pools);
    give_moments(pools, {0u, 2u, 3u});
    drive(pools, chosen.policy, 13, chosen.looks);
    CHECK(pools.differences == 0);
    CHECK(pools.worst_sum < 4e-3);
    CHECK(pools.rounds >= 5);
    CHECK(pools.compared_positions > 500);
    CHECK(pools.compared_outputs > 50);
    CHECK((pools.compared_sums > 1000) == chosen.looks);
    if (!chosen.looks) CHECK(pools.host.fake.synchronisations() == 0);
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

TEST_CASE("a round without what it goes by says so") {
    observing_pools pools;
    kv_policy policy = policy_of(KV_SCORER_H2O);
    policy.every = 0;
    policy.observe_every = 1;
    twin_sequence sequence = pools.create(&policy);
    pools.attend_flags = KV_ATTEND_NO_STATISTICS;
    pools.step({{&sequence, 70, 70}});
    CHECK(pools.compress(sequence, nullptr) == KV_OK);
    CHECK(pools.rounds == 0);
}

namespace {

/// Of those that a launch is about.
kernels::observe_item& first_item(observing_pools& pools, const kernels::observe_parameters& call) {
    const auto of_device = [&]<class type>(const type* address, uint32_t count) {
        return pools.host.fake.memory_of<type>(reinterpret_cast<device_pointer>(address), count);
    };
    const uint32_t first = of_device(call.wave, 1)->first_item;
    return of_device(call.items, first + 1)[first];
}

}  // namespace

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
            if (++number == 20) first_item(pools, call).before = kernels::no_array;
        };
    }
    SUBCASE("sums in the array of a step before") {
        pools.faults.observe = [&](kernels::observe_parameters& call) {
            if (++number != 20) return;
            kernels::observe_item& item = first_item(pools, call);
            std::swap(item.array, item.before);
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
