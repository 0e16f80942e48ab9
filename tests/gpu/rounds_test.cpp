// Rounds of eviction on a GPU against those on the CPU: each scorer, each way to share a set, what
// stays whatever its score, what attention gave, and each way to score by TriAttention.
#include "device/counted_pools.hpp"
#include "device/observed_pools.hpp"
#include "device/round_cases.hpp"
#include "gpu_twin_device.hpp"
#include "test_length.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

void check(const round_pools_on& pools, uint64_t rounds) {
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= rounds);
    CHECK(pools.compared_positions > 50 * rounds);
}

}  // namespace

TEST_CASE("short: rounds of a policy, that score keys, choose and move") {
    gpu_twin_device device;
    round_pools_on pools(device);
    pools.give_statistics();
    drive(pools, policy_of(KV_SCORER_TRIATTENTION), 2);
    check(pools, 1);
}

TEST_CASE("rounds keep what those on the CPU keep, and return the same blocks") {
    const kv_policy policy = policy_for_rounds();
    gpu_twin_device device;
    round_pools_on pools(device);
    pools.give_statistics();
    drive(pools, policy, whole_length() ? 15 : 5);
    check(pools, whole_length() ? 8 : 1);
    CHECK(pools.compared_outputs >= 8);
}

TEST_CASE("sets common to layers and heads, ranges of values, quotas of segments") {
    kv_policy policy;
    SUBCASE("sets") { policy = policy_for_sets(); }
    SUBCASE("what stays") { policy = policy_for_quotas(); }
    gpu_twin_device device;
    round_pools_on pools(device);
    pools.give_statistics();
    drive(pools, policy, whole_length() ? 6 : 2);
    check(pools, whole_length() ? 4 : 1);
}

TEST_CASE("heads of a layer compete for their budgets, and are counted first") {
    const kv_policy policy = policy_for_competing();
    gpu_twin_device device;
    round_pools_on pools(device, std::make_unique<layers_by_head>());
    drive_counted(pools, policy, whole_length() ? 6 : 1);
    check(pools, whole_length() ? 12 : 2);
}

TEST_CASE("rounds go by what attention gave there, as those on the CPU") {
    gpu_twin_device device;
    observing_pools_on pools(device);
    const observed_policy chosen = policy_for_observed(pools);
    give_moments(pools, {0u, 2u, 3u});
    drive(pools, chosen.policy, whole_length() ? 13 : 3, chosen.looks);
    check(pools, whole_length() ? 5 : 1);
    CHECK(pools.worst_sum < 4e-3);
    CHECK((pools.compared_sums > 0) == chosen.looks);
    if (chosen.looks) MESSAGE("largest error of a sum, relative: ", pools.worst_sum);
}

TEST_CASE("a captured decode step is replayed behind rounds that move what it reads") {
    gpu_twin_device device;
    round_pools_on pools(device);
    replay_behind_rounds(pools);
}

TEST_CASE("rounds of TRIATTENTION keep what the CPU keeps, by a kernel and by matrix products") {
    for (const uint32_t method : {KV_CUDA_SCORE_KERNEL, KV_CUDA_SCORE_PRODUCTS}) {
        CAPTURE(method);
        gpu_twin_device device;
        round_pools_on pools(device);
        pools.give_statistics();
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
        pools.compare(sequence);
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
