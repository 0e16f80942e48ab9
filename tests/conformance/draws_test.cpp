// Survivors that are drawn, by how often each stays.
#include "draws.hpp"

using namespace conformance;

TEST_CASE("SAMPLE: survivors are drawn with probabilities as their scores") {
    engine host(shape_of(false, 2));
    kv_policy policy = policy_of(KV_SCORER_HOST, 12);
    policy.flags = KV_POLICY_SAMPLE;
    tracker t(host, host.create(&policy), 1);
    t.step(40);
    std::vector<float> scores(3 * 40);
    std::vector<double> weights(40);
    for (uint32_t i = 0; i < 120; ++i) {
        scores[i] = i % 40 % 7 == 0 ? -1.0f : 0.25f + static_cast<float>(i % 40 % 5);
    }
    for (uint32_t i = 0; i < 40; ++i) weights[i] = std::max(0.0, double{scores[i]});
    for (const uint32_t layer : {0, 1}) {
        require_ok(kv_seq_set_scores(host.pool(), t.sequence, layer, 0, 40, scores.data()));
    }
    for (const uint32_t selection :
         {KV_SELECT_PER_LAYER_PER_HEAD, KV_SELECT_PER_HEAD, KV_SELECT_PER_LAYER, KV_SELECT_UNION}) {
        CAPTURE(selection);
        policy.selection = selection;
        check_frequencies(frequencies(t, policy, 1, 2), expected_frequencies(weights, 12),
                          std::vector<char>(40, 1));
    }
    // Heads draw apart, the same seed draws the same.
    policy.selection = KV_SELECT_PER_LAYER_PER_HEAD;
    std::vector<std::vector<uint32_t>> kept;
    for (int again = 0; again < 2; ++again) {
        kv_seq child = 0;
        require_ok(kv_seq_fork(host.pool(), t.sequence, 1, &child));
        compress(host, child, policy);
        for (uint32_t head = 0; head < 3; ++head) kept.push_back(host.positions(child, 0, head));
    }
    CHECK(kept[0] == kept[3]);
    CHECK(kept[1] == kept[4]);
    CHECK(kept[0] != kept[1]);
    CHECK(kept[1] != kept[2]);
}

TEST_CASE("VaSE by attention: a quarter by the range of values, the rest is drawn") {
    engine host(shape_of(false, 1));
    check_vase_attention(host, 0, 1);
}

TEST_CASE("VaSE by sketch: sizes in random directions, others for every round") {
    engine host(shape_of(false, 1));
    check_vase_sketch(host, 0, 1);
}
