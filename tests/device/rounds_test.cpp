// Policies and kv_compress of a CUDA pool, through the public header: the plugin's launches run the
// kernels' own bodies, late, and a CPU pool says what stays, where, and what comes back.
#include <algorithm>

#include "twin_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

constexpr float slopes[4] = {0.5f, 0.25f, 0.125f, 0.0625f};

/// One that attention reads positions of, codes, a window, and a lane for each head.
std::vector<kv_layer> layers_for_rounds(const kv_rope& rope) {
    kv_layer layer = KV_INIT(kv_layer);
    layer.query_heads = 4;
    layer.kv_heads = 2;
    layer.key_dim = 64;
    layer.key_format = layer.value_format = KV_FORMAT_F16;
    layer.rope = &rope;
    std::vector<kv_layer> made(4, layer);
    made[0].alibi_slopes = slopes;
    made[1].key_format = KV_FORMAT_INT8_TOKEN;
    made[1].value_format = KV_FORMAT_INT4_TOKEN;
    made[2].window = 40;
    made[2].window_sinks = 4;
    made[3].key_format = made[3].value_format = KV_FORMAT_BF16;
    made[3].flags = KV_LAYER_LANE_PER_HEAD;
    return made;
}

struct rope_of_tests {
    kv_rope rope = KV_INIT(kv_rope);
    rope_of_tests() {
        rope.style = KV_ROPE_HALF;
        rope.theta = 1e4;
    }
};

/// Twin pools whose sequences have policies.
struct round_pools : rope_of_tests, twin_pools {
    explicit round_pools(uint32_t flags = 0)
        : twin_pools(flags, layers_for_rounds(rope_of_tests::rope)) {}

    /// The same means of queries in both.
    void give_statistics() {
        for (uint32_t layer : {0u, 1u, 3u}) {
            std::vector<float> real(4 * 32), imaginary(4 * 32), magnitude(4 * 32);
            std::normal_distribution<float> normal;
            for (std::size_t i = 0; i < real.size(); ++i) {
                real[i] = normal(random);
                imaginary[i] = normal(random);
                magnitude[i] = std::hypot(real[i], imaginary[i]) + std::abs(normal(random));
            }
            kv_query_statistics statistics = KV_INIT(kv_query_statistics);
            statistics.layer = layer;
            statistics.query_heads = 4;
            statistics.bands = 32;
            statistics.tokens = 1;
            statistics.mean_real = real.data();
            statistics.mean_imaginary = imaginary.data();
            statistics.mean_magnitude = magnitude.data();
            for (kv_pool* pool : pools) REQUIRE(kv_pool_set_statistics(pool, &statistics) == KV_OK);
        }
    }
    void compare_reports() {
        CHECK(reports[0].compactions == reports[1].compactions);
        CHECK(reports[0].compactions_skipped == reports[1].compactions_skipped);
        CHECK(reports[0].last_skip_outcome == reports[1].last_skip_outcome);
        CHECK(reports[0].last_skip_status == reports[1].last_skip_status);
        CHECK(reports[0].blocks_returned == reports[1].blocks_returned);
        CHECK(reports[0].bytes_returned == reports[1].bytes_returned);
        rounds += reports[0].compactions;
    }
    /// Positions, by the device's own memory, where a round has placed them there.
    void compare_positions(const twin_sequence& sequence) {
        host.fake.run_all();
        cache &here = pools[0]->store, &there = pools[1]->store;
        const kvrt::sequence& device = *here.sequences.find(sequence.of[0]);
        const kvrt::sequence& cpu = *there.sequences.find(sequence.of[1]);
        CHECK(device.next_position == cpu.next_position);
        for (uint32_t l = 0; l < here.model.lanes.size(); ++l) {
            CAPTURE(l);
            const lane_state& state = device.lanes[l];
            REQUIRE(state.slots == cpu.lanes[l].slots);
            REQUIRE(state.explicit_slots == cpu.lanes[l].explicit_slots);
            REQUIRE(state.blocks == cpu.lanes[l].blocks);
            if (!device_has_positions(here, device, l)) continue;
            const position_store store = pools[0]->steps.rounds.positions_of(pools[0]->steps, l);
            for (uint32_t head = 0; head < here.model.lanes[l].kv_heads; ++head) {
                const slot_positions expected = positions_of(there, cpu, l, head);
                for (uint32_t slot = 0; slot < state.explicit_slots; ++slot) {
                    const uint32_t* const row = host.fake.memory_of<uint32_t>(
                        reinterpret_cast<device_pointer>(store.of(state.table[slot / 16], head)),
                        16);
                    REQUIRE(row != nullptr);
                    differences += row[slot % 16] != expected.at(slot) ? 1 : 0;
                    ++compared_positions;
                }
            }
        }
    }
    void compare(const twin_sequence& sequence) {
        compare_stored(sequence);
        compare_positions(sequence);
        for (kv_pool* pool : pools) {
            const kv_status verdict = kv_pool_check(pool);
            CHECK_MESSAGE(verdict == KV_OK, message_buffer());
        }
    }
    /// Both, and the same answers.
    kv_status compress(const twin_sequence& sequence, const kv_policy* policy) {
        kv_compress_options options = KV_INIT(kv_compress_options);
        options.policy = policy;
        kv_compress_report told[2];
        kv_status verdicts[2];
        for (uint32_t i = 0; i < 2; ++i) {
            told[i] = KV_INIT(kv_compress_report);
            verdicts[i] = kv_compress(pools[i], sequence.of[i], &options, &told[i]);
            CAPTURE(message_buffer());
            CHECK(verdicts[i] == verdicts[0]);
        }
        CHECK(told[0].outcome == told[1].outcome);
        CHECK(told[0].layers == told[1].layers);
        CHECK(told[0].tokens_before == told[1].tokens_before);
        CHECK(told[0].tokens_after == told[1].tokens_after);
        CHECK(told[0].blocks_after == told[1].blocks_after);
        CHECK(told[0].blocks_returned == told[1].blocks_returned);
        CHECK(told[0].bytes_returned == told[1].bytes_returned);
        CHECK(told[0].blocks_copied == told[1].blocks_copied);
        rounds += told[0].outcome == KV_COMPRESS_DONE ? 1 : 0;
        return verdicts[0];
    }

