// Attention over a plain dense cache of one sequence, in double: what a paged cache must agree
// with.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "llama.hpp"

// Whether the token at one position sees that at another, which is not behind it.
using visibility = std::function<bool(std::size_t query, std::size_t key)>;

class dense_cache : public generate::attention_cache {
  public:
    // Without `sees`, every token sees all before it.
    explicit dense_cache(const generate::llama_config& config, visibility sees = nullptr)
        : config_(config), sees_(std::move(sees)), keys_(config.layers), values_(config.layers) {}

    generate::outcome<generate::nothing> attend(std::uint32_t layer,
                                                const generate::attention_rows& rows) override;

  private:
    const generate::llama_config& config_;
    visibility sees_;
    std::vector<std::vector<float>> keys_;  // per layer, [tokens, kv_heads, head_dim]
    std::vector<std::vector<float>> values_;
};
