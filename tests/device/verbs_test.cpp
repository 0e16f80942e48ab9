// kv_write and kv_attend of a CUDA pool, through the public header: the plugin's launches run the
// kernels' own bodies, late, and a CPU pool says what is right.
#include <algorithm>

#include "twin_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

/// Prompts, single tokens, drafts of which some are accepted, a fork, truncations, a release.
void drive(twin_pools& pools, uint32_t rounds) {
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 3; ++i) sequences.push_back(pools.create());
    pools.step({{&sequences[0], 5, 5}, {&sequences[1], 37, 37}, {&sequences[2], 1, 1}});
    for (uint32_t round = 0; round < rounds; ++round) {
        CAPTURE(round);
        if (round == 2) sequences.push_back(pools.fork(sequences[1]));
        if (round == 4) pools.truncate(sequences[0], sequences[0].tokens - 2);
        if (round == 5) {
            pools.release(sequences[2]);
            sequences[2] = pools.create();
        }
        std::vector<twin_append> items;
        for (twin_sequence& each : sequences) {
            if (round % 3 == 2 && &each == &sequences[1]) continue;
            const uint32_t rows =
                round % 2 == 0 ? 1 : 1 + static_cast<uint32_t>(pools.random() % 5);
            const uint32_t refused = rows > 1 && pools.random() % 2 != 0 ? 1 : 0;
            items.push_back({&each, rows, rows - refused});
        }
        std::reverse(items.begin(), items.end());
        pools.step(items);
        for (uint32_t i = pools.random() % 40; i > 0; --i) {
            pools.host.fake.run_one(pools.host.stream);
        }
    }
    pools.host.fake.run_all();
    for (const twin_sequence& each : sequences) pools.compare_stored(each);
}

}  // namespace

TEST_CASE("a CUDA pool writes and attends as a CPU pool does, however late the device is") {
    for (const uint32_t flags : {0u, uint32_t{KV_POOL_ELASTIC}}) {
        CAPTURE(flags);
        twin_pools pools(flags);
        drive(pools, 8);
        CHECK(pools.differences == 0);
        CHECK(pools.compared_words > 10000);
        CHECK(pools.compared_outputs > 100);
        CHECK(pools.host.fake.calls("cuLaunchKernel") > 100);
        CHECK(pools.host.fake.synchronisations() == 0);
        MESSAGE("largest error, of the largest output: ", pools.worst);
    }
}
