// What is observed of attention lives with its sequence: through forks, going back, compaction,
// cancelled steps, other policies, other hands for the same memory.
#include "scorer_reference.hpp"

using namespace conformance;

namespace {

constexpr uint64_t everything = std::numeric_limits<uint64_t>::max();

pool_shape shape_of(uint32_t threads = 1, bool lane_per_head = false) {
    layer_shape layer;
    layer.kv_heads = 2;
    layer.query_heads = 6;
    layer.key_dim = layer.value_dim = 32;
    layer.key_format = layer.value_format = KV_FORMAT_F32;
    layer.lane_per_head = lane_per_head;
    pool_shape shape;
    shape.layers = {layer, layer};
    shape.threads = threads;
    shape.slabs = 8;
    shape.max_tokens = 512;
    shape.max_observed_sequences = 3;
    return shape;
}

/// What the library says of all layers and heads.
std::vector<std::vector<float>> all_scores(const engine& host, kv_seq sequence) {
    std::vector<std::vector<float>> found;
    for (uint32_t layer = 0; layer < host.shape().layers.size(); ++layer) {
        if (host.shape().layers[layer].shared_layer >= 0) continue;
        for (uint32_t head = 0; head < host.shape().layers[layer].kv_heads; ++head) {
            found.push_back(host.scores(sequence, layer, head));
        }
    }
    return found;
}

bool observed_nothing(const engine& host, kv_seq sequence) {
    for (const std::vector<float>& head : all_scores(host, sequence)) {
        if (!head.empty()) return false;
    }
    return true;
}

kv_compress_report compress(engine& host, kv_seq sequence, const kv_policy* policy = nullptr) {
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    require_ok(kv_compress(host.pool(), sequence, &options, &report));
    return report;
}

struct kind {
    const char* name;
    uint32_t scorer;
    uint32_t window;
    counted_rows rule;
};
const kind kinds[] = {{"mass", KV_SCORER_H2O, 0, {}},
                      {"last", KV_SCORER_TOVA, 0, {1}},
                      {"recent", KV_SCORER_SNAPKV, 300, {300}},
                      {"counts", KV_SCORER_SCISSORHANDS, 300, {300, 1.0, true}}};

kv_policy policy_of_kind(const kind& k, uint32_t budget) {
    kv_policy policy = policy_of(k.scorer, budget);
    policy.window = k.window;
    return policy;
}

}  // namespace

TEST_CASE("observations: a child has seen what its parent has, then each its own") {
    for (const kind& k : kinds) {
        CAPTURE(k.name);
        engine host(shape_of());
        const kv_policy policy = policy_of_kind(k, 25);
        tracker parent(host, host.create(&policy), 1);
        parent.step(30);
        parent.step(1);
        tracker child = parent.fork(2);
        CHECK(all_scores(host, child.sequence) == all_scores(host, parent.sequence));
        parent.step(3, 1);
        child.step(7);
        child.step(1);
        check_observed(parent, k.rule);
        check_observed(child, k.rule);
        // A child of a parent in an open step knows nothing of it.
        const auto before = all_scores(host, parent.sequence);
        kv_step* step = host.begin({{parent.sequence, 1, 2}});
        host.write(step, 0);
        host.attend(step, 0);
        tracker second = parent.fork(3);
        CHECK(all_scores(host, second.sequence) == before);
        CHECK(all_scores(host, parent.sequence) == before);
        require_ok(kv_step_cancel(step));
        second.step(2);
        check_observed(second, k.rule);
        // A round moves the sums of one and leaves those of the others.
        const auto of_parent = all_scores(host, parent.sequence);
        const uint32_t selection = k.scorer == KV_SCORER_TOVA
                                       ? uint32_t{KV_SELECT_PER_LAYER}
                                       : uint32_t{KV_SELECT_PER_LAYER_PER_HEAD};
        check_round(child, policy, selection, k.rule);
        CHECK(all_scores(host, parent.sequence) == of_parent);
        child.step(5);
        check_observed(child, k.rule);
        check_observed(second, k.rule);
    }
}

