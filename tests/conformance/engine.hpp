// A small host of the library, as an engine would be written: it knows kvrt.h and nothing else.
// Keys, values and queries are numbers drawn from (stream, position, layer, head, dimension), so
// that any pool, batch or thread count can be given the same ones.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "kvrt/kvrt.h"

namespace conformance {

inline std::string last_error() {
    std::string text(512, '\0');
    text.resize(kv_last_error(text.data(), text.size()));
    return text;
}

inline void require_ok(kv_status status) {
    REQUIRE_MESSAGE(status == KV_OK, kv_status_name(status), ": ", last_error());
}

struct layer_shape {
    uint32_t query_heads = 4;
    uint32_t kv_heads = 2;
    uint32_t key_dim = 32;
    uint32_t value_dim = 40;
    uint32_t key_format = KV_FORMAT_F16;
    uint32_t value_format = KV_FORMAT_BF16;
    uint32_t storage_flags = 0;  // KV_STORAGE_*, of both
    uint32_t window = 0;
    uint32_t window_sinks = 0;
    float softcap = 0.0f;
    std::vector<float> sink_logits = {};
    std::vector<float> alibi_slopes = {};
    int32_t shared_layer = -1;       // -1: stores by itself
    bool lane_per_head = false;      // KV_LAYER_LANE_PER_HEAD
    int32_t outlier_head = -1;       // a query head with a channel far above the others
    std::vector<float> scales = {};  // static ones, of keys and of values
    std::vector<float> channel_means = {}, channel_scales = {};  // of keys, [kv_heads, key_dim]
    uint32_t demoted_key_format = 0, demoted_value_format = 0, demote_after = 0;
    uint32_t demoted_storage_flags = 0;
    bool cache_positions = false;  // KV_LAYER_CACHE_POSITIONS, or the owner's
};

struct pool_shape {
    std::vector<layer_shape> layers;
    uint32_t layout = KV_LAYOUT_NATIVE;
    uint32_t block_tokens = 16;
    uint32_t flags = 0;
    uint32_t slabs = 16;
    uint32_t threads = 1;
    const kv_hooks* hooks = nullptr;
    uint32_t max_tokens = 4096;
    uint32_t rope_style = KV_ROPE_HALF;
    uint32_t max_observed_sequences = 0;
    double rope_theta = 10000.0;
    const struct recorded_rows* recording = nullptr;  // in place of drawn numbers
};

/// Rows that a model made, by layer: [position][head][dim], of keys, values and queries.
struct recorded_rows {
    struct tensor {
        uint32_t heads = 0, dim = 0;
        std::vector<float> numbers;
    };
    std::vector<tensor> of[3];
};

/// A number in [-2, 2) that depends on all of its arguments.
inline float drawn(uint64_t stream, uint64_t position, uint64_t layer, uint64_t head, uint64_t dim,
                   uint64_t kind) {
    uint64_t x = stream * 0x9e3779b97f4a7c15u + position;
    for (const uint64_t part : {layer, head, dim, kind}) {
        x = (x ^ (x >> 29)) * 0xbf58476d1ce4e5b9u + part;
    }
    x = (x ^ (x >> 32)) * 0x94d049bb133111ebu;
    return static_cast<float>(static_cast<int64_t>(x >> 40) - (1 << 23)) / (1 << 22);
}

/// A number of a key (kind 0), value (1) or query (2): recorded where there is a recording.
inline float number_of(const pool_shape& shape, uint64_t stream, uint64_t position, uint64_t layer,
                       uint64_t head, uint64_t dim, uint64_t kind) {
    if (shape.recording == nullptr) return drawn(stream, position, layer, head, dim, kind);
    const recorded_rows::tensor& rows = shape.recording->of[kind][layer];
    return rows.numbers.at((position * rows.heads + head) * rows.dim + dim);
}

/// What one sequence contributes to a step.
struct part {
    kv_seq sequence = 0;
    uint64_t stream = 0;
    uint32_t rows = 0;
    uint64_t content_shift = 0;          // keys and values of position p are those of p + shift
    std::vector<uint64_t> content = {};  // or, row by row, those of these positions
};

class engine {
  public:
    explicit engine(const pool_shape& shape) : shape_(shape) {
        describe(shape, [&](const kv_pool_config& config, const kv_model& model) {
            require_ok(kv_pool_create(&config, &model, &pool_));
        });
    }
    ~engine() { kv_pool_release(pool_); }
    engine(const engine&) = delete;
    engine& operator=(const engine&) = delete;

