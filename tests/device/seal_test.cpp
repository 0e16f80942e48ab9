// Blocks that are sealed, demoted and opened again on a CUDA pool: launches that run the kernels'
// own bodies, late, leave the bytes, tables and counts of a CPU pool that does the same.
#include <algorithm>
#include <cmath>

#include "driver/staging.hpp"
#include "sealing_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

TEST_CASE("a CUDA pool seals, demotes and opens as a CPU pool does, however late the device is") {
    for (const uint32_t flags : {0u, uint32_t{KV_POOL_ELASTIC}}) {
        CAPTURE(flags);
        sealing_pools pools(flags);
        drive(pools, 6);
        CHECK(pools.differences == 0);
        CHECK(pools.compared_sealed > 20);
        CHECK(pools.host.fake.synchronisations() == 0);
    }
}

TEST_CASE("what a wrong launch would seal is found by the comparison with the CPU pool") {
    sealing_pools pools;
    uint32_t number = 0;
    SUBCASE("none") { number = 1; }
    SUBCASE("a block more or less") {
        pools.faults.seal = [&](kernels::seal_parameters& call) {
            if (++number == 3) --call.count;
        };
    }
    SUBCASE("items of another launch") {
        pools.faults.seal = [&](kernels::seal_parameters& call) {
            if (++number == 8) ++call.items;
        };
    }
    SUBCASE("tiles in the place of others") {
        pools.faults.seal = [&](kernels::seal_parameters& call) {
            if (is_tile(call.to.keys.codes) && ++number == 2) call.to.keys.head_stride -= 64;
        };
    }
    SUBCASE("rows in another order") {
        pools.faults.seal = [&](kernels::seal_parameters& call) {
            if (++number == 5) call.from.keys.slot_stride *= 2;
        };
    }
    SUBCASE("static scales of another head") {
        pools.faults.seal = [&](kernels::seal_parameters& call) {
            if (call.to.keys.codes == kernels::coding::fp8_e4m3 && ++number == 1) {
                ++call.to.keys.scales;
            }
        };
    }
    const bool intact = !pools.faults.seal;
    std::deque<twin_sequence> sequences = {pools.create(), pools.create()};
    pools.step({{&sequences[0], 64, 64}, {&sequences[1], 130, 130}});
    pools.truncate(sequences[1], 90);
    pools.append(sequences[1], 60);
    for (const twin_sequence& each : sequences) pools.compare_stored(each);
    const uint64_t found = pools.differences + pools.host.fake.violations.size();
    pools.host.fake.violations.clear();
    CHECK((found == 0) == intact);
    CHECK(number != 0);
}

TEST_CASE("blocks wait for a step of theirs where the device has no room to be told of them") {
    sealing_pools pools;
    twin_sequence full = pools.create(), other = pools.create();
    pools.append(full, 63);
    pools.append(other, 1);
    pools.host.fake.run_all();
    // The device stands still: this many steps' tables can wait for it, one more's list cannot.
    for (uint32_t i = 0; i < staging_ring::most_batches - 1; ++i) pools.append(other, 1);
    pools.step({{&full, 1, 1}, {&other, 1, 1}});
    CHECK(pools.lane(1, full, 0).sealed_blocks == 1);
    CHECK(pools.lane(0, full, 0).sealed_blocks == 0);
    pools.check();
    pools.host.fake.run_all();
    pools.append(full, 2);
    CHECK(pools.lane(0, full, 0).sealed_blocks == 1);
    for (const twin_sequence* each : {&full, &other}) pools.compare_stored(*each);
    CHECK(pools.differences == 0);
    pools.check();
}

TEST_CASE("blocks that the host's kernels may still read are sealed, and wait for the host") {
    sealing_pools pools(KV_POOL_HOST_FENCES);
    kv_pool* const pool = pools.pools[0];
    const auto parked = [&] {
        kv_pool_stats stats = KV_INIT(kv_pool_stats);
        REQUIRE(kv_pool_get_stats(pool, &stats) == KV_OK);
        return stats.parked;
    };
    pools.settle();
    REQUIRE(kv_pool_pass_fence(pool, pool->store.fences.last_begun) == KV_OK);
    CHECK(parked() == 0);
    twin_sequence sequence = pools.create();
    pools.append(sequence, 70);
    CHECK(pools.lane(0, sequence, 0).sealed_blocks == 1);
    const uint64_t raw_blocks = 5;  // of layers 0 to 2, of which the last has two lanes, and of 5
    CHECK(parked() == raw_blocks);
    pools.settle();
    CHECK(parked() == raw_blocks);
    REQUIRE(kv_pool_pass_fence(pool, pool->store.fences.last_begun) == KV_OK);
    CHECK(parked() == 0);
    CHECK(kv_pool_check(pool) == KV_OK);
}

