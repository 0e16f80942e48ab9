// How many tokens stay where, and which: allocators, reserves, quotas and guards over scores that
// the host gave, where a plain sort says exactly what must come out.
#include <random>

#include "host_scores.hpp"

using namespace conformance;

TEST_CASE("host scores: exact sets for every selection, with ties, guards and pins") {
    for (const bool apart : {false, true}) {
        for (const uint32_t selection : {KV_SELECT_PER_LAYER_PER_HEAD, KV_SELECT_PER_HEAD,
                                         KV_SELECT_UNION, KV_SELECT_PER_LAYER}) {
            CAPTURE(apart);
            CAPTURE(selection);
            engine host(shape_of(apart));
            kv_policy policy = host_policy(30);
            policy.selection = selection;
            tracker t = scored_sequence(host, policy, 90);
            require_ok(kv_seq_pin(host.pool(), t.sequence, 40, 3));
            CHECK(compress(host, t.sequence, policy).outcome == KV_COMPRESS_DONE);
            for (uint32_t layer = 0; layer < 3; ++layer) {
                for (uint32_t head = 0; head < 3; ++head) {
                    const tracked_head& before = t.layers[layer].heads[head];
                    slots candidates = candidates_of(t, before, policy);
                    std::erase_if(candidates, [](std::size_t s) { return s >= 40 && s < 43; });
                    const auto score = [&](uint32_t p) {
                        if (selection == KV_SELECT_PER_LAYER_PER_HEAD) {
                            return double{host_score(layer, head, p)};
                        }
                        float sum = 0.0f, most = -1.0f;
                        for (uint32_t l = 0; l < 3; ++l) {
                            for (uint32_t h = 0; h < 3; ++h) {
                                most = std::max(most, host_score(l, h, p));
                                const bool mine =
                                    selection == KV_SELECT_PER_LAYER ? l == layer : h == head;
                                sum += mine ? host_score(l, h, p) : 0.0f;
                            }
                        }
                        return double{selection == KV_SELECT_UNION ? most : sum};
                    };
                    CHECK(host.positions(t.sequence, layer, head) ==
                          best(before.retained, candidates, score, 30));
                }
            }
        }
    }
}

TEST_CASE("host scores: NaN goes first, tokens without a score stay, the newest of them first") {
    engine host(shape_of(true, 1));
    const kv_policy policy = policy_of(KV_SCORER_HOST, 20);
    tracker t(host, host.create(&policy), 1);
    t.step(50);
    CHECK(compress(host, t.sequence, policy).outcome == KV_COMPRESS_NO_OBSERVATIONS);
    CHECK(host.scores(t.sequence, 0, 0).empty());
    // Positions 5 to 9 are left out.
    std::vector<float> first(3 * 5, 1.0f), others(3 * 40, 2.0f);
    others[3] = NAN;                         // position 13 of head 0
    others[40 + 7] = -INFINITY;              // 17 of head 1
    others[80 + 8] = others[80 + 9] = 9.0f;  // 18 and 19 of head 2
    require_ok(kv_seq_set_scores(host.pool(), t.sequence, 0, 0, 5, first.data()));
    require_ok(kv_seq_set_scores(host.pool(), t.sequence, 0, 10, 40, others.data()));
    const std::vector<float> noted = host.scores(t.sequence, 0, 2);
    REQUIRE(noted.size() == 50);
    CHECK(noted[4] == 1.0f);
    CHECK(std::isinf(noted[5]));
    CHECK(noted[18] == 9.0f);
    t.step(3);
    kv_policy loose = policy;
    loose.budget = 52;
    compress(host, t.sequence, loose);
    for (uint32_t head = 0; head < 3; ++head) {
        // One goes: NaN, minus infinity, or the last of the lowest.
        const std::vector<uint32_t> kept = host.positions(t.sequence, 0, head);
        const uint32_t gone = head == 0 ? 13 : head == 1 ? 17 : 4;
        CHECK(!std::binary_search(kept.begin(), kept.end(), gone));
        CHECK(kept.size() == 52);
    }
    compress(host, t.sequence, policy);
    const std::vector<uint32_t> kept = host.positions(t.sequence, 0, 2);
    REQUIRE(kept.size() == 20);
    for (const uint32_t p : {5, 6, 7, 8, 9, 18, 19, 50, 51, 52}) {
        CHECK(std::binary_search(kept.begin(), kept.end(), p));
    }
    // More without a score than the budget holds: none of the newest goes.
    t.step(25);
    compress(host, t.sequence, policy);
    CHECK(host.positions(t.sequence, 0, 1).size() == 28);
    CHECK(host.positions(t.sequence, 0, 1).front() == 50);
}

