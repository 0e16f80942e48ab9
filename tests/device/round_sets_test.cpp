// Sets of survivors that lanes and heads of a CUDA pool have in common, what stays of them whatever
// its score, and rounds under pressure: as in a CPU pool.
#include "round_cases.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

void check(const round_pools& pools, uint64_t rounds) {
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= rounds);
    CHECK(pools.compared_positions > 200);
    CHECK(pools.host.fake.violations.empty());
    CHECK(pools.host.fake.synchronisations() == 0);
}

}  // namespace

TEST_CASE("sets common to layers, whose lanes are of three kinds") {
    const kv_policy policy = policy_for_sets();
    round_pools pools;
    pools.give_statistics();
    drive(pools, policy, 6);
    check(pools, 5);
}

TEST_CASE("what stays whatever its score: ranges of values, and the best of each segment") {
    const kv_policy policy = policy_for_quotas();
    round_pools pools;
    drive(pools, policy, 5);
    check(pools, 4);
}

TEST_CASE("where STREAMING keeps more than the newest, the host does not guess which") {
    kv_policy policy = policy_of(KV_SCORER_STREAMING);
    SUBCASE("ranges of values") { policy.value_reserve = 12; }
    SUBCASE("the best of each segment") {
        policy.prompt_tokens = 60;
        policy.segments = 3;
        policy.segment_quota = 4;
    }
    round_pools pools;
    twin_sequence sequence = start(pools, 90);
    REQUIRE(pools.compress(sequence, &policy) == KV_OK);
    for (const uint32_t layer : {0u, 1u, 3u}) {
        for (uint32_t head = 0; head < 2; ++head) {
            std::vector<uint32_t> found[2];
            for (uint32_t i = 0; i < 2; ++i) {
                uint64_t count = 0;
                found[i].resize(90);
                REQUIRE(kv_seq_get_positions(pools.pools[i], sequence.of[i], layer, head, 90,
                                             found[i].data(), &count) == KV_OK);
                found[i].resize(count);
            }
            CHECK(found[0] == found[1]);
        }
    }
    pools.compare(sequence);
    CHECK(pools.differences == 0);
}

namespace {

/// Lanes by head whose keys have steps of their own: no two are of one kind.
struct scaled_heads : twin_model {
    float scales[2] = {0.02f, 0.05f};
    kv_storage storage = KV_INIT(kv_storage);
    scaled_heads() {
        storage.scales = scales;
        storage.scale_count = 2;
        for (uint32_t i = 0; i < 2; ++i) {
            kv_layer& layer = add(KV_FORMAT_FP8_E4M3, KV_FORMAT_F16);
            layer.key_storage = &storage;
            layer.flags = KV_LAYER_LANE_PER_HEAD;
        }
    }
};

}  // namespace

TEST_CASE("heads that have a set in common need not be stored with the same scales") {
    round_pools pools(std::make_unique<scaled_heads>());
    kv_policy policy = policy_of(KV_SCORER_KEY_NORM);
    SUBCASE("PER_LAYER") { policy.selection = KV_SELECT_PER_LAYER; }
    SUBCASE("UNION") { policy.selection = KV_SELECT_UNION; }
    drive(pools, policy, 4);
    check(pools, 3);
}

TEST_CASE("sets common to layers need the same tokens in all of them") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence sequence = start(pools, 100);
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    policy.selection = KV_SELECT_UNION;
    policy.budget = 80;
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    twin_sequence fork = pools.fork(sequence);
    policy.selection = KV_SELECT_PER_HEAD;  // what is the same in all is so head by head
    policy.budget = 60;
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    policy.budget = 50;
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    CHECK(pools.rounds == 3);
    policy.budget = 40;
    for (const uint32_t selection : {KV_SELECT_UNION, KV_SELECT_PER_LAYER}) {
        policy.selection = selection;
        CHECK(pools.compress(sequence, &policy) == KV_INVALID);
    }
    CHECK(pools.compress(fork, &policy) == KV_OK);  // PER_LAYER: layers part
    policy.selection = KV_SELECT_PER_HEAD;
    policy.budget = 30;
    CHECK(pools.compress(fork, &policy) == KV_INVALID);
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    pools.compare(sequence);
    pools.compare(fork);
    CHECK(pools.differences == 0);
}

