// Sets that rounds leave against those of kvpress's presses, whose rules are written out here in
// double: one prompt, then a round that keeps int(n * (1 - ratio)) tokens of each KV head.
// Conventions that differ on purpose:
// - kvpress gives a window's tokens the greatest score + 1; here they are guarded by a mask.
// - kvpress cuts into the window when fewer tokens are to stay; here the budget grows to hold it.
// - kvpress leaves survivors in the order of their scores; here they are in that of positions.
#include <functional>
#include <numeric>

#include "scorer_reference.hpp"

using namespace conformance;

namespace {

constexpr uint32_t tokens = 301, group = 2, kv_heads = 3, query_heads = group * kv_heads, dim = 32;

using vectors = std::vector<std::vector<double>>;

/// Of one layer, by head and token.
struct prompt {
    std::vector<vectors> keys, queries;
};

vectors rows_of(const std::vector<float>& numbers, uint32_t heads, uint32_t head) {
    vectors rows;
    for (std::size_t token = 0; token < tokens; ++token) {
        const auto first =
            numbers.begin() + static_cast<std::ptrdiff_t>((token * heads + head) * dim);
        rows.emplace_back(first, first + dim);
    }
    return rows;
}

/// SnapKVPress's parts, of which some may be other than they should, to see that it is told.
struct window_rule {
    uint32_t queries = 64, width = 5;
    bool padding_counts = true, greatest_of_group = false;
};

/// compute_window_attention: what the last queries gave each key in front of them, their mean.
std::vector<double> window_attention(const prompt& p, uint32_t query_head, uint32_t queries) {
    std::vector<double> mean(tokens - queries, 0.0);
    for (uint32_t token = tokens - queries; token < tokens; ++token) {
        std::vector<double> logits;
        slots seen(token + 1);
        std::iota(seen.begin(), seen.end(), 0u);
        for (const std::size_t j : seen) {
            logits.push_back(dot(p.queries[query_head][token], p.keys[query_head / group][j]) /
                             std::sqrt(double{dim}));
        }
        const std::vector<double> weights = softmax_over(logits, seen);
        for (std::size_t j = 0; j < mean.size(); ++j) mean[j] += weights[j] / queries;
    }
    return mean;
}

/// avg_pool1d(kernel_size = width, stride = 1, padding = width / 2).
std::vector<double> average_pool(const std::vector<double>& in, const window_rule& rule) {
    const std::ptrdiff_t half = rule.width / 2, count = static_cast<std::ptrdiff_t>(in.size());
    std::vector<double> out;
    for (std::ptrdiff_t at = 0; at < count; ++at) {
        double sum = 0.0, inside = 0.0;
        for (std::ptrdiff_t i = at - half; i <= at + half; ++i) {
            if (i < 0 || i >= count) continue;
            sum += in[static_cast<std::size_t>(i)];
            inside += 1.0;
        }
        out.push_back(sum / (rule.padding_counts ? rule.width : inside));
    }
    return out;
}

/// Scores of a KV head's tokens in front of what is kept whatever it scores.
using press = std::function<std::vector<double>(const prompt& p, uint32_t head)>;

press snapkv(const window_rule& rule) {
    return [rule](const prompt& p, uint32_t head) {
        std::vector<double> score(tokens - rule.queries, 0.0);
        for (uint32_t member = 0; member < group; ++member) {
            const std::vector<double> pooled =
                average_pool(window_attention(p, head * group + member, rule.queries), rule);
            for (std::size_t j = 0; j < score.size(); ++j) {
                score[j] = rule.greatest_of_group ? std::max(score[j], pooled[j])
                                                  : score[j] + pooled[j] / group;
            }
        }
        return score;
    };
}

press tova(bool all_heads) {
    return [all_heads](const prompt& p, uint32_t head) {
        std::vector<double> score(tokens - 1, 0.0);
        for (uint32_t h = 0; h < query_heads; ++h) {
            if (!all_heads && h / group != head) continue;
            const std::vector<double> weights = window_attention(p, h, 1);
            for (std::size_t j = 0; j < score.size(); ++j) score[j] += weights[j];
        }
        for (double& x : score) x /= all_heads ? query_heads : group;
        return score;
    };
}

press knorm(double sign) {
    return [sign](const prompt& p, uint32_t head) {
        std::vector<double> score;
        for (const std::vector<double>& key : p.keys[head]) score.push_back(sign * norm(key));
        return score;
    };
}

press keydiff(double sign, bool normalised) {
    return [sign, normalised](const prompt& p, uint32_t head) {
        std::vector<double> anchor(dim, 0.0), score;
        for (const std::vector<double>& key : p.keys[head]) {
            const double length = normalised ? norm(key) : 1.0;
            for (std::size_t d = 0; d < dim; ++d) anchor[d] += key[d] / length / tokens;
        }
        for (const std::vector<double>& key : p.keys[head]) {
            score.push_back(sign * dot(key, anchor) / (norm(key) * norm(anchor)));
        }
        return score;
    };
}

/// Whether the best of the scored stayed, and all behind them, but for those too close to tell:
/// the library keeps weights as f16 and adds up in single precision.
bool is_kept_by(const std::vector<double>& score, const std::vector<uint32_t>& kept,
                double relative, double absolute) {
    double worst_kept = std::numeric_limits<double>::infinity(), best_gone = -worst_kept;
    for (uint32_t token = 0; token < tokens; ++token) {
        const bool stays = std::binary_search(kept.begin(), kept.end(), token);
        if (token >= score.size()) {
            if (!stays) return false;
            continue;
        }
        const double slack = relative * std::abs(score[token]) + absolute;
        if (stays) worst_kept = std::min(worst_kept, score[token] + slack);
        if (!stays) best_gone = std::max(best_gone, score[token] - slack);
    }
    return worst_kept >= best_gone;
}

struct parity_case {
    std::string name;
    kv_policy policy;
    press rule;
    std::vector<press> others;  // each of which keeps other sets
    bool by_attention;
};

kv_policy kept_as(uint32_t scorer, uint32_t selection, uint32_t window, uint32_t pool_width,
                  uint32_t recent) {
    kv_policy policy = policy_of(scorer, 1);
    policy.selection = selection;
    policy.window = window;
    policy.pool_width = pool_width;
    policy.recent = recent;
    return policy;
}

std::vector<parity_case> parity_cases() {
    const uint32_t apart = KV_SELECT_PER_LAYER_PER_HEAD;
    const std::vector<press> unlike_snapkv = {snapkv({64, 3}), snapkv({64, 7}), snapkv({64, 1}),
                                              snapkv({64, 5, false}), snapkv({64, 5, true, true})};
    return {
        {"SnapKVPress", kept_as(KV_SCORER_SNAPKV, apart, 64, 5, 64), snapkv({}), unlike_snapkv,
         true},
        {"SnapKVPress, by this library's defaults",
         kept_as(KV_SCORER_SNAPKV, KV_SELECT_DEFAULT, 0, 0, 64), snapkv({}), unlike_snapkv, true},
        {"SnapKVPress, of a short window",
         kept_as(KV_SCORER_SNAPKV, apart, 9, 7, 9),
         snapkv({9, 7}),
         {snapkv({9, 5}), snapkv({9, 7, false}), snapkv({9, 7, true, true})},
         true},
        {"TOVAPress",
         kept_as(KV_SCORER_TOVA, KV_SELECT_DEFAULT, 0, 0, 1),
         tova(true),
         {tova(false)},
         true},
        {"KnormPress",
         kept_as(KV_SCORER_KEY_NORM, apart, 0, 0, 0),
         knorm(-1.0),
         {knorm(1.0)},
         false},
        {"KeyDiffPress",
         kept_as(KV_SCORER_KEYDIFF, apart, 0, 0, 0),
         keydiff(-1.0, true),
         {keydiff(1.0, true), keydiff(-1.0, false)},
         false},
    };
}

pool_shape one_layer() {
    layer_shape layer;
    layer.kv_heads = kv_heads;
    layer.query_heads = query_heads;
    layer.key_dim = layer.value_dim = dim;
    layer.key_format = layer.value_format = KV_FORMAT_F32;
    pool_shape shape;
    shape.layers = {layer};
    shape.slabs = 4;
    shape.max_tokens = 512;
    shape.max_observed_sequences = 2;
    return shape;
}

}  // namespace

