#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace generate {

token_id greedy_token(std::span<const float> logits) {
    std::size_t best = 0;
    for (std::size_t i = 1; i < logits.size(); ++i) {
        if (logits[i] > logits[best]) {
            best = i;
        }
    }
    return static_cast<token_id>(best);
}

outcome<token_id> sampler::pick(std::span<const float> logits, std::span<const token_id> history) {
    if (!std::all_of(logits.begin(), logits.end(), [](float x) { return std::isfinite(x); })) {
        return error{"the model's output is not finite: its weights are damaged"};
    }
    adjusted_.assign(logits.begin(), logits.end());
    if (options_.repeat_penalty != 1.0) {
        const auto factor = static_cast<float>(options_.repeat_penalty);
        const std::size_t window = std::min<std::size_t>(history.size(), options_.repeat_window);
        for (const token_id token : history.last(window)) {
            if (token < adjusted_.size()) {
                // From the original, so that a token seen twice is not punished twice.
                const float logit = logits[token];
                adjusted_[token] = logit > 0 ? logit / factor : logit * factor;
            }
        }
    }
    for (const token_id token : options_.banned) {
        if (token < adjusted_.size()) {
            adjusted_[token] = -std::numeric_limits<float>::infinity();
        }
    }
    const token_id likeliest = greedy_token(adjusted_);
    if (!std::isfinite(adjusted_[likeliest])) {
        return error{"no token is left to pick: all are banned"};
    }
    if (options_.temperature <= 0) {
        return likeliest;
    }
    const auto largest = static_cast<double>(adjusted_[likeliest]);
    double total = 0;
    candidates_.clear();
    for (std::size_t i = 0; i < adjusted_.size(); ++i) {
        const double weight =
            std::exp((static_cast<double>(adjusted_[i]) - largest) / options_.temperature);
        total += weight;
        candidates_.push_back({weight, static_cast<token_id>(i)});
    }
    // Tokens below this share cannot be among the likeliest that make up top_p, so that only a few
    // need sorting. The likeliest always stays.
    const double least =
        std::min(1.0, total * (1.0 - options_.top_p) / static_cast<double>(candidates_.size()));
    std::erase_if(candidates_, [&](const candidate& c) { return c.weight < least; });
    std::sort(candidates_.begin(), candidates_.end(), [](const candidate& a, const candidate& b) {
        return a.weight != b.weight ? a.weight > b.weight : a.token < b.token;
    });
    double kept = 0;
    std::size_t count = 0;
    while (count < candidates_.size() && (count == 0 || kept < options_.top_p * total)) {
        kept += candidates_[count++].weight;
    }
    candidates_.resize(count);
    return draw();
}

// One of the candidates, with a probability in proportion to its weight.
token_id sampler::draw() {
    double total = 0;
    for (const candidate& c : candidates_) {
        total += c.weight;
    }
    const double uniform = static_cast<double>(generator_() >> 11) * 0x1p-53;  // [0, 1)
    double left = uniform * total;
    for (const candidate& c : candidates_) {
        left -= c.weight;
        if (left < 0) {
            return c.token;
        }
    }
    return candidates_.back().token;
}

}  // namespace generate
