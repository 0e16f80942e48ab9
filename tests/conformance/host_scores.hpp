// Scores that the host gives, as numbers that follow from layer, head and position, and sequences
// that hold them.
#pragma once

#include "scorer_reference.hpp"

namespace conformance {

inline pool_shape shape_of(bool lane_per_head, uint32_t layers = 3) {
    layer_shape layer;
    layer.kv_heads = 3;
    layer.query_heads = 3;
    layer.key_dim = layer.value_dim = 32;
    layer.key_format = layer.value_format = KV_FORMAT_F32;
    layer.lane_per_head = lane_per_head;
    pool_shape shape;
    shape.layers.assign(layers, layer);
    shape.slabs = 8;
    shape.max_tokens = 512;
    shape.max_observed_sequences = 4;
    return shape;
}

/// In steps of 1/16, so that there are ties; of heads and layers that differ in size.
inline float host_score(uint32_t layer, uint32_t head, uint32_t position) {
    const float x = std::abs(drawn(5, position, layer, head, 0, 9));
    return std::floor(x * 16.0f * static_cast<float>(1 + head)) / 16.0f +
           static_cast<float>(layer) / 64.0f;
}

inline void give_scores(engine& host, kv_seq sequence, uint32_t first, uint32_t tokens) {
    for (uint32_t layer = 0; layer < host.shape().layers.size(); ++layer) {
        std::vector<float> scores;
        for (uint32_t head = 0; head < host.shape().layers[layer].kv_heads; ++head) {
            for (uint32_t i = 0; i < tokens; ++i) {
                scores.push_back(host_score(layer, head, first + i));
            }
        }
        require_ok(kv_seq_set_scores(host.pool(), sequence, layer, first, tokens, scores.data()));
    }
}

/// Of ascending positions those that stay: what guards hold, and the best of the others; of equals
/// the first.
using score_of = std::function<double(uint32_t position)>;
inline std::vector<uint32_t> best(const std::vector<uint32_t>& positions, const slots& candidates,
                                  const score_of& score, std::size_t keep) {
    std::vector<uint32_t> kept, others;
    for (std::size_t slot = 0; slot < positions.size(); ++slot) {
        const bool may_go =
            std::find(candidates.begin(), candidates.end(), slot) != candidates.end();
        (may_go ? others : kept).push_back(positions[slot]);
    }
    std::stable_sort(others.begin(), others.end(),
                     [&](uint32_t a, uint32_t b) { return score(a) > score(b); });
    others.resize(keep - kept.size());
    kept.insert(kept.end(), others.begin(), others.end());
    std::sort(kept.begin(), kept.end());
    return kept;
}

inline kv_compress_report compress(engine& host, kv_seq sequence, const kv_policy& policy) {
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    require_ok(kv_compress(host.pool(), sequence, &options, &report));
    require_ok(kv_pool_check(host.pool()));
    return report;
}

inline kv_policy host_policy(uint32_t budget) {
    kv_policy policy = policy_of(KV_SCORER_HOST, budget);
    policy.sinks = 3;
    policy.recent = 4;
    return policy;
}

/// A sequence of so many tokens, all with scores.
inline tracker scored_sequence(engine& host, const kv_policy& policy, uint32_t tokens) {
    tracker t(host, host.create(&policy), 1);
    t.step(tokens);
    give_scores(host, t.sequence, 0, tokens);
    return t;
}

inline double value_range(const tracker& t, uint32_t layer, uint32_t head, uint32_t position) {
    const std::vector<double> v = t.value(layer, head, position);
    return *std::max_element(v.begin(), v.end()) - *std::min_element(v.begin(), v.end());
}

/// What stays in a layer of heads that compete, as Ada-KV says: the best `safe` of each, then the
/// best of all; of equals the first head's.
inline std::vector<std::vector<uint32_t>> adaptive(const tracker& t, uint32_t layer,
                                                   const kv_policy& policy, double floor_share) {
    struct entry {
        double score;
        uint32_t head, position;
    };
    std::vector<std::vector<uint32_t>> kept(t.layers[layer].heads.size());
    std::vector<entry> open;
    std::size_t places = 0;
    for (uint32_t head = 0; head < kept.size(); ++head) {
        const tracked_head& mine = t.layers[layer].heads[head];
        const slots candidates = candidates_of(t, mine, policy);
        const std::size_t held = mine.retained.size() - candidates.size();
        places += policy.budget - held;
        const std::size_t floor = static_cast<std::size_t>(floor_share * policy.budget);
        const std::size_t safe = std::min(candidates.size(), floor > held ? floor - held : 0);
        kept[head] = best(
            mine.retained, candidates, [&](uint32_t p) { return host_score(layer, head, p); },
            held + safe);
        places -= safe;
        for (const std::size_t slot : candidates) {
            const uint32_t p = mine.retained[slot];
            if (std::binary_search(kept[head].begin(), kept[head].end(), p)) continue;
            open.push_back({host_score(layer, head, p), head, p});
        }
    }
    std::stable_sort(open.begin(), open.end(),
                     [](const entry& a, const entry& b) { return a.score > b.score; });
    for (std::size_t i = 0; i < std::min(places, open.size()); ++i) {
        kept[open[i].head].push_back(open[i].position);
    }
    for (std::vector<uint32_t>& head : kept) std::sort(head.begin(), head.end());
    return kept;
}

}  // namespace conformance
