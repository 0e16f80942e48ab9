// The sampler: determinism, and frequencies against the probabilities that the formula gives.
#include "sampler.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

using generate::sampler;
using generate::sampler_options;
using generate::token_id;

namespace {

std::vector<token_id> draws(const sampler_options& options, const std::vector<float>& logits,
                            std::size_t count) {
    sampler made(options);
    std::vector<token_id> tokens;
    for (std::size_t i = 0; i < count; ++i) {
        auto token = made.pick(logits, {});
        REQUIRE(token);
        tokens.push_back(*token);
    }
    return tokens;
}

}  // namespace

TEST_CASE("sampler: greedy takes the largest, the first among equals") {
    CHECK(generate::greedy_token(std::vector<float>{1, 3, 2, 3}) == 1);
    CHECK(generate::greedy_token(std::vector<float>{-5}) == 0);
    CHECK(draws({}, {0, 1, 4, 4}, 3) == std::vector<token_id>{2, 2, 2});
}

TEST_CASE("sampler: the same seed draws the same tokens, another seed others") {
    const std::vector<float> logits = {0.1f, 0.2f, 0.3f, 0.4f, 0.5f, 0.0f};
    sampler_options options;
    options.temperature = 1.0;
    options.seed = 5;
    const auto first = draws(options, logits, 200);
    CHECK(first == draws(options, logits, 200));
    options.seed = 6;
    CHECK(first != draws(options, logits, 200));
}

TEST_CASE("sampler: frequencies follow the softmax at the temperature") {
    const std::vector<float> logits = {1.0f, 2.0f, 0.0f, 3.0f};
    sampler_options options;
    options.temperature = 0.7;
    const std::size_t count = 40000;
    std::vector<double> seen(logits.size());
    for (const token_id token : draws(options, logits, count)) {
        seen[token] += 1.0 / static_cast<double>(count);
    }
    double total = 0;
    for (const float logit : logits) {
        total += std::exp(static_cast<double>(logit) / 0.7);
    }
    for (std::size_t i = 0; i < logits.size(); ++i) {
        const double expected = std::exp(static_cast<double>(logits[i]) / 0.7) / total;
        // Five standard deviations of a frequency.
        const double bound = 5 * std::sqrt(expected * (1 - expected) / static_cast<double>(count));
        CHECK(std::fabs(seen[i] - expected) < bound);
    }
}

TEST_CASE("sampler: top-p keeps the fewest likeliest tokens that reach the share") {
    // Probabilities 0.5, 0.3, 0.15, 0.05.
    const std::vector<float> logits = {std::log(0.15f), std::log(0.5f), std::log(0.05f),
                                       std::log(0.3f)};
    const auto kept = [&](double top_p) {
        sampler_options options;
        options.temperature = 1.0;
        options.top_p = top_p;
        std::vector<bool> seen(4);
        for (const token_id token : draws(options, logits, 2000)) {
            seen[token] = true;
        }
        return seen;
    };
    CHECK(kept(0.0) == std::vector<bool>{false, true, false, false});
    CHECK(kept(0.4) == std::vector<bool>{false, true, false, false});
    CHECK(kept(0.6) == std::vector<bool>{false, true, false, true});
    CHECK(kept(0.9) == std::vector<bool>{true, true, false, true});
    CHECK(kept(1.0) == std::vector<bool>{true, true, true, true});
}

TEST_CASE("sampler: bans and repeats") {
    sampler_options options;
    options.banned = {1, 99};
    CHECK(draws(options, {1, 5, 2}, 1).front() == 2);
    options.banned = {0, 1, 2};
    sampler nothing_left(options);
    CHECK_FALSE(nothing_left.pick(std::vector<float>{1, 5, 2}, {}));

    sampler_options penalised;
    penalised.repeat_penalty = 2.0;
    penalised.repeat_window = 2;
    sampler made(penalised);
    const std::vector<float> logits = {4.0f, 3.0f, -1.0f};
    CHECK(*made.pick(logits, {}) == 0);
    CHECK(*made.pick(logits, std::vector<token_id>{0}) == 1);        // 4 becomes 2
    CHECK(*made.pick(logits, std::vector<token_id>{0, 0}) == 1);     // once, not twice
    CHECK(*made.pick(logits, std::vector<token_id>{0, 2, 2}) == 0);  // outside the window
    CHECK(*made.pick(logits, std::vector<token_id>{0, 1}) == 0);     // 2 and 1.5
}

TEST_CASE("sampler: output that is not finite is an error") {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
          -std::numeric_limits<float>::infinity()}) {
        sampler made(sampler_options{});
        auto picked = made.pick(std::vector<float>{1.0f, bad}, {});
        REQUIRE_FALSE(picked);
        CHECK(picked.message().find("not finite") != std::string::npos);
    }
}