TEST_CASE("observations: going back forgets what later tokens were given, not what they gave") {
    for (const kind& k : kinds) {
        CAPTURE(k.name);
        engine host(shape_of());
        const kv_policy policy = policy_of_kind(k, 25);
        tracker t(host, host.create(&policy), 1);
        t.step(40);
        t.step(1);
        t.truncate(33);
        check_observed(t, k.rule);
        t.stream = 5;
        t.step(4);
        t.step(6, 0);
        check_observed(t, k.rule);
        t.truncate(0);
        for (const std::vector<float>& head : all_scores(host, t.sequence)) CHECK(head.empty());
        t.step(9);
        check_observed(t, k.rule);
    }
}

TEST_CASE("observations: a cancelled step leaves the bits of before") {
    for (const kind& k : kinds) {
        CAPTURE(k.name);
        engine host(shape_of());
        const kv_policy policy = policy_of_kind(k, 25);
        tracker t(host, host.create(&policy), 1);
        t.step(30);
        for (const uint32_t rows : {1u, 4u, 80u}) {
            const auto before = all_scores(host, t.sequence);
            kv_step* step = host.begin({{t.sequence, 9, rows}});
            for (const uint32_t layer : {0, 1}) {
                host.write(step, layer);
                host.attend(step, layer);
            }
            CHECK(all_scores(host, t.sequence) == before);
            require_ok(kv_step_cancel(step));
            CHECK(all_scores(host, t.sequence) == before);
            step = host.begin({{t.sequence, 9, rows}});
            host.write(step, 0);
            host.attend(step, 0);
            CHECK(kv_step_end(step, nullptr) == KV_INVALID);  // layer 1 was not written
            CHECK(all_scores(host, t.sequence) == before);
            t.step(2, 1);
            check_observed(t, k.rule);
        }
    }
}

TEST_CASE("observations: a policy of the same rules keeps them, one of others begins anew") {
    engine host(shape_of());
    kv_policy policy = policy_of(KV_SCORER_SNAPKV, 20);
    tracker t(host, host.create(&policy), 1);
    t.step(30);
    const auto before = all_scores(host, t.sequence);
    const auto set = [&](const kv_policy* other) {
        require_ok(kv_seq_set_policy(host.pool(), t.sequence, other));
    };
    policy.budget = 12;
    policy.pool_width = 9;
    policy.selection = KV_SELECT_UNION;
    set(&policy);
    CHECK(all_scores(host, t.sequence) == before);
    policy.scorer = KV_SCORER_VASE_ATTENTION;
    set(&policy);
    CHECK(all_scores(host, t.sequence) == before);
    policy.scorer = KV_SCORER_RKV;
    policy.window = 64;
    set(&policy);
    CHECK(all_scores(host, t.sequence) == before);
    // A round of another scorer has nothing to go by; one by content has, and sums move along.
    const kv_policy other = policy_of(KV_SCORER_H2O, 20);
    CHECK(compress(host, t.sequence, &other).outcome == KV_COMPRESS_NO_OBSERVATIONS);
    kv_policy by_content = policy_of(KV_SCORER_KEYDIFF, 26);
    by_content.selection = KV_SELECT_UNION;
    CHECK(compress(host, t.sequence, &by_content).outcome == KV_COMPRESS_DONE);
    t.adopt();
    check_observed(t, {});
    for (const auto& change : std::vector<std::function<void(kv_policy&)>>{
             [](kv_policy& p) { p.window = 65; }, [](kv_policy& p) { p.observe_every = 2; },
             [](kv_policy& p) { p.scorer = KV_SCORER_SCISSORHANDS; },
             [](kv_policy& p) {
                 p.scorer = KV_SCORER_H2O;
                 p.window = 0;
             },
             [](kv_policy& p) { p.decay = 0.5f; },
             [](kv_policy& p) {
                 p.scorer = KV_SCORER_TOVA;
                 p.decay = 0.0f;
             },
             [](kv_policy& p) {
                 p.scorer = KV_SCORER_HOST;
                 p.observe_every = 0;
             }}) {
        t.step(2);
        change(policy);
        set(&policy);
        CHECK(observed_nothing(host, t.sequence));
        CHECK(compress(host, t.sequence).outcome == KV_COMPRESS_NO_OBSERVATIONS);
    }
    set(nullptr);
    t.step(1);
    CHECK(observed_nothing(host, t.sequence));
    // In the middle of a step: layer 0 was observed by the old rules, which are gone.
    policy = policy_of(KV_SCORER_H2O, 20);
    set(&policy);
    kv_step* step = host.begin({{t.sequence, 1, 1}});
    host.write(step, 0);
    host.attend(step, 0);
    policy.decay = 0.5f;
    set(&policy);
    host.write(step, 1);
    host.attend(step, 1);
    require_ok(kv_step_end(step, nullptr));
    CHECK(host.scores(t.sequence, 0, 0).empty());
    CHECK(!host.scores(t.sequence, 1, 0).empty());
    CHECK(compress(host, t.sequence).outcome == KV_COMPRESS_NO_OBSERVATIONS);
}

