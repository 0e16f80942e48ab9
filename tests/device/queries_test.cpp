// Statistics of queries that kv_attend of a CUDA pool gathers: those of a CPU pool, behind forks,
// cancelled steps and rounds. Rounds by them are in rounds_test.cpp.
#include "gathered_queries.hpp"
#include "round_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

void compare_statistics(round_pools& pools, const twin_sequence& sequence, uint64_t tokens) {
    for (const uint32_t layer : {0u, 1u, 3u}) {
        CAPTURE(layer);
        CHECK(worst_of_gathered(pools, sequence, layer, tokens) < 2e-6);
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