TEST_CASE("ADAPTIVE: heads compete for the sum of their budgets, round after round") {
    engine host(shape_of(true));
    for (const float floor_share : {0.0f, 0.5f, 1.0f}) {
        kv_policy policy = host_policy(32);
        policy.allocator = KV_ALLOCATE_ADAPTIVE;
        policy.floor_share = floor_share;
        tracker t = scored_sequence(host, policy, 100);
        for (int round = 0; round < 4; ++round) {
            CAPTURE(round);
            std::vector<std::vector<std::vector<uint32_t>>> expected;
            for (uint32_t layer = 0; layer < 3; ++layer) {
                expected.push_back(
                    adaptive(t, layer, policy, floor_share != 0.0f ? double{floor_share} : 0.2));
            }
            const kv_compress_report report = compress(host, t.sequence, policy);
            CHECK(report.outcome == KV_COMPRESS_DONE);
            CHECK(report.tokens_after == 3 * 3 * 32);
            for (uint32_t layer = 0; layer < 3; ++layer) {
                for (uint32_t head = 0; head < 3; ++head) {
                    CAPTURE(layer);
                    CAPTURE(head);
                    CHECK(host.positions(t.sequence, layer, head) == expected[layer][head]);
                }
            }
            t.adopt();
            const uint32_t seen = t.next_position();
            t.step(17);
            give_scores(host, t.sequence, seen, 17);
        }
        require_ok(kv_seq_release(host.pool(), t.sequence));
    }
}

TEST_CASE("PER_LAYER: heads that hold different tokens have no set in common") {
    engine host(shape_of(true, 1));
    kv_policy policy = policy_of(KV_SCORER_HOST, 30);
    policy.allocator = KV_ALLOCATE_ADAPTIVE;
    const kv_seq sequence = host.create(&policy);
    host.run({{sequence, 1, 90}});
    std::vector<float> scores(3 * 90, 1.0f);
    std::fill_n(scores.begin(), 90, 2.0f);
    require_ok(kv_seq_set_scores(host.pool(), sequence, 0, 0, 90, scores.data()));
    compress(host, sequence, policy);
    const auto retained = [&](uint32_t head) { return host.positions(sequence, 0, head).size(); };
    REQUIRE(retained(0) > 40);
    REQUIRE(retained(1) < 40);
    // A budget that the first head alone is above: the others' scores would be nobody's.
    policy = policy_of(KV_SCORER_KEY_NORM, 40);
    policy.selection = KV_SELECT_PER_LAYER;
    const std::size_t before = retained(0);
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    CHECK(kv_compress(host.pool(), sequence, &options, nullptr) == KV_INVALID);
    CHECK(last_error().find("retains other tokens") != std::string::npos);
    CHECK(retained(0) == before);
}

