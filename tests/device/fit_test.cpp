// kv_seq_fit_affine of a CUDA pool: the keys come to the host, and constants are those that a CPU
// pool finds in the same keys.
#include "round_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

struct fitted {
    std::vector<float> means, scales;
    kv_affine_fit fit = KV_INIT(kv_affine_fit);
    kv_status verdict = KV_OK;

    fitted(kv_pool* pool, kv_seq sequence, uint32_t layer, uint64_t first)
        : means(2 * 64, -1.0f), scales(means) {
        fit.layer = layer;
        fit.kv_heads = 2;
        fit.key_dim = 64;
        fit.first_position = first;
        fit.channel_means = means.data();
        fit.channel_scales = scales.data();
        verdict = kv_seq_fit_affine(pool, sequence, &fit);
    }
};

}  // namespace

TEST_CASE("constants of affine keys are fitted to keys on a device, also behind rounds") {
    round_pools pools;
    const twin_sequence sequence = start(pools, 120);
    kv_policy policy = policy_of(KV_SCORER_KEY_NORM);
    policy.budget = 90;
    for (uint32_t round = 0; round < 2; ++round) {
        CAPTURE(round);
        if (round == 1) REQUIRE(pools.compress(sequence, &policy) == KV_OK);
        for (uint32_t layer = 0; layer < pools.layers(); ++layer) {
            CAPTURE(layer);
            const fitted device(pools.pools[0], sequence.of[0], layer, 5);
            const fitted cpu(pools.pools[1], sequence.of[1], layer, 5);
            CHECK(device.verdict == cpu.verdict);
            CHECK((device.verdict == KV_OK) == (layer != 2));  // its window holds too few
            CHECK(device.fit.tokens_used == cpu.fit.tokens_used);
            CHECK(device.fit.identity == cpu.fit.identity);
            CHECK(device.means == cpu.means);
            CHECK(device.scales == cpu.scales);
        }
    }
    CHECK(pools.rounds == 1);
    pools.compare(sequence);
    CHECK(pools.differences == 0);
}
