// Rounds of a CUDA pool in which scores say how many slots stay: in two goes, against rounds of a
// CPU pool, which need one; and what becomes of a count before it is used.
#include "counted_pools.hpp"
#include "observed_pools.hpp"
#include "retention/round.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

struct counted_pools : round_pools {
    counted_pools() : round_pools(std::make_unique<layers_by_head>()) {}
};

void check(const fake_side& side, const round_pools_on& pools) {
    CHECK(pools.differences == 0);
    CHECK(pools.compared_positions > 200);
    CHECK(side.host.fake.violations.empty());
    CHECK(side.host.fake.synchronisations() == 0);
}

/// Waits for nothing; the device runs all.
kv_status again(round_pools_on& pools, const twin_sequence& sequence, const kv_policy& policy) {
    pools.device().catch_up();
    return compress_on_device(pools, sequence, policy);
}

/// What a round of the CPU leaves that keeps so many slots of each lane.
void compact_on_cpu(round_pools_on& pools, const twin_sequence& sequence, kv_policy policy,
                    const std::vector<uint32_t>& keep) {
    policy.allocator = KV_ALLOCATE_UNIFORM;
    kv_pool& pool = *pools.pools[1];
    kvrt::sequence& owner = *pool.store.sequences.find(sequence.of[1]);
    round_plan plan = plan_of(pool.store, pool.retention, owner, policy);
    for (uint32_t lane = 0; lane < keep.size(); ++lane) {
        plan.context.keep[lane] = keep[lane];
        plan.context.chosen_lanes[lane] = keep[lane] < owner.lanes[lane].slots ? 1 : 0;
    }
    compaction_report report;
    REQUIRE(run_round(plan, report) == KV_OK);
}

/// What a round of the policy would keep now of each lane, by a fork of the CPU's.
std::vector<uint32_t> counts_of_cpu(round_pools_on& pools, const twin_sequence& sequence,
                                    const kv_policy& policy) {
    kv_seq child = 0;
    REQUIRE(kv_seq_fork(pools.pools[1], sequence.of[1], 1, &child) == KV_OK);
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    REQUIRE(kv_compress(pools.pools[1], child, &options, nullptr) == KV_OK);
    std::vector<uint32_t> counts;
    for (uint32_t lane = 0; lane < pools.pools[1]->store.model.lanes.size(); ++lane) {
        counts.push_back(pools.pools[1]->store.sequences.find(child)->lanes[lane].slots);
    }
    REQUIRE(kv_seq_release(pools.pools[1], child) == KV_OK);
    return counts;
}

}  // namespace

TEST_CASE("heads of a layer compete for their budgets as on the CPU") {
    const kv_policy policy = policy_for_competing();
    counted_pools pools;
    const uint32_t uneven = drive_counted(pools, policy, 3);
    check(pools, pools);
    CHECK(pools.rounds >= 6);
    CHECK(pools.compared_sealed > 0);
    if (policy.scorer != KV_SCORER_STREAMING) CHECK(uneven > 6);
}

TEST_CASE("heads compete by what attention gave, as on the CPU") {
    kv_policy policy = adaptive(KV_SCORER_SNAPKV);
    policy.window = 8;
    SUBCASE("SNAPKV") {}
    SUBCASE("H2O") { policy = adaptive(KV_SCORER_H2O); }
    SUBCASE("BLEND") { policy = adaptive(KV_SCORER_BLEND); }
    auto model = std::make_unique<layers_by_head>();
    model->layers.resize(2);  // of the others no kernel of these tests scores keys
    observing_pools pools(std::move(model));
    give_moments(pools, {0u, 1u});
    twin_sequence sequence = pools.create(&policy);
    uint32_t uneven = 0;
    for (const uint32_t rows : {120u, 40u, 60u}) {
        pools.step({{&sequence, rows, rows}});
        uneven += compress_counted(pools, sequence, policy);
    }
    pools.compare(sequence);
    check(pools, pools);
    CHECK(pools.rounds == 3);
    CHECK(uneven >= 3);
}

TEST_CASE("lanes keep what reaches a threshold, and no more than the budget, as on the CPU") {
    kv_policy policy = policy_of(KV_SCORER_RANDOM);
    policy.every = 0;
    policy.allocator = KV_ALLOCATE_THRESHOLD;
    policy.threshold = 0.8f;
    policy.budget = 70;
    SUBCASE("of both heads of a lane the one with more") {}
    SUBCASE("one set for the heads of a layer") { policy.selection = KV_SELECT_PER_LAYER; }
    SUBCASE("with values' ranges, which reach any") { policy.value_reserve = 9; }
    SUBCASE("nothing reaches it: what guards hold stays") { policy.threshold = 2.0f; }
    SUBCASE("all does: the budget") { policy.threshold = -1.0f; }
    auto model = std::make_unique<layers_given>(
        layers_for_rounds(rope_of_tests().rope));  // lanes of two heads, and of one
    const rope_of_tests rotation;
    for (kv_layer& layer : model->layers) layer.rope = &rotation.rope;
    round_pools pools(std::move(model));
    drive_counted(pools, policy, 3);
    check(pools, pools);
    CHECK(pools.rounds >= 6);
}