TEST_CASE("observations: places are as many as the pool was created with, and carry nothing over") {
    engine host(shape_of());
    const kv_policy policy = policy_of(KV_SCORER_H2O, 20);
    kv_policy plain = policy_of(KV_SCORER_RANDOM, 20);
    std::vector<kv_seq> alive;
    for (int i = 0; i < 3; ++i) alive.push_back(host.create(&policy));
    for (const kv_seq sequence : alive) host.run({{sequence, 4, 25}});
    const kv_seq other = host.create(&plain);
    host.run({{other, 4, 25}});

    const auto refuses = [&](const char* word, kv_status verdict) {
        CHECK(verdict == KV_LIMIT);
        CHECK(last_error().find(word) != std::string::npos);
    };
    const kv_pool_stats before = host.stats();
    kv_seq_config config = KV_INIT(kv_seq_config);
    config.policy = &policy;
    kv_seq sequence = 7, children[2] = {7, 7};
    refuses("max_observed_sequences", kv_seq_create(host.pool(), &config, &sequence));
    CHECK(sequence == 0);
    refuses("max_observed_sequences", kv_seq_fork(host.pool(), alive[0], 2, children));
    CHECK(children[0] == 7);
    refuses("max_observed_sequences", kv_seq_set_policy(host.pool(), other, &policy));
    const kv_pool_stats after = host.stats();
    CHECK(std::memcmp(&before, &after, sizeof before) == 0);
    // Its own policy is in force.
    CHECK(compress(host, other).outcome == KV_COMPRESS_DONE);
    require_ok(kv_seq_fork(host.pool(), other, 2, children));

    // A round may still ask for it: no place, no observations.
    CHECK(compress(host, children[0], &policy).outcome == KV_COMPRESS_NOTHING);
    kv_policy smaller = policy;
    smaller.budget = 10;
    CHECK(compress(host, children[0], &smaller).outcome == KV_COMPRESS_NO_OBSERVATIONS);

    // One place comes free by release, one by another policy.
    require_ok(kv_seq_release(host.pool(), alive[0]));
    require_ok(kv_seq_set_policy(host.pool(), alive[1], &plain));
    refuses("max_observed_sequences", kv_seq_fork(host.pool(), alive[2], 3, children));
    tracker fresh(host, host.create(&policy), 1);
    CHECK(observed_nothing(host, fresh.sequence));
    CHECK(compress(host, fresh.sequence).outcome == KV_COMPRESS_NOTHING);
    fresh.step(30);
    check_observed(fresh, {});
    tracker child = fresh.fork(2);
    child.step(3);
    check_observed(child, {});
    check_observed(fresh, {});
    refuses("max_observed_sequences", kv_seq_create(host.pool(), &config, &sequence));
}

