// Rules of eviction as their papers state them, in double, for what an engine was fed. Nothing is
// added up as the library does: the weights of every query are kept, by position, and looked at
// when a round comes. Where the library's arithmetic may differ, a score has a slack.
#pragma once

#include <complex>
#include <functional>
#include <limits>

#include "engine.hpp"

namespace conformance {

/// Weights are kept as f16, and exponentials are fast ones.
inline constexpr double weight_error = 1.2e-3;

/// What a query row gave the positions of one KV head, summed over its query heads.
struct observed_row {
    std::vector<double> weight;               // [position]; behind the end: 0
    std::vector<double> count, maybe_counts;  // at least the mean; or too close to tell
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
            numbers[d] = double{drawn(streams_[position], position, layer, head, d, kind)};
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
            }
            factor *= rule.decay;
        }
        found.score.push_back(score);
        found.slack.push_back(rule.counts ? slack + 1e-3 : weight_error * score + 1e-9);
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

// ---- From observations to scores ---------------------------------------------------------------

using slots = std::vector<std::size_t>;

/// What guards leave over.
inline slots candidates_of(const tracker& t, const tracked_head& head, const kv_policy& policy) {
    slots found;
    const bool prompt = (policy.flags & KV_POLICY_PROTECT_PROMPT) != 0;
    for (std::size_t slot = 0; slot < head.retained.size(); ++slot) {
        const uint64_t p = head.retained[slot];
        if (p < policy.sinks || (prompt && p < policy.prompt_tokens)) continue;
        if (p + policy.recent >= t.next_position()) continue;
        found.push_back(slot);
    }
    return found;
}

/// Neighbours in front of the recent window; what lies outside of them counts as 0.
inline scored pooled(const scored& in, std::size_t end, uint32_t width, bool maximum) {
    scored out = in;
    const std::ptrdiff_t half = width / 2;
    for (std::ptrdiff_t slot = 0; slot < static_cast<std::ptrdiff_t>(end); ++slot) {
        double sum = 0.0, slack = 0.0, best = 0.0;
        for (std::ptrdiff_t i = std::max<std::ptrdiff_t>(0, slot - half);
             i <= std::min<std::ptrdiff_t>(static_cast<std::ptrdiff_t>(end) - 1, slot + half);
             ++i) {
            sum += in.score[static_cast<std::size_t>(i)] / width;
            slack += in.slack[static_cast<std::size_t>(i)] / width;
            best = std::max(best, in.score[static_cast<std::size_t>(i)]);
        }
        const std::size_t at = static_cast<std::size_t>(slot);
        out.score[at] = maximum ? best : sum;
        out.slack[at] = maximum ? weight_error * best + 1e-9 : slack;
    }
    return out;
}

inline std::vector<double> softmax_over(const std::vector<double>& logits, const slots& chosen) {
    std::vector<double> out(logits.size(), 0.0);
    double total = 0.0;
    for (const std::size_t slot : chosen) total += std::exp(logits[slot]);
    for (const std::size_t slot : chosen) out[slot] = std::exp(logits[slot]) / total;
    return out;
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
}
inline double norm(const std::vector<double>& a) { return std::sqrt(dot(a, a)); }

inline std::vector<std::vector<double>> directions(const tracker& t, uint32_t layer,
                                                   uint32_t head) {
    std::vector<std::vector<double>> units;
    for (const uint32_t p : t.layers[layer].heads[head].retained) {
        units.push_back(t.key(layer, head, p));
        const double length = norm(units.back());
        for (double& x : units.back()) x /= length;
    }
    return units;
}

