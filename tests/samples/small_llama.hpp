// A small Llama with made-up weights, as it computes with the library and without.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "dense_cache.hpp"
#include "llama.hpp"

namespace small_llama {

using generate::token_id;

inline constexpr std::uint32_t vocabulary = 100;
inline constexpr std::uint32_t layers = 3;
inline constexpr std::uint32_t head_dim = 32;
inline constexpr std::uint32_t width = 64;

// Two query heads on one KV head, as small as the library's heads can be; with `kv_heads`, two on
// each. A context of 512 tokens.
const generate::llama_model& small_model();
const generate::llama_model& model_of_two_heads();

std::vector<token_id> some_tokens(std::size_t count);

// Logits of every token of one text, [tokens, vocabulary], without the library.
std::vector<float> dense_logits(std::span<const token_id> tokens,
                                const generate::llama_model& model = small_model(),
                                const visibility& sees = nullptr,
                                const distances& distance = nullptr);

double loss_of(std::span<const float> logits, token_id token);

}  // namespace small_llama
