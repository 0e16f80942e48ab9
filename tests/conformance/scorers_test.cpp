// Every scorer against its published formula in double, through the calls of an engine: what was
// observed in prefill, decode and drafts, and which tokens stay.
#include "scorer_reference.hpp"

using namespace conformance;

namespace {

constexpr uint64_t everything = std::numeric_limits<uint64_t>::max();

/// Two plain layers and one whose heads have lanes of their own.
pool_shape shape_of(uint32_t group, uint32_t threads = 1) {
    layer_shape plain;
    plain.kv_heads = 2;
    plain.query_heads = 2 * group;
    plain.key_dim = 32;
    plain.value_dim = 40;
    plain.key_format = plain.value_format = KV_FORMAT_F32;
    layer_shape apart = plain;
    apart.lane_per_head = true;
    pool_shape shape;
    shape.layers = {plain, apart, plain};
    shape.threads = threads;
    shape.slabs = 8;
    shape.max_tokens = 512;
    shape.max_observed_sequences = 4;
    return shape;
}

kv_policy with_window(uint32_t scorer, uint32_t budget, uint32_t window) {
    kv_policy policy = policy_of(scorer, budget);
    policy.window = window;
    policy.recent = 5;
    policy.sinks = 2;
    return policy;
}

/// A prompt in chunks, tokens, drafts of which some are taken back.
void live(tracker& t) {
    t.step(37);
    t.step(20);
    for (int i = 0; i < 12; ++i) t.step(1);
    t.step(5, 2);
    t.step(4, 4);
    t.step(6, 1);
    for (int i = 0; i < 7; ++i) t.step(1);
}

struct observed_case {
    const char* name;
    uint32_t scorer;
    uint32_t selection;  // that the default stands for
    counted_rows rule;
    uint32_t window = 0;
    float decay = 0.0f;
    uint32_t pool_width = 0;
    uint32_t flags = 0;
};

const observed_case observed_cases[] = {
    {"H2O", KV_SCORER_H2O, KV_SELECT_PER_LAYER_PER_HEAD, {}},
    {"H2O, decayed", KV_SCORER_H2O, KV_SELECT_PER_LAYER_PER_HEAD, {everything, 0.9375}, 0, 0.9375f},
    {"H2O, pooled",
     KV_SCORER_H2O,
     KV_SELECT_PER_LAYER_PER_HEAD,
     {},
     0,
     0.0f,
     3,
     KV_POLICY_POOL_MAX},
    {"Scissorhands", KV_SCORER_SCISSORHANDS, KV_SELECT_PER_LAYER_PER_HEAD, {1000, 1.0, true}, 1000},
    {"TOVA", KV_SCORER_TOVA, KV_SELECT_PER_LAYER, {1}},
    {"SnapKV", KV_SCORER_SNAPKV, KV_SELECT_PER_LAYER_PER_HEAD, {500}, 500},
    {"SnapKV, pooled otherwise",
     KV_SCORER_SNAPKV,
     KV_SELECT_PER_LAYER_PER_HEAD,
     {500},
     500,
     0.0f,
     9,
     KV_POLICY_POOL_MAX},
    {"R-KV", KV_SCORER_RKV, KV_SELECT_PER_LAYER_PER_HEAD, {500}, 500},
    {"R-KV, exact",
     KV_SCORER_RKV,
     KV_SELECT_PER_LAYER_PER_HEAD,
     {500},
     500,
     0.0f,
     0,
     KV_POLICY_EXACT_REDUNDANCY},
};

kv_policy policy_of_case(const observed_case& c, uint32_t budget) {
    kv_policy policy = with_window(c.scorer, budget, c.window);
    policy.decay = c.decay;
    policy.pool_width = c.pool_width;
    policy.flags = c.flags;
    if (c.scorer == KV_SCORER_RKV) {
        // So that both parts matter.
        policy.redundancy = 0.5f;
        if ((c.flags & KV_POLICY_EXACT_REDUNDANCY) != 0) policy.similarity = 0.25f;
    }
    return policy;
}

}  // namespace

TEST_CASE("scorers: observed attention is that of all queries, by position") {
    for (const uint32_t group : {1u, 3u}) {
        for (const observed_case& c : observed_cases) {
            CAPTURE(c.name);
            CAPTURE(group);
            engine host(shape_of(group));
            kv_policy policy = policy_of_case(c, 40);
            tracker t(host, host.create(&policy), 1);
            live(t);
            check_observed(t, c.rule);
            check_round(t, policy, c.selection, c.rule);
            check_observed(t, c.rule);
            // A second round, over sums that moved with their tokens.
            for (int i = 0; i < 9; ++i) t.step(1);
            t.step(3, 2);
            t.step(11);
            check_observed(t, c.rule);
            policy.budget = 31;
            check_round(t, policy, c.selection, c.rule);
        }
    }
}