/// R-KV: the mean cosine of a key with all others; with `exact`, each row's newest similar one is
/// spared.
inline std::vector<double> redundancy(const tracker& t, uint32_t layer, uint32_t head, bool exact,
                                      double threshold) {
    const std::vector<std::vector<double>> units = directions(t, layer, head);
    const std::size_t n = units.size();
    std::vector<double> column(n, 0.0);
    for (std::size_t i = 0; i < n; ++i) {
        std::vector<double> cosine(n, 0.0);
        std::size_t newest = n;
        for (std::size_t j = 0; j < n; ++j) {
            if (j == i) continue;
            cosine[j] = dot(units[i], units[j]);
            if (cosine[j] > threshold) newest = j;
        }
        if (exact && newest != n) cosine[newest] = 0.0;
        for (std::size_t j = 0; j < n; ++j) column[j] += cosine[j] / static_cast<double>(n);
    }
    return column;
}

/// A paper's score per slot of one head of one layer.
inline scored scores_of(const tracker& t, uint32_t layer, uint32_t head, const kv_policy& policy,
                        const counted_rows& rule) {
    const tracked_head& mine = t.layers[layer].heads[head];
    const slots chosen = candidates_of(t, mine, policy);
    const std::size_t count = mine.retained.size();
    const std::size_t before_recent = static_cast<std::size_t>(
        std::count_if(mine.retained.begin(), mine.retained.end(),
                      [&](uint64_t p) { return p + policy.recent < t.next_position(); }));
    const auto exact_to = [](std::vector<double> score, double error) {
        scored made;
        for (const double s : score) made.slack.push_back(error * std::abs(s) + 1e-9);
        made.score = std::move(score);
        return made;
    };
    switch (policy.scorer) {
        case KV_SCORER_H2O:
        case KV_SCORER_TOVA:
        case KV_SCORER_SCISSORHANDS:
            return policy.pool_width > 1
                       ? pooled(observed_scores(mine, rule), before_recent, policy.pool_width,
                                (policy.flags & KV_POLICY_POOL_MAX) != 0)
                       : observed_scores(mine, rule);
        case KV_SCORER_SNAPKV:
            return pooled(observed_scores(mine, rule), before_recent,
                          policy.pool_width != 0 ? policy.pool_width : 5,
                          (policy.flags & KV_POLICY_POOL_MAX) != 0);
        case KV_SCORER_RKV: {
            scored importance = pooled(observed_scores(mine, rule), before_recent, 7, true);
            double total = 0.0;
            for (const std::size_t slot : chosen) total += importance.score[slot];
            const bool exact = (policy.flags & KV_POLICY_EXACT_REDUNDANCY) != 0;
            const std::vector<double> redundant = softmax_over(
                redundancy(t, layer, head, exact,
                           policy.similarity != 0.0f ? double{policy.similarity} : 0.5),
                chosen);
            const double weight = policy.redundancy != 0.0f ? double{policy.redundancy} : 0.9;
            for (std::size_t slot = 0; slot < count; ++slot) {
                const double part = (1.0 - weight) * importance.score[slot] / total;
                importance.score[slot] = part - weight * redundant[slot];
                importance.slack[slot] = 3 * weight_error * part + 1e-5 * redundant[slot];
            }
            return importance;
        }
        case KV_SCORER_KEYDIFF: {
            const std::vector<std::vector<double>> units = directions(t, layer, head);
            std::vector<double> sum(units[0].size(), 0.0), score;
            for (const std::vector<double>& u : units) {
                for (std::size_t d = 0; d < u.size(); ++d) sum[d] += u[d];
            }
            for (const std::vector<double>& u : units) score.push_back(-dot(u, sum) / norm(sum));
            return exact_to(score, 1e-5);
        }
        case KV_SCORER_KEY_NORM: {
            std::vector<double> score;
            for (const uint32_t p : mine.retained) score.push_back(-norm(t.key(layer, head, p)));
            return exact_to(score, 1e-6);
        }
        case KV_SCORER_EXPECTED_ATTENTION: {
            const layer_shape& s = t.shape(layer);
            const uint32_t group = s.query_heads / s.kv_heads, half = s.key_dim / 2;
            const tracked_layer& whole = t.layers[layer];
            std::vector<double> mean_weight(count, 0.0);
            for (uint32_t member = 0; member < group; ++member) {
                std::vector<double> expected(s.key_dim, 0.0);
                for (uint32_t band = 0; band < half; ++band) {
                    const double frequency = std::pow(10000.0, -2.0 * band / s.key_dim);
                    std::complex<double> mean = 0.0, turned = 0.0;
                    for (std::size_t i = 0; i < whole.queries.size(); ++i) {
                        const double* q = whole.queries[i].data() +
                                          (head * group + member) * std::size_t{s.key_dim};
                        mean += std::complex<double>(q[band], q[band + half]) *
                                std::polar(1.0, -frequency *
                                                    static_cast<double>(whole.query_positions[i]));
                    }
                    mean /= static_cast<double>(whole.queries.size());
                    for (uint32_t ahead = 0; ahead < 512; ++ahead) {
                        turned +=
                            mean * std::polar(1.0 / 512.0, frequency * (t.next_position() + ahead));
                    }
                    expected[band] = turned.real();
                    expected[band + half] = turned.imag();
                }
                std::vector<double> logits;
                for (const uint32_t p : mine.retained) {
                    logits.push_back(dot(expected, t.key(layer, head, p)) /
                                     std::sqrt(static_cast<double>(s.key_dim)));
                }
                const std::vector<double> weights = softmax_over(logits, chosen);
                for (const std::size_t i : chosen) mean_weight[i] += weights[i] / group;
            }
            for (std::size_t i = 0; i < count; ++i) {
                mean_weight[i] *= norm(t.value(layer, head, mine.retained[i]));
            }
            return exact_to(mean_weight, 1e-4);
        }
        case KV_SCORER_LAGKV: {
            constexpr std::size_t lag = 128;
            const std::size_t sinks = policy.sinks != 0 ? policy.sinks : 4;
            const std::size_t parts = (count - sinks) / lag - 1;
            scored made;
            made.score.assign(count, 1.0);
            made.slack.assign(count, 0.0);
            for (std::size_t part = 0; part < parts; ++part) {
                std::vector<double> sum(lag, 0.0);
                for (const bool values : {false, true}) {
                    std::vector<std::vector<double>> rows;
                    for (std::size_t i = 0; i < 2 * lag; ++i) {
                        const uint32_t p = mine.retained[sinks + part * lag + i];
                        rows.push_back(values ? t.value(layer, head, p) : t.key(layer, head, p));
                    }
                    const std::size_t dim = rows[0].size();
                    std::vector<double> least(dim, 1e300), greatest(dim, -1e300), deviation(lag);
                    for (std::size_t i = lag; i < 2 * lag; ++i) {
                        for (std::size_t d = 0; d < dim; ++d) {
                            least[d] = std::min(least[d], rows[i][d]);
                            greatest[d] = std::max(greatest[d], rows[i][d]);
                        }
                    }
                    for (std::size_t i = 0; i < lag; ++i) {
                        double mean = 0.0, square = 0.0;
                        for (std::size_t d = 0; d < dim; ++d) {
                            rows[i][d] = (rows[i][d] - least[d]) / (greatest[d] - least[d]);
                            mean += rows[i][d] / static_cast<double>(dim);
                        }
                        for (const double x : rows[i]) square += (x - mean) * (x - mean);
                        deviation[i] = std::sqrt(square / static_cast<double>(dim - 1));
                    }
                    double total = 0.0;
                    for (const double x : deviation) total += std::exp(x);
                    for (std::size_t i = 0; i < lag; ++i) sum[i] += std::exp(deviation[i]) / total;
                }
                for (std::size_t i = 0; i < lag; ++i) {
                    double below = 0.0, close = 0.0;
                    for (std::size_t j = 0; j < lag; ++j) {
                        below += sum[j] < sum[i] ? 1.0 : 0.0;
                        close += std::abs(sum[j] - sum[i]) < 1e-6 * sum[i] ? 1.0 : 0.0;
                    }
                    made.score[sinks + part * lag + i] = below / lag;
                    made.slack[sinks + part * lag + i] = (close - 1.0) / lag + 1e-6;
                }
            }
            return made;
        }
        default:
            FAIL("no reference for scorer ", policy.scorer);
    }
    return {};
}

