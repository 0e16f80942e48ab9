// Policies and kv_compress of a CUDA pool, through the public header: the plugin's launches run the
// kernels' own bodies, late, and a CPU pool says what stays, where, and what comes back.
#include "round_cases.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

TEST_CASE("rounds on the device keep what those on the CPU keep, and return the same blocks") {
    const kv_policy policy = policy_for_rounds();
    round_pools pools;
    pools.give_statistics();
    drive(pools, policy, 15);
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= 8);
    CHECK(pools.compared_positions > 500);
    CHECK(pools.compared_outputs > 10);
    CHECK(pools.host.fake.synchronisations() == 0);
}

namespace {

uint64_t parked_blocks(const kv_pool* pool) {
    uint64_t parked = 0;
    for (uint32_t c = 0; c < pool->store.blocks.class_count(); ++c) {
        parked += pool->store.blocks.counters(c).parked;
    }
    return parked;
}

}  // namespace

TEST_CASE("a captured decode step is replayed behind rounds that move what it reads") {
    round_pools pools;
    replay_behind_rounds(pools);
}

TEST_CASE("kv_compress outside of steps runs behind what was enqueued, and before what comes") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence sequence = start(pools, 90);
    twin_sequence other = start(pools, 20);
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    SUBCASE("the host's stream is blocked") {
        pools.host.fake.block(pools.host.stream);
        CHECK(pools.compress(sequence, &policy) == KV_OK);
        const uint64_t parked = parked_blocks(pools.pools[0]);
        CHECK(parked >= 10);
        pools.host.fake.unblock(pools.host.stream);
        pools.host.fake.run_all();
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(pools.pools[0], &step) == KV_OK);
        CHECK(parked_blocks(pools.pools[0]) == 0);
        REQUIRE(kv_step_cancel(step) == KV_OK);
    }
    SUBCASE("another sequence is in an open step, on whose stream it goes") {
        kv_step* steps[2];
        const std::vector<twin_append> items = {{&other, 1, 1}};
        pools.begin(items, steps);
        CHECK(pools.compress(sequence, &policy) == KV_OK);
        for (kv_step* step : steps) REQUIRE(kv_step_cancel(step) == KV_OK);
    }
    SUBCASE(
        "the sequence itself is: the round runs at the step's end, with all that was accepted") {
        kv_step* steps[2];
        const std::vector<twin_append> items = {{&sequence, 2, 1}};
        pools.begin(items, steps);
        CHECK(pools.compress(sequence, &policy) == KV_OK);
        twin_tensor keys = pools.make_tensor(2, 2, 64);
        pools.draw(keys);
        pools.upload(keys)();
        for (uint32_t l = 0; l < pools.layers(); ++l) pools.write(steps, l, keys, keys);
        pools.end(items, steps);
        pools.compare_reports();
        CHECK(pools.reports[0].compactions == 1);
    }
    CHECK(pools.compress(sequence, &policy) == KV_OK);  // nothing is left to do
    pools.step({{&sequence, 3, 3}, {&other, 1, 1}});
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    pools.step({{&sequence, 1, 1}});
    pools.compare(sequence);
    pools.compare(other);
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= 2);
    CHECK(pools.host.fake.synchronisations() == 0);
}

TEST_CASE("blocks that a fork reads stay as they are: survivors go to fresh ones, or it waits") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence parent = start(pools, 100);
    twin_sequence child = pools.fork(parent);
    kv_policy policy = policy_of(KV_SCORER_KEY_NORM);
    policy.sinks = policy.recent = 0;
    CHECK(pools.compress(child, &policy) == KV_OK);
    pools.compare(parent);
    pools.compare(child);
    CHECK(pools.compress(parent, &policy) == KV_OK);  // alone now
    pools.step({{&parent, 1, 1}, {&child, 2, 2}});
    twin_sequence third = pools.fork(child);  // with a tail that a round has placed
    pools.step({{&child, 1, 1}, {&third, 2, 2}});
    for (const twin_sequence* each : {&parent, &child, &third}) pools.compare(*each);

    // No block is left for copies.
    twin_sequence fork = pools.fork(third);
    for (kv_pool* pool : pools.pools) {
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(pool, &step) == KV_OK);  // what the device is done with is free
        REQUIRE(kv_step_cancel(step) == KV_OK);
        for (uint32_t c = 0; c < pool->store.blocks.class_count(); ++c) {
            while (pool->store.blocks.allocate(c) != no_block) {
            }
        }
    }
    policy.budget = 20;
    CHECK(pools.compress(fork, &policy) == KV_AGAIN);
    pools.host.fake.run_all();
    for (const twin_sequence* each : {&third, &fork}) {
        pools.compare_stored(*each);
        pools.compare_positions(*each);
    }
    CHECK(pools.differences == 0);
}

