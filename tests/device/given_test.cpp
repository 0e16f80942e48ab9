// Scores that the host gives to sequences of a CUDA pool, and rounds that go by them: a CPU pool
// that is given the same says what each slot has, which stay, and where.
#include "round_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

/// Elements, codes, and a lane for each head.
struct scored_layers : twin_model {
    scored_layers() {
        max_observed_sequences = 5;
        add(KV_FORMAT_F16, KV_FORMAT_F16);
        add(KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT4_TOKEN);
        add(KV_FORMAT_BF16, KV_FORMAT_BF16).flags = KV_LAYER_LANE_PER_HEAD;
    }
};

struct scored_pools : round_pools {
    uint32_t compared_scores = 0, refused = 0;
    bool by_stream = false;  ///< scores are in device memory

    scored_pools() : round_pools(std::make_unique<scored_layers>()) {}

    /// In steps of 1/8, so that there are ties; of heads and layers that differ. One is NaN.
    std::vector<float> scores_of(uint32_t layer, uint32_t first, uint32_t tokens) {
        std::vector<float> made;
        for (uint32_t head = 0; head < 2; ++head) {
            for (uint32_t i = 0; i < tokens; ++i) {
                const uint32_t mixed = (first + i + 31 * layer + 17 * head) * 2654435761u + draws;
                made.push_back(static_cast<float>(mixed >> 28) / 8.0f + 0.125f);
            }
        }
        if (tokens > 20) made[7] = std::numeric_limits<float>::quiet_NaN();
        return made;
    }
    /// To both, of all layers. Where the device has no room it catches up.
    void give(const twin_sequence& sequence, uint32_t first, uint32_t tokens) {
        ++draws;
        for (uint32_t l = 0; l < layers(); ++l) {
            const std::vector<float> scores = scores_of(l, first, tokens);
            REQUIRE(kv_seq_set_scores(pools[1], sequence.of[1], l, first, tokens, scores.data()) ==
                    KV_OK);
            kv_status verdict = give_to_device(sequence, l, first, tokens, scores);
            if (verdict == KV_AGAIN) {
                ++refused;
                host.fake.run_all();
                verdict = give_to_device(sequence, l, first, tokens, scores);
            }
            REQUIRE_MESSAGE(verdict == KV_OK, std::string(message_buffer()));
        }
    }
    kv_status give_to_device(const twin_sequence& sequence, uint32_t layer, uint32_t first,
                             uint32_t tokens, const std::vector<float>& scores) {
        if (!by_stream) {
            return kv_seq_set_scores(pools[0], sequence.of[0], layer, first, tokens, scores.data());
        }
        twin_tensor there = make_tensor(2, tokens, 1);
        there.host = scores;
        fake_device.enqueue("scores", upload(there));  // they come when the stream does
        return kv_cuda_seq_set_scores(pools[0], sequence.of[0], layer, first, tokens,
                                      reinterpret_cast<const float*>(there.device),
                                      as_stream(fake_device.stream()));
    }

    /// Not to among the survivors of a round, on neither.
    bool truncate_if_possible(twin_sequence& sequence, uint32_t tokens) {
        kv_status verdicts[2];
        for (uint32_t i = 0; i < 2; ++i) {
            verdicts[i] = kv_seq_truncate(pools[i], sequence.of[i], sequence.tokens - tokens);
        }
        REQUIRE(verdicts[0] == verdicts[1]);
        if (verdicts[0] != KV_OK) return false;
        sequence.tokens -= tokens;
        return true;
    }

    /// What each slot has, on both: the same bits.
    void compare_scores(const twin_sequence& sequence) {
        for (uint32_t l = 0; l < layers(); ++l) {
            for (uint32_t head = 0; head < 2; ++head) {
                CAPTURE(l);
                CAPTURE(head);
                std::vector<float> scores[2];
                for (uint32_t i = 0; i < 2; ++i) {
                    scores[i].resize(512);
                    uint64_t count = 0;
                    REQUIRE(kv_seq_get_scores(pools[i], sequence.of[i], l, head, 512,
                                              scores[i].data(), &count) == KV_OK);
                    scores[i].resize(count);
                }
                REQUIRE(scores[0].size() == scores[1].size());
                differences += std::memcmp(scores[0].data(), scores[1].data(),
                                           scores[0].size() * sizeof(float)) != 0
                                   ? 1
                                   : 0;
                compared_scores += static_cast<uint32_t>(scores[0].size());
            }
        }
    }

