// Text without an end: each token's loss against a model that is told, in double, what is left in
// the cache and how far away it is; bytes against a count by hand; what is refused; the forms of
// what was found.
#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "evaluate/endless_command.hpp"
#include "evaluate/endless_results.hpp"
#include "evaluate/endless_text.hpp"
#include "real_model.hpp"
#include "small_llama.hpp"
#include "wellformed.hpp"

using namespace evaluate;
using generate::token_id;
using small_llama::dense_logits;
using small_llama::loss_of;
using small_llama::some_tokens;
using small_llama::vocabulary;

namespace {

endless_options small_options(bool cache_positions) {
    endless_options options;
    options.tokens = 320;
    options.budget = 40;
    options.sinks = 4;
    options.chunk = 16;
    options.score_every = 2;
    options.stretch = 80;
    options.cache_positions = cache_positions;
    options.threads = 1;
    return options;
}

endless_scores read(const generate::llama_model& model, std::span<const token_id> text,
                    const endless_options& options) {
    auto scores = read_endlessly(model, text, options, [](const endless_stretch&) {});
    REQUIRE_MESSAGE(scores, (scores ? std::string() : scores.message()));
    return std::move(*scores);
}

// Tokens that are in the cache when the chunk of `query` is read, and where they are.
struct places {
    std::size_t budget, sinks, chunk;

    std::size_t start(std::size_t query) const { return query / chunk * chunk; }
    bool sees(std::size_t query, std::size_t key) const {
        return start(query) <= budget || key < sinks || key + budget - sinks >= start(query);
    }
    std::size_t of(std::size_t query, std::size_t token) const {
        const std::size_t evicted = start(query) > budget ? start(query) - budget : 0;
        return token < sinks ? token : token - evicted;
    }
};

// Losses of all tokens of the stream but the last one's.
std::vector<double> dense_losses(std::span<const token_id> stream, const endless_options& options) {
    const places at = {options.budget, options.sinks, options.chunk};
    const auto sees = [=](std::size_t query, std::size_t key) { return at.sees(query, key); };
    const auto by_place = [=](std::size_t query, std::size_t key) {
        return static_cast<double>(at.of(query, query)) - static_cast<double>(at.of(query, key));
    };
    const auto logits =
        options.cache_positions
            ? dense_logits(stream, small_llama::model_of_two_heads(), sees, by_place)
            : dense_logits(stream, small_llama::model_of_two_heads(), sees);
    std::vector<double> losses;
    for (std::size_t i = 0; i + 1 < stream.size(); ++i) {
        losses.push_back(
            loss_of(std::span(logits).subspan(i * vocabulary, vocabulary), stream[i + 1]));
    }
    return losses;
}

}  // namespace

TEST_CASE("endless: losses are those of a model that sees what is left, by its places") {
    const auto text = some_tokens(130);  // 128 in whole rounds of two chunks
    std::vector<token_id> stream;
    for (std::size_t i = 0; i < 321; ++i) {
        stream.push_back(text[i % 128]);
    }
    std::vector<std::vector<double>> by_way;
    for (const bool cache_positions : {false, true}) {
        CAPTURE(cache_positions);
        const endless_options options = small_options(cache_positions);
        const auto losses = dense_losses(stream, options);
        by_way.push_back(losses);
        const auto scores = read(small_llama::model_of_two_heads(), text, options);
        CHECK(scores.pass_tokens == 128);
        REQUIRE(scores.stretches.size() == 4);
        std::size_t position = 0;
        for (const endless_stretch& one : scores.stretches) {
            CAPTURE(one.end);
            endless_stretch expected;
            for (; position < one.end; ++position) {
                if (position / 16 % 2 != 0) {
                    continue;
                }
                expected.scored += 1;
                expected.loss += losses[position];
                if (position >= 128 && position % 128 >= 40 + 16) {
                    expected.compared += 1;
                    expected.compared_loss += losses[position];
                    expected.first_loss += losses[position % 128];
                    expected.difference += std::abs(losses[position] - losses[position % 128]);
                }
            }
            CHECK(one.scored == expected.scored);
            CHECK(one.compared == expected.compared);
            CHECK(one.loss == doctest::Approx(expected.loss).epsilon(1e-5));  // rows are f16
            CHECK(one.compared_loss == doctest::Approx(expected.compared_loss).epsilon(1e-5));
            CHECK(one.first_loss == doctest::Approx(expected.first_loss).epsilon(1e-5));
            CHECK(std::abs(one.difference - expected.difference) <=
                  1e-4 * static_cast<double>(one.compared));
        }
        CHECK(scores.stretches.back().end == 320);
    }
    // Both ways are the same until something is evicted, and no longer.
    double before = 0, behind = 0;
    for (std::size_t i = 0; i < 320; ++i) {
        (i < 48 ? before : behind) += std::abs(by_way[0][i] - by_way[1][i]);
    }
    CHECK(before < 1e-3);
    CHECK(behind > 0.1);
}

TEST_CASE("endless: the sequence never holds more than budget and chunk, and blocks come back") {
    const auto scores =
        read(small_llama::model_of_two_heads(), some_tokens(128), small_options(true));
    // 40 tokens and 16 more are four blocks of 16 tokens, of three layers with two KV heads of 32
    // dimensions, key and value, in f16.
    const std::uint64_t block = 16 * 2 * 32 * 2 * 2;
    for (const endless_stretch& one : scores.stretches) {
        CHECK(one.most_bytes == 4 * 3 * block);
    }
    // Of 320 tokens 40 are left, in three blocks a layer; each step that ends with 56 gives back
    // the fourth.
    CHECK(scores.blocks_returned == 3 * (320 - 48) / 16);
    CHECK(scores.bytes_returned == scores.blocks_returned * block);
}

