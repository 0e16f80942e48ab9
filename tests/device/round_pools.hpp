// Twin pools whose sequences have policies, and what rounds leave in them: on the fake driver
// (round_pools), or on a GPU (tests/gpu).
#pragma once

#include <algorithm>

#include "twin_pools.hpp"

namespace kvrt::cuda {

inline constexpr float slopes[4] = {0.5f, 0.25f, 0.125f, 0.0625f};

/// One that attention reads positions of, codes, a window, and a lane for each head.
inline std::vector<kv_layer> layers_for_rounds(const kv_rope& rope) {
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
    made[2].alibi_slopes = slopes;
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

/// The same means and covariances of queries in both; for layers of layers_for_rounds, or others
/// of 4 query heads with 32 bands.
inline void give_moments(twin_pools_on& twins,
                         std::initializer_list<uint32_t> layers = {0u, 1u, 3u}) {
    for (uint32_t layer : layers) {
        std::vector<float> real(4 * 32), imaginary(4 * 32), magnitude(4 * 32);
        std::normal_distribution<float> normal;
        for (std::size_t i = 0; i < real.size(); ++i) {
            real[i] = normal(twins.random);
            imaginary[i] = normal(twins.random);
            magnitude[i] = std::hypot(real[i], imaginary[i]) + std::abs(normal(twins.random));
        }
        kv_query_statistics statistics = KV_INIT(kv_query_statistics);
        statistics.layer = layer;
        statistics.query_heads = 4;
        statistics.bands = 32;
        statistics.tokens = 1;
        statistics.mean_real = real.data();
        statistics.mean_imaginary = imaginary.data();
        statistics.mean_magnitude = magnitude.data();
        std::vector<float> first(real.size()), second(first), both(first);
        for (std::size_t i = 0; i < first.size(); ++i) {
            first[i] = std::abs(normal(twins.random));
            second[i] = std::abs(normal(twins.random));
            both[i] = 0.5f * std::sqrt(first[i] * second[i]);
        }
        statistics.variance_real = first.data();
        statistics.variance_imaginary = second.data();
        statistics.covariance = both.data();
        for (kv_pool* pool : twins.pools) {
            REQUIRE(kv_pool_set_statistics(pool, &statistics) == KV_OK);
        }
    }
}

/// Twin pools whose sequences have policies.
struct round_pools_on : rope_of_tests, twin_pools_on {
    explicit round_pools_on(twin_device& device, uint32_t flags = 0,
                            const kvrt_plugin* plugin = nullptr)
        : twin_pools_on(device, flags, layers_for_rounds(rope_of_tests::rope), plugin) {}
    round_pools_on(twin_device& device, std::unique_ptr<twin_model> model)
        : twin_pools_on(device, 0, std::move(model)) {}

    void give_statistics() { give_moments(*this); }
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
        device().catch_up();
        cache &here = pools[0]->store, &there = pools[1]->store;
        const uint32_t tokens = here.model.block_tokens;
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
            const auto store_of = [&](uint32_t index) {
                return pools[0]->steps.rounds.positions_of(pools[0]->steps, l,
                                                           index < state.sealed_blocks);
            };
            for (uint32_t head = 0; head < here.model.lanes[l].kv_heads; ++head) {
                const slot_positions expected = positions_of(there, cpu, l, head);
                std::vector<std::byte> bytes;
                for (uint32_t slot = 0; slot < state.explicit_slots; ++slot) {
                    const uint32_t at = slot % tokens;
                    if (at == 0) {
                        const uint32_t block = state.table[slot / tokens];
                        twin_pools_on::device().read(reinterpret_cast<device_pointer>(
                                                         store_of(slot / tokens).of(block, head)),
                                                     bytes, tokens * sizeof(uint32_t));
                    }
                    uint32_t position = 0;
                    std::memcpy(&position, bytes.data() + at * sizeof position, sizeof position);
                    differences += position != expected.at(slot) ? 1 : 0;
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

struct round_pools : fake_side, round_pools_on {
    explicit round_pools(uint32_t flags = 0, const kvrt_plugin* plugin = nullptr)
        : round_pools_on(fake_device, flags, plugin) {}
    explicit round_pools(std::unique_ptr<twin_model> model)
        : round_pools_on(fake_device, std::move(model)) {}
};

inline kv_policy policy_of(uint32_t scorer) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = scorer;
    policy.budget = 48;
    policy.every = 8;
    policy.sinks = 3;
    policy.recent = 9;
    policy.seed = 77;
    return policy;
}

/// A sequence with a prompt.
inline twin_sequence start(round_pools_on& pools, uint32_t tokens,
                           const kv_policy* policy = nullptr) {
    twin_sequence made = pools.create(policy);
    pools.step({{&made, tokens, tokens}}, true);
    return made;
}

/// Prompts, tokens one by one, drafts, a pinned range, a fork that goes on from a shared tail,
/// truncations; rounds at step ends, and the device as late as chance has it.
inline void drive(round_pools_on& pools, const kv_policy& policy, uint32_t steps) {
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
        pools.device().run_some(static_cast<uint32_t>(pools.random() % 60));
    }
    for (const twin_sequence& each : sequences) pools.compare(each);
}

}  // namespace kvrt::cuda
