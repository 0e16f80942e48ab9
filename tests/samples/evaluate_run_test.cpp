// Whole evaluations of a small model with made-up weights: against the same cache twice, and
// against attention without a library.
#include <doctest/doctest.h>

#include <cmath>

#include "evaluate/calibration.hpp"
#include "evaluate/tasks.hpp"
#include "evaluate/text_run.hpp"
#include "sampler.hpp"
#include "small_llama.hpp"

using evaluate::configuration;
using generate::token_id;

namespace {

using small_llama::dense_logits;
using small_llama::head_dim;
using small_llama::layers;
using small_llama::loss_of;
using small_llama::small_model;
using small_llama::some_tokens;
using small_llama::vocabulary;
using small_llama::width;

std::vector<configuration> configurations(std::string_view list) {
    auto read = evaluate::parse_configurations(list);
    REQUIRE_MESSAGE(read, (read ? std::string() : read.message()));
    return *read;
}

evaluate::text_scores_of_all score(std::span<const token_id> tokens, std::string_view list,
                                   std::uint32_t window, std::uint32_t chunk,
                                   std::optional<token_id> marker = std::nullopt) {
    evaluate::text_options options;
    options.window = window;
    options.chunk = chunk;
    options.threads = 1;
    options.marker = marker;
    const auto list_read = configurations(list);
    auto scores = evaluate::score_text(small_model(), tokens, list_read, options,
                                       [](std::size_t, std::size_t) {});
    REQUIRE_MESSAGE(scores, (scores ? std::string() : scores.message()));
    return std::move(*scores);
}

}  // namespace

TEST_CASE("evaluation: the f16 cache does not differ from itself, and small formats do") {
    const auto scores = score(some_tokens(3 * 64 + 20), "f16,f32,q8_0,int4_token", 64, 16);
    REQUIRE(scores.others.size() == 4);
    const auto& same = scores.others[0].sums;
    CHECK(same.count() == 3 * 32);
    CHECK(same.mean_divergence() == 0);
    CHECK(same.percentile_divergence(1) == 0);
    CHECK(same.agreement() == 1);
    CHECK(same.perplexity() == scores.reference.sums.perplexity());
    // The coarser, the further.
    double before = 0;
    for (std::size_t i = 1; i < 4; ++i) {
        const auto& sums = scores.others[i].sums;
        CHECK(sums.count() == 3 * 32);
        CHECK(sums.mean_divergence() > before);
        CHECK(sums.percentile_divergence(0.99) > sums.mean_divergence());
        before = sums.mean_divergence();
    }
    CHECK(scores.others[3].sums.agreement() < 1);
}

TEST_CASE(
    "evaluation: constants of keys are measured beforehand, where a configuration needs them") {
    CHECK_FALSE(evaluate::needs_key_channels(configurations("f16,q4_1")));
    CHECK(evaluate::needs_key_channels(configurations("f16,affine4/f32")));

    const std::vector<token_id> tokens = some_tokens(200);
    auto channels = evaluate::measure_key_channels(small_model(), tokens, 32, 1);
    REQUIRE_MESSAGE(channels, (channels ? std::string() : channels.message()));
    REQUIRE(channels->size() == layers);
    // The first layer's keys before rotation: the matrix times the normalised embedding.
    const generate::llama_layer& first = small_model().layers[0];
    const generate::matrix& matrix = first.query_key_value;
    std::vector<double> means(head_dim);
    for (const token_id token : tokens) {
        std::vector<double> row(width);
        double square = 0;
        for (std::uint32_t i = 0; i < width; ++i) {
            row[i] = small_model().embedding.weights[std::size_t{i} * vocabulary + token];
            square += row[i] * row[i] / width;
        }
        const double norm = std::sqrt(square + small_model().config.norm_epsilon);
        for (std::uint32_t k = 0; k < head_dim; ++k) {
            for (std::uint32_t i = 0; i < width; ++i) {
                means[k] += matrix.weights[i * matrix.outputs + 2 * head_dim + k] * row[i] / norm *
                            first.attention_norm[i] / 200;
            }
        }
    }
    double off = 0, size = 0;
    for (std::uint32_t k = 0; k < head_dim; ++k) {
        off += std::pow(means[k] - (*channels)[0].means[k], 2);
        size += means[k] * means[k];
    }
    CHECK(std::sqrt(off / size) < 1e-3);  // keys were stored in f16

    evaluate::text_options options;
    options.window = 64;
    options.chunk = 16;
    options.threads = 1;
    const auto ignore = [](std::size_t, std::size_t) {};
    const auto list = configurations("q4_1/f16,affine4/f16");
    CHECK_FALSE(evaluate::score_text(small_model(), tokens, list, options, ignore));
    options.key_channels = *channels;
    auto scores = evaluate::score_text(small_model(), tokens, list, options, ignore);
    REQUIRE_MESSAGE(scores, (scores ? std::string() : scores.message()));
    CHECK(scores->others[1].bytes_per_token == scores->others[0].bytes_per_token);
    CHECK(scores->others[1].sums.mean_divergence() > 0);
    CHECK(scores->others[1].sums.mean_divergence() < 1e-5);  // a model whose keys hardly matter
    evaluate::task_options asked;
    asked.chunk = 16;
    asked.threads = 1;
    std::vector<evaluate::task_context> contexts(1);
    contexts[0].tokens = some_tokens(40);
    contexts[0].probes.resize(1);
    contexts[0].probes[0].cue = {1, 2};
    contexts[0].probes[0].answer = {3};
    CHECK_FALSE(evaluate::run_tasks(small_model(), contexts, list[1], asked));
    asked.key_channels = *channels;
    CHECK(evaluate::run_tasks(small_model(), contexts, list[1], asked));
}

