// kv_attend of a CUDA pool over rows of all numbers: prompts, drafts and single tokens in one step,
// in waves, captured and replayed; a CPU pool says what is right.
#include "step/device_attention.hpp"
#include "twin_pools.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

TEST_CASE("prompts of hundreds of rows, drafts and single tokens are attended in one step") {
    twin_pools pools;
    uint64_t many = 0, few = 0;
    pools.faults.attend_rows = [&](kernels::rows_parameters&) { ++many; };
    pools.faults.attend = [&](kernels::attend_parameters&) { ++few; };
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 4; ++i) sequences.push_back(pools.create());
    pools.step({{&sequences[0], 210, 210}, {&sequences[1], 1, 1}, {&sequences[2], 45, 45}});
    // A draft of 18 vectors and 30 over more than one piece, a prompt that goes on, a new one.
    pools.step({{&sequences[0], 80, 80},
                {&sequences[1], 1, 1},
                {&sequences[2], 9, 4},
                {&sequences[3], 150, 150}});
    pools.step({{&sequences[0], 11, 6}, {&sequences[3], 60, 60}, {&sequences[1], 5, 5}});
    sequences.push_back(pools.fork(sequences[3]));
    pools.step({{&sequences[4], 130, 130}, {&sequences[0], 1, 1}, {&sequences[3], 2, 1}});
    pools.host.fake.run_all();
    CHECK(pools.differences == 0);
    CHECK(pools.compared_outputs >= 3 * pools.layers());
    CHECK(many > 20);
    CHECK(few > 20);
    for (const twin_sequence& each : sequences) pools.compare_stored(each);
    CHECK(pools.differences == 0);
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

namespace {

/// Tensors of a layer at fixed addresses, as a graph needs them.
struct layer_tensors {
    twin_tensor keys, values, queries, out, log_sums;
};

std::vector<layer_tensors> make_layers(twin_pools& pools, uint32_t rows) {
    std::vector<layer_tensors> made;
    for (const kv_layer& layer : pools.kinds.layers) {
        const uint32_t value_dim = layer.value_dim != 0 ? layer.value_dim : layer.key_dim;
        made.push_back({pools.make_tensor(rows, layer.kv_heads, layer.key_dim),
                        pools.make_tensor(rows, layer.kv_heads, value_dim),
                        pools.make_tensor(rows, layer.query_heads, layer.key_dim),
                        pools.make_tensor(rows, layer.query_heads, value_dim),
                        pools.make_tensor(rows, layer.query_heads, 1)});
    }
    return made;
}

}  // namespace

TEST_CASE("a graph of a step's launches, captured once for each place, is replayed for others") {
    uint32_t most = 1;  // rows of an item
    SUBCASE("single tokens") {}
    SUBCASE("prompts and drafts") { most = 45; }
    twin_pools pools;
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 3; ++i) sequences.push_back(pools.create());
    pools.step({{&sequences[0], 250, 250}}, true);
    pools.step({{&sequences[1], 20, 20}, {&sequences[2], 47, 47}});
    std::vector<layer_tensors> tensors = make_layers(pools, 2 * most + 1);
    std::vector<operation> graph;
    uint64_t launches = 0;
    for (uint32_t round = 0; round < 8; ++round) {
        CAPTURE(round);
        kv_step* steps[2];
        // Fewer items than were captured, too: of what is behind them nothing is touched.
        const auto up_to = [&](uint32_t end) {
            return round == 0 ? end : 1 + static_cast<uint32_t>(pools.random() % end);
        };
        const uint32_t first = up_to(most), second = up_to(most);
        std::vector<twin_append> items = {{&sequences[0], 1, 1}, {&sequences[1], first, 1}};
        if (round % 3 != 1) items.push_back({&sequences[2], second, 1});
        pools.begin(items, steps);
        uint32_t rows = 0;
        for (const twin_append& item : items) rows += item.rows;
        const uint64_t before = pools.host.fake.calls("cuLaunchKernel");
        if (round == 0) {
            pools.host.fake.begin_capture(pools.host.stream);
            for (uint32_t l = 0; l < pools.layers(); ++l) {
                const layer_tensors& of = tensors[l];
                kv_attend_options options = KV_INIT(kv_attend_options);
                options.log_sum_exp = static_cast<float*>(of.log_sums.on_device.data);
                if (pools.stores(l)) {
                    REQUIRE(kv_write(steps[0], l, &of.keys.on_device, &of.values.on_device) ==
                            KV_OK);
                }
                REQUIRE(kv_attend(steps[0], l, &of.queries.on_device, &of.out.on_device,
                                  &options) == KV_OK);
            }
            graph = pools.host.fake.end_capture(pools.host.stream);
            launches = pools.host.fake.calls("cuLaunchKernel") - before;
        }
        for (uint32_t l = 0; l < pools.layers(); ++l) {
            layer_tensors& of = tensors[l];
            for (twin_tensor* each : {&of.keys, &of.values, &of.queries}) {
                pools.draw(*each);
                pools.host.stream->queue.push_back({"inputs", pools.upload(*each)});
            }
        }
        pools.host.fake.replay(graph, pools.host.stream);
        for (uint32_t l = 0; l < pools.layers(); ++l) {
            layer_tensors& of = tensors[l];
            for (twin_tensor* each : {&of.keys, &of.values, &of.queries, &of.out, &of.log_sums}) {
                each->on_host.rows = rows;
            }
            if (pools.stores(l)) {
                REQUIRE(kv_write(steps[1], l, &of.keys.on_host, &of.values.on_host) == KV_OK);
                // The library does not see the replay: the layer counts as the host's own.
                const uint32_t heads =
                    (pools.kinds.layers[l].flags & KV_LAYER_LANE_PER_HEAD) != 0 ? 2 : 1;
                for (uint32_t head = 0; head < heads; ++head) {
                    kv_cuda_tables tables = KV_INIT(kv_cuda_tables);
                    tables.kv_head = head;
                    REQUIRE(kv_cuda_step_tables(steps[0], l, &tables) == KV_OK);
                    REQUIRE(tables.place == 0);
                }
            }
            kv_attend_options options = KV_INIT(kv_attend_options);
            options.log_sum_exp = of.log_sums.host.data();
            REQUIRE(kv_attend(steps[1], l, &of.queries.on_host, &of.out.on_host, &options) ==
                    KV_OK);
            pools.expect(of.out, pools.bound_of(l));
            pools.expect(of.log_sums, pools.bound_of(l));
        }
        pools.end(items, steps);
        pools.host.fake.run_all();
        CHECK(pools.differences == 0);
    }
    CHECK(launches > 20);
    for (const twin_sequence& each : sequences) pools.compare_stored(each);
    CHECK(pools.differences == 0);
    CHECK(sequences[0].tokens == 258);  // past the first piece
}
