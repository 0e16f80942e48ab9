// Rounds on a device that cannot run as asked: what is refused by name, what waits, what fails, and
// that nothing has changed then.
#include "round_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

TEST_CASE("what the host cannot know of positions is refused, not guessed") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence sequence = start(pools, 90);
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    uint32_t positions[128];
    uint64_t count = 0;
    SUBCASE("positions after a round by scores are read back, but for tables") {
        REQUIRE(pools.compress(sequence, &policy) == KV_OK);
        CHECK(kv_seq_get_positions(pools.pools[0], sequence.of[0], 0, 0, 0, nullptr, &count) ==
              KV_OK);
        CHECK(count == 48);
        pools.step({{&sequence, 3, 3}}, true);
        for (uint32_t layer = 0; layer < 4; ++layer) {
            for (const uint64_t capacity : {7u, 48u, 50u, 128u}) {
                uint32_t expected[128];
                uint64_t expected_count = 0;
                REQUIRE(kv_seq_get_positions(pools.pools[0], sequence.of[0], layer, 1, capacity,
                                             positions, &count) == KV_OK);
                REQUIRE(kv_seq_get_positions(pools.pools[1], sequence.of[1], layer, 1, capacity,
                                             expected, &expected_count) == KV_OK);
                CHECK(count == expected_count);
                CHECK(std::equal(positions, positions + std::min(count, capacity), expected));
            }
        }
        CHECK(pools.host.fake.synchronisations() != 0);  // it waits, and it alone
        pools.host.fake.run_all();
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(pools.pools[0], &step) == KV_OK);
        REQUIRE(kv_cuda_step_use_stream(step, as_stream(pools.host.stream)) == KV_OK);
        REQUIRE(kv_seq_append(step, sequence.of[0], nullptr, 1, nullptr) == KV_OK);
        REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
        kv_tables tables = KV_INIT(kv_tables);
        CHECK(kv_step_export(step, 0, &tables) == KV_OK);
        std::vector<int32_t> slot_positions(tables.slot_positions_count);
        tables.slot_positions = slot_positions.data();
        tables.slot_positions_capacity = slot_positions.size();
        CHECK(kv_step_export(step, 0, &tables) == KV_UNSUPPORTED);
        CHECK(message_has("slot_positions"));
        REQUIRE(kv_step_cancel(step) == KV_OK);
    }
    SUBCASE("positions after STREAMING are known") {
        policy = policy_of(KV_SCORER_STREAMING);
        REQUIRE(pools.compress(sequence, &policy) == KV_OK);
        REQUIRE(kv_seq_get_positions(pools.pools[0], sequence.of[0], 0, 1, 128, positions,
                                     &count) == KV_OK);
        uint32_t expected[128];
        REQUIRE(kv_seq_get_positions(pools.pools[1], sequence.of[1], 0, 1, 128, expected, &count) ==
                KV_OK);
        CHECK(std::equal(positions, positions + count, expected));
        CHECK(pools.host.fake.synchronisations() == 0);
        kv_step* steps[2];
        pools.host.fake.run_all();
        pools.begin({{&sequence, 2, 2}}, steps);
        for (uint32_t layer = 0; layer < 4; ++layer) {
            std::vector<int32_t> exported[2];
            for (uint32_t i = 0; i < 2; ++i) {
                kv_tables tables = KV_INIT(kv_tables);
                REQUIRE(kv_step_export(steps[i], layer, &tables) == KV_OK);
                exported[i].resize(tables.slot_positions_count);
                tables.slot_positions = exported[i].data();
                tables.slot_positions_capacity = exported[i].size();
                REQUIRE(kv_step_export(steps[i], layer, &tables) == KV_OK);
            }
            CHECK(exported[0] == exported[1]);
        }
        for (kv_step* step : steps) REQUIRE(kv_step_cancel(step) == KV_OK);
        for (uint32_t i = 0; i < 2; ++i) {
            CHECK(kv_seq_truncate(pools.pools[i], sequence.of[i], 60) == KV_NO_SNAPSHOT);
        }
        pools.truncate(sequence, 3);  // of which nothing was removed
        pools.step({{&sequence, 40, 40}});
        pools.compare(sequence);
    }
    SUBCASE("going back to among survivors") {
        REQUIRE(pools.compress(sequence, &policy) == KV_OK);
        pools.step({{&sequence, 4, 4}}, true);
        pools.truncate(sequence, 91);
        CHECK(kv_seq_truncate(pools.pools[0], sequence.of[0], 50) == KV_NO_SNAPSHOT);
        CHECK(message_has("only the device knows"));
        CHECK(kv_seq_truncate(pools.pools[1], sequence.of[1], 50) == KV_NO_SNAPSHOT);
        pools.compare(sequence);
    }
    SUBCASE("guards that reach further back than those of the round before") {
        REQUIRE(pools.compress(sequence, &policy) == KV_OK);
        policy.recent = 30;
        policy.budget = 40;  // holds them, however many there are
        CHECK(pools.compress(sequence, &policy) == KV_OK);
        policy.recent = 60;
        policy.budget = 20;
        kv_compress_options options = KV_INIT(kv_compress_options);
        options.policy = &policy;
        CHECK(kv_compress(pools.pools[0], sequence.of[0], &options, nullptr) == KV_UNSUPPORTED);
        CHECK(message_has("only the device knows"));
        pools.compare(sequence);
    }
    CHECK(pools.differences == 0);
}

