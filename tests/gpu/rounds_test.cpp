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
        give_moments(pools);
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

TEST_CASE("rounds go by scores of the host, from its memory and from the device's") {
    const rope_of_tests rotation;
    gpu_twin_device device;
    auto model = std::make_unique<layers_given>(layers_for_rounds(rotation.rope));
    model->max_observed_sequences = 2;
    twin_pools_on pools(device, 0, std::move(model));
    const kv_policy policy = policy_of(KV_SCORER_HOST);
    twin_sequence sequences[2] = {pools.create(&policy), pools.create(&policy)};
    const auto give = [&](uint32_t index, uint32_t first, uint32_t tokens) {
        twin_sequence& sequence = sequences[index];
        for (const uint32_t layer : {0u, 1u, 3u}) {  // layer 2 has a window
            twin_tensor scores = pools.make_tensor(2, tokens, 1);
            pools.draw(scores);
            const float* const numbers = scores.host.data();
            REQUIRE(kv_seq_set_scores(pools.pools[1], sequence.of[1], layer, first, tokens,
                                      numbers) == KV_OK);
            if (index == 0) {
                REQUIRE(kv_seq_set_scores(pools.pools[0], sequence.of[0], layer, first, tokens,
                                          numbers) == KV_OK);
                continue;
            }
            device.enqueue("scores", pools.upload(scores));
            REQUIRE(kv_cuda_seq_set_scores(pools.pools[0], sequence.of[0], layer, first, tokens,
                                           reinterpret_cast<const float*>(scores.device),
                                           as_stream(device.stream())) == KV_OK);
        }
    };
    pools.step({{&sequences[0], 100, 100}, {&sequences[1], 120, 120}}, true);
    for (const uint32_t index : {0u, 1u}) give(index, 0, sequences[index].tokens);
    for (uint32_t i = 0; i < 4; ++i) {
        pools.step({{&sequences[0], 8, 8}, {&sequences[1], 8, 8}});
        for (const uint32_t index : {0u, 1u}) give(index, sequences[index].tokens - 8, 8);
    }
    CHECK(pools.reports[0].compactions == 2);
    for (const twin_sequence& each : sequences) {
        pools.compare_stored(each);
        for (const uint32_t layer : {0u, 1u, 3u}) {
            float scores[2][128] = {};
            uint64_t count[2] = {};
            for (uint32_t i = 0; i < 2; ++i) {
                REQUIRE(kv_seq_get_scores(pools.pools[i], each.of[i], layer, 1, 128, scores[i],
                                          &count[i]) == KV_OK);
            }
            CHECK(count[0] == count[1]);
            CHECK(std::memcmp(scores[0], scores[1], sizeof scores[0]) == 0);
        }
    }
    CHECK(pools.differences == 0);
}