    uint64_t rounds = 0, compared_positions = 0;
};

kv_policy policy_of(uint32_t scorer) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = scorer;
    policy.budget = 48;
    policy.every = 8;
    policy.sinks = 3;
    policy.recent = 9;
    policy.seed = 77;
    return policy;
}

/// Prompts, tokens one by one, drafts, a pinned range, a fork that goes on from a shared tail,
/// truncations; rounds at step ends, and the device as late as chance has it.
void drive(round_pools& pools, const kv_policy& policy, uint32_t steps) {
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 3; ++i) sequences.push_back(pools.create(&policy));
    for (uint32_t i = 0; i < 2; ++i) {
        REQUIRE(kv_seq_pin(pools.pools[i], sequences[1].of[i], 20, 5) == KV_OK);
    }
    pools.step({{&sequences[0], 70, 70}, {&sequences[1], 90, 90}, {&sequences[2], 5, 5}}, true);
    pools.compare_reports();
    for (uint32_t step = 0; step < steps; ++step) {
        CAPTURE(step);
        if (step == 3) sequences.push_back(pools.fork(sequences[0]));
        if (step == 6) pools.truncate(sequences[1], sequences[1].tokens - 2);
        std::vector<twin_append> items;
        for (twin_sequence& each : sequences) {
            const uint32_t rows = 1 + static_cast<uint32_t>(pools.random() % 6);
            items.push_back({&each, rows, rows - (rows > 3 ? 1 : 0)});
        }
        pools.step(items, step % 5 != 4);
        pools.compare_reports();
        for (uint32_t i = pools.random() % 60; i > 0; --i) {
            pools.host.fake.run_one(pools.host.stream);
        }
    }
    for (const twin_sequence& each : sequences) pools.compare(each);
}

}  // namespace

