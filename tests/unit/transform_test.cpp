// Pooling, softmax and mixtures of scores, and sampling, against plain loops in double.
#include "retention/transform.hpp"

#include "retention/rank.hpp"
#include "retention/sampling.hpp"
#include "scorer_fixture.hpp"

using namespace scorer_test;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

std::vector<float> normal_scores(uint32_t count, float size, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<float> scores(count);
    for (float& score : scores) score = size * normal(random);
    return scores;
}

}  // namespace

TEST_CASE("pooling by hand") {
    const std::vector<float> in = {3, 6, 9, 0, 3};
    std::vector<float> out(6, -1.0f);
    pool_mean(in.data(), 5, 3, out.data());
    CHECK(out == std::vector<float>{3, 6, 5, 4, 1, -1});  // zeroes at the ends are counted
    pool_max(in.data(), 5, 3, out.data());
    CHECK(out == std::vector<float>{6, 9, 9, 9, 3, -1});
    // Negative scores: what lies outside never wins. NaN loses.
    const std::vector<float> low = {-3, NAN, NAN, NAN, -8};
    pool_max(low.data(), 5, 3, out.data());
    CHECK(out[0] == -3);
    CHECK(out[1] == -3);
    CHECK(std::isnan(out[2]));
    CHECK(out[3] == -8);
    CHECK(out[4] == -8);
    pool_mean(low.data(), 5, 3, out.data());
    CHECK(std::isnan(out[0]));
    pool_mean(in.data(), 0, 3, out.data());
}

TEST_CASE("pooling in place and out of place, of any length and width") {
    for (uint32_t slots : {1u, 2u, 5u, 511u, 512u, 513u, 515u, 1024u, 2001u}) {
        const std::vector<float> in = normal_scores(slots, 3.0f, slots);
        for (uint32_t width : {1u, 3u, 5u, 7u, 31u, widest_pool}) {
            CAPTURE(slots);
            CAPTURE(width);
            const int half = static_cast<int>(width / 2), count = static_cast<int>(slots);
            std::vector<float> mean(slots), greatest(slots), mean_there = in, greatest_there = in;
            pool_mean(in.data(), slots, width, mean.data());
            pool_max(in.data(), slots, width, greatest.data());
            pool_mean(mean_there.data(), slots, width, mean_there.data());
            pool_max(greatest_there.data(), slots, width, greatest_there.data());
            CHECK(mean_there == mean);
            CHECK(greatest_there == greatest);
            for (int s = 0; s < count; ++s) {
                double sum = 0;
                float most = -infinity;
                for (int i = std::max(0, s - half); i <= std::min(count - 1, s + half); ++i) {
                    sum += double{in[static_cast<std::size_t>(i)]};
                    most = std::max(most, in[static_cast<std::size_t>(i)]);
                }
                const std::size_t slot = static_cast<std::size_t>(s);
                CHECK(std::abs(mean[slot] - sum / width) < 2e-6);
                CHECK(greatest[slot] == most);
            }
        }
    }
}

TEST_CASE("softmax over candidates, mean over heads") {
    constexpr uint32_t slots = 1500, stride = 1507;
    for (const slot_ranges& candidates :
         {ranges_of({{0, slots}}), ranges_of({{3, 4}, {17, 40}, {41, 1499}}),
          ranges_of({{9, 10}})}) {
        for (uint32_t heads : {1u, 3u}) {
            // Sizes that would overflow without a common peak. Differences of 80 lose 4e-6.
            const std::vector<float> logits = normal_scores(heads * stride, 40.0f, heads);
            std::vector<double> expected(slots);
            for (uint32_t h = 0; h < heads; ++h) {
                double sum = 0;
                const auto power = [&](uint32_t s) {
                    return std::exp(double{logits[h * stride + s]} - 100.0);
                };
                for (uint32_t s : slots_of(candidates)) sum += power(s);
                for (uint32_t s : slots_of(candidates)) expected[s] += power(s) / sum / heads;
            }
            on_every_target([&] {
                std::vector<float> work = logits, out(slots, 5.0f), there = logits;
                softmax_mean(work.data(), stride, heads, candidates, out.data());
                softmax_mean(there.data(), stride, heads, candidates, there.data());
                double sum = 0;
                for (uint32_t s : slots_of(candidates)) {
                    CHECK(close(double{out[s]}, expected[s], 6e-6, 1e-30));
                    CHECK(there[s] == out[s]);
                    sum += double{out[s]};
                    out[s] = 5.0f;
                }
                CHECK(sum == doctest::Approx(1.0));
                for (float score : out) CHECK(score == 5.0f);
            });
        }
    }
}

TEST_CASE("logits that are no numbers keep to their slots") {
    on_every_target([] {
        std::vector<float> logits = {1, NAN, 2, infinity, -infinity, 1}, out(6);
        softmax_mean(logits.data(), 6, 1, ranges_of({{0, 6}}), out.data());
        const double sum = 2 * std::exp(1.0) + std::exp(2.0);
        CHECK(out[0] == doctest::Approx(std::exp(1.0) / sum));
        CHECK(out[2] == doctest::Approx(std::exp(2.0) / sum));
        CHECK(std::isnan(out[1]));
        CHECK(std::isnan(out[3]));
        CHECK(out[4] == 0.0f);
        logits.assign(3, -infinity);
        softmax_mean(logits.data(), 3, 1, ranges_of({{0, 3}}), out.data());
        for (int i = 0; i < 3; ++i) CHECK(out[i] == 0.0f);
    });
}

