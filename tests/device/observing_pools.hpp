// Twin pools that observe attention. Both must rank tokens alike, though they round differently. So
// a key says by its position how much attention it gets, no two alike, and tokens of different age
// are compared only where age counts for nothing: what older queries paid has decayed, or is
// forgotten.
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

struct observing_pools : round_pools {
    uint32_t compared_sums = 0;
    double worst_sum = 0.0;
    uint32_t attend_flags = 0;
    bool two_levels = false;  ///< of attention that a token gets
    double head_step = 17.0;  ///< heads differ

    observing_pools() : round_pools(std::make_unique<observed_layers>()) {}

    /// Rows of a step, each of a position: bf16 holds them, and their sum is finer than it.
    template <class callable>
    void fill(twin_tensor& tensor, const std::vector<twin_append>& items, const callable& level) {
        const uint32_t heads = static_cast<uint32_t>(tensor.on_host.heads);
        const uint32_t dim = static_cast<uint32_t>(tensor.on_host.dim);
        uint32_t row = 0;
        for (const twin_append& item : items) {
            for (uint32_t r = 0; r < item.rows; ++r, ++row) {
                for (uint32_t head = 0; head < heads; ++head) {
                    const double here = level(item.sequence->tokens + r, head);
                    for (uint32_t c = 0; c < dim; ++c) {
                        const double finer = here + static_cast<double>(c) / dim / 128.0;
                        tensor.host[(row * heads + head) * dim + c] =
                            static_cast<float>(std::floor(finer * 128.0) / 128.0);
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
            fill(keys, items, [&](uint32_t position, uint32_t head) {
                const double level = spread(position + head_step * head + 31.0 * l);
                return two_levels ? level < 0.6 ? 0.2 : 1.7 : 1.9 * level;
            });
            draw(values);
            device().enqueue("inputs", upload(values));
        }
        fill(queries, items, [&](uint32_t position, uint32_t head) {
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

}  // namespace kvrt::cuda
