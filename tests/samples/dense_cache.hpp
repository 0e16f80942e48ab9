// Attention over a plain dense cache of one sequence, in double: what a paged cache must agree
// with.
#pragma once

#include <vector>

#include "llama.hpp"

class dense_cache : public generate::attention_cache {
  public:
    explicit dense_cache(const generate::llama_config& config)
        : config_(config), keys_(config.layers), values_(config.layers) {}

    generate::outcome<generate::nothing> attend(std::uint32_t layer,
                                                const generate::attention_rows& rows) override;

  private:
    const generate::llama_config& config_;
    std::vector<std::vector<float>> keys_;  // per layer, [tokens, kv_heads, head_dim]
    std::vector<std::vector<float>> values_;
};
