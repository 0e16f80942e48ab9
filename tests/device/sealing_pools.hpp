// Twin pools whose blocks are sealed, demoted and opened again, on the fake driver and on a GPU.
#pragma once

#include "twin_pools.hpp"

namespace kvrt::cuda {

/// Lanes of tiles and of demoted blocks; one whose blocks stay as they are. All are attended over.
struct layers_that_seal : twin_model {
    float scales[2] = {0.002f, 0.004f};  // so that many numbers saturate
    kv_storage static_scales = KV_INIT(kv_storage);
    kv_storage rotated = KV_INIT(kv_storage);

    layers_that_seal() {
        block_tokens = 64;
        arena_bytes = uint64_t{64} << 20;
        static_scales.scales = scales;
        static_scales.scale_count = 2;
        rotated.flags = KV_STORAGE_ROTATE;
        add(KV_FORMAT_KIVI4, KV_FORMAT_KIVI4);
        kv_layer& windowed = add(KV_FORMAT_KIVI2, KV_FORMAT_KVARN2);
        windowed.window = 100;
        windowed.window_sinks = 4;
        windowed.key_dim = 40;
        windowed.value_dim = 72;
        add(KV_FORMAT_KVARN4, KV_FORMAT_KVARN4).flags = KV_LAYER_LANE_PER_HEAD;
        kv_layer& to_int8 = add(KV_FORMAT_F16, KV_FORMAT_F16);
        to_int8.demoted_key_format = to_int8.demoted_value_format = KV_FORMAT_INT8_TOKEN;
        to_int8.demote_after = 100;
        kv_layer& to_int4 = add(KV_FORMAT_F32, KV_FORMAT_BF16);
        to_int4.demoted_key_format = KV_FORMAT_INT4_TOKEN;
        to_int4.demoted_value_format = KV_FORMAT_Q4_0;
        to_int4.demoted_key_storage = to_int4.demoted_value_storage = &rotated;
        to_int4.demote_after = 30;
        kv_layer& saturating = add(KV_FORMAT_F32, KV_FORMAT_F16);
        saturating.demoted_key_format = KV_FORMAT_FP8_E4M3;
        saturating.demoted_value_format = KV_FORMAT_F16;
        saturating.demoted_key_storage = &static_scales;
        saturating.demote_after = 1;
        add(KV_FORMAT_F16, KV_FORMAT_F16);
    }
};

struct sealing_pools_on : twin_pools_on {
    /// The first tables fill the ring of uploads: they are there when a test begins.
    explicit sealing_pools_on(twin_device& device, uint32_t flags = 0)
        : twin_pools_on(device, flags, std::make_unique<layers_that_seal>()) {
        twin_sequence first = create();
        append(first, 1);
        device.catch_up();
        release(first);
    }

    void append(twin_sequence& sequence, uint32_t rows) { step({{&sequence, rows, rows}}); }
    void run_some() { device().run_some(static_cast<uint32_t>(random() % 60)); }
    void check() {
        for (kv_pool* pool : pools) {
            const kv_status verdict = kv_pool_check(pool);
            REQUIRE_MESSAGE(verdict == KV_OK, message_buffer());
        }
    }
    const lane_state& lane(uint32_t pool, const twin_sequence& sequence, uint32_t index) const {
        return pools[pool]->store.sequences.find(sequence.of[pool])->lanes[index];
    }
    std::vector<uint64_t> saturated_keys(uint32_t pool, uint32_t layer) const {
        std::vector<uint64_t> counts(2);
        kv_layer_stats stats = KV_INIT(kv_layer_stats);
        stats.layer = layer;
        stats.saturated_keys = counts.data();
        stats.head_capacity = 2;
        REQUIRE(kv_pool_get_layer_stats(pools[pool], &stats) == KV_OK);
        return counts;
    }
    /// The device catches up, and the pool asks it; again, as a copy of counts may be of before.
    void settle() {
        for (uint32_t turn = 0; turn < 3; ++turn) {
            device().catch_up();
            kv_step* step = nullptr;
            REQUIRE(kv_step_begin(pools[0], &step) == KV_OK);
            REQUIRE(kv_cuda_step_use_stream(step, as_stream(device().stream())) == KV_OK);
            REQUIRE(kv_step_cancel(step) == KV_OK);
        }
    }
};

struct sealing_pools : fake_side, sealing_pools_on {
    explicit sealing_pools(uint32_t flags = 0) : sealing_pools_on(fake_device, flags) {}
};

/// Prompts, chunks, drafts, forks and truncations into sealed blocks, cancelled steps.
inline void drive(sealing_pools_on& pools, uint32_t rounds) {
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 3; ++i) sequences.push_back(pools.create());
    pools.step({{&sequences[0], 70, 70}, {&sequences[1], 150, 150}, {&sequences[2], 1, 1}});
    for (uint32_t round = 0; round < rounds; ++round) {
        CAPTURE(round);
        if (round == 1) {  // goes on inside of a sealed block, alone and as a fork
            pools.truncate(sequences[1], 100);
            sequences.push_back(pools.fork(sequences[1]));
        }
        if (round == 3) {
            pools.truncate(sequences[0], 40);
            pools.release(sequences[2]);
            sequences[2] = pools.create();
        }
        std::vector<twin_append> items;
        for (twin_sequence& each : sequences) {
            if (round % 3 == 2 && &each == &sequences[1]) continue;
            const uint32_t rows = round % 2 == 0 ? 1 : 20 + pools.random() % 40;
            const uint32_t refused = rows > 1 && pools.random() % 2 != 0 ? rows / 3 : 0;
            items.push_back({&each, rows, rows - refused});
        }
        if (round % 2 == 1) {
            kv_step* steps[2];
            pools.begin(items, steps);
            pools.cancel(steps);
        }
        pools.step(items);
        pools.run_some();
        if (round % 2 == 1) pools.device().catch_up();  // more steps have no room for lists
        pools.check();
    }
    for (const twin_sequence& each : sequences) pools.compare_stored(each);
    for (uint32_t i = 0; i < 2; ++i) pools.settle();  // the last steps' counts come with another's
    CHECK(pools.saturated_keys(0, 5) == pools.saturated_keys(1, 5));
    for (const twin_sequence& each : sequences) pools.release(each);
    pools.settle();
    pools.check();
    CHECK(pools.pools[0]->store.blocks.totals().pinned == 0);
    for (uint32_t c = 0; c < pools.pools[0]->store.blocks.class_count(); ++c) {
        CHECK(pools.pools[0]->store.blocks.counters(c).parked == 0);
    }
}

}  // namespace kvrt::cuda
