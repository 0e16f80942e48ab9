// Twin pools whose policies go by what attention gave, on the fake driver and on a GPU.
//
// Both pools must rank tokens alike, though they round differently. So a key says by its position
// how much attention it gets, no two alike, and tokens of different age are compared only where
// age counts for nothing: what older queries paid has decayed, or is forgotten.
#pragma once

#include "round_pools.hpp"

namespace kvrt::cuda {

/// Elements, codes, a lane for each head, and a layer that looks at another's cache.
struct observed_layers : rope_of_tests, twin_model {
    observed_layers() {
        max_observed_sequences = 5;
        add(KV_FORMAT_F16, KV_FORMAT_F16);
        kv_layer& shared = add(KV_FORMAT_F16, KV_FORMAT_F16);
        shared.flags = KV_LAYER_SHARED;
        shared.query_heads = 2;
        add(KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT4_TOKEN);
        add(KV_FORMAT_BF16, KV_FORMAT_BF16).flags = KV_LAYER_LANE_PER_HEAD;
        for (const uint32_t storing : {0u, 2u, 3u}) layers[storing].rope = &rope;
    }
};

/// Between 0 and 1, far from each other for near numbers.
inline double spread(double number) {
    return number * 0.6180339887498949 - std::floor(number * 0.6180339887498949);
}

struct observing_pools_on : round_pools_on {
    uint32_t compared_sums = 0;
    double worst_sum = 0.0;
    uint32_t attend_flags = 0;
    bool two_levels = false;  ///< of attention that a token gets
    double head_step = 17.0;  ///< heads differ
    uint32_t same_way = 0;    ///< so many keys in a row point the same way, of eight; 0: all do

    explicit observing_pools_on(twin_device& device, std::unique_ptr<twin_model> model =
                                                         std::make_unique<observed_layers>())
        : round_pools_on(device, std::move(model)) {}

    /// Rows of a step, each of a position: bf16 holds them, and their sum is finer than it.
    template <class callable>
    void fill(twin_tensor& tensor, const std::vector<twin_append>& items, uint32_t turns_after,
              const callable& level) {
        const uint32_t heads = static_cast<uint32_t>(tensor.on_host.heads);
        const uint32_t dim = static_cast<uint32_t>(tensor.on_host.dim);
        uint32_t row = 0;
        for (const twin_append& item : items) {
            for (uint32_t r = 0; r < item.rows; ++r, ++row) {
                for (uint32_t head = 0; head < heads; ++head) {
                    const uint32_t position = item.sequence->tokens + r;
                    const double here = level(position, head);
                    for (uint32_t c = 0; c < dim; ++c) {
                        const double finer = here + static_cast<double>(c) / dim / 128.0;
                        const bool points =
                            turns_after == 0 || c / (dim / 8) == position / turns_after % 8;
                        tensor.host[(row * heads + head) * dim + c] =
                            points ? static_cast<float>(std::floor(finer * 128.0) / 128.0) : 0.0f;
                    }
                }
            }
        }
        device().enqueue("inputs", upload(tensor));
    }

    /// What a step writes and asks for in a layer, for when the device's stream gets there.
    void fill_inputs(uint32_t l, const std::vector<twin_append>& items, twin_tensor& keys,
                     twin_tensor& values, twin_tensor& queries) {
        if (stores(l)) {
            fill(keys, items, same_way, [&](uint32_t position, uint32_t head) {
                const double level = spread(position + head_step * head + 31.0 * l);
                return two_levels ? level < 0.6 ? 0.2 : 1.7 : 1.9 * level;
            });
            draw(values);
            device().enqueue("inputs", upload(values));
        }
        fill(queries, items, 0, [&](uint32_t position, uint32_t head) {
            return 0.2 + 0.1 * spread(3.0 * position + head);
        });
    }

    void step(const std::vector<twin_append>& items) {
        kv_step* steps[2];
        begin(items, steps);
        uint32_t rows = 0;
        for (const twin_append& item : items) rows += item.rows;
        for (uint32_t l = 0; l < layers(); ++l) {
            const kv_layer& layer = kinds.layers[l];
            twin_tensor keys = make_tensor(rows, 2, 64), values = make_tensor(rows, 2, 64);
            twin_tensor queries = make_tensor(rows, layer.query_heads, 64);
            twin_tensor out = make_tensor(rows, layer.query_heads, 64);
            fill_inputs(l, items, keys, values, queries);
            if (stores(l)) write(steps, l, keys, values);
            attend_both(steps, l, queries, out);
            expect(out, bound_of(l));
        }
        end(items, steps);
        compare_reports();
    }
    void attend_both(kv_step* (&steps)[2], uint32_t layer, const twin_tensor& queries,
                     const twin_tensor& out) {
        kv_attend_options options = KV_INIT(kv_attend_options);
        options.flags = attend_flags;
        REQUIRE(kv_attend(steps[1], layer, &queries.on_host, &out.on_host, &options) == KV_OK);
        const kv_status verdict =
            kv_attend(steps[0], layer, &queries.on_device, &out.on_device, &options);
        REQUIRE_MESSAGE(verdict == KV_OK, std::string(message_buffer()));
    }

