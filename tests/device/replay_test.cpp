// Graphs of a step that attends with statistics, captured once for each place and replayed for
// others: what a CUDA pool observes and gathers then is what a CPU pool does, step by step, and
// rounds go by it.
#include "gathered_queries.hpp"
#include "observed_pools.hpp"
#include "twin_cases.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

namespace {

constexpr uint32_t most_items = 4, most_item_rows = 2;

/// Pools whose steps are replays of a graph for each place.
struct replaying_pools : observing_pools {
    std::vector<layer_tensors> tensors = make_layers(*this, most_items* most_item_rows);
    std::vector<operation> graphs[2];
    uint32_t replays[2] = {0, 0};
    uint32_t compared_statistics = 0;

    replaying_pools() {  // what no step has written is the same on both
        for (const layer_tensors& of : tensors) device().enqueue("outputs", upload(of.out));
    }

    /// In the place that the next step has; nothing of it runs.
    void capture() {
        std::deque<twin_sequence> sequences;
        std::vector<twin_append> items;
        for (uint32_t i = 0; i < most_items; ++i) sequences.push_back(create());
        for (twin_sequence& each : sequences) items.push_back({&each, most_item_rows, 0});
        kv_step* steps[2];
        begin(items, steps);
        set_rows(most_items * most_item_rows);
        host.fake.begin_capture(host.stream);
        for (uint32_t l = 0; l < layers(); ++l) {
            const layer_tensors& of = tensors[l];
            if (stores(l)) {
                REQUIRE(kv_write(steps[0], l, &of.keys.on_device, &of.values.on_device) == KV_OK);
            }
            const kv_status verdict =
                kv_attend(steps[0], l, &of.queries.on_device, &of.out.on_device, nullptr);
            REQUIRE_MESSAGE(verdict == KV_OK, std::string(message_buffer()));
        }
        graphs[place_of(steps[0])] = host.fake.end_capture(host.stream);
        cancel(steps);
        for (const twin_sequence& each : sequences) release(each);
    }
    /// For both places.
    void capture_both() {
        kv_step* other[2];
        for (uint32_t i = 0; i < 2; ++i) REQUIRE(kv_step_begin(pools[i], &other[i]) == KV_OK);
        capture();
        cancel(other);
        capture();
        REQUIRE(!graphs[0].empty());
        REQUIRE(!graphs[1].empty());
    }

    /// All layers of a step that is reserved. `told`: the host says that they attended.
    void replay(const std::vector<twin_append>& items, kv_step* (&steps)[2], bool told = true) {
        uint32_t rows = 0;
        for (const twin_append& item : items) rows += item.rows;
        set_rows(rows);
        for (uint32_t l = 0; l < layers(); ++l) {
            fill_inputs(l, items, tensors[l].keys, tensors[l].values, tensors[l].queries);
        }
        const uint32_t place = place_of(steps[0]);
        ++replays[place];
        host.fake.replay(graphs[place], host.stream);
        kv_attend_options options = KV_INIT(kv_attend_options);
        options.flags = told ? 0 : KV_ATTEND_NO_STATISTICS;
        for (uint32_t l = 0; l < layers(); ++l) {
            const layer_tensors& of = tensors[l];
            if (stores(l)) {
                REQUIRE(kv_write(steps[1], l, &of.keys.on_host, &of.values.on_host) == KV_OK);
                tell(steps[0], l, told ? KV_CUDA_TABLES_ATTENDED : 0);
            }
            REQUIRE(kv_attend(steps[1], l, &of.queries.on_host, &of.out.on_host, &options) ==
                    KV_OK);
            expect(of.out, bound_of(l));
        }
    }
    void replay_step(const std::vector<twin_append>& items, bool told = true) {
        kv_step* steps[2];
        begin(items, steps);
        replay(items, steps, told);
        end(items, steps);
        compare_reports();
    }

