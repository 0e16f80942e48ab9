// Perplexity, divergence, agreement and percentiles against numbers worked by hand.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "evaluate/metrics.hpp"

using evaluate::reference_rows;
using evaluate::row_scores;
using evaluate::score_sums;

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// Logits of these probabilities, and something that all share and that must not matter.
std::vector<float> logits_of(const std::vector<double>& probabilities, double shift = 0) {
    std::vector<float> logits;
    for (const double probability : probabilities) {
        logits.push_back(static_cast<float>(std::log(probability) + shift));
    }
    return logits;
}

row_scores compare(const std::vector<float>& expected, const std::vector<float>& logits,
                   std::uint32_t token) {
    reference_rows reference(expected.size());
    reference.assign(expected);
    return reference.compare(0, logits, token);
}

}  // namespace

TEST_CASE("metrics: the logarithm of the sum of exponentials") {
    const std::vector<float> logits = {0.0f, std::log(2.0f), std::log(5.0f)};
    CHECK(evaluate::log_sum_exp(logits) == doctest::Approx(std::log(8.0)).epsilon(1e-7));
    // Exponentials of these alone would overflow, or vanish.
    CHECK(evaluate::log_sum_exp(std::vector<float>{1000, 1000}) ==
          doctest::Approx(1000 + std::log(2.0)));
    CHECK(evaluate::log_sum_exp(std::vector<float>{-1000, -1000}) ==
          doctest::Approx(-1000 + std::log(2.0)));
    CHECK(std::isnan(evaluate::log_sum_exp(std::vector<float>{1, NAN})));
}

TEST_CASE("metrics: divergence and loss of one row") {
    const auto expected = logits_of({0.5, 0.25, 0.25}, 3);
    const auto logits = logits_of({0.25, 0.5, 0.25}, -20);
    // 1/2 log(2) + 1/4 log(1/2) + 1/4 log(1) = 1/4 log(2)
    const row_scores scores = compare(expected, logits, 1);
    CHECK(scores.divergence == doctest::Approx(0.25 * std::log(2.0)).epsilon(1e-5));
    CHECK(scores.loss == doctest::Approx(std::log(2.0)).epsilon(1e-5));
    CHECK_FALSE(scores.agrees);
    CHECK(compare(expected, logits, 2).loss == doctest::Approx(std::log(4.0)).epsilon(1e-5));
    // KL is not symmetric: p = (3/4, 1/4), q = (1/2, 1/2).
    const auto steep = logits_of({0.75, 0.25});
    const auto flat = logits_of({0.5, 0.5});
    CHECK(compare(steep, flat, 0).divergence ==
          doctest::Approx(0.75 * std::log(1.5) + 0.25 * std::log(0.5)).epsilon(1e-6));
    CHECK(compare(flat, steep, 0).divergence ==
          doctest::Approx(0.5 * std::log(2.0 / 3) + 0.5 * std::log(2.0)).epsilon(1e-6));
}

TEST_CASE("metrics: a row does not diverge from itself, and hardly when all is shifted") {
    const auto expected = logits_of({0.7, 0.1, 0.15, 0.05}, 12.5);
    const row_scores same = compare(expected, expected, 0);
    CHECK(same.divergence == 0);
    CHECK(same.agrees);
    auto shifted = expected;
    for (float& logit : shifted) {
        logit += 4;
    }
    CHECK(compare(expected, shifted, 0).divergence < 1e-6);
}

TEST_CASE("metrics: rows that are not finite count as the worst") {
    const auto expected = logits_of({0.5, 0.25, 0.25});
    for (const float flaw : {NAN, std::numeric_limits<float>::infinity()}) {
        const row_scores scores = compare(expected, {flaw, 0, 0}, 1);
        CHECK(scores.divergence == infinity);
        CHECK_FALSE(scores.agrees);
    }
}

TEST_CASE("metrics: each row is compared with its own") {
    auto expected = logits_of({0.5, 0.5});
    const auto second = logits_of({0.2, 0.8});
    expected.insert(expected.end(), second.begin(), second.end());
    reference_rows reference(2);
    reference.assign(expected);
    CHECK(reference.compare(1, second, 0).divergence == 0);
    CHECK(reference.compare(0, second, 0).divergence > 0.1);
    CHECK(reference.compare(1, second, 0).loss == doctest::Approx(std::log(5.0)).epsilon(1e-5));
}

TEST_CASE("metrics: many rows") {
    score_sums sums;
    CHECK(sums.count() == 0);
    CHECK(sums.perplexity() == 0);
    CHECK(sums.mean_divergence() == 0);
    CHECK(sums.percentile_divergence(0.99) == 0);
    CHECK(sums.agreement() == 0);
    // The perplexity is the geometric mean of 2, 8 and 4.
    sums.add({std::log(2.0), 0.1, true});
    sums.add({std::log(8.0), 0.5, false});
    sums.add({std::log(4.0), 0.3, true});
    CHECK(sums.count() == 3);
    CHECK(sums.perplexity() == doctest::Approx(4.0));
    CHECK(sums.mean_divergence() == doctest::Approx(0.3));
    CHECK(sums.percentile_divergence(0.5) == 0.3);
    CHECK(sums.percentile_divergence(0.99) == 0.5);
    CHECK(sums.agreement() == doctest::Approx(2.0 / 3));
    sums.add({1, infinity, false});
    CHECK(sums.mean_divergence() == infinity);
    CHECK(sums.percentile_divergence(0.5) == 0.3);
    CHECK(sums.percentile_divergence(0.99) == infinity);
}

TEST_CASE("metrics: percentiles by the nearest rank") {
    std::vector<double> values;
    for (int i = 0; i < 100; ++i) {
        values.push_back((i * 37) % 100 + 1);  // 1 to 100, mixed
    }
    CHECK(evaluate::percentile(values, 0.99) == 99);
    CHECK(evaluate::percentile(values, 1) == 100);
    CHECK(evaluate::percentile(values, 0) == 1);
    CHECK(evaluate::percentile(values, 0.5) == 50);
    CHECK(evaluate::percentile(values, 0.501) == 51);
    CHECK(evaluate::percentile(values, 0.07) == 7);  // 0.07 * 100 is more than 7 in binary
    CHECK(evaluate::percentile(std::vector<double>{7}, 0.99) == 7);
    CHECK(evaluate::percentile({}, 0.99) == 0);
}
