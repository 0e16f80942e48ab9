// How far logits are from those of the reference, row by row, and what is said of many rows.
//
// A row holds the logits of one position, [vocabulary]. Natural logarithms throughout: divergences
// and losses are in nats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace evaluate {

// Of one row, as the token that the text really continues with judges it, and the reference.
struct row_scores {
    double loss = 0;        // -log p(token)
    double divergence = 0;  // KL(reference || this); infinite where this row is not finite
    bool agrees = false;    // its likeliest token is the reference's
};

// log(sum(exp(logits))). NaN if one of them is.
double log_sum_exp(std::span<const float> logits);

// The reference's rows of one chunk, kept until all others are compared with them.
class reference_rows {
  public:
    explicit reference_rows(std::size_t vocabulary) : vocabulary_(vocabulary) {}

    // `logits` is [rows, vocabulary], and must stay as it is while rows are compared.
    void assign(std::span<const float> logits);

    // Compares row `row` of another run with the same row here.
    row_scores compare(std::size_t row, std::span<const float> logits, std::uint32_t token) const;

  private:
    struct summary {
        double log_sum;
        std::uint32_t likeliest;
    };

    std::size_t vocabulary_;
    std::span<const float> logits_;
    std::vector<float> probabilities_;  // [rows, vocabulary]
    std::vector<summary> rows_;
};

// Many rows together.
class score_sums {
  public:
    void add(const row_scores& row);

    std::size_t count() const { return divergences_.size(); }
    // All are 0 where nothing was added.
    double perplexity() const;
    double mean_divergence() const;
    double percentile_divergence(double share) const;
    double agreement() const;  // share of rows

  private:
    double loss_ = 0;
    std::size_t agreeing_ = 0;
    std::vector<double> divergences_;
};

// The smallest value that at least `share` of all are not above (nearest rank). 0 of none.
double percentile(std::span<const double> values, double share);

}  // namespace evaluate