    uint32_t draws = 0;
};

/// Prompts, tokens one by one, drafts, a fork, truncations, rounds at step ends; scores of all that
/// is new, or of more, or of less, before and behind rounds. `looks`: they are read in between,
/// which waits.
void drive_scored(scored_pools& pools, const kv_policy& policy, uint32_t steps, bool looks) {
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 3; ++i) sequences.push_back(pools.create(&policy));
    pools.step({{&sequences[0], 70, 70}, {&sequences[1], 90, 90}, {&sequences[2], 40, 40}}, true);
    pools.compare_reports();
    for (const twin_sequence& each : sequences) pools.give(each, 0, each.tokens);
    bool truncated = false;
    for (uint32_t step = 0; step < steps; ++step) {
        CAPTURE(step);
        if (step == 3) sequences.push_back(pools.fork(sequences[0]));
        if (step >= 4 && !truncated) truncated = pools.truncate_if_possible(sequences[1], 2);
        std::vector<twin_append> items;
        std::vector<uint32_t> before;
        for (twin_sequence& each : sequences) {
            const uint32_t rows = 1 + static_cast<uint32_t>(pools.random() % 6);
            items.push_back({&each, rows, rows - (rows > 3 ? 1 : 0)});
            before.push_back(each.tokens);
        }
        pools.step(items, true);
        pools.compare_reports();
        for (uint32_t i = 0; i < sequences.size(); ++i) {
            const uint32_t tokens = sequences[i].tokens;
            if (step % 4 == 0 && i == 0) continue;  // later
            if (step % 5 == 3) {
                pools.give(sequences[i], 10, tokens - 12);  // of which some are gone
            } else {
                pools.give(sequences[i], before[i], tokens - before[i]);
            }
        }
        for (uint32_t i = pools.random() % 60; i > 0; --i) {
            pools.host.fake.run_one(pools.host.stream);
        }
        if (!looks || step % 3 != 2) continue;
        for (const twin_sequence& each : sequences) pools.compare_scores(each);
    }
    CHECK((truncated || steps <= 4));
    for (const twin_sequence& each : sequences) pools.compare(each);
}

kv_policy host_policy() {
    kv_policy policy = policy_of(KV_SCORER_HOST);
    policy.budget = 40;
    return policy;
}

}  // namespace

TEST_CASE("rounds on the device go by the host's scores, as those on the CPU") {
    scored_pools pools;
    kv_policy policy = host_policy();
    bool looks = true;
    SUBCASE("each head by its own, and nobody waits") { looks = false; }
    SUBCASE("that are in device memory, and nobody waits") {
        pools.by_stream = true;
        looks = false;
    }
    SUBCASE("the means of neighbours, one set for the heads of a layer") {
        policy.pool_width = 3;
        policy.selection = KV_SELECT_PER_LAYER;
    }
    SUBCASE("the greatest, one set for all layers' heads") { policy.selection = KV_SELECT_UNION; }
    SUBCASE("sums, one set for the same head of all layers, drawn") {
        policy.selection = KV_SELECT_PER_HEAD;
        policy.flags = KV_POLICY_SAMPLE;
    }
    drive_scored(pools, policy, 9, looks);
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= 5);
    CHECK(pools.compared_positions > 500);
    CHECK((pools.compared_scores > 1000) == looks);
    if (!looks) CHECK(pools.host.fake.synchronisations() == 0);
}

TEST_CASE("rounds of another scorer move scores along, and a round without any says so") {
    scored_pools pools;
    const kv_policy policy = host_policy();
    twin_sequence sequence = pools.create(&policy);
    pools.step({{&sequence, 60, 60}}, true);
    CHECK(pools.compress(sequence, nullptr) == KV_OK);
    CHECK(pools.rounds == 0);
    pools.give(sequence, 20, 30);  // others have none
    kv_policy other = policy_of(KV_SCORER_KEY_NORM);
    CHECK(pools.compress(sequence, &other) == KV_OK);
    CHECK(pools.rounds == 1);
    pools.compare_scores(sequence);
    pools.step({{&sequence, 20, 20}}, true);
    CHECK(pools.compress(sequence, nullptr) == KV_OK);
    pools.compare_scores(sequence);
    pools.compare(sequence);
    CHECK(pools.differences == 0);
}

