#include "evaluate/metrics.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "sampler.hpp"

namespace evaluate {

double log_sum_exp(std::span<const float> logits) {
    float largest = -std::numeric_limits<float>::infinity();
    for (const float logit : logits) {
        largest = std::max(largest, logit);
    }
    double sum = 0;
    for (const float logit : logits) {
        sum += std::exp(static_cast<double>(logit) - static_cast<double>(largest));
    }
    return static_cast<double>(largest) + std::log(sum);
}

void reference_rows::assign(std::span<const float> logits) {
    logits_ = logits;
    probabilities_.resize(logits.size());
    rows_.resize(logits.size() / vocabulary_);
    for (std::size_t row = 0; row < rows_.size(); ++row) {
        const auto of_row = logits.subspan(row * vocabulary_, vocabulary_);
        rows_[row] = {log_sum_exp(of_row), generate::greedy_token(of_row)};
        for (std::size_t i = 0; i < vocabulary_; ++i) {
            const double log_probability = static_cast<double>(of_row[i]) - rows_[row].log_sum;
            probabilities_[row * vocabulary_ + i] = static_cast<float>(std::exp(log_probability));
        }
    }
}

row_scores reference_rows::compare(std::size_t row, std::span<const float> logits,
                                   std::uint32_t token) const {
    const float* expected = &logits_[row * vocabulary_];
    const float* probabilities = &probabilities_[row * vocabulary_];
    const double log_sum = log_sum_exp(logits);
    // log p - log q = (expected - logit) + (log_sum - expected's), whose second part is the same
    // for all tokens.
    double divergence = 0;
    for (std::size_t i = 0; i < vocabulary_; ++i) {
        const double difference = static_cast<double>(expected[i]) - static_cast<double>(logits[i]);
        divergence += static_cast<double>(probabilities[i]) * difference;
    }
    divergence += log_sum - rows_[row].log_sum;

    row_scores scores;
    scores.loss = log_sum - static_cast<double>(logits[token]);
    // It is never negative, but for rounding.
    const bool finite = std::isfinite(divergence);
    scores.divergence =
        finite ? std::max(divergence, 0.0) : std::numeric_limits<double>::infinity();
    scores.agrees = finite && generate::greedy_token(logits) == rows_[row].likeliest;
    return scores;
}

void score_sums::add(const row_scores& row) {
    loss_ += row.loss;
    agreeing_ += row.agrees ? 1 : 0;
    divergences_.push_back(row.divergence);
}

double score_sums::perplexity() const {
    return count() == 0 ? 0 : std::exp(loss_ / static_cast<double>(count()));
}

double score_sums::mean_divergence() const {
    const double sum = std::accumulate(divergences_.begin(), divergences_.end(), 0.0);
    return count() == 0 ? 0 : sum / static_cast<double>(count());
}

double score_sums::percentile_divergence(double share) const {
    return percentile(divergences_, share);
}

double score_sums::agreement() const {
    return count() == 0 ? 0 : static_cast<double>(agreeing_) / static_cast<double>(count());
}

double percentile(std::span<const double> values, double share) {
    if (values.empty()) {
        return 0;
    }
    const auto count = static_cast<double>(values.size());
    // A share of 0.99 times 100 must be rank 99, not 100 for the last bit's sake.
    const double rank = std::ceil(share * count * (1 - 1e-12));
    const auto index = static_cast<std::size_t>(std::clamp(rank, 1.0, count)) - 1;
    std::vector<double> sorted(values.begin(), values.end());
    std::nth_element(sorted.begin(), sorted.begin() + static_cast<std::ptrdiff_t>(index),
                     sorted.end());
    return sorted[index];
}

}  // namespace evaluate