TEST_CASE("evaluation: bytes are what the cache holds") {
    const auto scores =
        score(some_tokens(64), "f16,f32,q8_0,int4_token,q8_0/f16,int4_token@1", 64, 64);
    // A token's keys and values of one layer: 2 x 32 numbers. Rows of q8_0 are 32 codes and a scale
    // of 2 bytes, filled up to whole words of 4.
    const auto bytes = [&](std::size_t i) { return scores.others[i].bytes_per_token; };
    CHECK(scores.reference.bytes_per_token == layers * 64 * 2);
    CHECK(bytes(0) == layers * 64 * 2);
    CHECK(bytes(1) == layers * 64 * 4);
    CHECK(bytes(2) == layers * 2 * 36);
    CHECK(bytes(3) == layers * 2 * (16 + 4));
    CHECK(bytes(4) == layers * (36 + 32 * 2));
    CHECK(bytes(5) == 2 * 64 * 2 + 2 * (16 + 4));
}

TEST_CASE("evaluation: perplexity as computed without the library") {
    const auto tokens = some_tokens(2 * 48);
    double loss = 0;
    for (std::size_t window = 0; window < 2; ++window) {
        const auto part = std::span(tokens).subspan(window * 48, 48);
        const auto logits = dense_logits(part);
        for (std::size_t token = 24; token < 48; ++token) {
            loss += loss_of(std::span(logits).subspan((token - 1) * vocabulary, vocabulary),
                            part[token]);
        }
    }
    const double expected = std::exp(loss / 48);
    // Whatever the chunks, also those that end where the scored half begins.
    for (const std::uint32_t chunk : {1u, 7u, 24u, 48u, 100u}) {
        CAPTURE(chunk);
        const auto scores = score(tokens, "f32", 48, chunk);
        CHECK(scores.others[0].sums.count() == 48);
        CHECK(scores.others[0].sums.perplexity() == doctest::Approx(expected).epsilon(1e-4));
    }
}

TEST_CASE("evaluation: windows begin with the marker that a model wants") {
    auto tokens = some_tokens(48);
    const auto marked = score(tokens, "f32", 48, 16, 99);
    const double before = score(tokens, "f32", 48, 16).others[0].sums.perplexity();
    CHECK(marked.others[0].sums.perplexity() != before);
    tokens.front() = 99;
    CHECK(marked.others[0].sums.perplexity() ==
          score(tokens, "f32", 48, 16).others[0].sums.perplexity());
}

TEST_CASE("evaluation: texts and windows that do not fit are errors") {
    const auto refused = [](std::size_t tokens, std::uint32_t window, std::string_view part) {
        evaluate::text_options options;
        options.window = window;
        options.threads = 1;
        auto scores = evaluate::score_text(small_model(), some_tokens(tokens), {}, options,
                                           [](std::size_t, std::size_t) {});
        REQUIRE_FALSE(scores);
        CAPTURE(scores.message());
        return scores.message().find(part) != std::string::npos;
    };
    CHECK(refused(63, 64, "63 tokens, a window takes 64"));
    CHECK(refused(2000, 513, "this model takes 4 to 512"));
    CHECK(refused(2000, 3, "this model takes 4 to 512"));
}

TEST_CASE("tasks: probes are answered as the model would after reading all of it") {
    // Two contexts with probes of unlike lengths, asked in one batch.
    const auto tokens = some_tokens(140);
    const auto part = [&](std::size_t first, std::size_t count) {
        return std::vector<token_id>(tokens.begin() + static_cast<std::ptrdiff_t>(first),
                                     tokens.begin() + static_cast<std::ptrdiff_t>(first + count));
    };
    std::vector<evaluate::task_context> contexts(2);
    for (std::size_t i = 0; i < 2; ++i) {
        contexts[i].tokens = part(i * 20, 50);
        contexts[i].probes = {{evaluate::task::needle, 0, part(100, 3), {}},
                              {evaluate::task::needle, 1, part(103, 1), part(110, 4)},
                              {evaluate::task::copy, 2, part(105, 9), {}}};
        // What the model says itself is the right answer to the first, and every other token of
        // the last, whose wrong ones must be read all the same.
        for (const std::size_t asked : {0u, 2u}) {
            auto& one = contexts[i].probes[asked];
            auto read = contexts[i].tokens;
            read.insert(read.end(), one.cue.begin(), one.cue.end());
            for (token_id k = 0; k < 3 + 3 * asked; ++k) {
                const auto logits = dense_logits(read);
                const token_id said = generate::greedy_token(std::span(logits).last(vocabulary));
                one.answer.push_back(asked == 0 || k % 2 == 0 ? said
                                                              : (said + 11 * k) % vocabulary);
                read.push_back(one.answer.back());
            }
        }
    }
    evaluate::task_options options;
    options.chunk = 16;
    options.threads = 1;
    auto scores = evaluate::run_tasks(small_model(), contexts, configurations("f32")[0], options);
    REQUIRE_MESSAGE(scores, (scores ? std::string() : scores.message()));
    CHECK(scores->needle[0].right == 2);
    CHECK(scores->needle[0].all == 2);
    CHECK(scores->needle[1].right == 0);
    CHECK(scores->needle[1].all == 2);
    CHECK(scores->copy[2].all == 2 * 9);
    CHECK(scores->copy[2].right == 2 * 5);

    contexts[0].tokens = some_tokens(505);
    auto refused = evaluate::run_tasks(small_model(), contexts, configurations("f32")[0], options);
    REQUIRE_FALSE(refused);
    CHECK(refused.message().find("a task takes 523 tokens, the model 512") != std::string::npos);
}