TEST_CASE("a round after a prompt keeps the tokens that kvpress's presses keep") {
    for (const parity_case& c : parity_cases()) {
        CAPTURE(c.name);
        engine host(one_layer());
        const kv_seq whole = host.create(&c.policy);
        host.run({{whole, 11, tokens}});
        prompt p;
        const std::vector<float> keys = host.tensor(0, false), queries = host.queries(0);
        for (uint32_t h = 0; h < kv_heads; ++h) p.keys.push_back(rows_of(keys, kv_heads, h));
        for (uint32_t h = 0; h < query_heads; ++h) {
            p.queries.push_back(rows_of(queries, query_heads, h));
        }
        const double relative = c.by_attention ? weight_error : 1e-5;
        const double absolute = c.by_attention ? small_weight_error : 1e-6;
        // How often a rule is not what the sets follow: never, and of each of the others at times.
        std::vector<press> rules = {c.rule};
        rules.insert(rules.end(), c.others.begin(), c.others.end());
        std::vector<std::vector<std::vector<double>>> scores(rules.size());
        for (std::size_t rule = 0; rule < rules.size(); ++rule) {
            for (uint32_t h = 0; h < kv_heads; ++h) scores[rule].push_back(rules[rule](p, h));
        }
        std::vector<uint32_t> misses(rules.size(), 0);
        for (const double ratio : {0.25, 0.5, 0.75}) {
            CAPTURE(ratio);
            kv_policy policy = c.policy;
            policy.budget = static_cast<uint32_t>(tokens * (1.0 - ratio));
            kv_seq sequence = 0;
            require_ok(kv_seq_fork(host.pool(), whole, 1, &sequence));
            kv_compress_options options = KV_INIT(kv_compress_options);
            options.policy = &policy;
            kv_compress_report report = KV_INIT(kv_compress_report);
            require_ok(kv_compress(host.pool(), sequence, &options, &report));
            REQUIRE(report.outcome == KV_COMPRESS_DONE);
            for (uint32_t h = 0; h < kv_heads; ++h) {
                CAPTURE(h);
                const std::vector<uint32_t> kept = host.positions(sequence, 0, h);
                CHECK(kept.size() == policy.budget);
                CHECK(is_kept_by(scores[0][h], kept, relative, absolute));
                for (std::size_t rule = 0; rule < rules.size(); ++rule) {
                    misses[rule] += !is_kept_by(scores[rule][h], kept, relative, absolute);
                }
            }
            require_ok(kv_seq_release(host.pool(), sequence));
        }
        CHECK(misses[0] == 0);
        for (std::size_t rule = 1; rule < rules.size(); ++rule) {
            CAPTURE(rule);
            CHECK(misses[rule] != 0);
        }
    }
}
