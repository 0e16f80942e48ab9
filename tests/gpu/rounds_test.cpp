// Rounds of eviction on a GPU against those on the CPU, by each way to score.
#include "device/round_pools.hpp"
#include "gpu_twin_device.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

TEST_CASE("rounds of TRIATTENTION keep what the CPU keeps, by a kernel and by matrix products") {
    const rope_of_tests rotation;
    for (const uint32_t method : {KV_CUDA_SCORE_KERNEL, KV_CUDA_SCORE_PRODUCTS}) {
        CAPTURE(method);
        gpu_twin_device device;
        twin_pools_on pools(device, 0,
                            std::make_unique<layers_given>(layers_for_rounds(rotation.rope)));
        give_means(pools);
        kv_cuda_scoring scoring = KV_INIT(kv_cuda_scoring);
        scoring.method = method;
        const kv_status verdict = kv_cuda_pool_set_scoring(pools.pools[0], &scoring);
        if (verdict == KV_UNSUPPORTED) {
            MESSAGE("skipped: ", std::string(message_buffer()));
            continue;
        }
        REQUIRE(verdict == KV_OK);
        kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
        policy.flags = KV_POLICY_OFFSETS_MAX;
        policy.offset_max = 64;
        twin_sequence sequence = pools.create(&policy);
        pools.step({{&sequence, 120, 120}}, true);
        for (uint32_t i = 0; i < 4; ++i) pools.step({{&sequence, 8, 8}});
        pools.compare_stored(sequence);
        CHECK(pools.differences == 0);
        CHECK(pools.reports[0].compactions > 0);
        kv_cuda_scoring_report report = KV_INIT(kv_cuda_scoring_report);
        REQUIRE(kv_cuda_pool_get_scoring(pools.pools[0], &report) == KV_OK);
        CHECK((report.product_cohorts > 0) == (method == KV_CUDA_SCORE_PRODUCTS));
        CHECK((report.kernel_cohorts > 0) == (method == KV_CUDA_SCORE_KERNEL));
    }
}
