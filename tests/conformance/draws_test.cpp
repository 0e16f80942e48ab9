// Survivors that are drawn, by how often each stays.
#include <random>

#include "host_scores.hpp"

using namespace conformance;

namespace {

constexpr uint32_t draws = 600;

/// How often each position stays, over forks whose policies differ in the seed alone.
std::vector<double> frequencies(const tracker& t, kv_policy policy, uint32_t layer, uint32_t head) {
    std::vector<double> often(t.next_position(), 0.0);
    for (uint32_t draw = 0; draw < draws; ++draw) {
        policy.seed = 1000 + draw;
        kv_seq child = 0;
        require_ok(kv_seq_fork(t.host().pool(), t.sequence, 1, &child));
        kv_compress_options options = KV_INIT(kv_compress_options);
        options.policy = &policy;
        require_ok(kv_compress(t.host().pool(), child, &options, nullptr));
        for (const uint32_t p : t.host().positions(child, layer, head)) often[p] += 1.0 / draws;
        require_ok(kv_seq_release(t.host().pool(), child));
    }
    return often;
}

/// The same, drawn here, one after the other with probabilities as the weights.
std::vector<double> expected_frequencies(const std::vector<double>& weights, uint32_t places) {
    constexpr uint32_t times = 6000;
    std::mt19937_64 random(3);
    std::vector<double> often(weights.size(), 0.0);
    for (uint32_t time = 0; time < times; ++time) {
        std::vector<double> left = weights;
        for (uint32_t i = 0; i < places; ++i) {
            std::discrete_distribution<std::size_t> one(left.begin(), left.end());
            const std::size_t chosen = one(random);
            often[chosen] += 1.0 / times;
            left[chosen] = 0.0;
        }
    }
    return often;
}

void check_frequencies(const std::vector<double>& found, const std::vector<double>& expected,
                       const std::vector<char>& drawn_ones) {
    for (std::size_t p = 0; p < found.size(); ++p) {
        if (drawn_ones[p] == 0) continue;
        CAPTURE(p);
        const double chance = expected[p];
        const double deviation = std::sqrt(chance * (1.0 - chance) * (1.0 / draws + 1.0 / 6000));
        CHECK(std::abs(found[p] - chance) <= 4.5 * deviation + 1e-3);
    }
}

}  // namespace

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
    kv_policy policy = policy_of(KV_SCORER_VASE_ATTENTION, 24);
    policy.sinks = 2;
    policy.recent = 6;
    tracker t(host, host.create(&policy), 1);
    t.step(30);
    for (int i = 0; i < 20; ++i) t.step(1);
    const tracked_head& mine = t.layers[0].heads[1];
    const slots candidates = candidates_of(t, mine, policy);
    kv_policy snap = policy;
    snap.scorer = KV_SCORER_SNAPKV;
    std::vector<double> weights = scores_of(t, 0, 1, snap, {64}).score;
    const std::vector<uint32_t> reserved = best(
        mine.retained, candidates, [&](uint32_t p) { return value_range(t, 0, 1, p); }, 8 + 6);
    const std::vector<double> found = frequencies(t, policy, 0, 1);
    std::vector<char> drawn_ones(50, 1);
    for (const uint32_t p : reserved) {
        weights[p] = 0.0;
        drawn_ones[p] = 0;
        CHECK(found[p] == doctest::Approx(1.0));
    }
    check_frequencies(found, expected_frequencies(weights, 10), drawn_ones);
}

TEST_CASE("VaSE by sketch: sizes in random directions, others for every round") {
    engine host(shape_of(false, 1));
    const kv_policy policy = policy_of(KV_SCORER_VASE_SKETCH, 20);
    tracker t(host, host.create(&policy), 1);
    t.step(60);
    std::mt19937_64 random(11);
    std::normal_distribution<double> normal;
    std::vector<double> expected(60, 0.0);
    constexpr uint32_t times = 3000;
    std::vector<std::vector<double>> keys, values;
    for (uint32_t p = 0; p < 60; ++p) {
        keys.push_back(t.key(0, 1, p));
        values.push_back(t.value(0, 1, p));
    }
    for (uint32_t time = 0; time < times; ++time) {
        std::vector<std::vector<double>> directions_of(20, std::vector<double>(32));
        for (std::vector<double>& d : directions_of) {
            for (double& x : d) x = normal(random);
        }
        std::vector<std::pair<double, uint32_t>> ranked;
        for (uint32_t p = 0; p < 60; ++p) {
            double k = 0.0, v = 0.0;
            for (const std::vector<double>& d : directions_of) {
                k += dot(d, keys[p]) * dot(d, keys[p]);
                v += dot(d, values[p]) * dot(d, values[p]);
            }
            ranked.push_back({-k * v, p});
        }
        std::sort(ranked.begin(), ranked.end());
        for (uint32_t i = 0; i < 20; ++i) expected[ranked[i].second] += 1.0 / times;
    }
    const std::vector<double> found = frequencies(t, policy, 0, 1);
    for (uint32_t p = 0; p < 60; ++p) {
        CAPTURE(p);
        const double chance = expected[p];
        const double deviation = std::sqrt(chance * (1.0 - chance) * (1.0 / draws + 1.0 / times));
        CHECK(std::abs(found[p] - chance) <= 4.5 * deviation + 2e-3);
    }
}