TEST_CASE("heads that retain different tokens have no set in common") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence sequence = start(pools, 90);
    kv_policy policy = policy_of(KV_SCORER_STREAMING);
    CHECK(pools.compress(sequence, &policy) == KV_OK);  // the same in all, and known
    policy = policy_of(KV_SCORER_TRIATTENTION);
    policy.selection = KV_SELECT_PER_LAYER;
    policy.budget = 40;
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    pools.step({{&sequence, 5, 5}});
    CHECK(pools.compress(sequence, &policy) == KV_OK);  // by the set before
    twin_sequence fork = pools.fork(sequence);
    policy.budget = 30;
    CHECK(pools.compress(fork, &policy) == KV_OK);
    CHECK(pools.rounds == 4);
    policy.selection = KV_SELECT_PER_LAYER_PER_HEAD;
    policy.budget = 25;
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    policy.selection = KV_SELECT_PER_LAYER;
    policy.budget = 20;
    CHECK(pools.compress(sequence, &policy) == KV_INVALID);
    CHECK(pools.compress(fork, &policy) == KV_OK);
    pools.compare(sequence);
    pools.compare(fork);
    CHECK(pools.differences == 0);
}

TEST_CASE("parts of LAGKV are as many as each sequence of a round has") {
    round_pools pools;
    kv_policy policy = policy_of(KV_SCORER_LAGKV);
    policy.budget = 100;
    policy.recent = 0;
    policy.every = 1;
    std::deque<twin_sequence> sequences = {start(pools, 210), start(pools, 200), start(pools, 190)};
    pools.step({{&sequences[0], 120, 120}, {&sequences[2], 130, 130}}, true);
    pools.step({{&sequences[0], 120, 120}, {&sequences[2], 90, 90}}, true);
    for (uint32_t i = 0; i < 3; ++i) {
        policy.sinks = i == 2 ? 0 : 7;  // 0: LAGKV's own
        for (uint32_t pool = 0; pool < 2; ++pool) {
            REQUIRE(kv_seq_set_policy(pools.pools[pool], sequences[i].of[pool], &policy) == KV_OK);
        }
    }
    pools.step({{&sequences[0], 1, 1}, {&sequences[1], 1, 1}, {&sequences[2], 1, 1}}, true);
    pools.compare_reports();
    CHECK(pools.reports[0].compactions == 3);
    for (const twin_sequence& each : sequences) pools.compare(each);
    CHECK(pools.differences == 0);
    CHECK(pools.compared_positions > 500);
}

TEST_CASE("what a wrong round would do is found by the comparison with the CPU pool") {
    round_pools pools;
    pools.give_statistics();
    uint32_t number = 0;
    uint32_t scorer = KV_SCORER_TRIATTENTION, online = 0;
    SUBCASE("guards of another position") {
        pools.faults.guard = [&](kernels::guard_parameters& call) {
            ++number;
            ++call.tables;
        };
    }
    SUBCASE("another head's means") {
        pools.faults.score = [&](kernels::triattention_parameters& call) {
            if (++number == 2) ++call.mean_real;
        };
    }
    SUBCASE("survivors of the next head") {
        pools.faults.compact = [&](kernels::compact_parameters& call) {
            if (++number == 1) call.survivor_stride = 0;
        };
    }
    SUBCASE("positions stay behind") {
        pools.faults.compact = [&](kernels::compact_parameters& call) {
            if (++number == 4) call.positions.base = nullptr;
        };
    }
    SUBCASE("queries of another position") {
        online = KV_POLICY_STATISTICS_ONLINE;
        pools.faults.gather = [&](kernels::query_parameters& call) {
            ++number;
            ++call.positions;
        };
    }
    SUBCASE("covariances of another band") {
        scorer = KV_SCORER_EXPECTED_ATTENTION;
        pools.faults.expected = [&](kernels::expected_parameters& call) {
            ++number;
            ++call.moment_stride;
        };
    }
    kv_policy policy = policy_of(scorer);
    policy.flags = online;
    drive(pools, policy, 6);
    CHECK(number != 0);
    CHECK(pools.differences + pools.host.fake.violations.size() != 0);
    pools.host.fake.violations.clear();
}