TEST_CASE("scorers: what is expected, alone and beside what was observed") {
    for (const uint32_t group : {1u, 3u}) {
        for (const uint32_t scorer : {KV_SCORER_TRIATTENTION, KV_SCORER_BLEND}) {
            for (const float share : {0.0f, 0.2f}) {
                if (share != 0.0f && scorer != KV_SCORER_BLEND) continue;
                CAPTURE(group);
                CAPTURE(scorer);
                CAPTURE(share);
                engine host(shape_of(group));
                kv_policy policy = with_window(scorer, 40, 0);
                policy.flags = KV_POLICY_STATISTICS_ONLINE;
                policy.prior_share = share;
                const counted_rows rule{everything, double{0.97f}};
                tracker t(host, host.create(&policy), 1);
                live(t);
                if (scorer == KV_SCORER_BLEND) check_observed(t, rule);
                check_round(t, policy, KV_SELECT_PER_LAYER_PER_HEAD, rule);
                for (int i = 0; i < 9; ++i) t.step(1);
                t.step(11, 4);
                policy.budget = 31;
                check_round(t, policy, KV_SELECT_PER_LAYER_PER_HEAD, rule);
            }
        }
    }
}

TEST_CASE("scorers: one set per layer, per head, or for all") {
    for (const observed_case& c : observed_cases) {
        for (const uint32_t selection :
             {KV_SELECT_PER_HEAD, KV_SELECT_UNION, KV_SELECT_PER_LAYER}) {
            CAPTURE(c.name);
            CAPTURE(selection);
            engine host(shape_of(3, 2));
            kv_policy policy = policy_of_case(c, 30);
            policy.selection = selection;
            tracker t(host, host.create(&policy), 1);
            live(t);
            check_round(t, policy, selection, c.rule);
        }
    }
}

TEST_CASE("scorers: by content") {
    for (const uint32_t group : {1u, 3u}) {
        for (const uint32_t scorer : {KV_SCORER_KEYDIFF, KV_SCORER_KEY_NORM, KV_SCORER_LAGKV,
                                      KV_SCORER_EXPECTED_ATTENTION}) {
            CAPTURE(scorer);
            CAPTURE(group);
            engine host(shape_of(group));
            kv_policy policy = with_window(scorer, 200, 0);
            policy.flags = KV_POLICY_STATISTICS_ONLINE * (scorer == KV_SCORER_EXPECTED_ATTENTION);
            policy.sinks = 4;
            tracker t(host, host.create(&policy), 7);
            t.step(290);
            t.step(1);
            t.step(4, 3);
            t.step(131);
            check_round(t, policy, KV_SELECT_PER_LAYER_PER_HEAD, {});
            t.step(1);
            t.step(160);
            policy.budget = 330;
            check_round(t, policy, KV_SELECT_PER_LAYER_PER_HEAD, {});
        }
    }
}

TEST_CASE("scorers: a window forgets older queries, at least so many count") {
    for (const uint32_t scorer : {KV_SCORER_SNAPKV, KV_SCORER_SCISSORHANDS, KV_SCORER_RKV}) {
        CAPTURE(scorer);
        engine host(shape_of(3));
        kv_policy policy = with_window(scorer, 30, 8);
        tracker t(host, host.create(&policy), 1);
        counted_rows rule;
        rule.counts = scorer == KV_SCORER_SCISSORHANDS;
        // A prompt counts by its last rows; token by token every multiple of the window is exact.
        t.step(50);
        rule.last = 8;
        check_observed(t, rule);
        for (uint64_t since = 1; since <= 24; ++since) {
            t.step(1);
            rule.last = 8 + since % 8;
            check_observed(t, rule);
            if (since == 11) {
                tracker child = t.fork(2);
                child.step(2);
                counted_rows of_child = rule;
                of_child.last += 2;
                check_observed(child, of_child);
                require_ok(kv_seq_release(host.pool(), child.sequence));
            }
        }
        check_round(t, policy, KV_SELECT_PER_LAYER_PER_HEAD, rule);
        for (int i = 0; i < 3; ++i) t.step(1);
        t.step(4, 1);  // seven since: none is forgotten yet
        rule.last = 8 + 7;
        check_observed(t, rule);
        t.step(3, 3);  // ten since, in whole steps
        rule.last = 10;
        check_observed(t, rule);
        t.step(9, 4);
        rule.last = 8;
        check_observed(t, rule);
        t.step(1);
        rule.last = 9;
        check_round(t, policy, KV_SELECT_PER_LAYER_PER_HEAD, rule);
    }
}
