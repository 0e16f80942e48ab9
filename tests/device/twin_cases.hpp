// What twin pools do in tests, on the fake driver and on a GPU.
#pragma once

#include <algorithm>

#include "twin_pools.hpp"

namespace kvrt::cuda {

/// Prompts, single tokens, drafts of which some are accepted, a fork, truncations, a release.
inline void drive(twin_pools_on& pools, uint32_t rounds) {
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 3; ++i) sequences.push_back(pools.create());
    pools.step({{&sequences[0], 5, 5}, {&sequences[1], 47, 47}, {&sequences[2], 1, 1}});
    for (uint32_t round = 0; round < rounds; ++round) {
        CAPTURE(round);
        if (round == 2) sequences.push_back(pools.fork(sequences[1]));
        if (round == 4) pools.truncate(sequences[0], sequences[0].tokens - 2);
        if (round == 5) {
            pools.release(sequences[2]);
            sequences[2] = pools.create();
        }
        std::vector<twin_append> items;
        for (twin_sequence& each : sequences) {
            if (round % 3 == 2 && &each == &sequences[1]) continue;
            const uint32_t rows =
                round % 2 == 0 ? 1 : 1 + static_cast<uint32_t>(pools.random() % 5);
            const uint32_t refused = rows > 1 && pools.random() % 2 != 0 ? 1 : 0;
            items.push_back({&each, rows, rows - refused});
        }
        std::reverse(items.begin(), items.end());
        pools.step(items);
        pools.device().run_some(static_cast<uint32_t>(pools.random() % 40));
    }
    pools.device().catch_up();
    for (const twin_sequence& each : sequences) pools.compare_stored(each);
}

/// Whatever comes, over as many sequences as there are places for.
inline void drive_at_random(twin_pools_on& pools, uint32_t rounds) {
    std::deque<twin_sequence> sequences;
    const auto draw = [&](uint32_t below) { return static_cast<uint32_t>(pools.random() % below); };
    for (uint32_t round = 0; round < rounds; ++round) {
        CAPTURE(round);
        const uint32_t what = draw(8);
        if (sequences.size() < 2 || (what == 0 && sequences.size() < 6)) {
            sequences.push_back(pools.create());
        } else if (what == 1 && sequences.size() < 6) {
            sequences.push_back(pools.fork(sequences[draw(2)]));
        } else if (what == 2 && sequences[0].tokens > 8) {
            pools.truncate(sequences[0], sequences[0].tokens - draw(8));
        } else if (what == 3 && sequences.size() > 2) {
            pools.release(sequences.front());
            sequences.pop_front();
        }
        std::vector<twin_append> items;
        for (twin_sequence& each : sequences) {
            if (draw(4) == 0) continue;
            const uint32_t rows = each.tokens == 0 ? 1 + draw(30) : 1 + draw(2) * draw(5);
            items.push_back({&each, rows, each.tokens == 0 ? rows : 1 + draw(rows)});
        }
        if (!items.empty()) pools.step(items);
        pools.device().run_some(draw(60));
    }
    pools.device().catch_up();
    for (const twin_sequence& each : sequences) pools.compare_stored(each);
}

/// Prompts that begin and go on, drafts and single tokens beside each other, over several pieces.
inline void attend_many_rows(twin_pools_on& pools) {
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
    pools.device().catch_up();
    CHECK(pools.differences == 0);
    CHECK(pools.compared_outputs >= 3 * pools.layers());
    for (const twin_sequence& each : sequences) pools.compare_stored(each);
    CHECK(pools.differences == 0);
}

/// Tensors of a layer at fixed addresses, as a graph needs them.
struct layer_tensors {
    twin_tensor keys, values, queries, out, log_sums;
};

inline std::vector<layer_tensors> make_layers(twin_pools_on& pools, uint32_t rows) {
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

/// Steps of which the first is captured, with `most` rows of two of its items, and replayed for
/// all: those have as many, or fewer. From 7 on they go past the first piece of a context.
inline void replay_steps(twin_pools_on& pools, uint32_t rounds, uint32_t most = 1) {
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 3; ++i) sequences.push_back(pools.create());
    pools.step({{&sequences[0], 250, 250}}, true);
    pools.step({{&sequences[1], 20, 20}, {&sequences[2], 47, 47}});
    std::vector<layer_tensors> tensors = make_layers(pools, 2 * most + 1);
    for (uint32_t round = 0; round < rounds; ++round) {
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
        if (round == 0) {
            pools.device().begin_capture();
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
            pools.device().end_capture();
        }
        for (uint32_t l = 0; l < pools.layers(); ++l) {
            layer_tensors& of = tensors[l];
            for (twin_tensor* each : {&of.keys, &of.values, &of.queries}) {
                pools.draw(*each);
                pools.device().enqueue("inputs", pools.upload(*each));
            }
        }
        pools.device().replay();
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
        pools.device().catch_up();
        CHECK(pools.differences == 0);
    }
    for (const twin_sequence& each : sequences) pools.compare_stored(each);
    CHECK(pools.differences == 0);
    CHECK(sequences[0].tokens == 250 + rounds);
}

}  // namespace kvrt::cuda
