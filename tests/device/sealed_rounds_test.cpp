// Rounds on the device over lanes whose older blocks are sealed: what stays, where, and in which
// bytes, against a CPU pool that does the same.
#include "observed_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

/// Lanes whose blocks are demoted behind the newest tokens; a layer whose blocks stay as they are.
struct demoting_layers : twin_model {
    rope_of_tests rotation;
    float scales[2] = {0.002f, 0.004f};  // so that many numbers saturate
    kv_storage static_scales = KV_INIT(kv_storage);
    kv_storage rotated = KV_INIT(kv_storage);

    explicit demoting_layers(uint32_t tile_layout = KV_LAYOUT_NATIVE) {
        layout = tile_layout;
        arena_bytes = uint64_t{32} << 20;
        static_scales.scales = scales;
        static_scales.scale_count = 2;
        rotated.flags = KV_STORAGE_ROTATE;
        kv_layer& to_int8 = demoting(KV_FORMAT_F16, KV_FORMAT_INT8_TOKEN);
        to_int8.demoted_key_storage = to_int8.demoted_value_storage = &rotated;
        to_int8.alibi_slopes = slopes;  // attention reads positions
        kv_layer& by_head = demoting(KV_FORMAT_BF16, KV_FORMAT_INT4_TOKEN);
        by_head.flags = KV_LAYER_LANE_PER_HEAD;
        kv_layer& keys_alone = demoting(KV_FORMAT_F16, KV_FORMAT_FP8_E4M3);
        keys_alone.demoted_value_format = KV_FORMAT_F16;
        keys_alone.demoted_key_storage = &static_scales;
        add(KV_FORMAT_F16, KV_FORMAT_F16).rope = &rotation.rope;
    }
    kv_layer& demoting(uint32_t format, uint32_t demoted) {
        kv_layer& layer = add(format, format);
        layer.rope = &rotation.rope;
        layer.demoted_key_format = demoted;
        layer.demote_after = 20;
        return layer;
    }
};

/// All that is not demoted is held, so both know how much is.
kv_policy newest_held(uint32_t scorer) {
    kv_policy policy = policy_of(scorer);
    policy.recent = 36;
    policy.budget = 72;
    return policy;
}

}  // namespace

TEST_CASE("rounds over demoted blocks move them byte for byte, and leave what the CPU leaves") {
    kv_policy policy = newest_held(KV_SCORER_STREAMING);
    uint32_t layout = KV_LAYOUT_NATIVE;
    SUBCASE("STREAMING, which keeps the newest, whatever is held") { policy.recent = 5; }
    SUBCASE("RANDOM") { policy = newest_held(KV_SCORER_RANDOM); }
    SUBCASE("RANDOM, one set for the heads of a layer, in rows") {
        policy = newest_held(KV_SCORER_RANDOM);
        policy.selection = KV_SELECT_PER_LAYER;
        layout = KV_LAYOUT_NHD;
    }
    SUBCASE("VASE_SKETCH, drawn, one set for all layers, beside parts of a prompt") {
        policy = newest_held(KV_SCORER_VASE_SKETCH);
        policy.selection = KV_SELECT_UNION;
        policy.flags = KV_POLICY_SAMPLE;
        policy.prompt_tokens = 40;
        policy.segments = 2;
        policy.segment_quota = 3;
    }
    round_pools pools(std::make_unique<demoting_layers>(layout));
    drive(pools, policy, 7);
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= 3);
    CHECK(pools.compared_sealed > 20);
    CHECK(pools.compared_positions > 500);
    CHECK(pools.compared_outputs > 6);
    CHECK(pools.host.fake.synchronisations() == 0);
}

namespace {

struct observed_demoting_layers : observed_layers {
    kv_storage rotated = KV_INIT(kv_storage);

    observed_demoting_layers() {
        rotated.flags = KV_STORAGE_ROTATE;
        layers[2].key_format = layers[2].value_format = KV_FORMAT_F16;
        for (const uint32_t storing : {0u, 2u, 3u}) {
            kv_layer& layer = layers[storing];
            layer.demoted_key_format = storing == 2 ? KV_FORMAT_INT4_TOKEN : KV_FORMAT_INT8_TOKEN;
            layer.demote_after = 1;  // so a recent window of 16 holds what is not demoted
            if (storing != 3) layer.demoted_key_storage = layer.demoted_value_storage = &rotated;
        }
    }
};

}  // namespace

