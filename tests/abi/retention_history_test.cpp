// What rounds did, by layer and head: it adds up to the reports of the rounds, goes with a fork and
// not with a handle that is used again; what was lost of the attention is that of a formula.
#include "abi/world.hpp"

using namespace abi;

namespace {

/// Three layers: lanes per head, heads together, and one that shares the second's cache.
struct history_world {
    kv_pool* pool = nullptr;

    explicit history_world(kv_pool_config config = small_config()) {
        kv_layer layers[3];
        for (kv_layer& layer : layers) {
            layer = KV_INIT(kv_layer);
            layer.query_heads = query_heads;
            layer.kv_heads = kv_heads;
            layer.key_dim = key_dim;
            layer.value_dim = value_dim;
        }
        layers[0].flags = KV_LAYER_LANE_PER_HEAD;
        layers[2].flags = KV_LAYER_SHARED;
        layers[2].shared_layer = 1;
        kv_model model = KV_INIT(kv_model);
        model.layers = layers;
        model.layer_count = 3;
        config.max_observed_sequences = 2;
        REQUIRE(kv_pool_create(&config, &model, &pool) == KV_OK);
    }
    history_world(const history_world&) = delete;
    history_world& operator=(const history_world&) = delete;
    ~history_world() { kv_pool_release(pool); }

    kv_seq create(const kv_policy* policy = nullptr) const {
        kv_seq_config config = KV_INIT(kv_seq_config);
        config.policy = policy;
        kv_seq seq = 0;
        REQUIRE(kv_seq_create(pool, &config, &seq) == KV_OK);
        return seq;
    }

    /// All keys and queries alike: each token gives every one before it, and itself, the same.
    kv_step_report go(kv_seq seq, uint32_t rows) const {
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(pool, &step) == KV_OK);
        REQUIRE(kv_seq_append(step, seq, nullptr, rows, nullptr) == KV_OK);
        REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
        const tensors t(rows);
        for (const uint32_t layer : {0u, 1u, 2u}) {
            if (layer != 2) REQUIRE(kv_write(step, layer, &t.keys, &t.values) == KV_OK);
            REQUIRE(kv_attend(step, layer, &t.queries, &t.out, nullptr) == KV_OK);
        }
        kv_step_report report = KV_INIT(kv_step_report);
        REQUIRE(kv_step_end(step, &report) == KV_OK);
        return report;
    }

    /// As if the host's own kernels wrote.
    void fill(kv_seq seq, uint32_t rows) const {
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(pool, &step) == KV_OK);
        REQUIRE(kv_seq_append(step, seq, nullptr, rows, nullptr) == KV_OK);
        REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
        kv_tables tables = KV_INIT(kv_tables);
        REQUIRE(kv_step_export(step, 1, &tables) == KV_OK);
        for (tables.kv_head = 0; tables.kv_head < kv_heads; ++tables.kv_head) {
            REQUIRE(kv_step_export(step, 0, &tables) == KV_OK);
        }
        REQUIRE(kv_step_end(step, nullptr) == KV_OK);
    }

    kv_compress_report compress(kv_seq seq, const kv_policy& policy) const {
        kv_compress_options options = KV_INIT(kv_compress_options);
        options.policy = &policy;
        kv_compress_report report = KV_INIT(kv_compress_report);
        REQUIRE(kv_compress(pool, seq, &options, &report) == KV_OK);
        return report;
    }

    kv_retention_info of(kv_seq seq, uint32_t layer, uint32_t head) const {
        kv_retention_info info = KV_INIT(kv_retention_info);
        info.layer = layer;
        info.kv_head = head;
        REQUIRE(kv_seq_get_retention(pool, seq, &info) == KV_OK);
        return info;
    }

    kv_seq_info info(kv_seq seq) const {
        kv_seq_info result = KV_INIT(kv_seq_info);
        REQUIRE(kv_seq_get_info(pool, seq, &result) == KV_OK);
        return result;
    }

    uint64_t tokens_removed(kv_seq seq) const {
        uint64_t sum = 0;
        for (const uint32_t layer : {0u, 1u}) {
            for (const uint32_t head : {0u, 1u}) sum += of(seq, layer, head).tokens_removed;
        }
        return sum;
    }

    /// By lane: two of layer 0, one of layer 1.
    uint64_t blocks_returned(kv_seq seq) const {
        return of(seq, 0, 0).blocks_returned + of(seq, 0, 1).blocks_returned +
               of(seq, 1, 0).blocks_returned;
    }
};

kv_policy make_policy(uint32_t scorer, uint32_t budget) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = scorer;
    policy.budget = budget;
    policy.recent = 4;
    policy.seed = 7;
    return policy;
}