TEST_CASE("mixtures touch candidates only") {
    const slot_ranges candidates = ranges_of({{1, 3}, {4, 5}});
    std::vector<float> scores = {9, 1, 2, 9, 5, 9};
    normalise_to_sum(candidates, scores.data());
    CHECK(scores == std::vector<float>{9, 0.125f, 0.25f, 9, 0.625f, 9});
    const std::vector<float> norms = {7, 2, 4, 7, 8, 7};
    scale_by_norm(candidates, norms.data(), 0.5f, scores.data());
    CHECK(scores == std::vector<float>{9, 1.25f, 3, 9, 9, 9});
    std::vector<float> zeroes(6, 0.0f);
    normalise_to_sum(candidates, zeroes.data());
    CHECK(zeroes == std::vector<float>(6, 0.0f));
    scores = {1, NAN, 3, 1, 1, 1};
    normalise_to_sum(candidates, scores.data());
    CHECK(scores[2] == 0.75f);
    CHECK(std::isnan(scores[1]));

    const std::vector<float> importance = {0, 8, 4, 0, 2, 0}, redundancy = {1, 4, 8, 1, 16, 1};
    std::vector<float> out(6, 3.0f);
    mix_redundancy(candidates, importance.data(), redundancy.data(), 0.25f, out.data());
    CHECK(out == std::vector<float>{3, -1, -5, 3, -11.5f, 3});
}

TEST_CASE("the noise is Gumbel's, of key and position alone") {
    constexpr uint32_t slots = 20000;
    const slot_ranges all = ranges_of({{0, slots}});
    random_key key;
    key.seed = 3;
    key.layer = 1;
    std::vector<float> ones(slots, 1.0f), twice(slots, 2.0f), again(slots, 1.0f);
    sample_scores(key, consecutive(slots, 50000), all, ones.data());
    sample_scores(key, consecutive(slots, 50000), all, twice.data());
    // Distribution function exp(-exp(-x)): so many below its deciles, within five deviations.
    for (int decile = 1; decile < 10; ++decile) {
        const double level = -std::log(-std::log(decile / 10.0));
        double below = 0;
        for (float x : ones) below += x < level ? 1 : 0;
        const double p = decile / 10.0;
        CHECK(std::abs(below - slots * p) < 5 * std::sqrt(slots * p * (1 - p)));
    }
    for (uint32_t s = 0; s < slots; ++s) {
        CHECK(std::abs(twice[s] - ones[s] - std::log(2.0)) < 1e-5);
    }
    // The same token elsewhere draws the same.
    sample_scores(key, consecutive(slots - 100, 50000), ranges_of({{0, slots - 100}}),
                  again.data());
    for (uint32_t s = 0; s < slots - 100; ++s) REQUIRE(again[s] == ones[s + 100]);
    for (int part = 0; part < 4; ++part) {
        random_key changed = key;
        changed.seed += part == 0 ? 1 : 0;
        changed.round += part == 1 ? 1 : 0;
        changed.layer += part == 2 ? 1 : 0;
        changed.head += part == 3 ? 1 : 0;
        again.assign(slots, 1.0f);
        sample_scores(changed, consecutive(slots, 50000), all, again.data());
        uint32_t both_high = 0;  // above the median, in both
        for (uint32_t s = 0; s < slots; ++s) {
            both_high += ones[s] > 0.3665f && again[s] > 0.3665f ? 1 : 0;
        }
        CHECK(std::abs(both_high - slots / 4.0) < 5 * std::sqrt(slots * 3.0 / 16));
    }
    // Nothing is as likely as nothing; what is sure stays sure.
    std::vector<float> special = {0, -3, infinity, NAN, -infinity, 1e-40f, 7};
    sample_scores(key, consecutive(7, 9), ranges_of({{0, 6}}), special.data());
    CHECK(special[0] == -infinity);
    CHECK(special[1] == -infinity);
    CHECK(special[2] == infinity);
    CHECK(std::isnan(special[3]));
    CHECK(special[4] == -infinity);
    CHECK(std::isfinite(special[5]));
    CHECK(special[6] == 7.0f);
}

TEST_CASE("the highest of noisy scores are a draw without replacement, in proportion") {
    // Five slots, two drawn. Probability of each to be among them, by enumeration: first i, then j
    // with what is left.
    const std::vector<float> weights = {5, 3, 1, 0.5f, 0.5f};
    double inclusion[5] = {}, first[5] = {};
    for (std::size_t i = 0; i < 5; ++i) {
        first[i] = double{weights[i]} / 10;
        for (std::size_t j = 0; j < 5; ++j) {
            if (i == j) continue;
            const double both = first[i] * double{weights[j]} / (10 - double{weights[i]});
            inclusion[i] += both;
            inclusion[j] += both;
        }
    }
    constexpr int rounds = 20000;
    double drawn[5] = {}, drawn_first[5] = {};
    for (int round = 0; round < rounds; ++round) {
        random_key key;
        key.seed = 12;
        key.round = static_cast<uint64_t>(round);
        std::vector<float> scores = weights;
        sample_scores(key, consecutive(5, 1000), ranges_of({{0, 5}}), scores.data());
        std::vector<float> one = scores;
        reserve_largest(scores.data(), ranges_of({{0, 5}}), 1, one.data());
        reserve_largest(scores.data(), ranges_of({{0, 5}}), 2, scores.data());
        for (std::size_t i = 0; i < 5; ++i) {
            drawn[i] += scores[i] == infinity ? 1 : 0;
            drawn_first[i] += one[i] == infinity ? 1 : 0;
        }
    }
    for (std::size_t i = 0; i < 5; ++i) {
        const auto bound = [](double p) { return 5 * std::sqrt(rounds * p * (1 - p)); };
        CHECK(std::abs(drawn[i] - rounds * inclusion[i]) < bound(inclusion[i]));
        CHECK(std::abs(drawn_first[i] - rounds * first[i]) < bound(first[i]));
    }
}
