#include "small_llama.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <numeric>
#include <string>

#include "tiny_model.hpp"

namespace small_llama {

namespace {

generate::llama_model made(std::uint32_t kv_heads) {
    tiny_model plan;
    plan.sizes = {
        {"llama.block_count", layers},
        {"llama.embedding_length", width},
        {"llama.attention.head_count", 2 * kv_heads},
        {"llama.attention.head_count_kv", kv_heads},
        {"llama.attention.key_length", head_dim},
        {"llama.attention.value_length", head_dim},
        {"llama.rope.dimension_count", head_dim},
        {"llama.feed_forward_length", 40},
        {"llama.context_length", 512},
    };
    plan.tensors = {{"token_embd.weight", {width, vocabulary}}, {"output_norm.weight", {width}}};
    for (std::uint32_t i = 0; i < layers; ++i) {
        const std::string block = "blk." + std::to_string(i) + ".";
        plan.shape(block + "attn_norm.weight") = {width};
        plan.shape(block + "attn_q.weight") = {width, 2 * kv_heads * head_dim};
        plan.shape(block + "attn_k.weight") = {width, kv_heads * head_dim};
        plan.shape(block + "attn_v.weight") = {width, kv_heads * head_dim};
        plan.shape(block + "attn_output.weight") = {2 * kv_heads * head_dim, width};
        plan.shape(block + "ffn_norm.weight") = {width};
        plan.shape(block + "ffn_gate.weight") = {width, 40};
        plan.shape(block + "ffn_up.weight") = {width, 40};
        plan.shape(block + "ffn_down.weight") = {40, width};
    }
    generate::set_matrix_threads(1);
    const gguf_builder built = plan.write();
    auto file = generate::gguf_file::parse(built.bytes());
    REQUIRE(file);
    auto loaded = generate::llama_model::load(*file);
    REQUIRE_MESSAGE(loaded, (loaded ? std::string() : loaded.message()));
    return std::move(*loaded);
}

}  // namespace

const generate::llama_model& small_model() {
    static const generate::llama_model model = made(1);
    return model;
}

const generate::llama_model& model_of_two_heads() {
    static const generate::llama_model model = made(2);
    return model;
}

std::vector<token_id> some_tokens(std::size_t count) {
    std::vector<token_id> tokens;
    for (std::uint32_t i = 0; i < count; ++i) {
        tokens.push_back((i * i + 7 * i) % 97);
    }
    return tokens;
}

std::vector<float> dense_logits(std::span<const token_id> tokens,
                                const generate::llama_model& model, const visibility& sees,
                                const distances& distance) {
    std::vector<std::uint32_t> rows(tokens.size());
    std::iota(rows.begin(), rows.end(), 0u);
    std::vector<float> logits(tokens.size() * vocabulary);
    dense_cache cache(model.config, sees, distance);
    generate::forward_pass pass(model, tokens.size());
    REQUIRE(pass.run({tokens, rows, rows}, cache, logits));
    return logits;
}

double loss_of(std::span<const float> logits, token_id token) {
    double sum = 0;
    for (const float logit : logits) {
        sum += std::exp(static_cast<double>(logit));
    }
    return std::log(sum) - static_cast<double>(logits[token]);
}

}  // namespace small_llama
