// Statistics of queries that kv_attend of a CUDA pool gathers: those of a CPU pool, behind forks,
// cancelled steps and rounds. Rounds by them are in rounds_test.cpp.
#include "round_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

struct gathered {
    std::vector<float> arrays[6];
    kv_query_statistics statistics = KV_INIT(kv_query_statistics);

    gathered(kv_pool* pool, kv_seq sequence, uint32_t layer) {
        for (std::vector<float>& array : arrays) array.assign(4 * 32, -1.0f);
        statistics.layer = layer;
        statistics.query_heads = 4;
        statistics.bands = 32;
        statistics.mean_real = arrays[0].data();
        statistics.mean_imaginary = arrays[1].data();
        statistics.mean_magnitude = arrays[2].data();
        statistics.variance_real = arrays[3].data();
        statistics.variance_imaginary = arrays[4].data();
        statistics.covariance = arrays[5].data();
        const kv_status verdict = kv_seq_get_statistics(pool, sequence, &statistics);
        REQUIRE_MESSAGE(verdict == KV_OK, std::string(message_buffer()));
    }
};

void compare_statistics(round_pools& pools, const twin_sequence& sequence, uint64_t tokens) {
    for (const uint32_t layer : {0u, 1u, 3u}) {
        CAPTURE(layer);
        const gathered device(pools.pools[0], sequence.of[0], layer);
        const gathered cpu(pools.pools[1], sequence.of[1], layer);
        CHECK(device.statistics.tokens == tokens);
        CHECK(cpu.statistics.tokens == tokens);
        double worst = 0.0;
        for (uint32_t array = 0; array < 6; ++array) {
            for (std::size_t i = 0; i < cpu.arrays[array].size(); ++i) {
                worst = std::max(worst, std::abs(double{device.arrays[array][i]} -
                                                 double{cpu.arrays[array][i]}));
            }
        }
        CHECK(worst < 2e-6);
    }
}

}  // namespace

TEST_CASE("queries that kv_attend sees on a device are those that it sees on the CPU") {
    round_pools pools;
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);  // nothing was given: it gathers
    policy.every = 16;
    twin_sequence sequence = pools.create(&policy);
    compare_statistics(pools, sequence, 0);
    pools.step({{&sequence, 40, 40}});
    compare_statistics(pools, sequence, 40);
    kv_step* steps[2];
    pools.begin({{&sequence, 5, 5}}, steps);
    pools.run_layers({{&sequence, 5, 5}}, steps);
    pools.cancel(steps);
    compare_statistics(pools, sequence, 40);
    pools.step({{&sequence, 1, 1}});
    twin_sequence child = pools.fork(sequence);
    pools.step({{&sequence, 2, 2}, {&child, 3, 1}});
    compare_statistics(pools, sequence, 43);
    compare_statistics(pools, child, 44);
    for (uint32_t i = 0; i < 10; ++i) {
        pools.step({{&sequence, 2, 2}});
        pools.compare_reports();
    }
    CHECK(pools.rounds != 0);
    compare_statistics(pools, sequence, 63);
    pools.release(sequence);
    twin_sequence next = pools.create(&policy);  // in the place of the other
    pools.step({{&next, 3, 3}, {&child, 1, 1}});
    compare_statistics(pools, next, 3);
    compare_statistics(pools, child, 45);
    pools.compare(child);
    CHECK(pools.differences == 0);
}

TEST_CASE("a captured kv_attend gathers no queries: it says so, or is told to leave them out") {
    round_pools pools;
    kv_policy policy = policy_of(KV_SCORER_EXPECTED_ATTENTION);
    policy.flags = KV_POLICY_STATISTICS_ONLINE;
    twin_sequence sequence = pools.create(&policy);
    pools.step({{&sequence, 9, 9}});
    kv_step* steps[2];
    pools.begin({{&sequence, 1, 1}}, steps);
    pools.write_layer(steps, 0, 1);
    twin_tensor queries = pools.make_tensor(1, 4, 64), out = pools.make_tensor(1, 4, 64);
    pools.host.fake.begin_capture(pools.host.stream);
    kv_attend_options options = KV_INIT(kv_attend_options);
    CHECK(kv_attend(steps[0], 0, &queries.on_device, &out.on_device, &options) == KV_UNSUPPORTED);
    CHECK(message_has("KV_ATTEND_NO_STATISTICS"));
    options.flags = KV_ATTEND_NO_STATISTICS;
    CHECK(kv_attend(steps[0], 0, &queries.on_device, &out.on_device, &options) == KV_OK);
    CHECK(pools.host.fake.end_capture(pools.host.stream).size() == 2);  // pieces, and their sum
    pools.cancel(steps);
    compare_statistics(pools, sequence, 9);
}

TEST_CASE("a fork whose copies the device refuses leaves no children, and no handles of them") {
    round_pools pools;
    kv_policy policy = policy_of(KV_SCORER_EXPECTED_ATTENTION);
    policy.flags = KV_POLICY_STATISTICS_ONLINE;
    twin_sequence sequence = pools.create(&policy);
    pools.step({{&sequence, 9, 9}});
    kv_seq children[2] = {7, 7};
    // All of the first child's are copied.
    pools.host.fake.inject("cuMemcpyDtoDAsync_v2", error_out_of_memory, 3);
    CHECK(kv_seq_fork(pools.pools[0], sequence.of[0], 2, children) == KV_NO_MEMORY);
    CHECK(message_has("cuMemcpyDtoDAsync"));
    CHECK(children[0] == 0);
    CHECK(children[1] == 0);
    CHECK(kv_seq_fork(pools.pools[0], sequence.of[0], 2, children) == KV_OK);
    for (const kv_seq child : children) CHECK(kv_seq_release(pools.pools[0], child) == KV_OK);
}
