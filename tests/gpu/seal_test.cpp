// Blocks that are sealed, demoted and opened again on a GPU: the bytes, tables and counts of a CPU
// pool that does the same.
#include "device/sealing_pools.hpp"
#include "gpu_twin_device.hpp"
#include "test_length.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

TEST_CASE("short: blocks are sealed, demoted and opened") {
    gpu_twin_device device;
    sealing_pools_on pools(device);
    twin_sequence sequence = pools.create();
    pools.append(sequence, 70);
    pools.truncate(sequence, 60);
    pools.append(sequence, 6);
    pools.compare_stored(sequence);
    CHECK(pools.differences == 0);
    CHECK(pools.compared_sealed > 2);
}

TEST_CASE("a pool on the GPU seals, demotes and opens as one on the CPU") {
    for (const uint32_t flags : {0u, uint32_t{KV_POOL_ELASTIC}}) {
        if (flags != 0 && !whole_length()) continue;
        CAPTURE(flags);
        gpu_twin_device device;
        sealing_pools_on pools(device, flags);
        drive(pools, whole_length() ? 6 : 2);
        CHECK(pools.differences == 0);
        CHECK(pools.compared_sealed > 20);
    }
}