TEST_CASE("rounds over demoted blocks go by what attention gave their slots") {
    kv_policy policy = policy_of(KV_SCORER_H2O);
    policy.recent = 16;
    policy.decay = 0.4f;
    SUBCASE("H2O") {}
    SUBCASE("SNAPKV") {
        policy.scorer = KV_SCORER_SNAPKV;
        policy.decay = 0.0f;
        policy.window = 8;
    }
    observing_pools pools(std::make_unique<observed_demoting_layers>());
    drive(pools, policy, 6, true);
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= 3);
    CHECK(pools.compared_sealed > 20);
    CHECK(pools.compared_sums > 500);
}

TEST_CASE("scorers of content read demoted rows as the CPU opens them") {
    kv_policy policy = newest_held(KV_SCORER_TRIATTENTION);
    SUBCASE("TRIATTENTION") {}
    SUBCASE("KEYDIFF, one set for the heads of a layer") {
        policy = newest_held(KV_SCORER_KEYDIFF);
        policy.selection = KV_SELECT_PER_LAYER;
    }
    SUBCASE("EXPECTED_ATTENTION") { policy = newest_held(KV_SCORER_EXPECTED_ATTENTION); }
    SUBCASE("RANDOM beside values of wide range") {
        policy = newest_held(KV_SCORER_RANDOM);
        policy.value_reserve = 5;
    }
    round_pools pools(std::make_unique<demoting_layers>());
    give_moments(pools, {0u, 1u, 2u, 3u});
    drive(pools, policy, 4);
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= 2);
    CHECK(pools.compared_sealed > 20);
}

TEST_CASE("demoted keys and their directions are weighed with what attention gave them") {
    auto model = std::make_unique<observed_demoting_layers>();
    uint32_t same_way = 0;
    kv_policy policy = policy_of(KV_SCORER_RKV);
    SUBCASE("BLEND") { policy.scorer = KV_SCORER_BLEND; }
    SUBCASE("RKV") {}
    SUBCASE("RKV, whose newest similar keys are spared") {
        // Of such sparse keys, 4 bits are too few for the bound that outputs are held to.
        model->layers[2].demoted_key_format = KV_FORMAT_INT8_TOKEN;
        policy.flags = KV_POLICY_EXACT_REDUNDANCY;
        policy.similarity = 0.25f;
        policy.redundancy = 0.98f;
        policy.pool_width = 1;
        same_way = 10;
    }
    policy.recent = 16;
    observing_pools pools(std::move(model));
    pools.same_way = same_way;
    give_moments(pools, {0u, 2u, 3u});
    drive(pools, policy, 9, true);
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= 4);
    CHECK(pools.compared_sealed > 20);
}

namespace {

/// Tiles of keys beside records of values, of both, and a lane for each head.
struct tiled_layers : twin_model {
    rope_of_tests rotation;

    tiled_layers() {
        block_tokens = 64;
        arena_bytes = uint64_t{64} << 20;
        add(KV_FORMAT_KIVI4, KV_FORMAT_KIVI4).rope = &rotation.rope;
        kv_layer& narrow = add(KV_FORMAT_KIVI2, KV_FORMAT_KVARN2);
        narrow.alibi_slopes = slopes;
        narrow.rope = &rotation.rope;
        kv_layer& by_head = add(KV_FORMAT_KVARN4, KV_FORMAT_KVARN4);
        by_head.flags = KV_LAYER_LANE_PER_HEAD;
        by_head.rope = &rotation.rope;
        add(KV_FORMAT_INT8_TOKEN, KV_FORMAT_KVARN4).rope = &rotation.rope;
    }
};

}  // namespace

