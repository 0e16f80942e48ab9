// Pools on the GPU of this machine against pools on its CPU, through the public header: the cases
// of tests/device, and what only a real device shows.
#include "device/twin_cases.hpp"
#include "gpu_twin_device.hpp"
#include "test_length.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

TEST_CASE("a pool on the GPU writes and attends as one on the CPU") {
    for (const uint32_t flags : {0u, uint32_t{KV_POOL_ELASTIC}}) {
        CAPTURE(flags);
        gpu_twin_device device;
        twin_pools_on pools(device, flags);
        drive(pools, whole_length() ? 30 : 6);
        CHECK(pools.differences == 0);
        CHECK(pools.compared_words > 5000);
        CHECK(pools.compared_outputs > 100);
        MESSAGE("largest error of an output, of its largest number: ", pools.worst);
    }
}

TEST_CASE("layouts that foreign kernels read are written and attended to, too") {
    for (const uint32_t layout : {KV_LAYOUT_HND, KV_LAYOUT_NHD}) {
        CAPTURE(layout);
        gpu_twin_device device;
        twin_pools_on pools(device, 0, layout);
        drive(pools, whole_length() ? 8 : 1);
        CHECK(pools.differences == 0);
    }
}

TEST_CASE("long: prompts of hundreds of rows, drafts and single tokens are attended in one step") {
    gpu_twin_device device;
    twin_pools_on pools(device, 0);
    attend_many_rows(pools);
}

TEST_CASE("short: a prompt, a draft and a token") {
    gpu_twin_device device;
    twin_pools_on pools(device, 0);
    drive(pools, 2);
    CHECK(pools.differences == 0);
    CHECK(pools.compared_outputs > 10);
}

TEST_CASE("steps at random: appends, drafts, forks, truncations, releases") {
    for (uint32_t seed = 1; seed <= (whole_length() ? 8 : 1); ++seed) {
        CAPTURE(seed);
        gpu_twin_device device;
        twin_pools_on pools(device, KV_POOL_ELASTIC);
        pools.random.seed(seed);
        drive_at_random(pools, whole_length() ? 60 : 12);
        CHECK(pools.differences == 0);
        CHECK(pools.compared_outputs > 50);
    }
}

TEST_CASE("a graph of a step's launches is replayed for other steps") {
    gpu_twin_device device;
    twin_pools_on pools(device, 0);
    const uint32_t rounds = whole_length() ? 24 : 4;
    SUBCASE("single tokens") { replay_steps(pools, rounds); }
    SUBCASE("prompts and drafts") { replay_steps(pools, rounds, 45); }
}

TEST_CASE("tables of steps that a stream has not begun are not those of later ones") {
    gpu_twin_device device;
    twin_pools_on pools(device, 0);
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 4; ++i) sequences.push_back(pools.create());
    pools.step({{&sequences[0], 20, 20}, {&sequences[1], 3, 3}, {&sequences[2], 15, 15}});
    for (uint32_t round = 0; round < 3; ++round) {
        CAPTURE(round);
        device.hold();
        // Two steps at once, and more behind them, all of them enqueued before anything runs.
        const std::vector<twin_append> some = {{&sequences[0], 1, 1}, {&sequences[2], 2, 1}};
        const std::vector<twin_append> others = {{&sequences[1], 3, 3}};
        kv_step* first[2];
        kv_step* second[2];
        pools.begin(some, first);
        pools.begin(others, second);
        pools.run_layers(others, second);
        pools.run_layers(some, first);
        pools.end(some, first);
        pools.end(others, second);
        pools.step({{&sequences[3], 5, 5}, {&sequences[0], 1, 1}});
        pools.step({{&sequences[2], 1, 1}, {&sequences[1], 1, 1}});
        device.let_go();
        device.catch_up();
        CHECK(pools.differences == 0);
    }
    for (const twin_sequence& each : sequences) pools.compare_stored(each);
    CHECK(pools.differences == 0);
}

TEST_CASE("memory that an elastic pool gives back is the device's again") {
    gpu_twin_device device;
    const uint64_t before = gpu().free_bytes();
    uint64_t created = 0;
    {
        twin_pools_on pools(device, KV_POOL_ELASTIC);
        std::deque<twin_sequence> sequences;
        for (uint32_t i = 0; i < 4; ++i) sequences.push_back(pools.create());
        for (uint32_t i = 0; i < 4; ++i) pools.step({{&sequences[i], 250, 250}}, true);
        device.catch_up();
        uint64_t full = 0, left = 0;
        REQUIRE(kv_cuda_pool_memory(pools.pools[0], &full) == KV_OK);
        const uint64_t free_when_full = gpu().free_bytes();
        CHECK(full > 0);
        CHECK(free_when_full + full <= before);
        for (const twin_sequence& each : sequences) pools.release(each);
        for (int i = 0; i < 8; ++i) {  // asks the device how far it is
            kv_step* step = nullptr;
            REQUIRE(kv_step_begin(pools.pools[0], &step) == KV_OK);
            REQUIRE(kv_step_cancel(step) == KV_OK);
        }
        REQUIRE(kv_cuda_pool_memory(pools.pools[0], &left) == KV_OK);
        CHECK(left < full);
        CHECK(gpu().free_bytes() >= free_when_full + (full - left));
        created = full;
    }
    MESSAGE(created, " bytes of slabs");
}