    void compare_gathered(const twin_sequence& sequence) {
        const uint64_t tokens = gathered(pools[1], sequence.of[1], 0).statistics.tokens;
        for (const uint32_t layer : {0u, 2u, 3u}) {
            differences += worst_of_gathered(*this, sequence, layer, tokens) < 2e-6 ? 0 : 1;
        }
        compared_statistics += tokens != 0 ? 1 : 0;
    }

  private:
    void set_rows(uint32_t rows) {
        for (layer_tensors& of : tensors) {
            for (twin_tensor* each : {&of.keys, &of.values, &of.queries, &of.out}) {
                each->on_host.rows = rows;
            }
        }
    }
    void tell(kv_step* step, uint32_t layer, uint32_t flags) {
        const bool by_head = (kinds.layers[layer].flags & KV_LAYER_LANE_PER_HEAD) != 0;
        for (uint32_t head = 0; head < (by_head ? 2u : 1u); ++head) {
            kv_cuda_tables tables = KV_INIT(kv_cuda_tables);
            tables.flags = flags;
            tables.kv_head = head;
            const kv_status verdict = kv_cuda_step_tables(step, layer, &tables);
            REQUIRE_MESSAGE(verdict == KV_OK, std::string(message_buffer()));
        }
    }
    uint32_t place_of(kv_step* step) { return step->core.place; }
};

/// Steps of one place and of both at once, with other sequences and rows each: some join, one
/// leaves and one is forked, rounds in between, a step that is cancelled once its graph runs, one
/// that nobody tells of, one that is no replay.
void drive(replaying_pools& pools, const kv_policy& policy, uint32_t rounds) {
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 2; ++i) sequences.push_back(pools.create(&policy));
    pools.step({{&sequences[0], 40, 40}, {&sequences[1], 60, 60}});
    const auto rows_of = [&](twin_sequence& each) -> twin_append {
        const uint32_t rows = 1 + static_cast<uint32_t>(pools.random() % 3 == 0);
        return {&each, rows, 1 + static_cast<uint32_t>(pools.random() % rows)};
    };
    for (uint32_t round = 0; round < rounds; ++round) {
        CAPTURE(round);
        if (round == 2) {
            sequences.push_back(pools.create(&policy));
            pools.step({{&sequences.back(), 30, 30}});
        }
        if (round == 4) sequences.push_back(pools.fork(sequences[0]));
        if (round == 8) {
            pools.release(sequences[1]);
            sequences[1] = pools.create(&policy);
            pools.step({{&sequences[1], 21, 21}, {&sequences[0], 1, 1}});
        }
        std::vector<twin_append> items[2];
        for (twin_sequence& each : sequences) {
            const bool leaves_out = round % 4 == 3 && &each == &sequences[0];
            if (!leaves_out)
                items[round % 3 == 1 ? pools.random() % 2 : 0].push_back(rows_of(each));
        }
        if (items[0].empty()) items[0].swap(items[1]);
        std::reverse(items[0].begin(), items[0].end());
        if (round == 5 || round == 9) {
            kv_step* steps[2];
            pools.begin(items[0], steps);
            pools.replay(items[0], steps, round == 9);
            pools.cancel(steps);
        }
        if (items[1].empty()) {
            pools.replay_step(items[0], round != 6);
        } else {
            kv_step *first[2], *second[2];
            pools.begin(items[0], first);
            pools.begin(items[1], second);
            pools.replay(items[1], second);
            pools.replay(items[0], first);
            pools.end(items[0], first);
            pools.compare_reports();
            pools.end(items[1], second);
            pools.compare_reports();
        }
        for (uint32_t i = pools.random() % 40; i > 0; --i) {
            pools.host.fake.run_one(pools.host.stream);
        }
        if (round % 3 != 2) continue;
        for (const twin_sequence& each : sequences) {
            pools.compare_sums(each);
            pools.compare_gathered(each);
        }
    }
    for (const twin_sequence& each : sequences) pools.compare(each);
}

