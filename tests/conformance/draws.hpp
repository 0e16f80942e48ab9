// How often survivors stay that are drawn, and what VaSE (arXiv 2606.03928) draws by, whatever the
// rows are.
#pragma once

#include <random>

#include "host_scores.hpp"

namespace conformance {

inline constexpr uint32_t draws = 600;

/// How often each position stays, over forks whose policies differ in the seed alone.
inline std::vector<double> frequencies(const tracker& t, kv_policy policy, uint32_t layer,
                                       uint32_t head) {
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
inline std::vector<double> expected_frequencies(const std::vector<double>& weights,
                                                uint32_t places) {
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

inline void check_frequencies(const std::vector<double>& found, const std::vector<double>& expected,
                              const std::vector<char>& drawn_ones) {
    for (std::size_t p = 0; p < found.size(); ++p) {
        if (drawn_ones[p] == 0) continue;
        CAPTURE(p);
        const double chance = expected[p];
        const double deviation = std::sqrt(chance * (1.0 - chance) * (1.0 / draws + 1.0 / 6000));
        CHECK(std::abs(found[p] - chance) <= 4.5 * deviation + 1e-3);
    }
}

/// By attention: a quarter of 24 by the range of values, the rest is drawn by what SnapKV ranks.
inline void check_vase_attention(engine& host, uint32_t layer, uint32_t head) {
    kv_policy policy = policy_of(KV_SCORER_VASE_ATTENTION, 24);
    policy.sinks = 2;
    policy.recent = 6;
    tracker t(host, host.create(&policy), 1);
    t.step(30);
    for (int i = 0; i < 20; ++i) t.step(1);
    const tracked_head& mine = t.layers[layer].heads[head];
    const slots candidates = candidates_of(t, mine, policy);
    kv_policy snap = policy;
    snap.scorer = KV_SCORER_SNAPKV;
    std::vector<double> weights = scores_of(t, layer, head, snap, {64}).score;
    const std::vector<uint32_t> reserved = best(
        mine.retained, candidates, [&](uint32_t p) { return value_range(t, layer, head, p); },
        8 + 6);
    const std::vector<double> found = frequencies(t, policy, layer, head);
    std::vector<char> drawn_ones(50, 1);
    for (const uint32_t p : reserved) {
        weights[p] = 0.0;
        drawn_ones[p] = 0;
        CHECK(found[p] == doctest::Approx(1.0));
    }
    check_frequencies(found, expected_frequencies(weights, 10), drawn_ones);
}

/// By sketch: sizes in random directions, others for every round.
inline void check_vase_sketch(engine& host, uint32_t layer, uint32_t head) {
    const kv_policy policy = policy_of(KV_SCORER_VASE_SKETCH, 20);
    tracker t(host, host.create(&policy), 1);
    t.step(60);
    std::mt19937_64 random(11);
    std::normal_distribution<double> normal;
    std::vector<double> expected(60, 0.0);
    constexpr uint32_t times = 3000;
    std::vector<std::vector<double>> keys, values;
    for (uint32_t p = 0; p < 60; ++p) {
        keys.push_back(t.key(layer, head, p));
        values.push_back(t.value(layer, head, p));
    }
    const std::size_t dim = std::max(keys[0].size(), values[0].size());
    for (uint32_t time = 0; time < times; ++time) {
        std::vector<std::vector<double>> directions_of(20, std::vector<double>(dim));
        for (std::vector<double>& d : directions_of) {
            for (double& x : d) x = normal(random);
        }
        const auto square = [&](const std::vector<double>& row) {
            double sum = 0.0;
            for (const std::vector<double>& d : directions_of) sum += dot(row, d) * dot(row, d);
            return sum;
        };
        std::vector<std::pair<double, uint32_t>> ranked;
        for (uint32_t p = 0; p < 60; ++p)
            ranked.push_back({-square(keys[p]) * square(values[p]), p});
        std::sort(ranked.begin(), ranked.end());
        for (uint32_t i = 0; i < 20; ++i) expected[ranked[i].second] += 1.0 / times;
    }
    const std::vector<double> found = frequencies(t, policy, layer, head);
    for (uint32_t p = 0; p < 60; ++p) {
        CAPTURE(p);
        const double chance = expected[p];
        const double deviation = std::sqrt(chance * (1.0 - chance) * (1.0 / draws + 1.0 / times));
        CHECK(std::abs(found[p] - chance) <= 4.5 * deviation + 2e-3);
    }
}

}  // namespace conformance
