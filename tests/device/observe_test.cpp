// Observed attention of a CUDA pool, and rounds that go by it: kernels keep weights and add them
// up, late, and a CPU pool says what each slot has got, which stay, and where.
#include "observing_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

/// Prompts that are listed in parts, tokens one by one, drafts, a fork that goes on from a shared
/// tail, a truncation; rounds at step ends. `looks`: sums are read in between, which waits.
void drive(observing_pools& pools, const kv_policy& policy, uint32_t steps, bool looks) {
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 3; ++i) sequences.push_back(pools.create(&policy));
    pools.step({{&sequences[0], 40, 40}, {&sequences[1], 90, 90}, {&sequences[2], 24, 24}});
    for (uint32_t step = 0; step < steps; ++step) {
        CAPTURE(step);
        if (step == 3) sequences.push_back(pools.fork(sequences[0]));
        if (step == 7) pools.truncate(sequences[1], sequences[1].tokens - 1);  // no round since
        pools.attend_flags = step == 8 ? KV_ATTEND_NO_STATISTICS : 0;
        std::vector<twin_append> items;
        for (twin_sequence& each : sequences) {
            const uint32_t rows = step % 4 != 1 ? 1 : 1 + static_cast<uint32_t>(pools.random() % 6);
            items.push_back({&each, rows, rows - (rows > 3 ? 1 : 0)});
        }
        pools.step(items);
        for (uint32_t i = pools.random() % 60; i > 0; --i) {
            pools.host.fake.run_one(pools.host.stream);
        }
        if (!looks || step % 3 != 2) continue;
        for (const twin_sequence& each : sequences) pools.compare_sums(each);
    }
    for (const twin_sequence& each : sequences) pools.compare(each);
}

}  // namespace

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
