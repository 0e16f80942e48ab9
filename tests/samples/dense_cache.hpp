// Attention over a plain dense cache of one sequence, in double: what a paged cache must agree
// with.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "llama.hpp"

// Whether the token at one position sees that at another, which is not behind it.
using visibility = std::function<bool(std::size_t query, std::size_t key)>;
// How far it is from there, as rotation has it.
using distances = std::function<double(std::size_t query, std::size_t key)>;

class dense_cache : public generate::attention_cache {
  public:
    // Without `sees`, every token sees all before it. With `distance`, rows come without rotation,
    // and each query is turned by its distance from each key.
    explicit dense_cache(const generate::llama_config& config, visibility sees = nullptr,
                         distances distance = nullptr)
        : config_(config),
          sees_(std::move(sees)),
          distance_(std::move(distance)),
          keys_(config.layers),
          values_(config.layers) {}

    generate::outcome<generate::nothing> attend(std::uint32_t layer,
                                                const generate::attention_rows& rows) override;
    bool rotates() const override { return distance_ != nullptr; }

  private:
    // Of a query and a key of one head, before scaling.
    double product(const float* query, const float* key, double distance) const;

    const generate::llama_config& config_;
    visibility sees_;
    distances distance_;
    std::vector<std::vector<float>> keys_;  // per layer, [tokens, kv_heads, head_dim]
    std::vector<std::vector<float>> values_;
};
