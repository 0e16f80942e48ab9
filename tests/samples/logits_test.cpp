// The sample's numbers on a real model against another engine's (golden/make_golden.py tells how
// they were made).
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "dense_cache.hpp"
#include "golden.hpp"
#include "llama.hpp"
#include "real_model.hpp"
#include "sampler.hpp"
#include "tokenizer.hpp"

using generate::token_id;

namespace {

struct golden_logits {
    std::vector<token_id> tokens;
    std::vector<std::vector<std::pair<std::uint32_t, float>>> top;  // per position
    std::vector<token_id> greedy;
};

golden_logits read_golden(const std::string& name) {
    golden_logits read;
    for (const golden::line& line : golden::read_lines(name)) {
        if (line.word == "tokens") {
            read.tokens = golden::numbers(line.content);
        } else if (line.word == "top") {
            read.top.push_back(golden::pairs(line.content));
        } else if (line.word == "greedy") {
            read.greedy = golden::numbers(line.content);
        }
    }
    REQUIRE(read.tokens.size() == read.top.size());
    REQUIRE(read.greedy.size() == 64);
    return read;
}

// Logits of every position of the golden prompt, [tokens, vocabulary], leaving the prompt in
// `cache`.
std::vector<float> prompt_logits(const golden_logits& golden, generate::attention_cache& cache) {
    const std::size_t count = golden.tokens.size();
    std::vector<std::uint32_t> rows(count);
    for (std::size_t i = 0; i < count; ++i) {
        rows[i] = static_cast<std::uint32_t>(i);
    }
    std::vector<float> logits(count * real_model().model.config.vocabulary);
    generate::forward_pass pass(real_model().model, count);
    REQUIRE(pass.run({golden.tokens, rows, rows}, cache, logits));
    return logits;
}

struct difference {
    double largest = 0;
    double mean = 0;
};

difference compare(const golden_logits& golden, const std::vector<float>& logits) {
    difference found;
    std::size_t count = 0;
    for (std::size_t position = 0; position < golden.top.size(); ++position) {
        REQUIRE(golden.top[position].size() == 20);
        for (const auto& [token, expected] : golden.top[position]) {
            const float value = logits[position * real_model().model.config.vocabulary + token];
            const double apart = std::fabs(static_cast<double>(value - expected));
            found.largest = std::max(found.largest, apart);
            found.mean += apart;
            ++count;
        }
    }
    found.mean /= static_cast<double>(count);
    return found;
}

}  // namespace

TEST_CASE("logits: the same arithmetic in another engine") {
    // Both compute in f32 on the same dequantised weights; sums run in another order, over 30
    // layers and up to 1,536 terms, on logits of up to 40 (one f32 step there is 4e-6).
    const golden_logits golden = read_golden("logits_f32.txt");
    dense_cache cache(real_model().model.config);
    const std::vector<float> logits = prompt_logits(golden, cache);
    const difference apart = compare(golden, logits);
    MESSAGE("largest difference ", apart.largest, ", mean ", apart.mean);
    CHECK(apart.largest < 5e-4);
    CHECK(apart.mean < 5e-5);
    for (std::size_t position = 0; position < golden.top.size(); ++position) {
        const std::size_t vocabulary = real_model().model.config.vocabulary;
        const auto row = std::span(logits).subspan(position * vocabulary, vocabulary);
        CHECK(generate::greedy_token(row) == golden.top[position].front().first);
    }
}

TEST_CASE("logits: 64 greedy tokens as in another engine") {
    const golden_logits golden = read_golden("logits_f32.txt");
    dense_cache cache(real_model().model.config);
    const std::vector<float> logits = prompt_logits(golden, cache);
    const std::size_t vocabulary = real_model().model.config.vocabulary;
    std::vector<float> last(logits.end() - static_cast<std::ptrdiff_t>(vocabulary), logits.end());
    generate::forward_pass pass(real_model().model, 1);
    std::vector<token_id> written;
    while (written.size() < golden.greedy.size()) {
        const token_id token = generate::greedy_token(last);
        const auto position = static_cast<std::uint32_t>(golden.tokens.size() + written.size());
        const std::uint32_t row = 0;
        written.push_back(token);
        REQUIRE(pass.run({{&token, 1}, {&position, 1}, {&row, 1}}, cache, last));
    }
    CHECK(written == golden.greedy);
}

TEST_CASE("logits: an engine that keeps the weights quantised") {
    // That engine rounds the input of every product to 8 bits per block of 32 (a relative error of
    // up to 1/254 of the block's largest value) through 211 products; the weights are the same. Its
    // own run on f32 weights tells what that costs on this prompt: the sample may not be farther
    // away than that run is, but for the bound of the first test.
    const golden_logits stored = read_golden("logits_stored.txt");
    const golden_logits exact = read_golden("logits_f32.txt");
    REQUIRE(stored.tokens == exact.tokens);
    dense_cache cache(real_model().model.config);
    const std::vector<float> logits = prompt_logits(stored, cache);
    const difference apart = compare(stored, logits);
    MESSAGE("largest difference ", apart.largest, ", mean ", apart.mean);
    CHECK(apart.largest < 2.5);
    CHECK(apart.mean < 0.3);
    int compared = 0;
    for (std::size_t position = 0; position < stored.top.size(); ++position) {
        const std::map<std::uint32_t, float> of_exact(exact.top[position].begin(),
                                                      exact.top[position].end());
        for (const auto& [token, quantised] : stored.top[position]) {
            if (const auto found = of_exact.find(token); found != of_exact.end()) {
                const float ours = logits[position * real_model().model.config.vocabulary + token];
                CHECK(std::fabs(ours - quantised) <= std::fabs(found->second - quantised) + 5e-4f);
                ++compared;
            }
        }
    }
    CHECK(compared > 700);
}