TEST_CASE("THRESHOLD: what reaches it, at most the budget") {
    for (const bool apart : {false, true}) {
        for (const uint32_t selection : {KV_SELECT_PER_LAYER_PER_HEAD, KV_SELECT_PER_LAYER}) {
            for (const float threshold : {0.5f, 1.25f, 2.0f, 100.0f, -1.0f}) {
                CAPTURE(apart);
                CAPTURE(selection);
                CAPTURE(threshold);
                engine host(shape_of(apart));
                kv_policy policy = host_policy(60);
                policy.allocator = KV_ALLOCATE_THRESHOLD;
                policy.threshold = threshold;
                policy.selection = selection;
                tracker t = scored_sequence(host, policy, 90);
                CHECK(compress(host, t.sequence, policy).outcome == KV_COMPRESS_DONE);
                for (uint32_t layer = 0; layer < 3; ++layer) {
                    const auto score = [&](uint32_t head, uint32_t p) {
                        double sum = 0.0;
                        for (uint32_t h = 0; h < 3; ++h) sum += double{host_score(layer, h, p)};
                        return selection == KV_SELECT_PER_LAYER
                                   ? sum
                                   : double{host_score(layer, head, p)};
                    };
                    std::size_t reached[3] = {};
                    for (uint32_t head = 0; head < 3; ++head) {
                        const tracked_head& mine = t.layers[layer].heads[head];
                        reached[head] = 7;
                        for (const std::size_t slot : candidates_of(t, mine, policy)) {
                            const double s = score(head, mine.retained[slot]);
                            reached[head] += s >= double{threshold} ? 1 : 0;
                        }
                    }
                    for (uint32_t head = 0; head < 3; ++head) {
                        const tracked_head& mine = t.layers[layer].heads[head];
                        const std::size_t most = *std::max_element(reached, reached + 3);
                        const std::size_t keep =
                            std::min<std::size_t>(60, apart ? reached[head] : most);
                        CHECK(host.positions(t.sequence, layer, head) ==
                              best(
                                  mine.retained, candidates_of(t, mine, policy),
                                  [&](uint32_t p) { return score(head, p); }, keep));
                    }
                }
                // All that is left reaches it, so nothing is removed, and the next round says so.
                const kv_compress_report again = compress(host, t.sequence, policy);
                CHECK((again.outcome == KV_COMPRESS_NOTHING ||
                       again.tokens_after < again.tokens_before));
                if (apart) CHECK(again.outcome == KV_COMPRESS_NOTHING);
                CHECK(host.info(t.sequence).compactions ==
                      1u + (again.outcome == KV_COMPRESS_DONE ? 1 : 0));
            }
        }
    }
}

TEST_CASE("THRESHOLD: a head may be left with nothing, and goes on") {
    engine host(shape_of(true, 1));
    kv_policy policy = policy_of(KV_SCORER_HOST, 60);
    policy.allocator = KV_ALLOCATE_THRESHOLD;
    policy.threshold = 1.0f;
    tracker t(host, host.create(&policy), 1);
    t.step(33);
    std::vector<float> scores(3 * 33, 0.0f);
    for (uint32_t i = 0; i < 33; ++i) scores[33 + i] = 1.0f;
    require_ok(kv_seq_set_scores(host.pool(), t.sequence, 0, 0, 33, scores.data()));
    CHECK(compress(host, t.sequence, policy).outcome == KV_COMPRESS_DONE);
    CHECK(host.positions(t.sequence, 0, 0).empty());
    CHECK(host.positions(t.sequence, 0, 1).size() == 33);
    t.adopt();
    kv_seq child = 0;
    require_ok(kv_seq_fork(host.pool(), t.sequence, 1, &child));
    t.step(20);
    CHECK(host.positions(t.sequence, 0, 2).size() == 20);
    require_ok(kv_seq_truncate(host.pool(), t.sequence, 40));
    CHECK(host.positions(t.sequence, 0, 0).size() == 7);
    CHECK(host.positions(t.sequence, 0, 1).size() == 40);
    require_ok(kv_pool_check(host.pool()));
}