    /// Calls body(config, model) with what makes a pool of this shape.
    template <class callable>
    static void describe(const pool_shape& shape, const callable& body) {
        std::vector<kv_layer> layers(shape.layers.size(), KV_INIT(kv_layer));
        std::vector<kv_storage> storages(shape.layers.size(), KV_INIT(kv_storage));
        std::vector<kv_storage> value_storages(shape.layers.size(), KV_INIT(kv_storage));
        std::vector<kv_storage> demoted_storages(shape.layers.size(), KV_INIT(kv_storage));
        kv_rope rope = KV_INIT(kv_rope);
        rope.style = shape.rope_style;
        rope.theta = shape.rope_theta;
        for (std::size_t i = 0; i < layers.size(); ++i) {
            const layer_shape& source = shape.layers[i];
            kv_layer& layer = layers[i];
            layer.query_heads = source.query_heads;
            layer.kv_heads = source.kv_heads;
            layer.key_dim = source.key_dim;
            layer.value_dim = source.value_dim;
            layer.key_format = source.key_format;
            layer.value_format = source.value_format;
            storages[i].flags = source.storage_flags;
            if (!source.scales.empty()) {
                storages[i].scales = source.scales.data();
                storages[i].scale_count = static_cast<uint32_t>(source.scales.size());
            }
            value_storages[i] = storages[i];
            if (!source.channel_means.empty()) {
                storages[i].flags = 0;
                storages[i].channel_means = source.channel_means.data();
                storages[i].channel_scales = source.channel_scales.data();
                storages[i].channel_heads = source.kv_heads;
                storages[i].channel_dim = source.key_dim;
            }
            layer.key_storage = &storages[i];
            layer.value_storage = &value_storages[i];
            layer.demoted_key_format = source.demoted_key_format;
            layer.demoted_value_format = source.demoted_value_format;
            layer.demote_after = source.demote_after;
            demoted_storages[i].flags = source.demoted_storage_flags;
            if (source.demoted_storage_flags != 0) {
                layer.demoted_key_storage = layer.demoted_value_storage = &demoted_storages[i];
            }
            if (source.lane_per_head) layer.flags = KV_LAYER_LANE_PER_HEAD;
            if (source.cache_positions) layer.flags |= KV_LAYER_CACHE_POSITIONS;
            if (source.shared_layer >= 0) {
                layer.flags = KV_LAYER_SHARED;
                layer.shared_layer = static_cast<uint32_t>(source.shared_layer);
            }
            layer.window = source.window;
            layer.window_sinks = source.window_sinks;
            layer.logit_softcap = source.softcap;
            layer.sink_logits = source.sink_logits.empty() ? nullptr : source.sink_logits.data();
            layer.alibi_slopes = source.alibi_slopes.empty() ? nullptr : source.alibi_slopes.data();
            layer.rope = &rope;
        }
        kv_model model = KV_INIT(kv_model);
        model.layers = layers.data();
        model.layer_count = static_cast<uint32_t>(layers.size());
        kv_pool_config config = KV_INIT(kv_pool_config);
        config.flags = shape.flags;
        config.arena_bytes = uint64_t{shape.slabs} << 21;
        config.layout = shape.layout;
        config.block_tokens = shape.block_tokens;
        config.max_sequences = 32;
        config.max_tokens_per_sequence = shape.max_tokens;
        config.max_step_tokens = shape.max_tokens;
        config.threads = shape.threads;
        config.hooks = shape.hooks;
        config.max_observed_sequences = shape.max_observed_sequences;
        body(config, model);
    }

    kv_pool* pool() const { return pool_; }
    const pool_shape& shape() const { return shape_; }

    kv_seq create(const kv_policy* policy = nullptr, bool gathers = false) {
        kv_seq_config config = KV_INIT(kv_seq_config);
        config.policy = policy;
        config.flags = gathers ? uint32_t{KV_SEQ_GATHER_STATISTICS} : 0u;
        kv_seq sequence = 0;
        require_ok(kv_seq_create(pool_, &config, &sequence));
        return sequence;
    }

    /// Begins a step over the parts and reserves it.
    kv_step* begin(const std::vector<part>& parts) {
        parts_ = parts;
        first_positions_.clear();
        rows_ = 0;
        kv_step* step = nullptr;
        require_ok(kv_step_begin(pool_, &step));
        for (const part& p : parts) {
            kv_append_info info = KV_INIT(kv_append_info);
            require_ok(kv_seq_append(step, p.sequence, nullptr, p.rows, &info));
            first_positions_.push_back(info.first_position);
            rows_ += p.rows;
        }
        require_ok(kv_step_reserve(step, nullptr));
        return step;
    }

    /// Keys (or values) of all rows of the step for one layer, [rows][kv_heads][dim].
    std::vector<float> tensor(uint32_t layer, bool value) const {
        const layer_shape& s = shape_.layers[layer];
        const uint32_t dim = value ? s.value_dim : s.key_dim;
        std::vector<float> numbers;
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            for (uint32_t r = 0; r < parts_[i].rows; ++r) {
                const uint64_t content = parts_[i].content.empty()
                                             ? first_positions_[i] + r + parts_[i].content_shift
                                             : parts_[i].content[r];
                for (uint32_t head = 0; head < s.kv_heads; ++head) {
                    for (uint32_t d = 0; d < dim; ++d) {
                        numbers.push_back(
                            number_of(shape_, parts_[i].stream, content, layer, head, d, value));
                    }
                }
            }
        }
        return numbers;
    }