TEST_CASE("observations: a sequence released in an open step leaves its place clean") {
    engine host(shape_of());
    const kv_policy policy = policy_of(KV_SCORER_H2O, 20);
    for (const bool cancelled : {false, true}) {
        CAPTURE(cancelled);
        std::vector<kv_seq> old;
        for (int i = 0; i < 3; ++i) old.push_back(host.create(&policy));
        kv_step* step = host.begin({{old[0], 1, 20}, {old[1], 1, 5}, {old[2], 1, 1}});
        host.write(step, 0);
        host.attend(step, 0);
        require_ok(kv_seq_release(host.pool(), old[0]));
        tracker fresh(host, host.create(&policy), 3);
        host.write(step, 1);
        host.attend(step, 1);
        CHECK(observed_nothing(host, fresh.sequence));
        require_ok(cancelled ? kv_step_cancel(step) : kv_step_end(step, nullptr));
        CHECK(observed_nothing(host, fresh.sequence));
        CHECK(observed_nothing(host, old[1]) == cancelled);
        fresh.step(30);
        check_observed(fresh, {});
        for (const kv_seq sequence : {fresh.sequence, old[1], old[2]}) {
            require_ok(kv_seq_release(host.pool(), sequence));
        }
    }
}

TEST_CASE("observations: of every third token's attention, and of no call that says so") {
    for (const kind& k : kinds) {
        CAPTURE(k.name);
        engine host(shape_of());
        kv_policy policy = policy_of_kind(k, 20);
        policy.observe_every = 3;
        tracker t(host, host.create(&policy), 1);
        t.step(10);
        for (int i = 1; i <= 7; ++i) {
            t.step(1, 1, 0, i % 3 == 0);
            check_observed(t, k.rule);
        }
        kv_step* step = host.begin({{t.sequence, 1, 1}});  // does not count
        host.write(step, 0);
        host.attend(step, 0);
        require_ok(kv_step_cancel(step));
        t.step(1, 1, 0, false);
        t.step(1, 1, KV_ATTEND_NO_STATISTICS);
        t.step(1, 1, 0, true);
        t.step(1, 1, 0, false);
        t.step(4, 2);  // drafts are always observed
        t.step(1, 1, 0, false);
        t.step(5, 5, KV_ATTEND_NO_STATISTICS);
        check_observed(t, k.rule);
    }
}

TEST_CASE("observations: of how many tokens, where a policy leaves it open") {
    for (const kind& k : kinds) {
        CAPTURE(k.name);
        engine host(shape_of());
        kv_policy policy = policy_of_kind(k, 20);
        policy.observe_every = 0;
        tracker t(host, host.create(&policy), 1);
        t.step(10);
        for (int i = 1; i <= 9; ++i) {
            t.step(1, 1, 0, k.scorer != KV_SCORER_H2O || i % 4 == 0);
            check_observed(t, k.rule);
        }
    }
}

TEST_CASE("observations: layers that share a cache add up, each row once") {
    for (const kind& k : kinds) {
        for (const bool apart : {false, true}) {
            CAPTURE(k.name);
            CAPTURE(apart);
            pool_shape shape = shape_of(1, apart);
            layer_shape sharing = shape.layers[0];
            sharing.lane_per_head = false;
            sharing.query_heads = 2;
            sharing.shared_layer = 0;
            shape.layers.push_back(sharing);
            engine host(shape);
            kv_policy policy = policy_of_kind(k, 20);
            counted_rows rule = k.rule;
            if (k.scorer == KV_SCORER_H2O) {
                policy.decay = 0.875f;
                rule.decay = 0.875;
            }
            tracker t(host, host.create(&policy), 1);
            t.step(25);
            t.step(1);
            t.step(4, 2);
            t.step(1);
            check_observed(t, rule);
            kv_policy round = policy;
            CHECK(compress(host, t.sequence, &round).outcome == KV_COMPRESS_DONE);
            t.adopt();
            t.step(1);
            check_observed(t, rule);
        }
    }
}