    /// What each slot has got, on both.
    void compare_sums(const twin_sequence& sequence) {
        for (uint32_t l = 0; l < layers(); ++l) {
            if (!stores(l) || kinds.layers[l].window != 0) continue;
            for (uint32_t head = 0; head < 2; ++head) {
                std::vector<float> sums[2];
                for (uint32_t i = 0; i < 2; ++i) {
                    sums[i].resize(512);
                    uint64_t count = 0;
                    REQUIRE(kv_seq_get_scores(pools[i], sequence.of[i], l, head, 512,
                                              sums[i].data(), &count) == KV_OK);
                    sums[i].resize(count);
                }
                CAPTURE(l);
                CAPTURE(head);
                REQUIRE(sums[0].size() == sums[1].size());
                compared_sums += static_cast<uint32_t>(sums[0].size());
                for (std::size_t slot = 0; slot < sums[0].size(); ++slot) {
                    const double expected = double{sums[1][slot]};
                    const double off = std::abs(double{sums[0][slot]} - expected);
                    const double error = off / (expected + 1e-3);
                    if (!(error <= worst_sum)) worst_sum = error;
                    differences += error <= 4e-3 ? 0 : 1;
                }
            }
        }
    }
};

struct observing_pools : fake_side, observing_pools_on {
    observing_pools() : observing_pools_on(fake_device) {}
    explicit observing_pools(std::unique_ptr<twin_model> model)
        : observing_pools_on(fake_device, std::move(model)) {}
};

struct observed_policy {
    kv_policy policy = policy_of(KV_SCORER_H2O);
    bool looks = true;  ///< sums are read in between, which waits
};

/// Each as a subcase; `pools` give keys the attention that it can rank.
inline observed_policy policy_for_observed(observing_pools_on& pools) {
    observed_policy chosen;
    kv_policy& policy = chosen.policy;
    bool& looks = chosen.looks;
    policy.recent = 16;
    SUBCASE("H2O, of every fourth token, decaying") { policy.decay = 0.4f; }
    SUBCASE("H2O, of every token, and nobody waits") {
        policy.decay = 0.4f;
        policy.observe_every = 1;
        looks = false;
    }
    SUBCASE("SCISSORHANDS") {
        policy.scorer = KV_SCORER_SCISSORHANDS;
        policy.window = 8;
        pools.two_levels = true;
    }
    SUBCASE("TOVA, one set for the heads of a layer") {
        policy.scorer = KV_SCORER_TOVA;
        pools.head_step = 0.0;
    }
    SUBCASE("SNAPKV, the greatest of neighbours") {
        policy.scorer = KV_SCORER_SNAPKV;
        policy.window = 8;
        policy.pool_width = 3;
        policy.flags = KV_POLICY_POOL_MAX;
    }
    SUBCASE("SNAPKV, drawn, one set for the heads of a layer") {
        policy.scorer = KV_SCORER_SNAPKV;
        policy.window = 8;
        policy.flags = KV_POLICY_SAMPLE;
        policy.selection = KV_SELECT_PER_LAYER;
    }
    SUBCASE("VASE_ATTENTION") {
        policy.scorer = KV_SCORER_VASE_ATTENTION;
        policy.window = 8;
    }
    SUBCASE("RKV") { policy.scorer = KV_SCORER_RKV; }
    SUBCASE("RKV, whose newest similar keys are spared") {
        policy.scorer = KV_SCORER_RKV;
        policy.flags = KV_POLICY_EXACT_REDUNDANCY;
        policy.similarity = 0.25f;
        policy.redundancy = 0.98f;
        policy.pool_width = 1;
        pools.same_way = 10;
    }
    SUBCASE("BLEND") { policy.scorer = KV_SCORER_BLEND; }
    SUBCASE("BLEND, one set for all layers' heads, by shares of its own") {
        policy.scorer = KV_SCORER_BLEND;
        policy.selection = KV_SELECT_UNION;
        policy.decay = 0.4f;
        policy.prior_share = 0.4f;
        policy.redundancy = 0.2f;
        policy.pool_width = 1;
        pools.head_step = 0.0;
    }
    return chosen;
}

/// Prompts that are listed in parts, tokens one by one, drafts, a fork that goes on from a shared
/// tail, a truncation; rounds at step ends. `looks`: sums are read in between, which waits.
inline void drive(observing_pools_on& pools, const kv_policy& policy, uint32_t steps, bool looks) {
    std::deque<twin_sequence> sequences;
    for (uint32_t i = 0; i < 3; ++i) sequences.push_back(pools.create(&policy));
    pools.step({{&sequences[0], 40, 40}, {&sequences[1], 90, 90}, {&sequences[2], 24, 24}});
    for (uint32_t step = 0; step < steps; ++step) {
        CAPTURE(step);
        if (step == 3) sequences.push_back(pools.fork(sequences[0]));
        if (step == 7) pools.truncate(sequences[1], sequences[1].tokens - 1);  // no round since
        pools.attend_flags = step == 8 ? KV_ATTEND_NO_STATISTICS : 0;
        std::vector<twin_append> items;
        for (twin_sequence& each : sequences) {
            const uint32_t rows = step % 4 != 1 ? 1 : 1 + static_cast<uint32_t>(pools.random() % 6);
            items.push_back({&each, rows, rows - (rows > 3 ? 1 : 0)});
        }
        pools.step(items);
        pools.device().run_some(static_cast<uint32_t>(pools.random() % 60));
        if (!looks || step % 3 != 2) continue;
        for (const twin_sequence& each : sequences) pools.compare_sums(each);
    }
    for (const twin_sequence& each : sequences) pools.compare(each);
}

}  // namespace kvrt::cuda
