// kv_attend of a CUDA pool over rows of all numbers: prompts, drafts and single tokens in one step,
// in waves, captured and replayed; a CPU pool says what is right.
#include "step/device_attention.hpp"
#include "twin_cases.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

TEST_CASE("prompts of hundreds of rows, drafts and single tokens are attended in one step") {
    twin_pools pools;
    uint64_t many = 0, few = 0;
    pools.faults.attend_rows = [&](kernels::rows_parameters&) { ++many; };
    pools.faults.attend = [&](kernels::attend_parameters&) { ++few; };
    attend_many_rows(pools);
    CHECK(many > 20);
    CHECK(few > 20);
}

TEST_CASE("what a wrong launch over many rows would do is found") {
    twin_pools pools;
    uint32_t number = 0;
    bool intact = false;
    SUBCASE("none") { intact = true; }
    SUBCASE("the first piece is left out") {
        pools.faults.attend_rows = [&](kernels::rows_parameters& call) {
            if (++number != 3) return;
            ++call.row_pieces;
            --call.row_piece_count;
        };
    }
    SUBCASE("queries of other rows") {
        pools.faults.attend_rows = [&](kernels::rows_parameters& call) {
            if (++number == 1) call.queries.row_stride += 4;
        };
    }
    twin_sequence one = pools.create(), two = pools.create();
    pools.step({{&one, 70, 70}, {&two, 33, 33}});
    pools.host.fake.run_all();
    CHECK((pools.differences + pools.host.fake.violations.size() == 0) == intact);
    pools.host.fake.violations.clear();
}

TEST_CASE("partial results that the workspace cannot hold at once are taken in waves") {
    twin_pools pools;
    device_attention& attention = pools.pools[0]->steps.attention;
    uint64_t joins = 0;
    for (uint32_t v = 0; v < attention.view_count; ++v) {
        device_attention::view& view = attention.views[v];
        REQUIRE(view.most_partials >= view.most.partials);
        view.most_partials = (view.most.partials + 1) / 2 * 2;
    }
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 6; ++i) sequences.push_back(pools.create());
    std::vector<twin_append> items;
    for (twin_sequence& each : sequences) pools.step({{&each, 250, 250}}, true);
    for (twin_sequence& each : sequences) pools.step({{&each, 45, 45}}, true);
    for (twin_sequence& each : sequences) items.push_back({&each, 16, 1});
    pools.step(items);
    pools.host.fake.run_all();
    CHECK(pools.differences == 0);
    for (uint32_t v = 0; v < attention.view_count; ++v) {
        joins += attention.planned[v].waves > 1 ? 1 : 0;
    }
    CHECK(joins > 2);
    // One launch, as a captured step has, does not do.
    kv_step* steps[2];
    pools.begin(items, steps);
    twin_tensor keys = pools.make_tensor(96, 2, 64), queries = pools.make_tensor(96, 4, 64);
    REQUIRE(kv_write(steps[0], 0, &keys.on_device, &keys.on_device) == KV_OK);
    pools.host.fake.begin_capture(pools.host.stream);
    CHECK(kv_attend(steps[0], 0, &queries.on_device, &queries.on_device, nullptr) == KV_LIMIT);
    CHECK(message_has("captured"));
    (void)pools.host.fake.end_capture(pools.host.stream);
    for (kv_step* step : steps) REQUIRE(kv_step_cancel(step) == KV_OK);
    // Once a step of as many rows was captured, reserve says so.
    attention.captured_rows = 96;
    for (uint32_t i = 0; i < 2; ++i) REQUIRE(kv_step_begin(pools.pools[i], &steps[i]) == KV_OK);
    REQUIRE(kv_cuda_step_use_stream(steps[0], as_stream(pools.host.stream)) == KV_OK);
    for (const twin_append& item : items) {
        REQUIRE(kv_seq_append(steps[0], item.sequence->of[0], nullptr, 16, nullptr) == KV_OK);
    }
    CHECK(kv_step_reserve(steps[0], nullptr) == KV_LIMIT);
    CHECK(message_has("captured"));
    for (kv_step* step : steps) REQUIRE(kv_step_cancel(step) == KV_OK);
    pools.host.fake.run_all();
}

TEST_CASE("a graph of a step's launches, captured once for each place, is replayed for others") {
    uint32_t most = 1;
    SUBCASE("single tokens") {}
    SUBCASE("prompts and drafts") { most = 45; }
    twin_pools pools;
    replay_steps(pools, 8, most);
    CHECK(pools.host.fake.calls("cuLaunchKernel") > 20);
}