// ---- Selection
// -----------------------------------------------------------------------------------

/// The best of a set stayed, but for those too close to tell.
inline void check_best(const std::vector<uint32_t>& before, const slots& candidates,
                       const scored& by, const std::vector<uint32_t>& kept) {
    double worst_kept = std::numeric_limits<double>::infinity();
    double best_gone = -worst_kept;
    std::vector<char> is_candidate(before.size(), 0);
    for (const std::size_t slot : candidates) is_candidate[slot] = 1;
    for (std::size_t slot = 0; slot < before.size(); ++slot) {
        const bool stays = std::binary_search(kept.begin(), kept.end(), before[slot]);
        if (is_candidate[slot] == 0) {
            CAPTURE(before[slot]);
            CHECK(stays);
        } else if (stays) {
            worst_kept = std::min(worst_kept, by.score[slot] + by.slack[slot]);
        } else {
            best_gone = std::max(best_gone, by.score[slot] - by.slack[slot]);
        }
    }
    CHECK(worst_kept >= best_gone);
}

/// Sums, or with `maximum` the greatest, slot by slot.
inline void join(scored& whole, const scored& part, bool maximum) {
    if (whole.score.empty()) {
        whole = part;
        return;
    }
    for (std::size_t slot = 0; slot < whole.score.size(); ++slot) {
        whole.score[slot] = maximum ? std::max(whole.score[slot], part.score[slot])
                                    : whole.score[slot] + part.score[slot];
        whole.slack[slot] += part.slack[slot];
    }
}