namespace {

/// The plugin, with a workspace for one layer of a short sequence.
kvrt_plugin with_little_workspace() {
    kvrt_plugin made = *kvrt_cuda_plugin();
    made.create_rounds = [](kvrt_device* device, kvrt_round_memory* memory) {
        kvrt_round_memory less = *memory;
        less.lanes = less.most_rounds = less.most_rows = 1;
        less.most_slots = 128;
        less.most_dim = 0;       // of TRIATTENTION's rows alone
        less.most_blocks *= 64;  // lists go up as before
        const kv_status verdict = kvrt_cuda_plugin()->create_rounds(device, &less);
        std::copy_n(less.positions, KVRT_MOST_POSITIONS, memory->positions);
        return verdict;
    };
    return made;
}

/// Launches of the end of a step, of as many sequences as are due.
uint64_t launches_of_rounds(round_pools& pools, std::deque<twin_sequence>& sequences) {
    std::vector<twin_append> items;
    for (twin_sequence& each : sequences) items.push_back({&each, 1, 1});
    kv_step* steps[2];
    pools.begin(items, steps);
    twin_tensor keys = pools.make_tensor(static_cast<uint32_t>(items.size()), 2, 64);
    pools.draw(keys);
    pools.upload(keys)();
    for (uint32_t l = 0; l < pools.layers(); ++l) pools.write(steps, l, keys, keys);
    const uint64_t before = pools.host.fake.calls("cuLaunchKernel");
    pools.end(items, steps);
    pools.compare_reports();
    return pools.host.fake.calls("cuLaunchKernel") - before;
}

}  // namespace

TEST_CASE("sequences that are due at once go together, whatever their number") {
    round_pools pools;
    pools.give_statistics();
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    policy.every = 1;
    std::deque<twin_sequence> sequences = {start(pools, 60, &policy)};
    pools.host.fake.run_all();
    const uint64_t of_one = launches_of_rounds(pools, sequences);
    CHECK(of_one == 3 * 5);  // kinds of lanes, and what a round is made of
    for (uint32_t i = 0; i < 4; ++i) sequences.push_back(start(pools, 50 + 7 * i, &policy));
    pools.host.fake.run_all();
    CHECK(launches_of_rounds(pools, sequences) == of_one);
    CHECK(pools.reports[0].compactions == 5);
    for (const twin_sequence& each : sequences) pools.compare(each);
    CHECK(pools.differences == 0);
}

TEST_CASE("lanes whose rows find no room beside each other are scored one behind the other") {
    const kvrt_plugin plugin = with_little_workspace();
    round_pools pools(0, &plugin);
    pools.give_statistics();
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    SUBCASE("a set for each head") {}
    SUBCASE("a set for each layer, whose lanes stay together") {
        policy.selection = KV_SELECT_PER_LAYER;
    }
    SUBCASE("a set for all layers, of one sequence at a time") {
        policy.selection = KV_SELECT_UNION;
    }
    drive(pools, policy, 6);
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= 5);
    policy.every = 1;
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 6; ++i) sequences.push_back(start(pools, 100, &policy));
    pools.host.fake.run_all();
    CHECK(launches_of_rounds(pools, sequences) >= 2 * 3 * 5);  // with room it is half of that
    for (const twin_sequence& each : sequences) pools.compare(each);
    CHECK(pools.differences == 0);
}
