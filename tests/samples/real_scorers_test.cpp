// Scorers against their published formulas in double, on the keys, values and queries of a real
// model: an early, a middle and its last layer, whose channels differ far more than drawn ones do.
#include <doctest/doctest.h>

#include "conformance/draws.hpp"
#include "dense_cache.hpp"
#include "real_model.hpp"

using namespace conformance;

namespace {

constexpr uint32_t tokens_recorded = 302;
constexpr uint64_t everything = std::numeric_limits<uint64_t>::max();

const char* const text =
    "The lighthouse at the end of the bay had been dark for eleven years when Martha bought it. "
    "She was not a sailor, and she had no love of storms; what she wanted was a room with a table, "
    "a window on each side, and nobody to ask what she was writing. The agent, a thin man called "
    "Mr. Pell, told her three times that the stairs were steep and that the water came from a "
    "cistern. \"In winter,\" he said, \"you will be alone here.\" Martha counted the steps on her "
    "way up: there were 143, and on the 90th someone had scratched a date, 4 March 1911, and two "
    "letters. She asked who they had been. \"A keeper and his wife,\" said Mr. Pell, \"or a keeper "
    "and his dog. Nobody remembers.\" The lamp room smelled of oil and salt. Four of its panes "
    "were "
    "cracked, the great lens was covered with a sheet, and under the sheet, when she lifted it, "
    "the "
    "glass threw the afternoon in bright bars over the floor. She paid what he asked. In the first "
    "week she cleaned the windows, carried up eleven boxes of books, and learned that the cistern "
    "held less than it should. In the second week a letter came, addressed to the keeper of the "
    "light, with a stamp that had not been sold for thirty years. She laid it on the table and "
    "looked at it for a whole evening before she opened it. It held one sheet, and on the sheet "
    "one line: \"If the lamp is lit again, we shall come home.\" Martha read it twice. Then she "
    "took her coat, went down the 143 steps and walked to the village to buy oil, and matches, and "
    "a new wick for the lamp.";

/// Runs the model once and keeps the rows of some layers.
class recording_cache : public generate::attention_cache {
  public:
    recorded_rows rows;

    explicit recording_cache(const generate::llama_config& config)
        : cache_(config), config_(config), layers_{1, config.layers / 2, config.layers - 1} {
        for (auto& kind : rows.of) kind.resize(layers_.size());
    }
    generate::outcome<generate::nothing> attend(std::uint32_t layer,
                                                const generate::attention_rows& given) override {
        for (std::size_t i = 0; i < layers_.size(); ++i) {
            if (layers_[i] != layer) continue;
            keep(rows.of[0][i], given.keys, config_.kv_heads, given);
            keep(rows.of[1][i], given.values, config_.kv_heads, given);
            keep(rows.of[2][i], given.queries, config_.query_heads, given);
        }
        return cache_.attend(layer, given);
    }

  private:
    void keep(recorded_rows::tensor& into, const float* from, uint32_t heads,
              const generate::attention_rows& given) const {
        into.heads = heads;
        into.dim = config_.head_dim;
        for (std::size_t row = 0; row < given.rows; ++row) {
            const float* first = from + row * given.row_stride;
            into.numbers.insert(into.numbers.end(), first, first + heads * config_.head_dim);
        }
    }

    dense_cache cache_;
    const generate::llama_config& config_;
    std::vector<uint32_t> layers_;
};

const recorded_rows& recording() {
    static const recorded_rows made = [] {
        const real_engine& real = real_model();
        std::vector<generate::token_id> tokens =
            real.words.encode(text, generate::special_tokens::as_text);
        REQUIRE(tokens.size() >= tokens_recorded);
        tokens.resize(tokens_recorded);
        std::vector<uint32_t> positions(tokens.size());
        for (uint32_t i = 0; i < positions.size(); ++i) positions[i] = i;
        recording_cache cache(real.model.config);
        generate::forward_pass pass(real.model, tokens.size());
        const uint32_t last = tokens_recorded - 1;
        std::vector<float> logits(real.model.config.vocabulary);
        REQUIRE(pass.run({tokens, positions, {&last, 1}}, cache, logits));
        return std::move(cache.rows);
    }();
    return made;
}

pool_shape real_shape() {
    const generate::llama_config& config = real_model().model.config;
    layer_shape layer;
    layer.query_heads = config.query_heads;
    layer.kv_heads = config.kv_heads;
    layer.key_dim = layer.value_dim = config.head_dim;
    layer.key_format = layer.value_format = KV_FORMAT_F32;
    REQUIRE(2 * config.inverse_frequencies.size() == config.head_dim);
    pool_shape shape;
    shape.layers = {layer, layer, layer};
    shape.max_tokens = 512;
    shape.max_observed_sequences = 2;
    shape.rope_style = KV_ROPE_INTERLEAVED;
    shape.rope_theta = std::pow(config.inverse_frequencies[1], -0.5 * config.head_dim);
    shape.recording = &recording();
    return shape;
}

kv_policy real_policy(uint32_t scorer, uint32_t budget) {
    kv_policy policy = policy_of(scorer, budget);
    policy.recent = 8;
    policy.sinks = 4;
    return policy;
}

struct real_case {
    const char* name;
    uint32_t scorer, selection;
    counted_rows rule;
    uint32_t window = 0, flags = 0;
};

}  // namespace