TEST_CASE("a count by the scores of other slots would be seen") {
    counted_pools pools;
    pools.faults.counting = [](kernels::counting_parameters& call) { call.scores += 1; };
    const kv_policy policy = adaptive(KV_SCORER_RANDOM);
    twin_sequence sequence = start(pools, 120);
    CHECK(again(pools, sequence, policy) == KV_AGAIN);
    CHECK(again(pools, sequence, policy) == KV_OK);
    const std::vector<uint32_t> counts = counts_of_cpu(pools, sequence, policy);
    uint32_t others = 0;
    for (uint32_t lane = 0; lane < counts.size(); ++lane) {
        others += state_of(pools, 0, sequence).lanes[lane].slots != counts[lane] ? 1 : 0;
    }
    CHECK(others > 0);
}

TEST_CASE("nothing moves before what was counted has come, and nobody waits for it") {
    counted_pools pools;
    const kv_policy policy = adaptive(KV_SCORER_RANDOM);
    twin_sequence sequence = start(pools, 120);
    pools.device().catch_up();
    for (uint32_t turn = 0; turn < 3; ++turn) {
        CHECK(compress_on_device(pools, sequence, policy) == KV_AGAIN);
        CHECK(state_of(pools, 0, sequence).compactions == 0);
    }
    pools.device().catch_up();
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    CHECK(state_of(pools, 0, sequence).compactions == 1);
    pools.compare(sequence);
    check(pools, pools);
}

TEST_CASE("a count serves the policy, the round and the tokens that it is of") {
    counted_pools pools;
    kv_policy policy = adaptive(KV_SCORER_RANDOM);
    twin_sequence sequence = start(pools, 120);
    REQUIRE(again(pools, sequence, policy) == KV_AGAIN);
    SUBCASE("of another policy there is none") {
        policy.budget = 50;
        CHECK(again(pools, sequence, policy) == KV_AGAIN);
    }
    SUBCASE("a policy that the sequence gets ends it") {
        const kv_policy other = policy_of(KV_SCORER_RANDOM);
        REQUIRE(kv_seq_set_policy(pools.pools[0], sequence.of[0], &other) == KV_OK);
        CHECK(again(pools, sequence, policy) == KV_AGAIN);
    }
    SUBCASE("the same policy does not end it") {
        REQUIRE(kv_seq_set_policy(pools.pools[0], sequence.of[0], &policy) == KV_OK);
        CHECK(again(pools, sequence, policy) == KV_OK);
    }
    SUBCASE("another round ends it") {
        policy.budget = 44;  // fewer than the other round leaves
        REQUIRE(again(pools, sequence, policy) == KV_AGAIN);
        REQUIRE(again(pools, sequence, policy_of(KV_SCORER_RANDOM)) == KV_OK);
        CHECK(again(pools, sequence, policy) == KV_AGAIN);
    }
    SUBCASE("a truncation ends it") {
        pools.truncate(sequence, 118);
        CHECK(again(pools, sequence, policy) == KV_AGAIN);
    }
    SUBCASE("a fork has none") {
        const twin_sequence child = pools.fork(sequence);
        CHECK(again(pools, child, policy) == KV_AGAIN);
        CHECK(again(pools, sequence, policy) == KV_OK);
    }
    SUBCASE("nor has who comes to its place, and that waits for what is on its way") {
        REQUIRE(compress_on_device(pools, pools.fork(sequence), policy) == KV_AGAIN);
        pools.release(sequence);
        twin_sequence next = start(pools, 120);
        CHECK(again(pools, next, policy) == KV_AGAIN);
        CHECK(again(pools, next, policy) == KV_OK);
    }
    CHECK(pools.host.fake.violations.empty());
}