TEST_CASE("PYRAMID: budgets fall from layer to layer on a line, with the budget as their mean") {
    for (const uint32_t steepness : {0u, 4u, 2u}) {
        for (const uint32_t budget : {20u, 37u, 75u}) {
            CAPTURE(steepness);
            CAPTURE(budget);
            engine host(shape_of(budget == 37, 5));
            kv_policy policy = policy_of(KV_SCORER_HOST, budget);
            policy.allocator = KV_ALLOCATE_PYRAMID;
            policy.steepness = steepness;
            tracker t = scored_sequence(host, policy, 96);
            compress(host, t.sequence, policy);
            // PyramidKV: least = B / beta, greatest = 2 B - least, or all there is.
            const double beta = steepness != 0 ? steepness : 20, b = budget;
            double greatest = 2 * b - b / beta;
            if (greatest >= 96) greatest = 96;
            const double fall = (greatest - (2 * b - greatest)) / 4;
            std::size_t sum = 0;
            for (uint32_t layer = 0; layer < 5; ++layer) {
                const std::vector<uint32_t> kept = host.positions(t.sequence, layer, 1);
                sum += kept.size();
                CHECK(std::abs(static_cast<double>(kept.size()) - (greatest - layer * fall)) < 1.0);
                const tracked_head& mine = t.layers[layer].heads[1];
                CHECK(kept == best(
                                  mine.retained, candidates_of(t, mine, policy),
                                  [&](uint32_t p) { return host_score(layer, 1, p); },
                                  kept.size()));
            }
            CHECK(sum == 5 * budget);
        }
    }
}

TEST_CASE("slack: rounds come when so much more is retained than they leave, not at every token") {
    struct slack_case {
        uint32_t allocator, skip_layers, flags;
    };
    for (const slack_case& c :
         {slack_case{KV_ALLOCATE_UNIFORM, 0, 0},
          {KV_ALLOCATE_UNIFORM, 1, 0},
          {KV_ALLOCATE_UNIFORM, 0, KV_POLICY_PROTECT_PROMPT | KV_POLICY_PROMPT_ON_TOP},
          {KV_ALLOCATE_UNIFORM, 0, KV_POLICY_PROTECT_PROMPT},
          {KV_ALLOCATE_PYRAMID, 0, 0},
          {KV_ALLOCATE_ADAPTIVE, 0, 0}}) {
        CAPTURE(c.allocator);
        CAPTURE(c.skip_layers);
        CAPTURE(c.flags);
        engine host(shape_of(true));
        kv_policy policy = policy_of(KV_SCORER_H2O, 24);
        policy.allocator = c.allocator;
        policy.skip_layers = c.skip_layers;
        policy.flags = c.flags;
        policy.prompt_tokens = c.flags != 0 ? 40 : 0;
        policy.slack = 10;
        const uint32_t left = c.flags == 0                               ? 24
                              : (c.flags & KV_POLICY_PROMPT_ON_TOP) != 0 ? 64
                                                                         : 40;
        tracker t(host, host.create(&policy), 1);
        t.step(left);
        uint32_t rounds = 0;
        for (uint32_t token = 1; token <= 44; ++token) {
            t.step(1);
            t.adopt();
            const uint32_t now = host.info(t.sequence).compactions;
            CHECK(now == token / 11);  // with the 11th token there are more than `slack`
            rounds = now;
        }
        CHECK(rounds == 4);
    }
}

TEST_CASE("AT_PROMPT_END: once, when the prompt is in") {
    engine host(shape_of(false));
    kv_policy policy = policy_of(KV_SCORER_SNAPKV, 16);
    policy.flags = KV_POLICY_AT_PROMPT_END;
    policy.prompt_tokens = 60;
    policy.recent = 8;
    tracker t(host, host.create(&policy), 1);
    t.step(40);
    CHECK(host.info(t.sequence).compactions == 0);
    t.step(25, 19);  // one is missing
    CHECK(host.info(t.sequence).compactions == 0);
    t.step(3);
    CHECK(host.info(t.sequence).compactions == 1);
    CHECK(host.positions(t.sequence, 0, 0).size() == 16);
    t.adopt();
    for (int i = 0; i < 5; ++i) t.step(1);
    CHECK(host.info(t.sequence).compactions == 1);
}