TEST_CASE("a step whose sealing fails is cancelled, and nothing has changed") {
    sealing_pools pools;
    twin_sequence sequence = pools.create();
    pools.append(sequence, 60);
    kv_step* steps[2];
    uint32_t skipped = 0;
    const char* call = "cuLaunchKernel";
    SUBCASE("the first launch") {}
    SUBCASE("a later launch") { skipped = 2; }
    SUBCASE("the upload of the list") { call = "cuMemcpyHtoDAsync_v2"; }
    SUBCASE("the copy of counts") { call = "cuMemcpyDtoHAsync_v2"; }
    SUBCASE("the event") {
        call = "cuEventRecord";
        skipped = 1;
    }
    pools.host.fake.run_all();
    pools.begin({{&sequence, 10, 10}}, steps);
    for (uint32_t l = 0; l < pools.layers(); ++l) pools.write_layer(steps, l, 10);
    pools.host.fake.inject(call, error_out_of_memory, skipped);
    CHECK(kv_step_end(steps[0], nullptr) == KV_NO_MEMORY);
    REQUIRE(kv_step_cancel(steps[1]) == KV_OK);
    pools.check();
    CHECK(pools.lane(0, sequence, 0).sealed_blocks == 0);
    CHECK(pools.lane(0, sequence, 0).slots == 60);
    for (uint32_t i = 0; i < 3; ++i) pools.append(sequence, 30);
    pools.compare_stored(sequence);
    CHECK(pools.differences == 0);
    CHECK(pools.compared_sealed > 4);
    pools.release(sequence);
    pools.settle();
    pools.check();
    CHECK(pools.pools[0]->store.blocks.totals().pinned == 0);
}

TEST_CASE("a step whose opening fails is not reserved, and can be again") {
    sealing_pools pools;
    twin_sequence sequence = pools.create();
    pools.append(sequence, 64);
    pools.truncate(sequence, 50);
    kv_step* steps[2];
    for (uint32_t i = 0; i < 2; ++i) {
        REQUIRE(kv_step_begin(pools.pools[i], &steps[i]) == KV_OK);
        if (i == 0) {
            REQUIRE(kv_cuda_step_use_stream(steps[0], as_stream(pools.host.stream)) == KV_OK);
        }
        REQUIRE(kv_seq_append(steps[i], sequence.of[i], nullptr, 20, nullptr) == KV_OK);
    }
    pools.host.fake.run_all();
    const uint64_t before = pools.host.fake.calls("cuLaunchKernel");
    pools.host.fake.inject("cuLaunchKernel", error_out_of_memory, 2);  // the tables', one tail
    CHECK(kv_step_reserve(steps[0], nullptr) == KV_NO_MEMORY);
    CHECK(pools.host.fake.calls("cuLaunchKernel") == before + 3);
    pools.check();
    CHECK(pools.lane(0, sequence, 0).sealed_blocks == 1);
    for (kv_step* step : steps) REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
    for (uint32_t l = 0; l < pools.layers(); ++l) pools.write_layer(steps, l, 20);
    const std::vector<twin_append> items = {{&sequence, 20, 20}};
    pools.end(items, steps);
    pools.compare_stored(sequence);
    CHECK(pools.differences == 0);
}

TEST_CASE("rows that are coded again are counted on the device, and not measured") {
    sealing_pools pools;
    twin_sequence sequence = pools.create();
    pools.append(sequence, 70);
    pools.truncate(sequence, 50);
    pools.append(sequence, 20);
    for (uint32_t layer = 0; layer < pools.layers(); ++layer) {
        CAPTURE(layer);
        kv_layer_stats stats[2] = {KV_INIT(kv_layer_stats), KV_INIT(kv_layer_stats)};
        for (uint32_t i = 0; i < 2; ++i) {
            stats[i].layer = layer;
            REQUIRE(kv_pool_get_layer_stats(pools.pools[i], &stats[i]) == KV_OK);
        }
        CHECK(stats[0].recoded_rows == stats[1].recoded_rows);
        CHECK((stats[0].recoded_rows != 0) == std::isnan(stats[0].recoding_error));
    }
}

TEST_CASE("counts of what saturates come behind the steps that counted it") {
    sealing_pools pools;
    twin_sequence sequence = pools.create();
    pools.append(sequence, 70);  // a block of layer 5 is demoted
    CHECK(pools.saturated_keys(1, 5)[0] > 0);
    CHECK(pools.saturated_keys(0, 5) == std::vector<uint64_t>{0, 0});
    pools.host.fake.run_all();
    CHECK(pools.saturated_keys(0, 5) == std::vector<uint64_t>{0, 0});  // nobody asked the device
    pools.settle();
    CHECK(pools.saturated_keys(0, 5) == pools.saturated_keys(1, 5));
    // Opened and demoted again: not counted twice. Meanwhile a copy is on its way, others wait.
    pools.truncate(sequence, 60);
    for (uint32_t i = 0; i < 3; ++i) pools.append(sequence, 30);
    pools.settle();
    pools.append(sequence, 1);
    pools.settle();
    CHECK(pools.saturated_keys(0, 5) == pools.saturated_keys(1, 5));
}

