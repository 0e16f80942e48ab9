// Wrong input in policies, and in scores that the host gives.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "abi/hostile_sequence.hpp"

using namespace abi;

namespace {

TEST_CASE("kv_seq_set_policy") {
    const populated w;
    const kv_policy good = good_policy();
    REFUSES(target{}, KV_INVALID, "pool", kv_seq_set_policy(nullptr, w.full, &good));
    w.refuses_handles([&](kv_seq seq) { return kv_seq_set_policy(w.pool, seq, &good); });
    refuses_wrong_headers(w.attacked, "policy", good, [&](const kv_policy* wrong) {
        return kv_seq_set_policy(w.pool, w.full, wrong);
    });
    struct attack {
        kv_status expected;
        const char* word;
        void (*change)(kv_policy&);
    };
    using p = kv_policy;
    const attack attacks[] = {
        {KV_UNSUPPORTED, "scorer", [](p& o) { o.scorer = KV_SCORER_NONE; }},
        {KV_UNSUPPORTED, "scorer", [](p& o) { o.scorer = KV_SCORER_BLEND + 1; }},
        {KV_UNSUPPORTED, "scorer", [](p& o) { o.scorer = UINT32_MAX; }},
        {KV_UNSUPPORTED, "selection", [](p& o) { o.selection = KV_SELECT_PER_LAYER + 1; }},
        {KV_UNSUPPORTED, "selection", [](p& o) { o.selection = UINT32_MAX; }},
        {KV_INVALID, "budget", [](p& o) { o.budget = 0; }},
        {KV_INVALID, "skip_layers", [](p& o) { o.skip_layers = UINT32_MAX; }},
        {KV_INVALID, "offset_max", [](p& o) { o.offset_max = 3; }},
        {KV_INVALID, "offset_max", [](p& o) { o.offset_max = UINT32_MAX; }},
        {KV_INVALID, "prompt_tokens", [](p& o) { o.flags = KV_POLICY_PROTECT_PROMPT; }},
        {KV_INVALID, "prompt_tokens", [](p& o) { o.flags = KV_POLICY_AT_PROMPT_END; }},
        {KV_INVALID, "PROTECT_PROMPT", [](p& o) { o.flags = KV_POLICY_PROMPT_ON_TOP; }},
        {KV_UNSUPPORTED, "flags", [](p& o) { o.flags = KV_POLICY_AT_PROMPT_END << 1; }},
        {KV_UNSUPPORTED, "reserved0", [](p& o) { o.reserved0 = 1; }},
        {KV_UNSUPPORTED, "reserved1", [](p& o) { o.reserved1 = 1; }},
        {KV_UNSUPPORTED, "allocator", [](p& o) { o.allocator = KV_ALLOCATE_THRESHOLD + 1; }},
        {KV_UNSUPPORTED, "allocator", [](p& o) { o.allocator = UINT32_MAX; }},
        {KV_UNSUPPORTED, "LANE_PER_HEAD", [](p& o) { o.allocator = KV_ALLOCATE_ADAPTIVE; }},
        {KV_INVALID, "one set",
         [](p& o) {
             o.allocator = KV_ALLOCATE_ADAPTIVE;
             o.selection = KV_SELECT_PER_LAYER;
         }},
        {KV_INVALID, "this scorer has them by default",
         [](p& o) {
             o.allocator = KV_ALLOCATE_ADAPTIVE;
             o.scorer = KV_SCORER_TOVA;
             o.selection = KV_SELECT_DEFAULT;
         }},
        {KV_INVALID, "one set",
         [](p& o) {
             o.allocator = KV_ALLOCATE_PYRAMID;
             o.selection = KV_SELECT_UNION;
         }},
        {KV_INVALID, "one set",
         [](p& o) {
             o.allocator = KV_ALLOCATE_THRESHOLD;
             o.selection = KV_SELECT_PER_HEAD;
         }},
        {KV_INVALID, "steepness",
         [](p& o) {
             o.allocator = KV_ALLOCATE_PYRAMID;
             o.steepness = 4097;
         }},
        {KV_INVALID, "threshold",
         [](p& o) {
             o.allocator = KV_ALLOCATE_THRESHOLD;
             o.threshold = NAN;
         }},
        {KV_INVALID, "SAMPLE",
         [](p& o) {
             o.scorer = KV_SCORER_VASE_SKETCH;
             o.flags = KV_POLICY_SAMPLE;
             o.allocator = KV_ALLOCATE_THRESHOLD;
         }},
        {KV_INVALID, "VASE_ATTENTION",
         [](p& o) {
             o.scorer = KV_SCORER_VASE_ATTENTION;
             o.allocator = KV_ALLOCATE_THRESHOLD;
         }},
        {KV_INVALID, "SAMPLE", [](p& o) { o.flags = KV_POLICY_SAMPLE; }},
        {KV_INVALID, "SAMPLE",
         [](p& o) {
             o.flags = KV_POLICY_SAMPLE;
             o.scorer = KV_SCORER_RKV;
         }},
        {KV_INVALID, "pool_width", [](p& o) { o.pool_width = 4; }},
        {KV_INVALID, "pool_width", [](p& o) { o.pool_width = 129; }},
        {KV_INVALID, "pool_width", [](p& o) { o.pool_width = UINT32_MAX; }},
        {KV_INVALID, "decay", [](p& o) { o.decay = NAN; }},
        {KV_INVALID, "decay", [](p& o) { o.decay = 1.0001f; }},
        {KV_INVALID, "decay", [](p& o) { o.decay = -0.5f; }},
        {KV_INVALID, "redundancy", [](p& o) { o.redundancy = NAN; }},
        {KV_INVALID, "redundancy", [](p& o) { o.redundancy = INFINITY; }},
        {KV_INVALID, "similarity", [](p& o) { o.similarity = -NAN; }},
        {KV_INVALID, "similarity", [](p& o) { o.similarity = 1e30f; }},
        {KV_INVALID, "floor_share", [](p& o) { o.floor_share = NAN; }},
        {KV_INVALID, "prior_share", [](p& o) { o.prior_share = NAN; }},
        {KV_INVALID, "prior_share", [](p& o) { o.prior_share = 1.5f; }},
        {KV_INVALID, "floor_share", [](p& o) { o.floor_share = -1e-9f; }},
        {KV_INVALID, "segments", [](p& o) { o.segments = 8; }},
        {KV_INVALID, "segment_quota",
         [](p& o) {
             o.segments = 8;
             o.prompt_tokens = 16;
         }},
        {KV_INVALID, "segment_quota", [](p& o) { o.segment_quota = 8; }},
        {KV_INVALID, "segments",
         [](p& o) {
             o.segments = 4097;
             o.prompt_tokens = 10;
         }},
        {KV_INVALID, "segments",
         [](p& o) {
             o.segments = UINT32_MAX;
             o.prompt_tokens = UINT32_MAX;
         }},
    };
    for (const attack& a : attacks) {
        CAPTURE(a.word);
        kv_policy wrong = good;
        a.change(wrong);
        REFUSES(w.attacked, a.expected, a.word, kv_seq_set_policy(w.pool, w.full, &wrong));
        kv_seq_config config = KV_INIT(kv_seq_config);
        config.policy = &wrong;
        kv_seq seq = 0;
        REFUSES(w.attacked, a.expected, a.word, kv_seq_create(w.pool, &config, &seq));
        kv_compress_options options = KV_INIT(kv_compress_options);
        options.policy = &wrong;
        REFUSES(w.attacked, a.expected, a.word, kv_compress(w.pool, w.full, &options, nullptr));
    }
    ACCEPTS(kv_seq_set_policy(w.pool, w.full, &good));
    ACCEPTS(kv_seq_set_policy(w.pool, w.full, nullptr));
}

/// A pool in which two sequences may be observed.
kv_pool_config observing_config() {
    kv_pool_config config = small_config();
    config.max_observed_sequences = 2;
    return config;
}

TEST_CASE("policies that need observations, and pools that have no place for them") {
    const populated none;
    kv_policy policy = good_policy();
    for (const uint32_t scorer :
         {KV_SCORER_H2O, KV_SCORER_SCISSORHANDS, KV_SCORER_TOVA, KV_SCORER_SNAPKV, KV_SCORER_RKV,
          KV_SCORER_VASE_ATTENTION, KV_SCORER_HOST, KV_SCORER_BLEND}) {
        policy.scorer = scorer;
        REFUSES(none.attacked, KV_LIMIT, "max_observed_sequences",
                kv_seq_set_policy(none.pool, none.full, &policy));
        kv_seq_config config = KV_INIT(kv_seq_config);
        config.policy = &policy;
        kv_seq seq = 0;
        REFUSES(none.attacked, KV_LIMIT, "max_observed_sequences",
                kv_seq_create(none.pool, &config, &seq));
        // A round may ask for what nobody has observed.
        kv_compress_options options = KV_INIT(kv_compress_options);
        kv_compress_report report = KV_INIT(kv_compress_report);
        options.policy = &policy;
        ACCEPTS(kv_compress(none.pool, none.full, &options, &report));
        CHECK(report.outcome == KV_COMPRESS_NO_OBSERVATIONS);
    }
    const populated w(observing_config());
    ACCEPTS(kv_seq_set_policy(w.pool, w.full, &policy));
    kv_seq children[2] = {9, 9};
    REFUSES(w.attacked, KV_LIMIT, "max_observed_sequences",
            kv_seq_fork(w.pool, w.full, 2, children));
    CHECK(children[0] == 9);
    ACCEPTS(kv_seq_fork(w.pool, w.full, 1, children));
    REFUSES(w.attacked, KV_LIMIT, "max_observed_sequences",
            kv_seq_set_policy(w.pool, w.empty, &policy));
}

TEST_CASE("a policy for a model that has no layer for it is refused, not left idle") {
    small_model model;
    model.layers[0].window = model.layers[2].window = 64;
    const kv_model description = model.describe();
    const kv_pool_config pool_config = observing_config();
    kv_pool* pool = nullptr;
    ACCEPTS(kv_pool_create(&pool_config, &description, &pool));
    kv_seq seq = 0;
    ACCEPTS(kv_seq_create(pool, nullptr, &seq));
    const target attacked{pool, {seq}};
    const kv_policy policy = good_policy();
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    REFUSES(attacked, KV_INVALID, "window", kv_seq_set_policy(pool, seq, &policy));
    REFUSES(attacked, KV_INVALID, "window", kv_compress(pool, seq, &options, nullptr));
    kv_policy_footprint taken = KV_INIT(kv_policy_footprint);
    REFUSES(attacked, KV_INVALID, "window", kv_pool_policy_footprint(pool, &policy, &taken));
    kv_pool_release(pool);
}

TEST_CASE("scorers that place keys in the text, and layers that rotate by places in the cache") {
    small_model model;
    model.layers[0].flags = KV_LAYER_CACHE_POSITIONS;
    const kv_model description = model.describe();
    const kv_pool_config pool_config = observing_config();
    kv_pool* pool = nullptr;
    ACCEPTS(kv_pool_create(&pool_config, &description, &pool));
    kv_seq seq = 0;
    ACCEPTS(kv_seq_create(pool, nullptr, &seq));
    const target attacked{pool, {seq}};
    kv_policy policy = good_policy();
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    for (uint32_t scorer = KV_SCORER_TRIATTENTION; scorer <= KV_SCORER_BLEND; ++scorer) {
        policy.scorer = scorer;
        if (scorer == KV_SCORER_TRIATTENTION || scorer == KV_SCORER_EXPECTED_ATTENTION ||
            scorer == KV_SCORER_BLEND) {
            REFUSES(attacked, KV_UNSUPPORTED, "layer 0 has KV_LAYER_CACHE_POSITIONS",
                    kv_seq_set_policy(pool, seq, &policy));
            REFUSES(attacked, KV_UNSUPPORTED, "choose a scorer by attention",
                    kv_compress(pool, seq, &options, nullptr));
        } else {
            ACCEPTS(kv_seq_set_policy(pool, seq, &policy));
        }
    }
    std::vector<float> means(query_heads * key_dim / 2);
    kv_query_statistics statistics = KV_INIT(kv_query_statistics);
    statistics.query_heads = query_heads;
    statistics.bands = key_dim / 2;
    statistics.tokens = 1;
    statistics.mean_real = statistics.mean_imaginary = statistics.mean_magnitude = means.data();
    REFUSES(attacked, KV_INVALID, "KV_LAYER_CACHE_POSITIONS",
            kv_pool_set_statistics(pool, &statistics));
    REFUSES(attacked, KV_INVALID, "KV_LAYER_CACHE_POSITIONS",
            kv_seq_get_statistics(pool, seq, &statistics));
    kv_pool_release(pool);
}

TEST_CASE("fields that neither the scorer nor the allocator reads are refused, by name") {
    const populated w(observing_config());
    const std::vector<uint32_t> windows = {KV_SCORER_SCISSORHANDS, KV_SCORER_SNAPKV, KV_SCORER_RKV,
                                           KV_SCORER_VASE_ATTENTION};
    const std::vector<uint32_t> sums = {KV_SCORER_H2O, KV_SCORER_BLEND};
    std::vector<uint32_t> attention = windows, redundancy = {KV_SCORER_RKV, KV_SCORER_BLEND};
    attention.insert(attention.end(), {KV_SCORER_H2O, KV_SCORER_TOVA, KV_SCORER_BLEND});
    std::vector<uint32_t> pooled = attention;
    pooled.push_back(KV_SCORER_HOST);
    const std::vector<uint32_t> ahead = {KV_SCORER_TRIATTENTION, KV_SCORER_BLEND};
    std::vector<uint32_t> queries = ahead;
    queries.push_back(KV_SCORER_EXPECTED_ATTENTION);
    struct special {
        const char* name;
        std::vector<uint32_t> readers;
        void (*set)(kv_policy&);
    };
    const special fields[] = {
        {"window", windows, [](kv_policy& p) { p.window = 4; }},
        {"observe_every", attention, [](kv_policy& p) { p.observe_every = 1; }},
        {"decay", sums, [](kv_policy& p) { p.decay = 0.5f; }},
        {"pool_width", pooled, [](kv_policy& p) { p.pool_width = 3; }},
        {"POOL_MAX", pooled, [](kv_policy& p) { p.flags = KV_POLICY_POOL_MAX; }},
        {"prior_share", {KV_SCORER_BLEND}, [](kv_policy& p) { p.prior_share = 0.5f; }},
        {"redundancy", redundancy, [](kv_policy& p) { p.redundancy = 0.5f; }},
        {"EXACT_REDUNDANCY",
         {KV_SCORER_RKV},
         [](kv_policy& p) { p.flags = KV_POLICY_EXACT_REDUNDANCY; }},
        {"similarity", {}, [](kv_policy& p) { p.similarity = 0.5f; }},
        {"offset_max", ahead, [](kv_policy& p) { p.offset_max = 16; }},
        {"OFFSETS_MAX", ahead, [](kv_policy& p) { p.flags = KV_POLICY_OFFSETS_MAX; }},
        {"STATISTICS_ONLINE", queries, [](kv_policy& p) { p.flags = KV_POLICY_STATISTICS_ONLINE; }},
        {"floor_share", {}, [](kv_policy& p) { p.floor_share = 0.5f; }},
        {"threshold", {}, [](kv_policy& p) { p.threshold = -0.5f; }},
        {"steepness", {}, [](kv_policy& p) { p.steepness = 4; }},
    };
    for (const special& field : fields) {
        for (uint32_t scorer = KV_SCORER_TRIATTENTION; scorer <= KV_SCORER_BLEND; ++scorer) {
            CAPTURE(field.name);
            CAPTURE(scorer);
            kv_policy policy = good_policy();
            policy.scorer = scorer;
            ACCEPTS(kv_seq_set_policy(w.pool, w.full, &policy));
            field.set(policy);
            const std::string named = "policy: " + std::string(field.name) + " is of ";
            if (std::count(field.readers.begin(), field.readers.end(), scorer) != 0) {
                ACCEPTS(kv_seq_set_policy(w.pool, w.full, &policy));
            } else {
                REFUSES(w.attacked, KV_INVALID, named.c_str(),
                        kv_seq_set_policy(w.pool, w.full, &policy));
            }
        }
    }
    // Those of a flag and of allocators, with what reads them.
    kv_policy policy = good_policy();
    policy.scorer = KV_SCORER_RKV;
    policy.similarity = 0.5f;
    policy.flags = KV_POLICY_EXACT_REDUNDANCY;
    ACCEPTS(kv_seq_set_policy(w.pool, w.full, &policy));
    policy = good_policy();
    policy.allocator = KV_ALLOCATE_PYRAMID;
    policy.steepness = 4;
    ACCEPTS(kv_seq_set_policy(w.pool, w.full, &policy));
    policy.allocator = KV_ALLOCATE_THRESHOLD;
    REFUSES(w.attacked, KV_INVALID, "with scorer STREAMING and allocator THRESHOLD leave it out",
            kv_seq_set_policy(w.pool, w.full, &policy));
    policy.steepness = 0;
    policy.threshold = 0.5f;
    ACCEPTS(kv_seq_set_policy(w.pool, w.full, &policy));
}

TEST_CASE("numbers of a policy beyond all measure do no harm") {
    const populated w(observing_config());
    uint32_t positions[64];
    uint64_t count = 0;
    kv_policy policy = good_policy();
    policy.scorer = KV_SCORER_SNAPKV;
    policy.budget = 38;
    policy.window = policy.observe_every = policy.slack = policy.every = UINT32_MAX;
    policy.sinks = policy.value_reserve = policy.segment_quota = UINT32_MAX;
    policy.prompt_tokens = UINT32_MAX;
    policy.segments = 4096;
    policy.pool_width = 127;
    policy.flags = KV_POLICY_PROTECT_PROMPT | KV_POLICY_PROMPT_ON_TOP | KV_POLICY_AT_PROMPT_END |
                   KV_POLICY_POOL_MAX;
    ACCEPTS(kv_seq_set_policy(w.pool, w.full, &policy));
    w.pool.append(w.full, 1);
    ACCEPTS(kv_compress(w.pool, w.full, nullptr, nullptr));
    policy.sinks = policy.flags = 0;
    policy.window = policy.observe_every = policy.pool_width = 0;
    for (const uint32_t scorer : {KV_SCORER_KEYDIFF, KV_SCORER_VASE_SKETCH, KV_SCORER_LAGKV}) {
        policy.scorer = scorer;
        ACCEPTS(kv_seq_set_policy(w.pool, w.full, &policy));
        ACCEPTS(kv_compress(w.pool, w.full, nullptr, nullptr));
        REQUIRE(kv_seq_get_positions(w.pool, w.full, 0, 1, 64, positions, &count) == KV_OK);
        CHECK(count == policy.budget);
        policy.budget -= 7;
    }
    void (*const extremes[])(kv_policy&) = {
        [](kv_policy& p) {
            p.scorer = KV_SCORER_BLEND;
            p.decay = p.redundancy = p.prior_share = 1.0f;
            p.offset_max = 1u << 31;
        },
        [](kv_policy& p) {
            p.scorer = KV_SCORER_RKV;
            p.redundancy = p.similarity = 1.0f;
            p.flags = KV_POLICY_EXACT_REDUNDANCY;
        },
        [](kv_policy& p) {
            p.allocator = KV_ALLOCATE_PYRAMID;
            p.steepness = 4096;
        },
        [](kv_policy& p) {
            p.allocator = KV_ALLOCATE_THRESHOLD;
            p.threshold = INFINITY;
        },
    };
    for (const auto& change : extremes) {
        kv_policy extreme = policy;
        extreme.segments = extreme.segment_quota = 0;
        change(extreme);
        ACCEPTS(kv_seq_set_policy(w.pool, w.full, &extreme));
        w.pool.append(w.full, 1);
        ACCEPTS(kv_compress(w.pool, w.full, nullptr, nullptr));
    }
    ACCEPTS(kv_seq_set_policy(w.pool, w.full, &policy));
    policy.prompt_tokens = 1;
    ACCEPTS(kv_compress(w.pool, w.full, nullptr, nullptr));
    REQUIRE(kv_pool_check(w.pool) == KV_OK);
}

TEST_CASE("kv_seq_set_scores, kv_seq_get_scores") {
    const populated w(observing_config());
    std::vector<float> scores(2 * 64, 1.0f);
    uint64_t count = 77;
    const auto set = [&](kv_pool* pool, kv_seq seq, uint32_t layer, uint64_t first,
                         uint64_t tokens) {
        return kv_seq_set_scores(pool, seq, layer, first, tokens, scores.data());
    };
    const auto get = [&](kv_pool* pool, kv_seq seq, uint32_t layer, uint32_t head) {
        return kv_seq_get_scores(pool, seq, layer, head, scores.size(), scores.data(), &count);
    };
    REFUSES(target{}, KV_INVALID, "pool", set(nullptr, w.full, 0, 0, 40));
    REFUSES(target{}, KV_INVALID, "pool", get(nullptr, w.full, 0, 0));
    w.refuses_handles([&](kv_seq seq) { return set(w.pool, seq, 0, 0, 40); });
    w.refuses_handles([&](kv_seq seq) { return get(w.pool, seq, 0, 0); });
    // Without a policy of the host's scores there is nothing to set, and nothing to get.
    REFUSES(w.attacked, KV_INVALID, "HOST", set(w.pool, w.full, 0, 0, 40));
    ACCEPTS(get(w.pool, w.full, 0, 0));
    CHECK(count == 0);
    kv_policy policy = good_policy();
    policy.scorer = KV_SCORER_H2O;
    REQUIRE(kv_seq_set_policy(w.pool, w.full, &policy) == KV_OK);
    REFUSES(w.attacked, KV_INVALID, "HOST", set(w.pool, w.full, 0, 0, 40));
    policy.scorer = KV_SCORER_HOST;
    REQUIRE(kv_seq_set_policy(w.pool, w.full, &policy) == KV_OK);
    for (const uint32_t wrong : {3u, 1024u, UINT32_MAX}) {
        REFUSES(w.attacked, KV_INVALID, "layer", set(w.pool, w.full, wrong, 0, 40));
        REFUSES(w.attacked, KV_INVALID, "layer", get(w.pool, w.full, wrong, 0));
    }
    for (const uint32_t chosen_elsewhere : {1u, 2u}) {  // a window; another's cache
        REFUSES(w.attacked, KV_INVALID, "layer", set(w.pool, w.full, chosen_elsewhere, 0, 40));
        REFUSES(w.attacked, KV_INVALID, "layer", get(w.pool, w.full, chosen_elsewhere, 0));
    }
    REFUSES(w.attacked, KV_INVALID, "scores", kv_seq_set_scores(w.pool, w.full, 0, 0, 40, nullptr));
    REFUSES(w.attacked, KV_INVALID, "scores", set(w.pool, w.full, 0, 0, 0));
    REFUSES(w.attacked, KV_INVALID, "positions", set(w.pool, w.full, 0, 0, 41));
    REFUSES(w.attacked, KV_INVALID, "positions", set(w.pool, w.full, 0, 40, 1));
    REFUSES(w.attacked, KV_INVALID, "positions", set(w.pool, w.full, 0, 1, UINT64_MAX));
    REFUSES(w.attacked, KV_INVALID, "positions", set(w.pool, w.full, 0, UINT64_MAX, 1));
    REFUSES(w.attacked, KV_INVALID, "positions", set(w.pool, w.full, 0, UINT64_MAX, UINT64_MAX));
    REFUSES(w.attacked, KV_INVALID, "positions", set(w.pool, w.empty, 0, 0, 1));
    REFUSES(w.attacked, KV_INVALID, "head", get(w.pool, w.full, 0, 2));
    REFUSES(w.attacked, KV_INVALID, "head", get(w.pool, w.full, 0, UINT32_MAX));
    REFUSES(w.attacked, KV_INVALID, "out_scores",
            kv_seq_get_scores(w.pool, w.full, 0, 0, 1, nullptr, &count));
    REFUSES(w.attacked, KV_INVALID, "out_count",
            kv_seq_get_scores(w.pool, w.full, 0, 0, 64, scores.data(), nullptr));
    count = 77;
    ACCEPTS(get(w.pool, w.full, 0, 1));
    CHECK(count == 0);

    // Whatever a float can be.
    for (uint32_t i = 0; i < 80; ++i) scores[i] = static_cast<float>(i);
    scores[3] = NAN;
    scores[4] = INFINITY;
    scores[5] = -INFINITY;
    scores[6] = std::numeric_limits<float>::denorm_min();
    ACCEPTS(set(w.pool, w.full, 0, 0, 40));
    std::vector<float> found(64, -9.0f);
    ACCEPTS(kv_seq_get_scores(w.pool, w.full, 0, 1, 3, found.data(), &count));
    CHECK(count == 40);
    CHECK(found[2] == 42.0f);
    CHECK(found[3] == -9.0f);
    ACCEPTS(kv_seq_get_scores(w.pool, w.full, 0, 0, UINT64_MAX, found.data(), &count));
    CHECK(std::isnan(found[3]));
    CHECK(found[5] == -INFINITY);
    CHECK(found[39] == 39.0f);
    ACCEPTS(kv_seq_get_scores(w.pool, w.full, 0, 0, 0, nullptr, &count));
    CHECK(count == 40);
    // In an open step: of what was accepted before.
    kv_step* step = w.pool.reserve(w.full, 2);
    REFUSES(w.attacked, KV_INVALID, "positions", set(w.pool, w.full, 0, 0, 41));
    ACCEPTS(set(w.pool, w.full, 0, 39, 1));
    CHECK(kv_step_cancel(step) == KV_OK);
}

TEST_CASE("TriAttention needs to be told the rotation") {
    small_model model;
    for (kv_layer& layer : model.layers) layer.rope = nullptr;
    const kv_model description = model.describe();
    const kv_pool_config config = small_config();
    kv_pool* pool = nullptr;
    REQUIRE(kv_pool_create(&config, &description, &pool) == KV_OK);
    kv_policy policy = good_policy();
    policy.scorer = KV_SCORER_TRIATTENTION;
    kv_seq_config sequence = KV_INIT(kv_seq_config);
    sequence.policy = &policy;
    kv_seq seq = 0;
    REFUSES((target{pool, {}}), KV_UNSUPPORTED, "kv_rope", kv_seq_create(pool, &sequence, &seq));
    kv_pool_release(pool);
}

}  // namespace