TEST_CASE("a round that is due at a step's end is counted there, and moves at a later one") {
    counted_pools pools;
    kv_policy policy = adaptive(KV_SCORER_RANDOM);
    bool inside = false;
    SUBCASE("every so many tokens") { policy.every = 100; }
    SUBCASE("at the end of the prompt, which comes once") {
        policy.flags = KV_POLICY_AT_PROMPT_END;
        policy.prompt_tokens = 110;
    }
    SUBCASE("by slack") { policy.slack = 30; }
    SUBCASE("asked for inside the step, of a sequence without a policy") { inside = true; }
    twin_sequence sequence = pools.create();
    if (!inside) {
        REQUIRE(kv_seq_set_policy(pools.pools[0], sequence.of[0], &policy) == KV_OK);
    }
    const std::vector<twin_append> prompt = {{&sequence, 110, 110}};
    kv_step* steps[2];
    pools.begin(prompt, steps);
    pools.run_layers(prompt, steps);
    if (inside) CHECK(compress_on_device(pools, sequence, policy) == KV_OK);  // deferred
    pools.end(prompt, steps);
    CHECK(pools.reports[0].compactions == 0);
    CHECK(pools.reports[0].compactions_skipped == 1);
    CHECK(pools.reports[0].last_skip_status == KV_AGAIN);
    const std::vector<uint32_t> counts = counts_of_cpu(pools, sequence, policy);

    // Before they have come: more tokens, and nothing moves.
    pools.step({{&sequence, 3, 3}});
    CHECK(pools.reports[0].compactions == 0);
    pools.device().catch_up();
    pools.step({{&sequence, 1, 1}});
    CHECK(pools.reports[0].compactions == 1);
    CHECK(pools.reports[0].blocks_returned > 0);
    compact_on_cpu(pools, sequence, policy, counts);
    pools.compare(sequence);
    for (uint32_t lane = 0; lane < counts.size(); ++lane) {
        CHECK(state_of(pools, 0, sequence).lanes[lane].slots == counts[lane]);
    }
    pools.step({{&sequence, 1, 1}});
    CHECK(pools.reports[0].compactions == 0);
    pools.compare(sequence);
    check(pools, pools);
}

TEST_CASE("what guards have come to hold stays, whatever was counted before") {
    counted_pools pools;
    kv_policy policy = adaptive(KV_SCORER_STREAMING);
    policy.recent = 0;
    policy.budget = 10;
    twin_sequence sequence = start(pools, 120);
    REQUIRE(again(pools, sequence, policy) == KV_AGAIN);
    for (uint32_t i = 0; i < 2; ++i) {
        REQUIRE(kv_seq_pin(pools.pools[i], sequence.of[i], 50, 30) == KV_OK);
    }
    REQUIRE(again(pools, sequence, policy) == KV_OK);
    for (uint32_t head = 0; head < 2; ++head) {
        uint64_t count = 0;
        std::vector<uint32_t> found(120);
        REQUIRE(kv_seq_get_positions(pools.pools[0], sequence.of[0], 0, head, 120, found.data(),
                                     &count) == KV_OK);
        found.resize(count);
        CHECK(count == 33);
        for (uint32_t position = 50; position < 80; ++position) {
            CHECK(std::find(found.begin(), found.end(), position) != found.end());
        }
    }
    CHECK(pools.host.fake.violations.empty());
}

TEST_CASE("heads without slots bring their budgets to the others") {
    // A policy that has removed all of one head's tokens, as a threshold may.
    auto model = std::make_unique<twin_model>();
    model->max_observed_sequences = 2;
    model->add(KV_FORMAT_F16, KV_FORMAT_F16).flags = KV_LAYER_LANE_PER_HEAD;
    round_pools pools(std::move(model));
    twin_sequence sequence = start(pools, 100);
    kv_policy reaching = policy_of(KV_SCORER_HOST);
    reaching.sinks = reaching.recent = reaching.every = 0;
    reaching.seed = 0;
    reaching.allocator = KV_ALLOCATE_THRESHOLD;
    reaching.budget = 90;
    std::vector<float> scores(200, -1.0f);
    std::fill(scores.begin() + 100, scores.end(), 1.0f);
    for (uint32_t i = 0; i < 2; ++i) {
        REQUIRE(kv_seq_set_policy(pools.pools[i], sequence.of[i], &reaching) == KV_OK);
        REQUIRE(kv_seq_set_scores(pools.pools[i], sequence.of[i], 0, 0, 100, scores.data()) ==
                KV_OK);
    }
    compress_counted(pools, sequence, reaching);
    CHECK(state_of(pools, 0, sequence).lanes[0].slots == 0);
    CHECK(state_of(pools, 0, sequence).lanes[1].slots == 90);

    kv_policy policy = adaptive(KV_SCORER_RANDOM);
    policy.sinks = policy.recent = 0;
    policy.budget = 30;
    compress_counted(pools, sequence, policy);
    CHECK(state_of(pools, 0, sequence).lanes[1].slots == 60);
    pools.compare(sequence);
    CHECK(pools.differences == 0);
}