TEST_CASE("AT_PROMPT_END that comes when the prompt is in has its round with the next step") {
    engine host(shape_of(false));
    kv_policy policy = policy_of(KV_SCORER_STREAMING, 16);
    policy.flags = KV_POLICY_AT_PROMPT_END;
    policy.prompt_tokens = 60;
    tracker t(host, host.create(nullptr), 1);
    t.step(60);
    require_ok(kv_seq_set_policy(host.pool(), t.sequence, &policy));
    CHECK(host.info(t.sequence).compactions == 0);
    t.step(1);
    CHECK(host.info(t.sequence).compactions == 1);
    CHECK(host.positions(t.sequence, 0, 0).size() == 16);
    t.adopt();
    // Once: neither later steps nor other numbers of the same policy bring another.
    for (int i = 0; i < 3; ++i) {
        policy.budget = 10 - static_cast<uint32_t>(i);
        require_ok(kv_seq_set_policy(host.pool(), t.sequence, &policy));
        t.step(1);
    }
    CHECK(host.info(t.sequence).compactions == 1);
    policy.prompt_tokens = 62;
    require_ok(kv_seq_set_policy(host.pool(), t.sequence, &policy));
    t.step(1);
    CHECK(host.info(t.sequence).compactions == 2);
}

TEST_CASE("segments: each part of the prompt keeps its best, as far as there are places") {
    for (const uint32_t quota : {2u, 1000u}) {
        CAPTURE(quota);
        engine host(shape_of(false, 1));
        kv_policy policy = host_policy(40);
        policy.prompt_tokens = 100;
        policy.segments = 6;
        policy.segment_quota = quota;
        tracker t = scored_sequence(host, policy, 130);
        compress(host, t.sequence, policy);
        const std::size_t each = std::min<std::size_t>(quota, 33 / 6);
        for (uint32_t head = 0; head < 3; ++head) {
            const tracked_head& mine = t.layers[0].heads[head];
            const slots candidates = candidates_of(t, mine, policy);
            std::vector<char> held(130, 0);
            for (uint32_t s = 0; s < 6; ++s) {
                std::vector<uint32_t> part;
                for (const std::size_t slot : candidates) {
                    if (slot >= 100 * s / 6 && slot < 100 * (s + 1) / 6) {
                        part.push_back(static_cast<uint32_t>(slot));
                    }
                }
                std::stable_sort(part.begin(), part.end(), [&](uint32_t a, uint32_t b) {
                    return host_score(0, head, a) > host_score(0, head, b);
                });
                for (std::size_t i = 0; i < std::min(each, part.size()); ++i) held[part[i]] = 1;
            }
            CHECK(
                host.positions(t.sequence, 0, head) ==
                best(
                    mine.retained, candidates,
                    [&](uint32_t p) { return held[p] != 0 ? 1e9 : double{host_score(0, head, p)}; },
                    40));
        }
    }
}

TEST_CASE("value_reserve: the widest values stay, of each set, and no others in their place") {
    for (const uint32_t selection :
         {KV_SELECT_PER_LAYER_PER_HEAD, KV_SELECT_PER_HEAD, KV_SELECT_UNION, KV_SELECT_PER_LAYER}) {
        for (const uint32_t reserve : {6u, 23u, 0xffffffffu}) {
            CAPTURE(selection);
            CAPTURE(reserve);
            engine host(shape_of(true));
            kv_policy policy = host_policy(30);
            policy.selection = selection;
            policy.value_reserve = reserve;
            tracker t = scored_sequence(host, policy, 90);
            compress(host, t.sequence, policy);
            for (uint32_t layer = 0; layer < 3; ++layer) {
                for (uint32_t head = 0; head < 3; ++head) {
                    const tracked_head& mine = t.layers[layer].heads[head];
                    const slots candidates = candidates_of(t, mine, policy);
                    const auto joins = [&](uint32_t l, uint32_t h) {
                        return selection == KV_SELECT_UNION ||
                               (selection == KV_SELECT_PER_LAYER  ? l == layer
                                : selection == KV_SELECT_PER_HEAD ? h == head
                                                                  : l == layer && h == head);
                    };
                    const auto widest = [&](uint32_t p) {
                        double most = 0.0;
                        for (uint32_t l = 0; l < 3; ++l) {
                            for (uint32_t h = 0; h < 3; ++h) {
                                if (joins(l, h)) most = std::max(most, value_range(t, l, h, p));
                            }
                        }
                        return most;
                    };
                    const std::size_t held = std::min<std::size_t>(reserve, 23);
                    const std::vector<uint32_t> reserved =
                        best(mine.retained, candidates, widest, 7 + held);
                    const auto score = [&](uint32_t p) {
                        if (std::binary_search(reserved.begin(), reserved.end(), p)) return 1e9;
                        float sum = 0.0f, most = 0.0f;
                        for (uint32_t l = 0; l < 3; ++l) {
                            for (uint32_t h = 0; h < 3; ++h) {
                                if (!joins(l, h)) continue;
                                sum += host_score(l, h, p);
                                most = std::max(most, host_score(l, h, p));
                            }
                        }
                        return double{selection == KV_SELECT_UNION ? most : sum};
                    };
                    CHECK(host.positions(t.sequence, layer, head) ==
                          best(mine.retained, candidates, score, 30));
                }
            }
        }
    }
}

