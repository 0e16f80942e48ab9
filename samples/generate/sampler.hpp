// From logits to the next token: greedy, or a seeded draw by temperature and top-p.
//
// The same logits and seed give the same tokens with every standard library: the generator is the
// standard's own, and its numbers are turned into reals here.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "outcome.hpp"
#include "tokenizer.hpp"

namespace generate {

struct sampler_options {
    double temperature = 0.0;     // 0: greedy
    double top_p = 1.0;           // the draw is among the likeliest tokens that make up this share
    double repeat_penalty = 1.0;  // logits of tokens seen lately shrink by this factor; 1: off
    std::uint32_t repeat_window = 256;  // how many tokens back `lately` is
    std::uint64_t seed = 0;
    std::vector<token_id> banned;  // never drawn
};

// The largest logit; the lowest id among equals. `logits` is not empty.
token_id greedy_token(std::span<const float> logits);

class sampler {
  public:
    explicit sampler(sampler_options options)
        : options_(std::move(options)), generator_(options_.seed) {}

    // Replaces the tokens that are never drawn.
    void ban(std::vector<token_id> tokens) { options_.banned = std::move(tokens); }

    // Picks a token. `history` is the text so far, for the repeat penalty.
    outcome<token_id> pick(std::span<const float> logits, std::span<const token_id> history);

  private:
    struct candidate {
        double weight;
        token_id token;
    };

    token_id draw();

    sampler_options options_;
    std::mt19937_64 generator_;
    std::vector<float> adjusted_;
    std::vector<candidate> candidates_;
};

}  // namespace generate