TEST_CASE("rounds on the device keep what those on the CPU keep, and return the same blocks") {
    kv_policy policy = policy_of(KV_SCORER_STREAMING);
    SUBCASE("STREAMING") {}
    SUBCASE("RANDOM, beside a protected prompt") {
        policy = policy_of(KV_SCORER_RANDOM);
        policy.prompt_tokens = 18;
        policy.flags = KV_POLICY_PROTECT_PROMPT;
    }
    SUBCASE("KEY_NORM, by slack, the first layer left whole") {
        policy = policy_of(KV_SCORER_KEY_NORM);
        policy.every = 0;
        policy.slack = 10;
        policy.skip_layers = 1;
    }
    SUBCASE("TRIATTENTION") { policy = policy_of(KV_SCORER_TRIATTENTION); }
    SUBCASE("TRIATTENTION, one set for the heads of a layer") {
        policy = policy_of(KV_SCORER_TRIATTENTION);
        policy.selection = KV_SELECT_PER_LAYER;
    }
    SUBCASE("RANDOM, one set for the heads of a layer") {
        policy = policy_of(KV_SCORER_RANDOM);
        policy.selection = KV_SELECT_PER_LAYER;
    }
    SUBCASE("TRIATTENTION, the greatest over offsets, in a pyramid, the prompt on top") {
        policy = policy_of(KV_SCORER_TRIATTENTION);
        policy.flags = KV_POLICY_OFFSETS_MAX | KV_POLICY_PROTECT_PROMPT | KV_POLICY_PROMPT_ON_TOP;
        policy.prompt_tokens = 10;
        policy.offset_max = 64;
        policy.allocator = KV_ALLOCATE_PYRAMID;
        policy.steepness = 2;
    }
    round_pools pools;
    pools.give_statistics();
    drive(pools, policy, 15);
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= 8);
    CHECK(pools.compared_positions > 500);
    CHECK(pools.compared_outputs > 10);
    CHECK(pools.host.fake.synchronisations() == 0);
}

namespace {

/// Tensors of a layer at fixed addresses, as a graph needs them.
struct layer_tensors {
    twin_tensor keys, values, queries, out, log_sums;
};

/// A decode step of three sequences, captured in the first place of a step.
struct decode_graph {
    round_pools& pools;
    std::vector<layer_tensors> tensors;
    std::vector<operation> graph;

    explicit decode_graph(round_pools& of) : pools(of) {
        for (uint32_t l = 0; l < pools.layers(); ++l) {
            tensors.push_back({pools.make_tensor(3, 2, 64), pools.make_tensor(3, 2, 64),
                               pools.make_tensor(3, 4, 64), pools.make_tensor(3, 4, 64),
                               pools.make_tensor(3, 4, 1)});
        }
    }
    void capture(kv_step* step) {
        pools.host.fake.begin_capture(pools.host.stream);
        for (uint32_t l = 0; l < pools.layers(); ++l) {
            const layer_tensors& of = tensors[l];
            kv_attend_options options = KV_INIT(kv_attend_options);
            options.log_sum_exp = static_cast<float*>(of.log_sums.on_device.data);
            REQUIRE(kv_write(step, l, &of.keys.on_device, &of.values.on_device) == KV_OK);
            REQUIRE(kv_attend(step, l, &of.queries.on_device, &of.out.on_device, &options) ==
                    KV_OK);
        }
        graph = pools.host.fake.end_capture(pools.host.stream);
    }
    void replay(kv_step* (&steps)[2]) {
        for (layer_tensors& of : tensors) {
            for (twin_tensor* each : {&of.keys, &of.values, &of.queries}) {
                pools.draw(*each);
                pools.host.stream->queue.push_back({"inputs", pools.upload(*each)});
            }
        }
        pools.host.fake.replay(graph, pools.host.stream);
        for (uint32_t l = 0; l < pools.layers(); ++l) {
            layer_tensors& of = tensors[l];
            REQUIRE(kv_write(steps[1], l, &of.keys.on_host, &of.values.on_host) == KV_OK);
            for (uint32_t head = 0; head < (l == 3 ? 2 : 1); ++head) {
                kv_cuda_tables tables = KV_INIT(kv_cuda_tables);
                tables.kv_head = head;
                REQUIRE(kv_cuda_step_tables(steps[0], l, &tables) == KV_OK);
                REQUIRE(tables.place == 0);
            }
            kv_attend_options options = KV_INIT(kv_attend_options);
            options.log_sum_exp = of.log_sums.host.data();
            REQUIRE(kv_attend(steps[1], l, &of.queries.on_host, &of.out.on_host, &options) ==
                    KV_OK);
            pools.expect(of.out, pools.bound_of(l));
            pools.expect(of.log_sums, pools.bound_of(l));
        }
    }
};

/// A sequence with a prompt.
twin_sequence start(round_pools& pools, uint32_t tokens, const kv_policy* policy = nullptr) {
    twin_sequence made = pools.create(policy);
    pools.step({{&made, tokens, tokens}}, true);
    return made;
}

uint64_t parked_blocks(const kv_pool* pool) {
    uint64_t parked = 0;
    for (uint32_t c = 0; c < pool->store.blocks.class_count(); ++c) {
        parked += pool->store.blocks.counters(c).parked;
    }
    return parked;
}

}  // namespace