namespace {

struct layers_of_codes : twin_model {
    layers_of_codes() { add(KV_FORMAT_F16, KV_FORMAT_Q4_0); }
};

}  // namespace

TEST_CASE("values whose ranges no kernel finds are refused, and only where they are asked for") {
    round_pools pools(std::make_unique<layers_of_codes>());
    const twin_sequence sequence = pools.create();
    kv_policy policy = policy_of(KV_SCORER_RANDOM);
    CHECK(kv_seq_set_policy(pools.pools[0], sequence.of[0], &policy) == KV_OK);
    policy.value_reserve = 4;
    CHECK(kv_seq_set_policy(pools.pools[0], sequence.of[0], &policy) == KV_UNSUPPORTED);
    CHECK(message_has("value_reserve"));
    CHECK(message_has("KV_DEVICE_CUDA"));
}

TEST_CASE("without statistics a round of TRIATTENTION says so, and takes nothing") {
    round_pools pools;
    twin_sequence sequence = start(pools, 60);
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    CHECK(pools.rounds == 0);
    pools.give_statistics();
    pools.host.fake.run_all();  // they go up like tables
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    CHECK(pools.rounds == 1);
    pools.compare(sequence);
    CHECK(pools.differences == 0);
}

TEST_CASE(
    "launches that fail leave lanes whole: those behind are moved, the others are as before") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence sequence = start(pools, 90);
    twin_sequence other = pools.fork(sequence);
    pools.host.fake.run_all();
    kv_policy policy = policy_of(KV_SCORER_KEY_NORM);
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    // Four launches for each of three kinds of lanes, the table's upload apart.
    for (const uint32_t launches : {0u, 5u, 7u}) {
        CAPTURE(launches);
        pools.host.fake.inject("cuLaunchKernel", error_out_of_memory, launches);
        CHECK(kv_compress(pools.pools[0], sequence.of[0], &options, nullptr) == KV_NO_MEMORY);
        CHECK(kv_pool_check(pools.pools[0]) == KV_OK);
        pools.host.fake.run_all();
    }
    CHECK(kv_compress(pools.pools[0], sequence.of[0], &options, nullptr) == KV_OK);
    CHECK(kv_compress(pools.pools[1], sequence.of[1], &options, nullptr) == KV_OK);
    pools.compare(sequence);
    pools.compare(other);
    CHECK(pools.differences == 0);
}

TEST_CASE("a device that is far behind has no room for more rounds, which are then made again") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence sequence = start(pools, 120);
    pools.host.fake.run_all();
    pools.host.fake.block(pools.host.stream);
    pools.step({{&sequence, 1, 1}}, true);
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    uint32_t refused = 0;
    for (policy.budget = 100; policy.budget > 40; policy.budget -= 2) {
        CAPTURE(policy.budget);
        REQUIRE(kv_compress(pools.pools[1], sequence.of[1], &options, nullptr) == KV_OK);
        kv_status verdict = kv_compress(pools.pools[0], sequence.of[0], &options, nullptr);
        if (verdict == KV_AGAIN) {
            ++refused;
            CHECK(kv_pool_check(pools.pools[0]) == KV_OK);
            pools.host.fake.unblock(pools.host.stream);
            pools.host.fake.run_all();
            pools.host.fake.block(pools.host.stream);
            verdict = kv_compress(pools.pools[0], sequence.of[0], &options, nullptr);
        }
        REQUIRE(verdict == KV_OK);
    }
    CHECK(refused != 0);
    pools.host.fake.unblock(pools.host.stream);
    pools.compare(sequence);
    CHECK(pools.differences == 0);
}

TEST_CASE("with host fences survivors go to fresh blocks until the host's kernels are done") {
    round_pools pools(KV_POOL_HOST_FENCES | KV_POOL_ELASTIC);
    pools.give_statistics();
    kv_policy policy = policy_of(KV_SCORER_STREAMING);
    policy.budget = 30;
    policy.every = 4;
    twin_sequence sequence = pools.create(&policy), other = pools.create(&policy);
    for (uint32_t step = 0; step < 12; ++step) {
        CAPTURE(step);
        pools.step({{&sequence, 9, 9}, {&other, 2, 2}}, true);
        pools.compare_reports();
        for (uint32_t i = 0; i < 2 && step % 3 != 2; ++i) {
            REQUIRE(kv_pool_pass_fence(pools.pools[i], pools.reports[i].fence) == KV_OK);
        }
        if (step % 2 == 0) pools.host.fake.run_all();
    }
    CHECK(pools.rounds > 5);
    pools.compare(sequence);
    pools.compare(other);
    CHECK(pools.differences == 0);
}