/// The first item that a launch is about, if there is one, and the step.
std::pair<kernels::observe_item*, uint32_t> listed(replaying_pools& pools,
                                                   const kernels::observe_parameters& call) {
    const auto of_device = [&]<class type>(const type* address, uint32_t count) {
        return pools.host.fake.memory_of<type>(reinterpret_cast<device_pointer>(address), count);
    };
    const kernels::observe_wave& wave = *of_device(call.wave, 1);
    if (wave.items == 0) return {nullptr, 0};
    return {of_device(call.items, wave.first_item + 1) + wave.first_item, wave.step};
}

}  // namespace

TEST_CASE("a graph that attends observes every step that it is replayed for") {
    kv_policy policy = policy_of(KV_SCORER_H2O);
    policy.recent = 16;
    policy.budget = 40;
    policy.every = 6;
    bool gathers = false;
    SUBCASE("H2O, decaying") { policy.decay = 0.4f; }
    SUBCASE("TOVA") { policy.scorer = KV_SCORER_TOVA; }
    SUBCASE("SNAPKV") {
        policy.scorer = KV_SCORER_SNAPKV;
        policy.window = 4;
    }
    SUBCASE("BLEND, by queries that it gathers") {
        policy.scorer = KV_SCORER_BLEND;
        gathers = true;
    }
    policy.observe_every = policy.scorer == KV_SCORER_H2O ? 1 : 0;
    replaying_pools pools;
    if (policy.scorer == KV_SCORER_TOVA) pools.head_step = 0.0;
    if (gathers) {
        (void)pools.create(&policy);  // the first one takes the memory
    } else {
        give_moments(pools, {0u, 2u, 3u});
    }
    pools.capture_both();
    drive(pools, policy, 12);
    CHECK((pools.compared_statistics > 10) == gathers);
    CHECK(pools.differences == 0);
    CHECK(pools.worst_sum < 4e-3);
    CHECK(pools.rounds >= 6);
    CHECK(pools.compared_sums > 1000);
    CHECK(pools.replays[0] >= 10);
    CHECK(pools.replays[1] >= 3);
}

TEST_CASE("replays whose lists are wrong, or that are not theirs, are found") {
    replaying_pools pools;
    kv_policy policy = policy_of(KV_SCORER_H2O);
    policy.decay = 0.4f;
    policy.observe_every = 1;
    uint32_t number = 0;
    bool intact = false;
    SUBCASE("none") { intact = true; }
    SUBCASE("the array of a step before") {
        pools.faults.observe = [&](kernels::observe_parameters& call) {
            kernels::observe_item* const item = listed(pools, call).first;
            if (item != nullptr && ++number == 13) std::swap(item->array, item->before);
        };
    }
    SUBCASE("sums that another launch of the step seems to have begun") {
        pools.faults.observe = [&](kernels::observe_parameters& call) {
            const auto [item, step] = listed(pools, call);
            if (item == nullptr || ++number != 13) return;
            *pools.host.fake.memory_of<uint32_t>(reinterpret_cast<device_pointer>(
                call.marks + item->array * call.marks_array_stride)) = step;
        };
    }
    SUBCASE("weights of what attention lists next") {
        pools.faults.observe = [&](kernels::observe_parameters& call) {
            if (listed(pools, call).first != nullptr && ++number == 13) ++call.sequences;
        };
    }
    SUBCASE("queries of the item before") {
        policy.scorer = KV_SCORER_BLEND;
        (void)pools.create(&policy);
        pools.faults.gather = [&](kernels::query_parameters& call) {
            if (++number == 8) ++call.items;
        };
    }
    pools.capture_both();
    drive(pools, policy, 3);
    CHECK((number != 0) == !intact);
    CHECK((pools.differences + pools.host.fake.violations.size() == 0) == intact);
    pools.host.fake.violations.clear();
}