TEST_CASE("a captured decode step is replayed behind rounds that move what it reads") {
    round_pools pools;
    pools.give_statistics();
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    policy.budget = 32;
    policy.every = 3;
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 3; ++i) sequences.push_back(pools.create(i == 2 ? nullptr : &policy));
    pools.step({{&sequences[0], 40, 40}, {&sequences[1], 61, 61}, {&sequences[2], 33, 33}});
    decode_graph decode(pools);
    for (uint32_t round = 0; round < 7; ++round) {
        CAPTURE(round);
        kv_step* steps[2];
        const std::vector<twin_append> items = {
            {&sequences[0], 1, 1}, {&sequences[1], 1, 1}, {&sequences[2], 1, 1}};
        pools.begin(items, steps);
        if (round == 0) decode.capture(steps[0]);
        decode.replay(steps);
        pools.end(items, steps);
        pools.compare_reports();
        pools.host.fake.run_all();
        CHECK(pools.differences == 0);
    }
    CHECK(pools.rounds >= 4);
    for (const twin_sequence& each : sequences) pools.compare(each);
    CHECK(pools.differences == 0);
}

TEST_CASE("kv_compress outside of steps runs behind what was enqueued, and before what comes") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence sequence = start(pools, 90);
    twin_sequence other = start(pools, 20);
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    SUBCASE("the host's stream is blocked") {
        pools.host.fake.block(pools.host.stream);
        CHECK(pools.compress(sequence, &policy) == KV_OK);
        const uint64_t parked = parked_blocks(pools.pools[0]);
        CHECK(parked >= 10);
        pools.host.fake.unblock(pools.host.stream);
        pools.host.fake.run_all();
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(pools.pools[0], &step) == KV_OK);
        CHECK(parked_blocks(pools.pools[0]) == 0);
        REQUIRE(kv_step_cancel(step) == KV_OK);
    }
    SUBCASE("another sequence is in an open step, on whose stream it goes") {
        kv_step* steps[2];
        const std::vector<twin_append> items = {{&other, 1, 1}};
        pools.begin(items, steps);
        CHECK(pools.compress(sequence, &policy) == KV_OK);
        for (kv_step* step : steps) REQUIRE(kv_step_cancel(step) == KV_OK);
    }
    SUBCASE(
        "the sequence itself is: the round runs at the step's end, with all that was accepted") {
        kv_step* steps[2];
        const std::vector<twin_append> items = {{&sequence, 2, 1}};
        pools.begin(items, steps);
        CHECK(pools.compress(sequence, &policy) == KV_OK);
        twin_tensor keys = pools.make_tensor(2, 2, 64);
        pools.draw(keys);
        pools.upload(keys)();
        for (uint32_t l = 0; l < pools.layers(); ++l) pools.write(steps, l, keys, keys);
        pools.end(items, steps);
        pools.compare_reports();
        CHECK(pools.reports[0].compactions == 1);
    }
    CHECK(pools.compress(sequence, &policy) == KV_OK);  // nothing is left to do
    pools.step({{&sequence, 3, 3}, {&other, 1, 1}});
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    pools.step({{&sequence, 1, 1}});
    pools.compare(sequence);
    pools.compare(other);
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= 2);
    CHECK(pools.host.fake.synchronisations() == 0);
}