/// Runs a round and checks each set of survivors against its scores. `keep`: of each layer and
/// head; empty: the policy's budget.
inline kv_compress_report check_round(tracker& t, const kv_policy& policy, uint32_t selection,
                                      const counted_rows& rule,
                                      std::vector<std::vector<uint32_t>> keep = {}) {
    struct joined_set {
        uint32_t layer, head;
        scored by;
    };
    std::vector<joined_set> sets;
    std::vector<std::vector<std::size_t>> set_of(t.layers.size());
    for (uint32_t layer = 0; layer < t.layers.size(); ++layer) {
        if (t.shape(layer).shared_layer >= 0 || layer < policy.skip_layers) continue;
        for (uint32_t head = 0; head < t.layers[layer].heads.size(); ++head) {
            const std::size_t index = selection == KV_SELECT_UNION      ? 0
                                      : selection == KV_SELECT_PER_HEAD ? head
                                      : selection == KV_SELECT_PER_LAYER && head != 0
                                          ? sets.size() - 1
                                          : sets.size();
            if (index == sets.size()) sets.push_back({layer, head, {}});
            join(sets[index].by, scores_of(t, layer, head, policy, rule),
                 selection == KV_SELECT_UNION);
            set_of[layer].push_back(index);
        }
    }
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    require_ok(kv_compress(t.host().pool(), t.sequence, &options, &report));
    REQUIRE(report.outcome == KV_COMPRESS_DONE);
    for (uint32_t layer = 0; layer < t.layers.size(); ++layer) {
        for (uint32_t head = 0; head < set_of[layer].size(); ++head) {
            CAPTURE(layer);
            CAPTURE(head);
            const tracked_head& before = t.layers[layer].heads[head];
            const std::vector<uint32_t> kept = t.host().positions(t.sequence, layer, head);
            const uint32_t expected = keep.empty() ? policy.budget : keep[layer][head];
            CHECK(kept.size() == expected);
            CHECK(std::is_sorted(kept.begin(), kept.end(), std::less_equal<>()));
            check_best(before.retained, candidates_of(t, before, policy),
                       sets[set_of[layer][head]].by, kept);
        }
    }
    t.adopt();
    require_ok(kv_pool_check(t.host().pool()));
    return report;
}

}  // namespace conformance