TEST_CASE("rounds over tiles code survivors anew as the CPU does, each once") {
    kv_policy policy = policy_of(KV_SCORER_RANDOM);
    policy.budget = 100;
    SUBCASE("RANDOM") {}
    SUBCASE("STREAMING, whose first block stays as it is") {
        policy.scorer = KV_SCORER_STREAMING;
        policy.sinks = 70;
    }
    SUBCASE("TRIATTENTION, one set for the heads of a layer") {
        policy.scorer = KV_SCORER_TRIATTENTION;
        policy.selection = KV_SELECT_PER_LAYER;
    }
    SUBCASE("LAGKV") { policy.scorer = KV_SCORER_LAGKV; }
    round_pools pools(std::make_unique<tiled_layers>());
    give_moments(pools, {0u, 1u, 2u, 3u});
    std::deque<twin_sequence> sequences = {start(pools, 150, &policy), start(pools, 200, &policy)};
    for (uint32_t step = 0; step < 8; ++step) {
        if (step == 2) sequences.push_back(pools.fork(sequences[0]));
        std::vector<twin_append> items;
        for (twin_sequence& each : sequences) items.push_back({&each, 5, step == 4 ? 4u : 5u});
        pools.step(items, step % 4 != 3);
        pools.compare_reports();
        pools.host.fake.run_all();
    }
    for (const twin_sequence& each : sequences) pools.compare(each);
    CHECK(pools.differences == 0);
    CHECK(pools.rounds >= 8);
    CHECK(pools.compared_sealed > 10);
    CHECK(pools.host.fake.synchronisations() == 0);
}

TEST_CASE("where scores say how many demoted rows stay, some are demoted early") {
    round_pools pools(std::make_unique<demoting_layers>());
    kv_policy policy = newest_held(KV_SCORER_RANDOM);
    policy.recent = 3;
    policy.budget = 64;  // whole blocks: none is opened by what comes
    twin_sequence sequence = start(pools, 115);
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    for (uint32_t i = 0; i < 2; ++i) {
        REQUIRE(kv_compress(pools.pools[i], sequence.of[i], &options, nullptr) == KV_OK);
    }
    pools.step({{&sequence, 1, 1}}, true);
    pools.compare_positions(sequence);
    const kvrt::sequence& device = *pools.pools[0]->store.sequences.find(sequence.of[0]);
    const kvrt::sequence& cpu = *pools.pools[1]->store.sequences.find(sequence.of[1]);
    bool early = false;
    for (uint32_t lane = 0; lane < 4; ++lane) {
        CHECK(device.lanes[lane].sealed_blocks >= cpu.lanes[lane].sealed_blocks);
        CHECK(device.lanes[lane].sealed_blocks <= 4);
        early = early || device.lanes[lane].sealed_blocks > cpu.lanes[lane].sealed_blocks;
    }
    CHECK(early);
    pools.step({{&sequence, 60, 60}}, true);  // all of them are demoted by now
    pools.compare(sequence);
    CHECK(pools.differences == 0);
    CHECK(pools.compared_sealed > 10);
}

TEST_CASE("where no block is left, as many stay demoted as there are") {
    round_pools pools(std::make_unique<demoting_layers>());
    twin_sequence sequence = start(pools, 150);
    pools.host.fake.run_all();
    for (kv_pool* pool : pools.pools) {
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(pool, &step) == KV_OK);  // what the device is done with is free
        REQUIRE(kv_step_cancel(step) == KV_OK);
        for (uint32_t c = 0; c < pool->store.blocks.class_count(); ++c) {
            while (pool->store.blocks.allocate(c) != no_block) {
            }
        }
    }
    const kv_policy policy = newest_held(KV_SCORER_RANDOM);
    CHECK(pools.compress(sequence, &policy) == KV_OK);
    CHECK(pools.rounds == 1);
    pools.host.fake.run_all();
    pools.compare_stored(sequence);
    pools.compare_positions(sequence);
    CHECK(pools.differences == 0);
}

TEST_CASE("what a wrong round over sealed blocks would do is found") {
    round_pools pools(std::make_unique<demoting_layers>());
    uint32_t number = 0;
    SUBCASE("rows of the other layout") {
        pools.faults.compact_sealed = [&](kernels::compact_sealed_parameters& call) {
            if (++number == 2) call.sealed = call.all.place;
        };
    }
    SUBCASE("positions of the other class") {
        pools.faults.compact_sealed = [&](kernels::compact_sealed_parameters& call) {
            ++number;
            call.sealed_positions = call.all.positions;
        };
    }
    SUBCASE("rotated keys") {
        pools.faults.open_lanes = [&](kernels::open_lanes_parameters& call) {
            ++number;
            call.what.sealed.keys.rotated = call.what.place.keys.rotated = false;
        };
    }
    give_moments(pools, {0u, 1u, 2u, 3u});
    drive(pools, newest_held(KV_SCORER_TRIATTENTION), 4);
    CHECK(number != 0);
    CHECK(pools.differences + pools.host.fake.violations.size() != 0);
    pools.host.fake.violations.clear();
}
