// Loading: a tiny model that is right, and files that are not. The numbers of the forward pass are
// checked against another engine in logits_test.cpp.
#include "llama.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>

#include "dense_cache.hpp"
#include "tiny_model.hpp"

using generate::gguf_file;
using generate::llama_model;

namespace {

std::string failure(const tiny_model& plan) {
    const gguf_builder built = plan.write();
    auto file = gguf_file::parse(built.bytes());
    REQUIRE(file);
    auto model = llama_model::load(*file);
    REQUIRE_FALSE(model);
    return model.message();
}

std::string failure_after(const std::function<void(tiny_model&)>& change) {
    tiny_model plan;
    change(plan);
    return failure(plan);
}

bool mentions(const std::string& message, std::string_view part) {
    return message.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("llama: a prompt at once and token by token give the same logits") {
    generate::set_matrix_threads(1);
    const gguf_builder built = tiny_model().write();
    auto file = gguf_file::parse(built.bytes());
    REQUIRE(file);
    auto model = llama_model::load(*file);
    REQUIRE_MESSAGE(model, (model ? std::string() : model.message()));
    CHECK(model->config.head_dim == 4);
    CHECK(model->config.vocabulary == 4);
    REQUIRE(model->config.inverse_frequencies.size() == 2);
    CHECK(model->config.inverse_frequencies[0] == 1.0);
    CHECK(model->config.inverse_frequencies[1] == doctest::Approx(0.01).epsilon(1e-12));

    const std::vector<generate::token_id> tokens = {0, 3, 1, 2, 2};
    const std::vector<std::uint32_t> rows = {0, 1, 2, 3, 4};
    std::vector<float> together(5 * 4);
    generate::forward_pass pass(*model, 5);
    dense_cache cache(model->config);
    REQUIRE(pass.run({tokens, rows, rows}, cache, together));

    dense_cache again(model->config);
    for (std::uint32_t i = 0; i < 5; ++i) {
        std::vector<float> alone(4);
        const std::uint32_t first_row = 0;
        REQUIRE(pass.run({{&tokens[i], 1}, {&rows[i], 1}, {&first_row, 1}}, again, alone));
        for (std::size_t k = 0; k < 4; ++k) {
            CHECK(alone[k] == doctest::Approx(together[i * 4 + k]).epsilon(1e-5));
        }
    }
}

TEST_CASE("llama: batches that do not fit are errors") {
    const gguf_builder built = tiny_model().write();
    auto file = gguf_file::parse(built.bytes());
    auto model = llama_model::load(*file);
    REQUIRE(model);
    generate::forward_pass pass(*model, 2);
    dense_cache cache(model->config);
    const std::vector<generate::token_id> tokens = {0, 9, 0};
    const std::vector<std::uint32_t> rows = {0, 1, 2};
    std::vector<float> logits(4);
    const auto run = [&](std::size_t count, std::span<const std::uint32_t> wanted,
                         std::span<float> room) {
        return pass.run({std::span(tokens).first(count), std::span(rows).first(count), wanted},
                        cache, room);
    };
    CHECK_FALSE(run(0, {}, {}));
    CHECK_FALSE(run(3, {}, {}));
    CHECK_FALSE(run(1, std::span(rows).first(1), {}));
    CHECK_FALSE(run(1, std::span(rows).subspan(1, 1), logits));
    CHECK(mentions(run(2, {}, {}).message(), "token 9 is outside the vocabulary of 4"));
    CHECK(run(1, std::span(rows).first(1), logits));
}

TEST_CASE("llama: files of another kind or with wrong shapes are refused") {
    const auto with_text = [](const char* key, const char* value) {
        return failure_after([&](tiny_model& plan) { plan.texts[key] = value; });
    };
    const auto with_size = [](const char* key, std::uint32_t value) {
        return failure_after([&](tiny_model& plan) { plan.sizes[key] = value; });
    };
    const auto with_number = [](const char* key, float value) {
        return failure_after([&](tiny_model& plan) { plan.numbers[key] = value; });
    };
    CHECK(mentions(with_text("general.architecture", "gemma3"), "'gemma3'"));
    CHECK(mentions(with_text("llama.rope.scaling.type", "yarn"), "rotation is scaled"));
    CHECK(mentions(with_size("llama.block_count", 0), "allowed are 1 to 1024"));
    CHECK(mentions(with_size("llama.block_count", 2), "'blk.1.attn_q.weight' is missing"));
    CHECK(mentions(with_size("llama.attention.head_count", ~0u), "allowed are 1 to 1024"));
    CHECK(mentions(with_size("llama.attention.head_count", 3), "not of shape"));
    CHECK(mentions(with_size("llama.attention.head_count_kv", 3), "evenly"));
    CHECK(mentions(with_size("llama.embedding_length", 16), "not of shape"));
    CHECK(mentions(with_size("llama.attention.value_length", 8), "different sizes"));
    CHECK(mentions(with_size("llama.expert_count", 8), "mixtures of experts"));
    CHECK(mentions(with_size("llama.rope.dimension_count", 3), "even number from 2 to 4"));
    CHECK(mentions(with_size("llama.rope.dimension_count", 8), "even number from 2 to 4"));
    CHECK(mentions(with_number("llama.attention.layer_norm_rms_epsilon", -1), "epsilon"));
    CHECK(mentions(with_number("llama.rope.freq_base", 0), "freq_base"));
    CHECK(mentions(with_number("llama.rope.freq_base", NAN), "freq_base"));
}

TEST_CASE("llama: missing, misshapen and unknown tensors are refused") {
    for (std::size_t i = 0; i < tiny_model().tensors.size(); ++i) {
        tiny_model plan;
        const std::string name = plan.tensors[i].name;
        CAPTURE(name);
        plan.tensors.erase(plan.tensors.begin() + static_cast<std::ptrdiff_t>(i));
        CHECK(mentions(failure(plan), name));

        tiny_model narrow;
        narrow.tensors[i].shape[0] -= 1;
        CHECK(mentions(failure(narrow), name));

        tiny_model deep;
        deep.tensors[i].shape.resize(3, 1);
        CHECK(mentions(failure(deep), name));
    }
    CHECK(mentions(failure_after([](tiny_model& plan) { plan.shape("blk.0.attn_q.bias") = {8}; }),
                   "'blk.0.attn_q.bias' that this engine has no use for"));
    CHECK(mentions(failure_after([](tiny_model& plan) { plan.shape("rope_freqs.weight") = {3}; }),
                   "'rope_freqs.weight' is not of shape"));
}

TEST_CASE("llama: damaged files are refused or run, never more") {
    generate::set_matrix_threads(1);
    const gguf_builder built = tiny_model().write();
    // Most of a file is weights: aim at the description before them.
    const std::size_t described = built.content.find("blk.0.attn_norm.weight") + 800;
    std::mt19937 random(5);
    int ran = 0;
    for (int round = 0; round < 5000; ++round) {
        gguf_builder damaged = built;
        for (int i = 0; i < 1 + round % 3; ++i) {
            damaged.content[random() % std::min(described, damaged.content.size())] =
                static_cast<char>(random());
        }
        auto file = gguf_file::parse(damaged.bytes());
        if (!file) {
            continue;
        }
        auto model = llama_model::load(*file);
        if (!model) {
            continue;
        }
        const generate::token_id token = 0;
        const std::uint32_t row = 0;
        std::vector<float> logits(model->config.vocabulary);
        generate::forward_pass pass(*model, 1);
        dense_cache cache(model->config);
        REQUIRE(pass.run({{&token, 1}, {&row, 1}, {&row, 1}}, cache, logits));
        ++ran;
    }
    CHECK(ran > 0);
    CHECK(ran < 5000);
}