TEST_CASE("blocks that a fork reads stay as they are: survivors go to fresh ones, or it waits") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence parent = start(pools, 100);
    twin_sequence child = pools.fork(parent);
    kv_policy policy = policy_of(KV_SCORER_KEY_NORM);
    policy.sinks = policy.recent = 0;
    CHECK(pools.compress(child, &policy) == KV_OK);
    pools.compare(parent);
    pools.compare(child);
    CHECK(pools.compress(parent, &policy) == KV_OK);  // alone now
    pools.step({{&parent, 1, 1}, {&child, 2, 2}});
    twin_sequence third = pools.fork(child);  // with a tail that a round has placed
    pools.step({{&child, 1, 1}, {&third, 2, 2}});
    for (const twin_sequence* each : {&parent, &child, &third}) pools.compare(*each);

    // No block is left for copies.
    twin_sequence fork = pools.fork(third);
    for (kv_pool* pool : pools.pools) {
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(pool, &step) == KV_OK);  // what the device is done with is free
        REQUIRE(kv_step_cancel(step) == KV_OK);
        for (uint32_t c = 0; c < pool->store.blocks.class_count(); ++c) {
            while (pool->store.blocks.allocate(c) != no_block) {
            }
        }
    }
    policy.budget = 20;
    CHECK(pools.compress(fork, &policy) == KV_AGAIN);
    pools.host.fake.run_all();
    for (const twin_sequence* each : {&third, &fork}) {
        pools.compare_stored(*each);
        pools.compare_positions(*each);
    }
    CHECK(pools.differences == 0);
}

TEST_CASE("what the host cannot know of positions is refused, not guessed") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence sequence = start(pools, 90);
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    uint32_t positions[128];
    uint64_t count = 0;
    SUBCASE("positions after a round by scores are read back, but for tables") {
        REQUIRE(pools.compress(sequence, &policy) == KV_OK);
        CHECK(kv_seq_get_positions(pools.pools[0], sequence.of[0], 0, 0, 0, nullptr, &count) ==
              KV_OK);
        CHECK(count == 48);
        pools.step({{&sequence, 3, 3}}, true);
        for (uint32_t layer = 0; layer < 4; ++layer) {
            for (const uint64_t capacity : {7u, 48u, 50u, 128u}) {
                uint32_t expected[128];
                uint64_t expected_count = 0;
                REQUIRE(kv_seq_get_positions(pools.pools[0], sequence.of[0], layer, 1, capacity,
                                             positions, &count) == KV_OK);
                REQUIRE(kv_seq_get_positions(pools.pools[1], sequence.of[1], layer, 1, capacity,
                                             expected, &expected_count) == KV_OK);
                CHECK(count == expected_count);
                CHECK(std::equal(positions, positions + std::min(count, capacity), expected));
            }
        }
        CHECK(pools.host.fake.synchronisations() != 0);  // it waits, and it alone
        pools.host.fake.run_all();
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(pools.pools[0], &step) == KV_OK);
        REQUIRE(kv_cuda_step_use_stream(step, as_stream(pools.host.stream)) == KV_OK);
        REQUIRE(kv_seq_append(step, sequence.of[0], nullptr, 1, nullptr) == KV_OK);
        REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
        kv_tables tables = KV_INIT(kv_tables);
        CHECK(kv_step_export(step, 0, &tables) == KV_OK);
        std::vector<int32_t> slot_positions(tables.slot_positions_count);
        tables.slot_positions = slot_positions.data();
        tables.slot_positions_capacity = slot_positions.size();
        CHECK(kv_step_export(step, 0, &tables) == KV_UNSUPPORTED);
        CHECK(message_has("slot_positions"));
        REQUIRE(kv_step_cancel(step) == KV_OK);
    }
    SUBCASE("positions after STREAMING are known") {
        policy = policy_of(KV_SCORER_STREAMING);
        REQUIRE(pools.compress(sequence, &policy) == KV_OK);
        REQUIRE(kv_seq_get_positions(pools.pools[0], sequence.of[0], 0, 1, 128, positions,
                                     &count) == KV_OK);
        uint32_t expected[128];
        REQUIRE(kv_seq_get_positions(pools.pools[1], sequence.of[1], 0, 1, 128, expected, &count) ==
                KV_OK);
        CHECK(std::equal(positions, positions + count, expected));
        for (uint32_t i = 0; i < 2; ++i) {
            CHECK(kv_seq_truncate(pools.pools[i], sequence.of[i], 60) == KV_NO_SNAPSHOT);
        }
        pools.truncate(sequence, 3);  // of which nothing was removed
        pools.step({{&sequence, 40, 40}});
        pools.compare(sequence);
    }
    SUBCASE("going back to among survivors") {
        REQUIRE(pools.compress(sequence, &policy) == KV_OK);
        pools.step({{&sequence, 4, 4}}, true);
        pools.truncate(sequence, 91);
        CHECK(kv_seq_truncate(pools.pools[0], sequence.of[0], 50) == KV_NO_SNAPSHOT);
        CHECK(message_has("only the device knows"));
        CHECK(kv_seq_truncate(pools.pools[1], sequence.of[1], 50) == KV_NO_SNAPSHOT);
        pools.compare(sequence);
    }
    SUBCASE("guards that reach further back than those of the round before") {
        REQUIRE(pools.compress(sequence, &policy) == KV_OK);
        policy.recent = 30;
        policy.budget = 40;  // holds them, however many there are
        CHECK(pools.compress(sequence, &policy) == KV_OK);
        policy.recent = 60;
        policy.budget = 20;
        kv_compress_options options = KV_INIT(kv_compress_options);
        options.policy = &policy;
        CHECK(kv_compress(pools.pools[0], sequence.of[0], &options, nullptr) == KV_UNSUPPORTED);
        CHECK(message_has("only the device knows"));
        pools.compare(sequence);
    }
    CHECK(pools.differences == 0);
}