TEST_CASE("endless: what cannot be read is refused with what would be right") {
    const auto text = some_tokens(128);
    const auto refused = [&](std::string_view part, auto change) {
        endless_options options = small_options(true);
        change(options);
        const auto scores = read_endlessly(small_llama::model_of_two_heads(), text, options,
                                           [](const endless_stretch&) {});
        REQUIRE_FALSE(scores);
        CHECK_MESSAGE(scores.message().find(part) != std::string::npos, scores.message());
    };
    refused("longer text", [](endless_options& one) { one.budget = 100; });
    refused("longer text", [](endless_options& one) { one.score_every = 100; });
    refused("40 sinks", [](endless_options& one) { one.sinks = 40; });
    refused("chunks must be", [](endless_options& one) { one.chunk = 0; });
    refused("chunks must be", [](endless_options& one) { one.score_every = 0; });
    refused("chunks must be", [](endless_options& one) { one.stretch = 0; });
    refused("chunks must be", [](endless_options& one) { one.stretch = 24; });
    refused("chunks must be", [](endless_options& one) { one.tokens = 15; });
    const auto longer = some_tokens(1024);
    endless_options options = small_options(true);
    options.budget = 500;
    const auto scores = read_endlessly(small_llama::model_of_two_heads(), longer, options,
                                       [](const endless_stretch&) {});
    REQUIRE_FALSE(scores);
    CHECK(scores.message().find("made for 512") != std::string::npos);
}

TEST_CASE("endless: the command line") {
    const auto parse = [](std::vector<const char*> words) {
        words.insert(words.end(), {"--model", "m", "--text", "t"});
        return parse_endless(words);
    };
    auto read = parse({"--tokens", "1000", "--chunk", "64", "--stretches", "4", "--positions",
                       "text", "--budget", "256", "--sinks", "8", "--score-every", "3"});
    REQUIRE(read);
    CHECK(read->options.tokens == 960);
    CHECK(read->options.stretch == 3 * 64);
    CHECK_FALSE(read->options.cache_positions);
    CHECK(read->options.budget == 256);
    CHECK(read->options.sinks == 8);
    CHECK(read->options.score_every == 3);
    read = parse({});
    REQUIRE(read);
    CHECK(read->options.tokens >= 1000000);
    CHECK(read->options.cache_positions);
    CHECK(parse({"--stretches", "9999"})->options.stretch == 128);

    CHECK(parse({"--positions", "both"}).message().find("cache or text") != std::string::npos);
    CHECK(parse({"--tokens", "10"}).message().find("--chunk of 128") != std::string::npos);
    CHECK(parse({"--tokens", "-1"}).message().find("--tokens is '-1'") != std::string::npos);
    CHECK(parse({"--window", "1"}).message().find("beside --endless") != std::string::npos);
    const std::vector<const char*> alone = {"--text", "t"};
    CHECK(parse_endless(alone).message().find("--model is missing") != std::string::npos);
}

TEST_CASE("endless: the table and the report") {
    endless_found found;
    found.model = "m \"1\".gguf";
    found.text = "t\n.txt";
    found.options = small_options(true);
    found.scores.pass_tokens = 128;
    // exp(2), exp(3) and exp(2.5).
    found.scores.stretches = {{80, 40, 80, 0, 0, 0, 0, 1u << 20},
                              {160, 40, 80, 10, 30, 25, 0.125, 3u << 19}};
    CHECK(table(found) ==
          "| tokens read | perplexity | tokens compared | their perplexity | in the first pass | "
          "mean difference, nats | bytes at most |\n"
          "| ----------: | ---------: | --------------: | ---------------: | ----------------: | "
          "--------------------: | ------------: |\n"
          "|          80 |      7.389 |               - |                - |                 - | "
          "                    - |      1.00 MiB |\n"
          "|         160 |      7.389 |              10 |           20.086 |            12.182 | "
          "               0.0125 |      1.50 MiB |\n");
    CHECK(wellformed::is_json(report(found)));
    CHECK(report(found).find("\"mean_difference\": 0.0125") != std::string::npos);
    found.scores.stretches.front().loss = std::numeric_limits<double>::quiet_NaN();
    CHECK(wellformed::is_json(report(found)));
}

TEST_CASE("endless: a real model predicts as well in the third pass as in the first") {
    const std::string words =
        "A block table says where the tokens of a sequence are. Each entry names a block, and each "
        "block holds the keys and values of sixteen tokens. When a block is evicted, its entry "
        "goes, and the block returns to the pool. ";
    std::string text;
    for (int i = 0; text.size() < 2400; ++i) {
        text += std::to_string(i) + ". " + words.substr(static_cast<std::size_t>(i) * 17 % 90);
    }
    const auto tokens = real_model().words.encode(text, generate::special_tokens::as_text);
    endless_options options;
    options.budget = 128;
    options.chunk = 64;
    options.score_every = 1;
    options.threads = 1;
    options.stretch = tokens.size() / 64 * 64;
    options.tokens = 3 * options.stretch;
    const auto scores = read(real_model().model, tokens, options);
    REQUIRE(scores.stretches.size() == 3);
    for (const std::size_t pass : {1, 2}) {
        const endless_stretch& one = scores.stretches[pass];
        CAPTURE(pass);
        CHECK(one.compared == options.stretch - 128 - 64);
        CHECK(one.compared_loss < 1.02 * one.first_loss);
        CHECK(one.difference < 0.1 * static_cast<double>(one.compared));
    }
    // What is left in the cache at the same place is the same from the second pass on.
    CHECK(scores.stretches[2].compared_loss ==
          doctest::Approx(scores.stretches[1].compared_loss).epsilon(1e-3));
}