TEST_CASE("observations: the same bits for every thread count, batch, and cut of lanes") {
    for (const kind& k : kinds) {
        CAPTURE(k.name);
        std::vector<std::vector<std::vector<float>>> found;
        for (const uint32_t threads : {1u, 2u, 3u}) {
            for (const bool apart : {false, true}) {
                for (const bool together : {false, true}) {
                    pool_shape shape = shape_of(threads, apart);
                    shape.max_tokens = 2048;
                    engine host(shape);
                    kv_policy policy = policy_of_kind(k, 700);
                    const kv_seq a = host.create(&policy), b = host.create(&policy);
                    const auto run = [&](uint32_t rows_a, uint32_t rows_b) {
                        if (together) {
                            host.run({{a, 1, rows_a}, {b, 2, rows_b}});
                        } else {
                            host.run({{a, 1, rows_a}});
                            host.run({{b, 2, rows_b}});
                        }
                    };
                    run(900, 5);
                    run(150, 1);
                    run(1, 4);
                    compress(host, a);
                    run(1, 1);
                    run(3, 100);
                    std::vector<std::vector<float>> all = all_scores(host, a);
                    for (std::vector<float>& head : all_scores(host, b)) all.push_back(head);
                    for (uint32_t head = 0; head < 2; ++head) {
                        const std::vector<uint32_t> kept = host.positions(a, 1, head);
                        all.emplace_back(kept.begin(), kept.end());
                    }
                    found.push_back(std::move(all));
                    CHECK(found.back() == found.front());
                }
            }
        }
    }
}

TEST_CASE("observations: in every format a query gives each of its heads one, whatever is biased") {
    struct storage {
        uint32_t keys, values, block_tokens;
    };
    for (const storage& s : {storage{KV_FORMAT_F32, KV_FORMAT_F32, 16},
                             {KV_FORMAT_F16, KV_FORMAT_F16, 16},
                             {KV_FORMAT_BF16, KV_FORMAT_F16, 32},
                             {KV_FORMAT_FP8_TOKEN, KV_FORMAT_FP8_TOKEN, 16},
                             {KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT8_TOKEN, 16},
                             {KV_FORMAT_INT4_TOKEN, KV_FORMAT_INT4_TOKEN, 16},
                             {KV_FORMAT_Q8_0, KV_FORMAT_Q4_0, 16},
                             {KV_FORMAT_NVFP4, KV_FORMAT_MXFP4, 16},
                             {KV_FORMAT_KIVI4, KV_FORMAT_KIVI4, 64},
                             {KV_FORMAT_KVARN4, KV_FORMAT_KVARN2, 64},
                             {KV_FORMAT_TURBO4, KV_FORMAT_TURBO3, 16}}) {
        for (const uint32_t layout : {KV_LAYOUT_NATIVE, KV_LAYOUT_HND}) {
            CAPTURE(s.keys);
            CAPTURE(layout);
            pool_shape shape = shape_of(2);
            shape.layout = layout;
            shape.block_tokens = s.block_tokens;
            shape.max_tokens = 2048;
            for (layer_shape& layer : shape.layers) {
                layer.key_dim = layer.value_dim = 64;
                layer.key_format = s.keys;
                layer.value_format = s.values;
                layer.storage_flags =
                    s.keys == KV_FORMAT_NVFP4 ? uint32_t{KV_STORAGE_SCALE_ONE} : 0u;
            }
            shape.layers[1].softcap = 20.0f;
            for (uint32_t head = 0; head < 6; ++head) {
                shape.layers[1].alibi_slopes.push_back(
                    std::ldexp(1.0f, -4 - static_cast<int>(head)));
            }
            engine host(shape);
            const kv_policy policy = policy_of(KV_SCORER_H2O, 600);
            const kv_seq sequence = host.create(&policy);
            double queries = 0.0;
            for (const uint32_t rows : {1100u, 1u, 5u, 1u, 60u, 1u}) {
                host.run({{sequence, 1, rows}});
                queries += rows;
                for (const std::vector<float>& head : all_scores(host, sequence)) {
                    double sum = 0.0;
                    for (const float score : head) sum += double{score};
                    CHECK(std::abs(sum - 3.0 * queries) < 1e-3 * 3.0 * queries);
                }
            }
            CHECK(compress(host, sequence).outcome == KV_COMPRESS_DONE);
            // What was dropped took its part along; from here on nothing is lost.
            std::vector<double> left;
            for (const std::vector<float>& head : all_scores(host, sequence)) {
                left.push_back(0.0);
                for (const float score : head) left.back() += double{score};
            }
            for (int i = 0; i < 70; ++i) host.run({{sequence, 1, 1}});
            const std::vector<std::vector<float>> now = all_scores(host, sequence);
            for (std::size_t head = 0; head < now.size(); ++head) {
                double sum = 0.0;
                for (const float score : now[head]) sum += double{score};
                CHECK(std::abs(sum - left[head] - 3.0 * 70) < 1e-3 * sum);
            }
            require_ok(kv_pool_check(host.pool()));
        }
    }
}