TEST_CASE("heads that retain different tokens have no set in common") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence sequence = start(pools, 90);
    kv_policy policy = policy_of(KV_SCORER_STREAMING);
    CHECK(pools.compress(sequence, &policy) == KV_OK);  // the same in all, and known
    policy = policy_of(KV_SCORER_TRIATTENTION);
    policy.selection = KV_SELECT_PER_LAYER;
    policy.budget = 40;
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    pools.step({{&sequence, 5, 5}});
    CHECK(pools.compress(sequence, &policy) == KV_OK);  // by the set before
    twin_sequence fork = pools.fork(sequence);
    policy.budget = 30;
    CHECK(pools.compress(fork, &policy) == KV_OK);
    CHECK(pools.rounds == 4);
    policy.selection = KV_SELECT_PER_LAYER_PER_HEAD;
    policy.budget = 25;
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    policy.selection = KV_SELECT_PER_LAYER;
    policy.budget = 20;
    CHECK(pools.compress(sequence, &policy) == KV_INVALID);
    CHECK(pools.compress(fork, &policy) == KV_OK);
    pools.compare(sequence);
    pools.compare(fork);
    CHECK(pools.differences == 0);
}

TEST_CASE("what rounds on the device do not do is refused with the policy, by name") {
    round_pools pools;
    twin_sequence sequence = pools.create();
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    const char* name = nullptr;
    SUBCASE("scorers") {
        policy.scorer = KV_SCORER_LAGKV;
        name = "LAGKV";
    }
    SUBCASE("statistics that kv_attend gathers") {
        policy.flags = KV_POLICY_STATISTICS_ONLINE;
        name = "STATISTICS_ONLINE";
    }
    SUBCASE("allocators by scores") {
        policy.allocator = KV_ALLOCATE_THRESHOLD;
        name = "THRESHOLD";
    }
    SUBCASE("sets common to layers") {
        policy.selection = KV_SELECT_UNION;
        name = "UNION";
    }
    SUBCASE("reserves") {
        policy.value_reserve = 4;
        name = "value_reserve";
    }
    SUBCASE("quotas") {
        policy.prompt_tokens = 10;
        policy.segments = policy.segment_quota = 2;
        name = "segment_quota";
    }
    CHECK(kv_seq_set_policy(pools.pools[0], sequence.of[0], &policy) == KV_UNSUPPORTED);
    CHECK(message_has(name));
    CHECK(message_has("KV_DEVICE_CUDA"));
}

TEST_CASE("without statistics a round of TRIATTENTION says so, and takes nothing") {
    round_pools pools;
    twin_sequence sequence = start(pools, 60);
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    CHECK(pools.rounds == 0);
    pools.give_statistics();
    pools.host.fake.run_all();  // they go up like tables
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    CHECK(pools.rounds == 1);
    pools.compare(sequence);
    CHECK(pools.differences == 0);
}