TEST_CASE("that a step attended is believed where a graph can have done so") {
    replaying_pools pools;
    kv_policy policy = policy_of(KV_SCORER_H2O);
    policy.every = 0;
    policy.observe_every = 1;
    twin_sequence sequence = pools.create(&policy);
    pools.step({{&sequence, 20, 20}});
    const std::vector<twin_append> items = {{&sequence, 1, 1}};
    kv_step* steps[2];
    pools.begin(items, steps);
    kv_cuda_tables tables = KV_INIT(kv_cuda_tables);
    tables.flags = KV_CUDA_TABLES_ATTENDED;
    CHECK(kv_cuda_step_tables(steps[0], 0, &tables) == KV_INVALID);
    CHECK(message_has("KV_ATTEND_NO_STATISTICS"));
    tables.flags = 1u << 7;
    CHECK(kv_cuda_step_tables(steps[0], 0, &tables) == KV_UNSUPPORTED);
    // What is captured counts for nothing until it is replayed.
    pools.write_layer(steps, 0, 1);
    twin_tensor queries = pools.make_tensor(1, 4, 64), out = pools.make_tensor(1, 4, 64);
    pools.host.fake.begin_capture(pools.host.stream);
    CHECK(kv_attend(steps[0], 0, &queries.on_device, &out.on_device, nullptr) == KV_OK);
    // Pieces, what joins them, and what adds weights up.
    CHECK(pools.host.fake.end_capture(pools.host.stream).size() == 3);
    cache& store = pools.pools[0]->store;
    const auto& observations = pools.pools[0]->retention.observations;
    const kvrt::sequence& owner = *store.sequences.find(sequence.of[0]);
    CHECK(!observed_lane_of(observations, owner, 0).pending);
    tables.flags = KV_CUDA_TABLES_ATTENDED;
    CHECK(kv_cuda_step_tables(steps[0], 0, &tables) == KV_OK);
    CHECK(observed_lane_of(observations, owner, 0).pending);
    CHECK(!observed_lane_of(observations, owner, 1).pending);
    pools.cancel(steps);
    CHECK(!observed_lane_of(observations, owner, 0).pending);
}

TEST_CASE("a graph from before anybody gathered is not believed to have done so") {
    replaying_pools pools;
    pools.capture_both();
    kv_policy policy = policy_of(KV_SCORER_EXPECTED_ATTENTION);
    policy.flags = KV_POLICY_STATISTICS_ONLINE;
    policy.every = 0;
    twin_sequence sequence = pools.create(&policy);
    pools.step({{&sequence, 9, 9}});
    const std::vector<twin_append> items = {{&sequence, 1, 1}};
    kv_step* steps[2];
    pools.begin(items, steps);
    kv_cuda_tables tables = KV_INIT(kv_cuda_tables);
    tables.flags = KV_CUDA_TABLES_ATTENDED;
    CHECK(kv_cuda_step_tables(steps[0], 0, &tables) == KV_INVALID);
    CHECK(message_has("capture it again"));
    CHECK(kv_cuda_step_tables(steps[0], 1, &tables) == KV_OK);  // it shares a cache: it has none
    pools.cancel(steps);
    pools.capture_both();
    pools.replay_step(items);
    pools.compare_gathered(sequence);
    CHECK(gathered(pools.pools[0], sequence.of[0], 0).statistics.tokens == 10);
    CHECK(pools.differences == 0);
}

TEST_CASE("a place of an open step's lists is nobody else's") {
    replaying_pools pools;
    kv_policy policy = policy_of(KV_SCORER_H2O);
    policy.every = 0;
    policy.observe_every = 1;
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 5; ++i) sequences.push_back(pools.create(&policy));
    pools.step({{&sequences[0], 20, 20}});
    const std::vector<twin_append> items = {{&sequences[0], 1, 1}};
    kv_step* steps[2];
    pools.begin(items, steps);
    REQUIRE(kv_seq_set_policy(pools.pools[0], sequences[0].of[0], nullptr) == KV_OK);
    kv_seq_config config = KV_INIT(kv_seq_config);
    config.policy = &policy;
    kv_seq other = 0;
    CHECK(kv_seq_create(pools.pools[0], &config, &other) == KV_LIMIT);
    pools.cancel(steps);
    CHECK(kv_seq_create(pools.pools[0], &config, &other) == KV_OK);
}