TEST_CASE("scores that find no room to go up change nothing, and none go up in a capture") {
    scored_pools pools;
    const kv_policy policy = host_policy();
    twin_sequence sequence = pools.create(&policy);
    pools.step({{&sequence, 60, 60}}, true);
    pools.give(sequence, 0, 60);
    pools.host.fake.run_all();
    pools.host.fake.block(pools.host.stream);
    pools.step({{&sequence, 1, 1}}, true);
    const std::vector<float> scores(2 * 61, 5.0f);
    kv_status verdict = KV_OK;
    uint32_t given = 0;
    for (; given < 1000 && verdict == KV_OK; ++given) {
        verdict = pools.give_to_device(sequence, 1, 0, 61, scores);
    }
    CHECK(verdict == KV_AGAIN);
    CHECK(given > 16);  // a model has many layers
    REQUIRE(kv_seq_set_scores(pools.pools[1], sequence.of[1], 1, 0, 61, scores.data()) == KV_OK);
    CHECK(pools.give_to_device(sequence, 0, 0, 61, scores) == KV_AGAIN);
    pools.host.fake.unblock(pools.host.stream);
    pools.host.fake.run_all();
    pools.compare_scores(sequence);
    CHECK(pools.differences == 0);
    kv_step* steps[2];
    pools.begin({{&sequence, 1, 1}}, steps);
    pools.host.fake.begin_capture(pools.host.stream);
    CHECK(pools.give_to_device(sequence, 0, 0, 61, scores) == KV_INVALID);
    CHECK(message_has("captured"));
    pools.host.fake.end_capture(pools.host.stream);
    pools.give(sequence, 3, 50);  // on the open step's stream
    pools.cancel(steps);
    pools.compare_scores(sequence);
    CHECK(pools.differences == 0);
}

TEST_CASE("scores that go astray are found by the comparison with the CPU pool") {
    scored_pools pools;
    const kv_policy policy = host_policy();
    uint32_t number = 0;
    std::function<void(kernels::give_parameters&)> fault;
    SUBCASE("to the next position") {
        fault = [](kernels::give_parameters& call) { ++call.first_position; };
    }
    SUBCASE("of another head") {
        fault = [](kernels::give_parameters& call) { call.scores += call.tokens; };
    }
    SUBCASE("to another head") {
        fault = [](kernels::give_parameters& call) { call.sums += call.sums_stride; };
    }
    SUBCASE("fewer") {
        fault = [](kernels::give_parameters& call) { call.tokens -= 1; };
    }
    SUBCASE("by positions of other blocks") {
        fault = [](kernels::give_parameters& call) { call.tables += 1; };
    }
    pools.faults.give = [&](kernels::give_parameters& call) {
        if (++number > 30) fault(call);  // behind rounds, which leave positions to be looked up
    };
    drive_scored(pools, policy, 4, true);
    CHECK(number > 30);
    CHECK(pools.differences + pools.host.fake.violations.size() != 0);
    pools.host.fake.violations.clear();
}

TEST_CASE("scores in device memory want a stream of that device, and a pool there") {
    scored_pools pools;
    const kv_policy policy = host_policy();
    twin_sequence sequence = pools.create(&policy);
    pools.step({{&sequence, 8, 8}}, true);
    const twin_tensor scores = pools.make_tensor(2, 8, 1);
    const auto give = [&](uint32_t pool, CUstream_st* stream) {
        return kv_cuda_seq_set_scores(pools.pools[pool], sequence.of[pool], 0, 0, 8,
                                      reinterpret_cast<const float*>(scores.device), stream);
    };
    CUstream_st* const stream = as_stream(pools.host.stream);
    CHECK(give(1, stream) == KV_INVALID);
    CHECK(message_has("CPU"));
    CHECK(give(0, nullptr) == KV_INVALID);
    CHECK(message_has("stream"));
    pools.host.fake.begin_capture(pools.host.stream);
    CHECK(give(0, stream) == KV_INVALID);
    CHECK(message_has("captured"));
    pools.host.fake.end_capture(pools.host.stream);
    kv_step* steps[2];
    pools.begin({{&sequence, 1, 1}}, steps);
    CHECK(give(0, as_stream(pools.host.fake.make_stream())) == KV_INVALID);
    CHECK(message_has("another stream"));
    CHECK(give(0, stream) == KV_OK);
    pools.cancel(steps);
}