TEST_CASE(
    "launches that fail leave lanes whole: those behind are moved, the others are as before") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence sequence = start(pools, 90);
    twin_sequence other = pools.fork(sequence);
    pools.host.fake.run_all();
    kv_policy policy = policy_of(KV_SCORER_KEY_NORM);
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    // Four launches for each of three kinds of lanes, the table's upload apart.
    for (const uint32_t launches : {0u, 5u, 7u}) {
        CAPTURE(launches);
        pools.host.fake.inject("cuLaunchKernel", error_out_of_memory, launches);
        CHECK(kv_compress(pools.pools[0], sequence.of[0], &options, nullptr) == KV_NO_MEMORY);
        CHECK(kv_pool_check(pools.pools[0]) == KV_OK);
        pools.host.fake.run_all();
    }
    CHECK(kv_compress(pools.pools[0], sequence.of[0], &options, nullptr) == KV_OK);
    CHECK(kv_compress(pools.pools[1], sequence.of[1], &options, nullptr) == KV_OK);
    pools.compare(sequence);
    pools.compare(other);
    CHECK(pools.differences == 0);
}

TEST_CASE("what a wrong round would do is found by the comparison with the CPU pool") {
    round_pools pools;
    pools.give_statistics();
    uint32_t number = 0;
    SUBCASE("guards of another position") {
        pools.faults.guard = [&](kernels::guard_parameters& call) {
            ++number;
            ++call.tables;
        };
    }
    SUBCASE("another head's means") {
        pools.faults.score = [&](kernels::triattention_parameters& call) {
            if (++number == 2) ++call.mean_real;
        };
    }
    SUBCASE("survivors of the next head") {
        pools.faults.compact = [&](kernels::compact_parameters& call) {
            if (++number == 1) call.survivor_stride = 0;
        };
    }
    SUBCASE("positions stay behind") {
        pools.faults.compact = [&](kernels::compact_parameters& call) {
            if (++number == 4) call.positions.base = nullptr;
        };
    }
    drive(pools, policy_of(KV_SCORER_TRIATTENTION), 6);
    CHECK(number != 0);
    CHECK(pools.differences + pools.host.fake.violations.size() != 0);
    pools.host.fake.violations.clear();
}

TEST_CASE("a device that is far behind has no room for more rounds, which are then made again") {
    round_pools pools;
    pools.give_statistics();
    twin_sequence sequence = start(pools, 120);
    pools.host.fake.run_all();
    pools.host.fake.block(pools.host.stream);
    pools.step({{&sequence, 1, 1}}, true);
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION);
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    uint32_t refused = 0;
    for (policy.budget = 100; policy.budget > 40; policy.budget -= 2) {
        CAPTURE(policy.budget);
        REQUIRE(kv_compress(pools.pools[1], sequence.of[1], &options, nullptr) == KV_OK);
        kv_status verdict = kv_compress(pools.pools[0], sequence.of[0], &options, nullptr);
        if (verdict == KV_AGAIN) {
            ++refused;
            CHECK(kv_pool_check(pools.pools[0]) == KV_OK);
            pools.host.fake.unblock(pools.host.stream);
            pools.host.fake.run_all();
            pools.host.fake.block(pools.host.stream);
            verdict = kv_compress(pools.pools[0], sequence.of[0], &options, nullptr);
        }
        REQUIRE(verdict == KV_OK);
    }
    CHECK(refused != 0);
    pools.host.fake.unblock(pools.host.stream);
    pools.compare(sequence);
    CHECK(pools.differences == 0);
}

TEST_CASE("with host fences survivors go to fresh blocks until the host's kernels are done") {
    round_pools pools(KV_POOL_HOST_FENCES | KV_POOL_ELASTIC);
    pools.give_statistics();
    kv_policy policy = policy_of(KV_SCORER_STREAMING);
    policy.budget = 30;
    policy.every = 4;
    twin_sequence sequence = pools.create(&policy), other = pools.create(&policy);
    for (uint32_t step = 0; step < 12; ++step) {
        CAPTURE(step);
        pools.step({{&sequence, 9, 9}, {&other, 2, 2}}, true);
        pools.compare_reports();
        for (uint32_t i = 0; i < 2 && step % 3 != 2; ++i) {
            REQUIRE(kv_pool_pass_fence(pools.pools[i], pools.reports[i].fence) == KV_OK);
        }
        if (step % 2 == 0) pools.host.fake.run_all();
    }
    CHECK(pools.rounds > 5);
    pools.compare(sequence);
    pools.compare(other);
    CHECK(pools.differences == 0);
}
