// Rules of eviction as their papers state them, in double, for what a tracker has seen. Where the
// library's arithmetic may differ, a score has a slack.
#pragma once

#include <complex>
#include <functional>

#include "tracker.hpp"

namespace conformance {

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
        double sum = 0.0, slack = 0.0, best = 0.0, loosest = 0.0;
        for (std::ptrdiff_t i = std::max<std::ptrdiff_t>(0, slot - half);
             i <= std::min<std::ptrdiff_t>(static_cast<std::ptrdiff_t>(end) - 1, slot + half);
             ++i) {
            sum += in.score[static_cast<std::size_t>(i)] / width;
            slack += in.slack[static_cast<std::size_t>(i)] / width;
            best = std::max(best, in.score[static_cast<std::size_t>(i)]);
            loosest = std::max(loosest, in.slack[static_cast<std::size_t>(i)]);
        }
        const std::size_t at = static_cast<std::size_t>(slot);
        out.score[at] = maximum ? best : sum;
        out.slack[at] = maximum ? loosest : slack;
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

/// KeyDiff: less the cosine to the mean direction.
inline std::vector<double> key_differences(const tracker& t, uint32_t layer, uint32_t head) {
    const std::vector<std::vector<double>> units = directions(t, layer, head);
    std::vector<double> sum(units[0].size(), 0.0), score;
    for (const std::vector<double>& u : units) {
        for (std::size_t d = 0; d < u.size(); ++d) sum[d] += u[d];
    }
    for (const std::vector<double>& u : units) score.push_back(-dot(u, sum) / norm(sum));
    return score;
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

/// What rotates together, as a complex number, and by how much from position to position.
inline std::complex<double> pair_of(const tracker& t, const double* row, uint32_t band,
                                    uint32_t half) {
    return t.host().shape().rope_style == KV_ROPE_INTERLEAVED
               ? std::complex<double>(row[2 * band], row[2 * band + 1])
               : std::complex<double>(row[band], row[band + half]);
}
inline double frequency_of(const tracker& t, const layer_shape& s, uint32_t band) {
    return std::pow(t.host().shape().rope_theta, -2.0 * band / s.key_dim);
}

/// TriAttention: the mean logit of queries 1, 2, 4, ... 65536 positions ahead and the part of the
/// norms, as z-scores over the candidates, of which a group's greatest counts.
inline std::vector<double> triattention(const tracker& t, uint32_t layer, uint32_t head,
                                        const slots& chosen) {
    const layer_shape& s = t.shape(layer);
    const uint32_t group = s.query_heads / s.kv_heads, half = s.key_dim / 2;
    const tracked_layer& whole = t.layers[layer];
    const std::vector<uint32_t>& retained = whole.heads[head].retained;
    const double seen = static_cast<double>(whole.queries.size());
    std::vector<double> best(retained.size(), -std::numeric_limits<double>::infinity());
    for (uint32_t member = 0; member < group; ++member) {
        std::vector<double> score(retained.size(), 0.0);
        for (uint32_t band = 0; band < half; ++band) {
            const double frequency = frequency_of(t, s, band);
            std::complex<double> mean = 0.0, future = 0.0;
            double magnitude = 0.0;
            for (std::size_t i = 0; i < whole.queries.size(); ++i) {
                const double* q =
                    whole.queries[i].data() + (head * group + member) * std::size_t{s.key_dim};
                const std::complex<double> rotated = pair_of(t, q, band, half);
                mean += rotated *
                        std::polar(1.0 / seen,
                                   -frequency * static_cast<double>(whole.query_positions[i]));
                magnitude += std::abs(rotated) / seen;
            }
            for (uint32_t power = 0; power <= 16; ++power) {
                future += mean * std::polar(1.0 / 17.0, frequency * (t.next_position() +
                                                                     double(uint64_t{1} << power)));
            }
            for (const std::size_t slot : chosen) {
                const std::vector<double> k = t.key(layer, head, retained[slot]);
                const std::complex<double> key = pair_of(t, k.data(), band, half);
                score[slot] +=
                    (future * std::conj(key)).real() + (magnitude - std::abs(mean)) * std::abs(key);
            }
        }
        double mean = 0.0, square = 0.0;
        const double count = static_cast<double>(chosen.size());
        for (const std::size_t slot : chosen) mean += score[slot] / count;
        for (const std::size_t slot : chosen) {
            square += (score[slot] - mean) * (score[slot] - mean) / count;
        }
        for (const std::size_t slot : chosen) {
            best[slot] = std::max(best[slot], (score[slot] - mean) / std::sqrt(square));
        }
    }
    return best;
}

inline std::vector<double> standardised(std::vector<double> numbers, const slots& chosen) {
    double mean = 0.0, square = 0.0;
    const double count = static_cast<double>(chosen.size());
    for (const std::size_t slot : chosen) mean += numbers[slot] / count;
    for (const std::size_t slot : chosen) {
        square += (numbers[slot] - mean) * (numbers[slot] - mean) / count;
    }
    for (double& x : numbers) x = (x - mean) / std::sqrt(square);
    return numbers;
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
                importance.slack[slot] = (1.0 - weight) * importance.slack[slot] / total +
                                         2 * weight_error * part + 1e-5 * redundant[slot];
            }
            return importance;
        }
        case KV_SCORER_TRIATTENTION: {
            std::vector<double> score = triattention(t, layer, head, chosen);
            scored made;
            made.slack.assign(count, 2e-4);
            made.score = std::move(score);
            return made;
        }
        case KV_SCORER_BLEND: {
            // Logarithms of what was observed, in units of its mean; far below it, all is alike.
            scored made = pooled(observed_scores(mine, rule), before_recent,
                                 policy.pool_width != 0 ? policy.pool_width : 5,
                                 (policy.flags & KV_POLICY_POOL_MAX) != 0);
            double mean = 0.0;
            for (const std::size_t slot : chosen) {
                mean += made.score[slot] / static_cast<double>(chosen.size());
            }
            for (double& x : made.score) x = std::log(x / mean + 1.0 / 1024);
            made.score = standardised(made.score, chosen);
            const std::vector<double> prior =
                standardised(triattention(t, layer, head, chosen), chosen);
            const std::vector<double> unlike =
                standardised(key_differences(t, layer, head), chosen);
            const double share = policy.prior_share != 0.0f ? double{policy.prior_share} : 0.1;
            const double apart = policy.redundancy != 0.0f ? double{policy.redundancy} : 0.3;
            for (std::size_t slot = 0; slot < count; ++slot) {
                const double asked = share * prior[slot] + (1.0 - share) * made.score[slot];
                made.score[slot] = (1.0 - apart) * asked + apart * unlike[slot];
                made.slack[slot] = 5e-3;
            }
            return made;
        }
        case KV_SCORER_KEYDIFF: {
            return exact_to(key_differences(t, layer, head), 1e-5);
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
            const double tokens = static_cast<double>(whole.queries.size());
            for (uint32_t member = 0; member < group; ++member) {
                // Per band the mean of the queries before rotation, their 2 x 2 covariance, and the
                // mean rotation of the next 512 positions.
                std::vector<double> logits(count, 0.0);
                for (uint32_t band = 0; band < half; ++band) {
                    const double frequency = frequency_of(t, s, band);
                    std::vector<std::complex<double>> queries;
                    std::complex<double> mean = 0.0, turned = 0.0;
                    for (std::size_t i = 0; i < whole.queries.size(); ++i) {
                        const double* q = whole.queries[i].data() +
                                          (head * group + member) * std::size_t{s.key_dim};
                        const double angle =
                            -frequency * static_cast<double>(whole.query_positions[i]);
                        queries.push_back(pair_of(t, q, band, half) * std::polar(1.0, angle));
                        mean += queries.back() / tokens;
                    }
                    double first = 0.0, second = 0.0, both = 0.0;
                    for (const std::complex<double>& q : queries) {
                        const std::complex<double> off = q - mean;
                        first += off.real() * off.real() / tokens;
                        second += off.imag() * off.imag() / tokens;
                        both += off.real() * off.imag() / tokens;
                    }
                    for (uint32_t ahead = 0; ahead < 512; ++ahead) {
                        turned += std::polar(1.0 / 512.0, frequency * (t.next_position() + ahead));
                    }
                    for (std::size_t i = 0; i < count; ++i) {
                        const std::vector<double> k = t.key(layer, head, mine.retained[i]);
                        const std::complex<double> key = pair_of(t, k.data(), band, half);
                        const std::complex<double> back = std::conj(turned) * key;
                        const double dim = s.key_dim;
                        logits[i] += (mean * std::conj(back)).real() / std::sqrt(dim);
                        logits[i] += (first * back.real() * back.real() +
                                      second * back.imag() * back.imag() +
                                      2.0 * both * back.real() * back.imag()) /
                                     (2.0 * dim);
                    }
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
            // What is kept whole: the sinks first, of the others the newest.
            made.score.assign(count, 2.0);
            made.slack.assign(count, 0.0);
            for (std::size_t i = sinks + parts * lag; i < count; ++i) {
                made.score[i] = 1.0 + static_cast<double>(i) / static_cast<double>(count + 1);
            }
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