    std::vector<float> queries(uint32_t layer) const {
        const layer_shape& s = shape_.layers[layer];
        std::vector<float> numbers;
        for (std::size_t i = 0; i < parts_.size(); ++i) {
            for (uint32_t r = 0; r < parts_[i].rows; ++r) {
                for (uint32_t head = 0; head < s.query_heads; ++head) {
                    for (uint32_t d = 0; d < s.key_dim; ++d) {
                        const uint64_t p = first_positions_[i] + r + parts_[i].content_shift;
                        const bool outlier = static_cast<int32_t>(head) == s.outlier_head;
                        numbers.push_back(
                            number_of(shape_, parts_[i].stream, p, layer, head, d, 2) *
                            (outlier && d == 5 ? 1000.0f : 1.0f));
                    }
                }
            }
        }
        return numbers;
    }

    static kv_tensor view(std::vector<float>& data, uint64_t rows, uint64_t heads, uint64_t dim) {
        kv_tensor made = KV_INIT(kv_tensor);
        made.data = data.data();
        made.dtype = KV_DTYPE_F32;
        made.rows = rows;
        made.heads = heads;
        made.dim = dim;
        return made;
    }

    void write(kv_step* step, uint32_t layer) {
        const layer_shape& s = shape_.layers[layer];
        std::vector<float> keys = tensor(layer, false), values = tensor(layer, true);
        const kv_tensor k = view(keys, rows_, s.kv_heads, s.key_dim);
        const kv_tensor v = view(values, rows_, s.kv_heads, s.value_dim);
        require_ok(kv_write(step, layer, &k, &v));
    }

    /// [rows][query_heads][value_dim]; log-sum-exps behind, [rows][query_heads].
    std::vector<float> attend(kv_step* step, uint32_t layer, uint32_t flags = 0) {
        const layer_shape& s = shape_.layers[layer];
        std::vector<float> q = queries(layer);
        std::vector<float> out(std::size_t{rows_} * s.query_heads * s.value_dim, NAN);
        std::vector<float> logs(std::size_t{rows_} * s.query_heads, NAN);
        const kv_tensor in = view(q, rows_, s.query_heads, s.key_dim);
        const kv_tensor result = view(out, rows_, s.query_heads, s.value_dim);
        kv_attend_options options = KV_INIT(kv_attend_options);
        options.flags = flags;
        options.log_sum_exp = logs.data();
        require_ok(kv_attend(step, layer, &in, &result, &options));
        out.insert(out.end(), logs.begin(), logs.end());
        return out;
    }

    /// A whole step; returns what attention gave, layer by layer.
    std::vector<std::vector<float>> run(const std::vector<part>& parts) {
        kv_step* step = begin(parts);
        std::vector<std::vector<float>> results;
        for (uint32_t layer = 0; layer < shape_.layers.size(); ++layer) {
            if (shape_.layers[layer].shared_layer < 0) write(step, layer);
            results.push_back(attend(step, layer));
        }
        require_ok(kv_step_end(step, nullptr));
        return results;
    }

    std::vector<uint32_t> positions(kv_seq sequence, uint32_t layer, uint32_t head) const {
        std::vector<uint32_t> found(shape_.max_tokens);
        uint64_t count = 0;
        require_ok(
            kv_seq_get_positions(pool_, sequence, layer, head, found.size(), found.data(), &count));
        found.resize(count);
        return found;
    }

    /// What a sequence's scorer has observed, or was given; empty where that is nothing.
    std::vector<float> scores(kv_seq sequence, uint32_t layer, uint32_t head) const {
        std::vector<float> found(shape_.max_tokens);
        uint64_t count = 0;
        require_ok(
            kv_seq_get_scores(pool_, sequence, layer, head, found.size(), found.data(), &count));
        found.resize(count);
        return found;
    }

    kv_pool_stats stats() const {
        kv_pool_stats found = KV_INIT(kv_pool_stats);
        require_ok(kv_pool_get_stats(pool_, &found));
        return found;
    }

    kv_seq_info info(kv_seq sequence) const {
        kv_seq_info found = KV_INIT(kv_seq_info);
        require_ok(kv_seq_get_info(pool_, sequence, &found));
        return found;
    }

    uint32_t rows() const { return rows_; }
    const std::vector<part>& parts() const { return parts_; }
    const std::vector<uint64_t>& first_positions() const { return first_positions_; }

  private:
    pool_shape shape_;
    kv_pool* pool_ = nullptr;
    std::vector<part> parts_;
    std::vector<uint64_t> first_positions_;
    uint32_t rows_ = 0;
};

/// Attention, where it is observed, is in every step, as the methods' authors do.
inline kv_policy policy_of(uint32_t scorer, uint32_t budget) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = scorer;
    policy.budget = budget;
    const bool observes = (scorer >= KV_SCORER_H2O && scorer <= KV_SCORER_VASE_ATTENTION) ||
                          scorer == KV_SCORER_BLEND;
    policy.observe_every = observes ? 1 : 0;
    return policy;
}

}  // namespace conformance