TEST_CASE("what is wrong with sets in common is found by the comparison with the CPU pool") {
    round_pools pools;
    kv_policy policy = policy_of(KV_SCORER_KEY_NORM);
    policy.selection = KV_SELECT_UNION;
    policy.value_reserve = 10;
    policy.prompt_tokens = 60;
    policy.segments = 3;
    policy.segment_quota = 5;
    bool changed = false;
    SUBCASE("scores add up instead") {
        pools.faults.join = [&](kernels::join_parameters& call) {
            call.greatest = false;
            changed = true;
        };
    }
    SUBCASE("segments of positions elsewhere") {
        pools.faults.quota = [&](kernels::quota_parameters& call) {
            call.tables += 1;
            changed = true;
        };
    }
    SUBCASE("ranges of keys") {
        pools.faults.measure = [&](kernels::measure_parameters& call) {
            call.values = false;
            changed = true;
        };
    }
    SUBCASE("survivors of another set") {
        pools.faults.compact = [&](kernels::compact_parameters& call) {
            call.survivors -= 64;
            changed = true;
        };
    }
    drive(pools, policy, 6);
    CHECK(changed);
    CHECK(pools.differences + pools.host.fake.violations.size() != 0);
    pools.host.fake.violations.clear();
}

namespace {

/// An arena of which sequences soon take more than a little.
struct pressed_rounds : twin_model {
    pressed_rounds() {
        arena_bytes = uint64_t{8} << 20;
        pressure_percent = 2;
        for (uint32_t i = 0; i < 4; ++i) add(KV_FORMAT_F16, KV_FORMAT_F16);
        layers[0].demoted_key_format = KV_FORMAT_INT8_TOKEN;
        layers[0].demoted_value_format = KV_FORMAT_INT8_TOKEN;
    }
};

}  // namespace

TEST_CASE("under pressure blocks are demoted, then rounds of policies run, at a step's end") {
    round_pools pools(std::make_unique<pressed_rounds>());
    kv_policy policy = policy_of(KV_SCORER_KEY_NORM);
    policy.every = 0;  // a last resort
    policy.skip_layers = 1;
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 4; ++i) sequences.push_back(pools.create(i == 3 ? nullptr : &policy));
    uint64_t rounds = 0, demoted = 0;
    for (uint32_t step = 0; step < 6; ++step) {
        CAPTURE(step);
        twin_sequence& grows = sequences[step % 3];
        pools.step({{&grows, 60 + 9 * step, 60 + 9 * step}, {&sequences[3], 1, 1}}, true);
        pools.compare_reports();
        CHECK(pools.reports[0].pressure_rounds == pools.reports[1].pressure_rounds);
        CHECK(pools.reports[0].demoted_blocks == pools.reports[1].demoted_blocks);
        CHECK(pools.reports[0].demoted_bytes == pools.reports[1].demoted_bytes);
        rounds += pools.reports[0].pressure_rounds;
        demoted += pools.reports[0].demoted_blocks;
        kv_pool_stats stats[2];
        for (uint32_t i = 0; i < 2; ++i) {
            stats[i] = KV_INIT(kv_pool_stats);
            REQUIRE(kv_pool_get_stats(pools.pools[i], &stats[i]) == KV_OK);
        }
        CHECK(stats[0].compactions == stats[1].compactions);
    }
    CHECK(demoted > 3);
    CHECK(rounds >= 3);
    for (const twin_sequence& each : sequences) pools.compare(each);
    check(pools, 0);
}