TEST_CASE("observations: eight bits see nearly what 32 bits see") {
    for (const kind& k : kinds) {
        CAPTURE(k.name);
        pool_shape shape = shape_of();
        for (layer_shape& layer : shape.layers) {
            layer.key_format = layer.value_format = KV_FORMAT_INT8_TOKEN;
        }
        engine host(shape);
        const kv_policy policy = policy_of_kind(k, 60);
        tracker t(host, host.create(&policy), 1);
        t.step(100);
        for (int i = 0; i < 20; ++i) t.step(1);
        for (uint32_t head = 0; head < 2; ++head) {
            const scored expected = observed_scores(t.layers[1].heads[head], k.rule);
            const std::vector<float> found = host.scores(t.sequence, 1, head);
            double difference = 0.0, size = 0.0;
            for (std::size_t slot = 0; slot < found.size(); ++slot) {
                difference += std::abs(double{found[slot]} - expected.score[slot]);
                size += expected.score[slot];
            }
            CHECK(difference < 0.02 * size);
        }
    }
}

TEST_CASE("observations: kernels of the host show the library no attention") {
    engine host(shape_of());
    kv_policy policy = policy_of(KV_SCORER_H2O, 10);
    policy.every = 4;
    const kv_seq sequence = host.create(&policy);
    uint64_t skipped = 0;
    for (int i = 0; i < 6; ++i) {
        kv_step* step = host.begin({{sequence, 1, 5}});
        for (const uint32_t layer : {0, 1}) {
            kv_tables tables = KV_INIT(kv_tables);
            require_ok(kv_step_export(step, layer, &tables));
        }
        kv_step_report report = KV_INIT(kv_step_report);
        require_ok(kv_step_end(step, &report));
        CHECK(report.compactions == 0);
        skipped += report.compactions_skipped;
    }
    CHECK(skipped == 4);  // once there were more than ten, at every step's end
    CHECK(observed_nothing(host, sequence));
    CHECK(compress(host, sequence).outcome == KV_COMPRESS_NO_OBSERVATIONS);
    CHECK(host.positions(sequence, 0, 0).size() == 30);
    // Scores of the host do not need to be seen.
    policy = policy_of(KV_SCORER_HOST, 10);
    require_ok(kv_seq_set_policy(host.pool(), sequence, &policy));
    std::vector<float> scores(2 * 30);
    for (uint32_t i = 0; i < 60; ++i) scores[i] = static_cast<float>(i % 30);
    for (const uint32_t layer : {0, 1}) {
        require_ok(kv_seq_set_scores(host.pool(), sequence, layer, 0, 30, scores.data()));
    }
    CHECK(compress(host, sequence).outcome == KV_COMPRESS_DONE);
    CHECK(host.positions(sequence, 1, 1).front() == 20);
}