TEST_CASE("allocators: lanes of tiles end in raw blocks, and say so when there are none") {
    pool_shape shape = shape_of(true, 5);
    shape.block_tokens = 64;
    shape.slabs = 3;
    for (layer_shape& layer : shape.layers) {
        layer.key_dim = layer.value_dim = 64;
        layer.key_format = layer.value_format = KV_FORMAT_KIVI4;
    }
    engine host(shape);
    kv_policy policy = policy_of(KV_SCORER_HOST, 256);
    policy.allocator = KV_ALLOCATE_THRESHOLD;
    policy.threshold = 0.5f;
    const kv_seq sequence = host.create(&policy);
    host.run({{sequence, 1, 256}});  // four tiles in each lane, no raw block
    std::vector<float> scores(3 * 256);
    for (uint32_t i = 0; i < scores.size(); ++i) scores[i] = i % 256 % 5 < 2 ? 1.0f : 0.0f;
    for (uint32_t layer = 0; layer < 5; ++layer) {
        require_ok(kv_seq_set_scores(host.pool(), sequence, layer, 0, 256, scores.data()));
    }
    // Others take raw blocks until there are fewer than a round wants: one for each of 15 lanes.
    std::vector<kv_seq> others;
    for (kv_status found = KV_OK; found == KV_OK;) {
        others.push_back(host.create());
        kv_step* step = nullptr;
        require_ok(kv_step_begin(host.pool(), &step));
        require_ok(kv_seq_append(step, others.back(), nullptr, 10, nullptr));
        found = kv_step_reserve(step, nullptr);
        REQUIRE((found == KV_OK || found == KV_AGAIN));
        for (uint32_t lane = 0; found == KV_OK && lane < 15; ++lane) {
            kv_tables tables = KV_INIT(kv_tables);
            tables.kv_head = lane % 3;
            require_ok(kv_step_export(step, lane / 3, &tables));
        }
        require_ok(found == KV_OK ? kv_step_end(step, nullptr) : kv_step_cancel(step));
    }
    const std::vector<float> before = host.scores(sequence, 2, 1);
    CHECK(kv_compress(host.pool(), sequence, nullptr, nullptr) == KV_AGAIN);
    CHECK(host.positions(sequence, 2, 1).size() == 256);
    CHECK(host.scores(sequence, 2, 1) == before);
    require_ok(kv_pool_check(host.pool()));
    for (const kv_seq other : others) require_ok(kv_seq_release(host.pool(), other));
    CHECK(compress(host, sequence, policy).outcome == KV_COMPRESS_DONE);
    for (uint32_t layer = 0; layer < 5; ++layer) {
        for (uint32_t head = 0; head < 3; ++head) {
            const std::vector<uint32_t> kept = host.positions(sequence, layer, head);
            CHECK(kept.size() == 103);
            for (const uint32_t p : kept) CHECK(p % 5 < 2);
        }
    }
    host.run({{sequence, 1, 30}});
    require_ok(kv_pool_check(host.pool()));
}