TEST_CASE("what rounds did to layers and heads adds up to their reports") {
    const history_world world;
    const kv_seq seq = world.create();
    world.go(seq, 120);
    uint64_t removed = 0, returned = 0, rounds = 0, rounds_of_first = 0;
    for (const uint32_t budget : {100u, 70u, 69u, 33u, 33u}) {
        kv_policy policy = make_policy(KV_SCORER_RANDOM, budget);
        policy.skip_layers = budget == 70 ? 1 : 0;
        const kv_compress_report report = world.compress(seq, policy);
        removed += report.tokens_before - report.tokens_after;
        returned += report.blocks_returned;
        const bool done = report.outcome == KV_COMPRESS_DONE;
        rounds += done ? 1 : 0;
        rounds_of_first += done && policy.skip_layers == 0 ? 1 : 0;
        CHECK(world.tokens_removed(seq) == removed);
        CHECK(world.blocks_returned(seq) == returned);
        CHECK(world.info(seq).compactions == rounds);
        CHECK(world.info(seq).last_outcome == report.outcome);
        CHECK(world.of(seq, 0, 1).rounds == rounds_of_first);
        CHECK(world.of(seq, 1, 1).rounds == rounds);
        CHECK(report.lost_attention == 0.0);  // nobody observed
    }
    CHECK(rounds == 4);  // the last had nothing to do
    CHECK(removed == 4 * (120 - 33));
    CHECK(returned == 3 * 8 - 3 * 3);
    CHECK(world.info(seq).rounds_skipped == 0);  // none was due by itself
    // A layer that shares another's cache shows its owner's.
    CHECK(world.of(seq, 2, 1).tokens_removed == world.of(seq, 1, 1).tokens_removed);
    CHECK(world.of(seq, 2, 1).rounds == rounds);
}

TEST_CASE("rounds at step ends and skipped ones are counted") {
    const history_world world;
    kv_policy policy = make_policy(KV_SCORER_STREAMING, 32);
    policy.every = 20;
    const kv_seq seq = world.create(&policy);
    CHECK(world.info(seq).last_outcome == 0);
    CHECK(world.go(seq, 30).compactions_skipped == 0);  // due, but for the budget
    CHECK(world.go(seq, 30).compactions == 1);
    CHECK(world.info(seq).compactions == 1);
    CHECK(world.of(seq, 0, 0).tokens_removed == 28);
    CHECK(world.go(seq, 30).compactions == 1);
    CHECK(world.of(seq, 0, 0).tokens_removed == 58);
    CHECK(world.of(seq, 0, 0).rounds == 2);

    policy.scorer = KV_SCORER_HOST;  // who never says anything
    REQUIRE(kv_seq_set_policy(world.pool, seq, &policy) == KV_OK);
    const kv_step_report report = world.go(seq, 30);
    CHECK(report.compactions == 0);
    CHECK(report.compactions_skipped == 1);
    CHECK(report.last_skip_outcome == KV_COMPRESS_NO_OBSERVATIONS);
    CHECK(report.last_skip_status == KV_OK);
    CHECK(world.info(seq).rounds_skipped == 1);
    CHECK(world.info(seq).last_outcome == KV_COMPRESS_NO_OBSERVATIONS);
    CHECK(world.info(seq).last_failure == KV_OK);
    CHECK(world.info(seq).compactions == 2);
    CHECK(world.of(seq, 0, 0).rounds == 2);
}

TEST_CASE("a round without blocks for its copies says AGAIN, and runs when there are some") {
    kv_pool_config config = small_config();
    config.max_tokens_per_sequence = config.max_step_tokens = 8192;
    const history_world world(config);
    const kv_seq seq = world.create();
    world.go(seq, 100);
    kv_policy policy = make_policy(KV_SCORER_RANDOM, 32);
    policy.every = 104;
    REQUIRE(kv_seq_set_policy(world.pool, seq, &policy) == KV_OK);
    kv_step* step = nullptr;
    REQUIRE(kv_step_begin(world.pool, &step) == KV_OK);
    REQUIRE(kv_seq_append(step, seq, nullptr, 4, nullptr) == KV_OK);
    REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    // A child reads all blocks of the first 100 tokens, and another sequence takes what is free: of
    // a slab with 341 blocks of layer 1, and one with 682 of layer 0's heads.
    kv_seq child = 0;
    REQUIRE(kv_seq_fork(world.pool, seq, 1, &child) == KV_OK);
    const kv_seq other = world.create();
    world.fill(other, (341 - 7) * 16);
    const tensors t(4);
    REQUIRE(kv_write(step, 0, &t.keys, &t.values) == KV_OK);
    REQUIRE(kv_write(step, 1, &t.keys, &t.values) == KV_OK);
    kv_step_report report = KV_INIT(kv_step_report);
    REQUIRE(kv_step_end(step, &report) == KV_OK);
    CHECK(report.compactions == 0);
    CHECK(report.compactions_skipped == 1);
    CHECK(report.last_skip_status == KV_AGAIN);
    CHECK(report.last_skip_outcome == 0);
    CHECK(world.info(seq).last_failure == KV_AGAIN);
    CHECK(world.info(seq).last_outcome == 0);
    CHECK(world.info(seq).rounds_skipped == 1);
    CHECK(world.tokens_removed(seq) == 0);

    REQUIRE(kv_seq_release(world.pool, other) == KV_OK);
    report = world.go(seq, 4);
    CHECK(report.compactions == 1);
    CHECK(report.last_skip_outcome == 0);
    CHECK(report.last_skip_status == KV_OK);
    CHECK(world.info(seq).last_failure == KV_OK);
    CHECK(world.info(seq).last_outcome == KV_COMPRESS_DONE);
    CHECK(world.tokens_removed(seq) == 4 * (108 - 32));
    CHECK(world.tokens_removed(child) == 0);
}