namespace {

/// Blocks that are demoted under pressure alone.
struct pressed_layers : twin_model {
    pressed_layers() {
        arena_bytes = uint64_t{64} << 20;
        pressure_percent = 1;
        for (uint32_t i = 0; i < 4; ++i) {
            kv_layer& layer = add(KV_FORMAT_F16, KV_FORMAT_F16);
            layer.demoted_key_format = i == 0 ? KV_FORMAT_INT8_TOKEN : KV_FORMAT_INT4_TOKEN;
        }
    }
};

}  // namespace

TEST_CASE("under pressure blocks are demoted at a step's end") {
    twin_pools pools(0, std::make_unique<pressed_layers>());
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 4; ++i) sequences.push_back(pools.create());
    const auto sealed_blocks = [&](uint32_t pool) {
        uint32_t blocks = 0;
        for (const twin_sequence& each : sequences) {
            blocks +=
                pools.pools[pool]->store.sequences.find(each.of[pool])->lanes[0].sealed_blocks;
        }
        return blocks;
    };
    pools.step({{&sequences[0], 250, 250}});
    CHECK(sealed_blocks(1) == 0);
    CHECK(sealed_blocks(0) == 0);
    pools.step({{&sequences[1], 120, 120}, {&sequences[2], 90, 90}, {&sequences[3], 9, 9}});
    CHECK(sealed_blocks(1) > 0);
    for (uint32_t i = 0; i < 3; ++i) {  // of sequences in the step, and of others
        CHECK(sealed_blocks(1) == sealed_blocks(0));
        CHECK(pools.reports[0].demoted_blocks == pools.reports[1].demoted_blocks);
        CHECK(pools.reports[0].demoted_bytes == pools.reports[1].demoted_bytes);
        kv_step* steps[2];
        pools.begin({{&sequences[i], 1, 1}}, steps);
        CHECK(sealed_blocks(1) == sealed_blocks(0));
        pools.cancel(steps);
        for (const twin_sequence& each : sequences) pools.compare_stored(each);
        pools.step({{&sequences[i], 40, 40}});
    }
    CHECK(pools.differences == 0);
    CHECK(pools.compared_sealed > 20);
    for (kv_pool* pool : pools.pools) REQUIRE(kv_pool_check(pool) == KV_OK);
}

namespace {

/// Keys that are levelled by their position.
struct levelled_layers : twin_model {
    std::vector<float> means, channel_scales;
    kv_storage channels = KV_INIT(kv_storage);
    kv_rope rope[2] = {KV_INIT(kv_rope), KV_INIT(kv_rope)};

    levelled_layers() {
        std::mt19937 draw(3);
        std::normal_distribution<float> normal;
        for (uint32_t i = 0; i < 2 * 64; ++i) {
            means.push_back(2.0f * normal(draw));
            channel_scales.push_back(std::exp(0.5f * normal(draw)));
        }
        channels.channel_means = means.data();
        channels.channel_scales = channel_scales.data();
        channels.channel_heads = 2;
        channels.channel_dim = 64;
        for (uint32_t i = 0; i < 2; ++i) {
            rope[i].style = i == 0 ? KV_ROPE_HALF : KV_ROPE_INTERLEAVED;
            rope[i].dimensions = i == 0 ? 64 : 48;
            rope[i].theta = 10000.0;
        }
        for (uint32_t i = 0; i < 4; ++i) {
            kv_layer& layer = add(KV_FORMAT_AFFINE4, KV_FORMAT_INT4_TOKEN);
            layer.key_storage = &channels;
            layer.rope = &rope[i % 2];
            if (i == 3) layer.flags = KV_LAYER_LANE_PER_HEAD;
        }
        add(KV_FORMAT_TURBO4, KV_FORMAT_F16);
    }
};

}  // namespace

TEST_CASE("a CUDA pool writes keys that are levelled as a CPU pool does") {
    twin_pools pools(0, std::make_unique<levelled_layers>());
    twin_sequence sequence = pools.create();
    for (const uint32_t rows : {50u, 1u, 200u, 1u}) pools.step({{&sequence, rows, rows}});
    pools.compare_stored(sequence);
    CHECK(pools.differences == 0);
    CHECK(pools.compared_words > 1000);
    bool changed = false;
    pools.faults.write = [&](kernels::write_parameters& call) {
        if (changed || call.place.keys.turning.table == nullptr) return;
        call.place.keys.turning.gain = 1.5f;
        changed = true;
    };
    pools.step({{&sequence, 2, 2}});
    pools.compare_stored(sequence);
    CHECK(changed);
    CHECK(pools.differences != 0);
}