TEST_CASE("scorers on a real model: what is observed, and what stays by it") {
    const real_case cases[] = {
        {"H2O", KV_SCORER_H2O, KV_SELECT_PER_LAYER_PER_HEAD, {}},
        {"Scissorhands",
         KV_SCORER_SCISSORHANDS,
         KV_SELECT_PER_LAYER_PER_HEAD,
         {1000, 1.0, true},
         1000},
        {"TOVA", KV_SCORER_TOVA, KV_SELECT_PER_LAYER, {1}},
        {"SnapKV", KV_SCORER_SNAPKV, KV_SELECT_PER_LAYER_PER_HEAD, {500}, 500},
        {"R-KV", KV_SCORER_RKV, KV_SELECT_PER_LAYER_PER_HEAD, {500}, 500},
        {"R-KV, exact",
         KV_SCORER_RKV,
         KV_SELECT_PER_LAYER_PER_HEAD,
         {500},
         500,
         KV_POLICY_EXACT_REDUNDANCY},
        {"BLEND",
         KV_SCORER_BLEND,
         KV_SELECT_PER_LAYER_PER_HEAD,
         {everything, double{0.97f}},
         0,
         KV_POLICY_STATISTICS_ONLINE},
    };
    for (const real_case& c : cases) {
        CAPTURE(c.name);
        engine host(real_shape());
        kv_policy policy = real_policy(c.scorer, 40);
        policy.window = c.window;
        if (c.scorer == KV_SCORER_RKV) {
            // Real keys are alike: so that redundancy decides, and not the newest row alone is
            // spared.
            policy.redundancy = 0.98f;
            if ((c.flags & KV_POLICY_EXACT_REDUNDANCY) != 0) policy.similarity = 0.9f;
        }
        policy.flags = c.flags;
        tracker t(host, host.create(&policy), 1);
        t.step(64);
        for (int i = 0; i < 3; ++i) t.step(1);
        t.step(4, 2);
        check_observed(t, c.rule);
        check_round(t, policy, c.selection, c.rule);
        t.step(3);
        check_observed(t, c.rule);
    }
}

TEST_CASE("scorers on a real model: by content and by what is expected") {
    for (const uint32_t scorer : {KV_SCORER_TRIATTENTION, KV_SCORER_KEYDIFF, KV_SCORER_KEY_NORM,
                                  KV_SCORER_LAGKV, KV_SCORER_EXPECTED_ATTENTION}) {
        CAPTURE(scorer);
        engine host(real_shape());
        kv_policy policy = real_policy(scorer, scorer == KV_SCORER_LAGKV ? 230 : 40);
        const bool expects =
            scorer == KV_SCORER_TRIATTENTION || scorer == KV_SCORER_EXPECTED_ATTENTION;
        policy.flags = expects ? uint32_t{KV_POLICY_STATISTICS_ONLINE} : 0u;
        tracker t(host, host.create(&policy), 1);
        t.step(scorer == KV_SCORER_LAGKV ? 300 : 100);
        t.step(1);
        check_round(t, policy, KV_SELECT_PER_LAYER_PER_HEAD, {});
    }
}

TEST_CASE("scorers on a real model: what VaSE draws, by attention and by sketches") {
    engine host(real_shape());
    check_vase_attention(host, 1, 1);
    check_vase_sketch(host, 2, 0);
}
