// What an engine's attention gave each token, in double, for what it was fed. Nothing is added up
// as the library does: the weights of every query are kept, by position, and looked at when a round
// comes.
#pragma once

#include <limits>

#include "engine.hpp"

namespace conformance {

/// Weights are kept as f16, and exponentials are fast ones.
inline constexpr double weight_error = 1.2e-3;
/// Half a step of the smallest f16: what a small weight of one query may be off by.
inline constexpr double small_weight_error = 1.0 / (1 << 25);

/// What a query row gave the positions of one KV head, summed over its query heads.
struct observed_row {
    std::vector<double> weight;               // [position]; behind the end: 0
    std::vector<double> count, maybe_counts;  // at least the mean; or too close to tell
    double queries = 0.0;                     // that were summed
};

struct scored {
    std::vector<double> score, slack;  // by slot
};

struct tracked_head {
    std::vector<uint32_t> retained;
    std::vector<observed_row> rows;
};

struct tracked_layer {
    std::vector<tracked_head> heads;
    std::vector<std::vector<double>> queries;  // of all rows seen: [query_heads * key_dim]
    std::vector<uint64_t> query_positions;
};

/// One sequence of an engine, and all that its attention ever paid. Copies are forks.
class tracker {
  public:
    kv_seq sequence;
    uint64_t stream;  // of the numbers of the tokens to come
    std::vector<tracked_layer> layers;

    tracker(engine& host, kv_seq of, uint64_t numbers)
        : sequence(of), stream(numbers), layers(host.shape().layers.size()), host_(&host) {
        for (std::size_t i = 0; i < layers.size(); ++i) {
            layers[i].heads.resize(host.shape().layers[i].kv_heads);
        }
    }

    /// A step of so many rows, of which the first `accepted` stay.
    void step(uint32_t rows, uint32_t accepted, uint32_t attend_flags = 0) {
        step(rows, accepted, attend_flags, attend_flags == 0);
    }
    /// The same, where a policy says whether it is observed.
    void step(uint32_t rows, uint32_t accepted, uint32_t attend_flags, bool observed) {
        kv_step* step = host_->begin({{sequence, stream, rows}});
        for (uint32_t layer = 0; layer < layers.size(); ++layer) {
            if (shape(layer).shared_layer < 0) host_->write(step, layer);
            host_->attend(step, layer, attend_flags);
        }
        require_ok(kv_step_accept(step, sequence, accepted));
        require_ok(kv_step_end(step, nullptr));
        note(rows, accepted, observed);
    }
    void step(uint32_t rows) { step(rows, rows); }

    /// What a step of so many rows does, once the engine has run it.
    void note(uint32_t rows, uint32_t accepted, bool observed) {
        const uint32_t first = static_cast<uint32_t>(streams_.size());
        streams_.resize(first + rows, stream);
        for (uint32_t layer = 0; layer < layers.size(); ++layer) {
            const uint32_t owner = owner_of(layer);
            for (uint32_t r = 0; observed && r < rows; ++r) observe(layer, owner, first, r, rows);
        }
        streams_.resize(first + accepted);
        for (uint32_t layer = 0; layer < layers.size(); ++layer) {
            for (tracked_head& head : layers[layer].heads) {
                for (uint32_t r = 0; r < accepted; ++r) head.retained.push_back(first + r);
                forget_from(head, first + accepted);
            }
        }
    }

    void truncate(uint32_t tokens) {
        require_ok(kv_seq_truncate(host_->pool(), sequence, tokens));
        streams_.resize(tokens);
        for (tracked_layer& layer : layers) {
            for (tracked_head& head : layer.heads) {
                std::erase_if(head.retained, [&](uint32_t p) { return p >= tokens; });
                forget_from(head, tokens);
            }
        }
    }

    /// Takes over what a round left.
    void adopt() {
        for (uint32_t layer = 0; layer < layers.size(); ++layer) {
            for (uint32_t head = 0; head < layers[layer].heads.size(); ++head) {
                layers[layer].heads[head].retained = host_->positions(sequence, layer, head);
            }
        }
    }

    tracker fork(uint64_t other_stream) const {
        tracker child = *this;
        require_ok(kv_seq_fork(host_->pool(), sequence, 1, &child.sequence));
        child.stream = other_stream;
        return child;
    }

    uint32_t next_position() const { return static_cast<uint32_t>(streams_.size()); }
    const layer_shape& shape(uint32_t layer) const { return host_->shape().layers[layer]; }
    engine& host() const { return *host_; }

    std::vector<double> key(uint32_t layer, uint32_t head, uint32_t position) const {
        return row(layer, head, position, 0, shape(layer).key_dim);
    }
    std::vector<double> value(uint32_t layer, uint32_t head, uint32_t position) const {
        return row(layer, head, position, 1, shape(layer).value_dim);
    }

  private:
    engine* host_;
    std::vector<uint64_t> streams_;  // whose numbers a position has

    uint32_t owner_of(uint32_t layer) const {
        const int32_t shared = shape(layer).shared_layer;
        return shared < 0 ? layer : static_cast<uint32_t>(shared);
    }