TEST_CASE("a fork has its parent's history, and goes on by itself; a new sequence has none") {
    const history_world world;
    const kv_policy policy = make_policy(KV_SCORER_H2O, 60);
    const kv_seq parent = world.create(&policy);
    world.go(parent, 100);
    world.compress(parent, policy);
    kv_seq child = 0;
    REQUIRE(kv_seq_fork(world.pool, parent, 1, &child) == KV_OK);
    for (const uint32_t layer : {0u, 1u, 2u}) {
        for (const uint32_t head : {0u, 1u}) {
            const kv_retention_info ours = world.of(parent, layer, head);
            const kv_retention_info theirs = world.of(child, layer, head);
            CHECK(ours.rounds == 1);
            CHECK(ours.tokens_removed == 40);
            CHECK(ours.lost_attention > 0.0);
            CHECK(std::memcmp(&ours, &theirs, sizeof ours) == 0);
        }
    }
    CHECK(world.info(child).compactions == 1);
    CHECK(world.info(child).last_outcome == KV_COMPRESS_DONE);

    const kv_compress_report report = world.compress(child, make_policy(KV_SCORER_H2O, 20));
    CHECK(report.outcome == KV_COMPRESS_DONE);
    CHECK(world.of(child, 1, 0).tokens_removed == 80);
    CHECK(world.of(parent, 1, 0).tokens_removed == 40);
    CHECK(world.info(child).compactions == 2);
    CHECK(world.info(parent).compactions == 1);

    // Places are used again, with other handles.
    REQUIRE(kv_seq_release(world.pool, child) == KV_OK);
    REQUIRE(kv_seq_release(world.pool, parent) == KV_OK);
    for (uint32_t i = 0; i < 8; ++i) {
        const kv_seq fresh = world.create();
        CHECK(world.of(fresh, 1, 1).rounds == 0);
        CHECK(world.of(fresh, 1, 1).tokens_removed == 0);
        CHECK(world.of(fresh, 1, 1).blocks_returned == 0);
        CHECK(world.of(fresh, 1, 1).lost_attention_sum == 0.0);
        CHECK(world.info(fresh).compactions == 0);
        CHECK(world.info(fresh).last_outcome == 0);
    }
}

TEST_CASE("what a round lost of the attention is that of the harmonic sums") {
    // Token t gives each of positions 0 to t a share of 1 / (t + 1) in each of a head's two query
    // heads, so that position p got 2 (H(n) - H(p)) in all: the oldest have most, and stay.
    const history_world world;
    const kv_policy policy = make_policy(KV_SCORER_H2O, 60);
    const kv_seq seq = world.create(&policy);
    world.go(seq, 100);
    const auto got = [](uint32_t position) {
        double sum = 0.0;
        for (uint32_t t = position; t < 100; ++t) sum += 2.0 / (t + 1);
        return sum;
    };
    for (const uint32_t layer : {0u, 1u}) {
        float scores[100] = {};
        uint64_t count = 0;
        REQUIRE(kv_seq_get_scores(world.pool, seq, layer, 1, 100, scores, &count) == KV_OK);
        CHECK(count == 100);
        const double readers = layer + 1;  // layer 2 reads layer 1's cache, too
        for (uint32_t p = 0; p < 100; ++p) {
            CHECK(double{scores[p]} == doctest::Approx(readers * got(p)).epsilon(1e-4));
        }
    }
    // The first 56 stay, and the last 4; then the first 36 of those, and the last 4.
    const auto sum_of = [&](uint32_t first, uint32_t end) {
        double sum = 0.0;
        for (uint32_t p = first; p < end; ++p) sum += got(p);
        return sum;
    };
    const double first = sum_of(56, 96) / sum_of(0, 100);
    kv_compress_report report = world.compress(seq, policy);
    CHECK(report.lost_attention == doctest::Approx(first).epsilon(1e-4));
    CHECK(world.of(seq, 0, 1).lost_attention == doctest::Approx(first).epsilon(1e-4));
    const double second = sum_of(36, 56) / (sum_of(0, 56) + sum_of(96, 100));
    kv_policy less = make_policy(KV_SCORER_H2O, 40);
    report = world.compress(seq, less);
    CHECK(report.lost_attention == doctest::Approx(second).epsilon(1e-4));
    const kv_retention_info info = world.of(seq, 1, 0);
    CHECK(info.lost_attention == doctest::Approx(second).epsilon(1e-4));
    CHECK(info.lost_attention_sum == doctest::Approx(first + second).epsilon(1e-4));
}

}  // namespace
