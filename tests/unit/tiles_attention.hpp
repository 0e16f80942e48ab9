// Attention over what the world of tiles_fixture.hpp holds.
#pragma once

#include "paged_fixture.hpp"
#include "tiles_fixture.hpp"

namespace tiles_test {

/// Attention in double over what the pool says is stored, against kv_attend. Slots are positions.
inline double attention_error(const world& w, kv_seq seq, uint32_t layer, uint32_t rows) {
    kv_step* open = nullptr;
    ok(kv_step_begin(w.pool, &open));
    kv_append_info info = KV_INIT(kv_append_info);
    ok(kv_seq_append(open, seq, nullptr, rows, &info));
    ok(kv_step_reserve(open, nullptr));
    w.write(open, 1, info.first_position, rows);
    const shape& shaped = w.shapes[layer];
    const uint32_t group = shaped.group, heads = group * shaped.kv_heads, dim = shaped.dim;
    std::vector<float> q(rows * heads * dim), out(q.size());
    std::mt19937 draw(5);
    std::normal_distribution<float> noise;
    for (float& x : q) x = noise(draw);
    kv_tensor tensors[2] = {KV_INIT(kv_tensor), KV_INIT(kv_tensor)};
    for (int i = 0; i < 2; ++i) {
        tensors[i].data = i == 0 ? q.data() : out.data();
        tensors[i].dtype = KV_DTYPE_F32;
        tensors[i].rows = rows;
        tensors[i].heads = heads;
        tensors[i].dim = dim;
    }
    const uint32_t slots = w.lane(seq, layer).slots + rows;
    std::vector<double> expected;
    for (uint32_t r = 0; r < rows; ++r) {
        for (uint32_t head = 0; head < heads; ++head) {
            std::vector<double> logits;
            double largest = -1e300, sum = 0.0;
            const uint32_t position = slots - rows + r;
            for (uint32_t slot = 0; slot <= position; ++slot) {
                if (shaped.window != 0 && slot >= window_sinks &&
                    slot + shaped.window <= position) {
                    logits.push_back(-INFINITY);
                    continue;
                }
                const auto key = w.stored(seq, layer, false, head / group, slot);
                double logit = 0.0;
                for (uint32_t i = 0; i < dim; ++i) {
                    logit += double{q[(r * heads + head) * dim + i]} * double{key[i]};
                }
                logits.push_back(logit / std::sqrt(double(dim)));
                largest = std::max(largest, logits.back());
            }
            std::vector<double> result(dim, 0.0);
            for (uint32_t slot = 0; slot < logits.size(); ++slot) {
                const double weight = std::exp(logits[slot] - largest);
                sum += weight;
                const auto value = w.stored(seq, layer, true, head / group, slot);
                for (uint32_t i = 0; i < dim; ++i) result[i] += weight * double{value[i]};
            }
            for (const double x : result) expected.push_back(x / sum);
        }
    }
    double worst = 0.0;
    paged_test::on_every_target([&] {
        std::fill(out.begin(), out.end(), -1.0f);
        ok(kv_attend(open, layer, &tensors[0], &tensors[1], nullptr));
        for (std::size_t i = 0; i < out.size(); ++i) {
            worst = std::max(worst, std::abs(double{out[i]} - expected[i]));
        }
    });
    ok(kv_step_cancel(open));
    return worst;
}

}  // namespace tiles_test