    std::vector<double> row(uint32_t layer, uint32_t head, uint32_t position, uint64_t kind,
                            uint32_t dim) const {
        std::vector<double> numbers(dim);
        for (uint32_t d = 0; d < dim; ++d) {
            numbers[d] = double{
                number_of(host_->shape(), streams_[position], position, layer, head, d, kind)};
        }
        return numbers;
    }

    static void forget_from(tracked_head& head, uint32_t position) {
        for (observed_row& row : head.rows) {
            for (std::vector<double>* of : {&row.weight, &row.count, &row.maybe_counts}) {
                if (of->size() > position) of->resize(position);
            }
        }
    }

    /// Row r of a step of `rows` from position `first` on, over the cache of layer `owner`.
    void observe(uint32_t layer, uint32_t owner, uint32_t first, uint32_t r, uint32_t rows) {
        const layer_shape& s = shape(layer);
        const uint32_t group = s.query_heads / s.kv_heads, position = first + r;
        std::vector<double> all_queries;
        for (uint32_t kv_head = 0; kv_head < s.kv_heads; ++kv_head) {
            tracked_head& head = layers[owner].heads[kv_head];
            std::vector<uint32_t> seen = head.retained;
            for (uint32_t p = first; p <= position; ++p) seen.push_back(p);
            observed_row found;
            for (std::vector<double>* of : {&found.weight, &found.count, &found.maybe_counts}) {
                of->assign(position + 1, 0.0);
            }
            for (uint32_t member = 0; member < group; ++member) {
                const std::vector<double> query =
                    row(layer, kv_head * group + member, position, 2, s.key_dim);
                all_queries.insert(all_queries.end(), query.begin(), query.end());
                std::vector<double> logit;
                for (const uint32_t p : seen) {
                    const std::vector<double> k = key(owner, kv_head, p);
                    double sum = 0.0;
                    for (uint32_t d = 0; d < s.key_dim; ++d) sum += query[d] * k[d];
                    logit.push_back(sum / std::sqrt(static_cast<double>(s.key_dim)));
                }
                double total = 0.0;
                for (const double l : logit) total += std::exp(l);
                const double mean = 1.0 / static_cast<double>(seen.size());
                found.queries += 1.0;
                for (std::size_t i = 0; i < seen.size(); ++i) {
                    const double weight = std::exp(logit[i]) / total;
                    found.weight[seen[i]] += weight;
                    const bool close = std::abs(weight - mean) <= weight_error * mean;
                    (close ? found.maybe_counts : found.count)[seen[i]] +=
                        close || weight >= mean ? 1.0 : 0.0;
                }
            }
            if (layer == owner) {
                head.rows.push_back(std::move(found));
                continue;
            }
            // Another layer's query of the same row: the owner came first.
            observed_row& row_of_owner = head.rows[head.rows.size() - rows + r];
            row_of_owner.queries += found.queries;
            for (std::size_t p = 0; p <= position; ++p) {
                row_of_owner.weight[p] += found.weight[p];
                row_of_owner.count[p] += found.count[p];
                row_of_owner.maybe_counts[p] += found.maybe_counts[p];
            }
        }
        layers[layer].queries.push_back(std::move(all_queries));
        layers[layer].query_positions.push_back(position);
    }
};

inline double at(const std::vector<double>& numbers, std::size_t index) {
    return index < numbers.size() ? numbers[index] : 0.0;
}

/// Which of a head's query rows count now, from the last on back, and with what factor.
struct counted_rows {
    uint64_t last = std::numeric_limits<uint64_t>::max();
    double decay = 1.0;
    bool counts = false;  // how often, not how much
};

inline scored observed_scores(const tracked_head& head, const counted_rows& rule) {
    scored found;
    for (const uint32_t position : head.retained) {
        double score = 0.0, slack = 0.0, factor = 1.0;
        for (std::size_t i = 0; i < std::min<uint64_t>(head.rows.size(), rule.last); ++i) {
            const observed_row& row = head.rows[head.rows.size() - 1 - i];
            if (rule.counts) {
                score += at(row.count, position) + 0.5 * at(row.maybe_counts, position);
                slack += 0.5 * at(row.maybe_counts, position);
            } else {
                score += factor * at(row.weight, position);
                if (position < row.weight.size())
                    slack += factor * row.queries * small_weight_error;
            }
            factor *= rule.decay;
        }
        found.score.push_back(score);
        found.slack.push_back(slack + (rule.counts ? 1e-3 : weight_error * score + 1e-9));
    }
    return found;
}

/// Compares what the library says of every layer and head.
inline void check_observed(const tracker& t, const counted_rows& rule) {
    for (uint32_t layer = 0; layer < t.layers.size(); ++layer) {
        if (t.shape(layer).shared_layer >= 0) continue;
        for (uint32_t head = 0; head < t.layers[layer].heads.size(); ++head) {
            CAPTURE(layer);
            CAPTURE(head);
            const std::vector<float> found = t.host().scores(t.sequence, layer, head);
            const scored expected = observed_scores(t.layers[layer].heads[head], rule);
            REQUIRE(found.size() == expected.score.size());
            for (std::size_t slot = 0; slot < found.size(); ++slot) {
                CAPTURE(slot);
                CHECK(std::abs(double{found[slot]} - expected.score[slot]) <= expected.slack[slot]);
            }
        }
    }
}

}  // namespace conformance
