// LagKV against the definition in double, and against sets that kvpress would keep.
#include "retention/lagkv.hpp"

#include "scorer_fixture.hpp"

using namespace scorer_test;

namespace {

std::vector<float> score(const row_set& set, uint32_t head, const lag_shape& shape,
                         uint32_t parts_at_once = ~0u) {
    std::vector<float> scores(set.slots + 3, -9.0f);
    std::vector<uint64_t> scratch(lag_scratch_bytes(shape) / 8 + 1, 0x5555555555555555u);
    const uint32_t parts = lag_parts(shape, set.slots);
    for (uint32_t first = 0; first < parts; first += std::min(parts_at_once, parts)) {
        score_lag_parts(set.view(head), shape, first,
                        first + std::min({parts_at_once, parts, parts - first}), scratch.data(),
                        scores.data());
    }
    score_lag_kept(shape, set.slots, scores.data());
    return scores;
}

// Softmax over a part's slots of the deviation (channels - 1) of rows scaled by the next part.
std::vector<double> information(const row_set& set, bool value, uint32_t head, uint32_t first,
                                uint32_t lag) {
    const uint32_t dim = set.dims[value];
    std::vector<double> out(lag);
    double sum = 0;
    for (uint32_t t = 0; t < lag; ++t) {
        std::vector<double> scaled(dim);
        double mean = 0, squares = 0;
        for (uint32_t i = 0; i < dim; ++i) {
            double least = INFINITY, greatest = -INFINITY;
            for (uint32_t r = first + lag; r < first + 2 * lag; ++r) {
                least = std::min(least, set.row(value, r, head)[i]);
                greatest = std::max(greatest, set.row(value, r, head)[i]);
            }
            scaled[i] = (set.row(value, first + t, head)[i] - least) / (greatest - least);
            mean += scaled[i] / dim;
        }
        for (double x : scaled) squares += (x - mean) * (x - mean);
        out[t] = std::exp(std::sqrt(squares / (dim - 1)));
        sum += out[t];
    }
    for (double& x : out) x /= sum;
    return out;
}

// What kvpress gives a sequence, except that ties go to the lower slot, and that of what it keeps
// whole (1 there) sinks have 2 and the others from 1 on to that, the newer the more. `gap`: the
// least difference between what ranks are made from.
std::vector<double> defined(const row_set& set, uint32_t head, const lag_shape& shape,
                            double& gap) {
    const uint32_t n = set.slots, lag = shape.lag, sinks = shape.sinks;
    std::vector<double> scores(n, 2.0);
    if (n < sinks + 2 * lag) {
        for (uint32_t s = sinks; s < n; ++s) scores[s] = double(s - sinks) / (n - sinks);
        return scores;
    }
    const uint32_t end = sinks + (n - sinks) / lag * lag;
    for (uint32_t first = sinks; first + 2 * lag <= end; first += lag) {
        const std::vector<double> k = information(set, false, head, first, lag);
        const std::vector<double> v = information(set, true, head, first, lag);
        for (uint32_t a = 0; a < lag; ++a) {
            uint32_t rank = 0;
            for (uint32_t b = 0; b < lag; ++b) {
                if (a == b) continue;
                const double difference = (k[a] + v[a]) - (k[b] + v[b]);
                gap = std::min(gap, std::abs(difference));
                rank += difference > 0 ? 1 : 0;
            }
            scores[first + a] = double(rank) / lag;
        }
    }
    for (uint32_t s = end - lag; s < n; ++s)
        scores[s] = 1 + double(s - (end - lag)) / (n - end + lag);
    return scores;
}

}  // namespace

TEST_CASE("LagKV in every kind of storage") {
    for (const lag_shape& shape : {lag_shape{24, 5}, lag_shape{16, 0}, lag_shape{50, 4}}) {
        for_each_row_set(135, 64, 32, [&](const row_set& set) {
            for (uint32_t head = 0; head < row_set::heads; ++head) {
                double gap = INFINITY;
                const std::vector<double> expected = defined(set, head, shape, gap);
                const std::vector<float> scores = score(set, head, shape);
                // Ranks of slots that are all but equal may be swapped; nothing else may differ.
                uint32_t different = 0;
                for (uint32_t slot = 0; slot < set.slots; ++slot) {
                    const double off = std::abs(scores[slot] - expected[slot]) * shape.lag;
                    CHECK(off < 1.001);
                    different += off > 1e-4 ? 1 : 0;
                }
                CHECK(different <= (gap < 1e-8 ? 4u : 0u));
                CHECK(scores[set.slots] == -9.0f);
                CHECK(score(set, head, shape, 1) == scores);
            }
        });
    }
}

TEST_CASE("LagKV's parts: which are scored, and what is kept") {
    const lag_shape shape{8, 4};
    CHECK(lag_parts(shape, 0) == 0);
    CHECK(lag_parts(shape, 19) == 0);
    CHECK(lag_parts(shape, 20) == 1);
    CHECK(lag_parts(shape, 27) == 1);
    CHECK(lag_parts(shape, 28) == 2);
    CHECK(lag_parts({128, 4}, 4 + 1000 * 128 + 127) == 999);

    // Too short: sinks, then the later the better.
    std::vector<float> scores(20, -9.0f);
    score_lag_kept(shape, 9, scores.data());
    CHECK(std::vector<float>(scores.begin(), scores.begin() + 10) ==
          std::vector<float>{2, 2, 2, 2, 0, 0.2f, 0.4f, 0.6f, 0.8f, -9});
    score_lag_kept(shape, 3, scores.data());
    CHECK(scores[2] == 2.0f);
    // 29 slots: sinks 4, one part of 8 scored and another, the last one and one slot kept.
    scores.assign(30, -9.0f);
    score_lag_kept(shape, 29, scores.data());
    for (uint32_t s = 0; s < 30; ++s) {
        CAPTURE(s);
        if (s < 4) {
            CHECK(scores[s] == 2.0f);
        } else if (s >= 20 && s < 29) {
            CHECK(scores[s] == doctest::Approx(1.0 + (s - 20) / 9.0));
        } else {
            CHECK(scores[s] == -9.0f);
        }
    }
}

TEST_CASE("LagKV by hand: deviations order a part, equal slots by place") {
    // Two parts of 4 slots and no sinks. The second part spans 0 to 1 in every channel of keys and
    // values, so rows of the first are taken as they are; half of the channels are x, half 0.
    const float x[4] = {0.5f, 2.0f, 0.5f, -1.0f};
    uint32_t drawn = 0;
    const row_set set({}, 8, 32, 32, [&](bool) {
        const uint32_t slot = drawn++ / (2 * row_set::heads);
        std::vector<float> row(32, slot == 5 ? 1.0f : 0.0f);
        for (uint32_t i = 0; slot < 4 && i < 16; ++i) row[i] = x[slot];
        return row;
    });
    on_every_target([&] {
        const std::vector<float> scores = score(set, 1, {4, 0});
        CHECK(scores ==
              std::vector<float>{0.25f, 0.75f, 0, 0.5f, 1, 1.25f, 1.5f, 1.75f, -9, -9, -9});
    });
}

TEST_CASE("LagKV: channels that do not vary and rows that are no numbers") {
    uint32_t drawn = 0;
    const row_set set({}, 8, 32, 32, [&](bool) {
        const uint32_t slot = drawn++ / (2 * row_set::heads);
        std::vector<float> row(32, 7.0f);  // constant in the second part, but for channel 0
        row[0] = slot == 5 ? 1.0f : 0.0f;
        if (slot < 4) row[0] = slot == 2 ? NAN : static_cast<float>(slot);
        return row;
    });
    on_every_target([&] {
        const std::vector<float> scores = score(set, 0, {4, 0});
        CHECK(std::vector<float>(scores.begin(), scores.begin() + 4) ==
              std::vector<float>{0.5f, 0.25f, 0, 0.75f});  // 0 and 1: as far from the middle
    });
}

TEST_CASE("LagKV: a row that is no number does not level the part before") {
    // The second part of 40 has a NaN, in one channel or in all, where its extremes are not: all
    // others rank as they do without it.
    const lag_shape shape{40, 3};
    for (const storage& how :
         {storage{tile_order::native, 16, KV_FORMAT_F16, KV_FORMAT_F16},
          storage{tile_order::native, 16, KV_FORMAT_F32, KV_FORMAT_BF16},
          storage{tile_order::nhd, 16, KV_FORMAT_BF16, KV_FORMAT_F32},
          storage{tile_order::native, 32, KV_FORMAT_INT8_TOKEN, KV_FORMAT_F16}}) {
        for (const float odd : {NAN, -NAN}) {
            for (const uint32_t channels : {1u, 32u}) {
                CAPTURE(how.key_format);
                CAPTURE(channels);
                const auto rows = [&](float at) {
                    return [=, drawn = 0u, draw = std::mt19937(4)](bool) mutable {
                        std::normal_distribution<float> normal;
                        const uint32_t slot = drawn++ / (2 * row_set::heads);
                        std::vector<float> row(32);
                        for (float& x : row) x = normal(draw);
                        const float extreme = slot % 2 == 0 ? 9.0f : -9.0f;
                        if (slot == 46 || slot == 75) row.assign(32, extreme);
                        if (slot == 60) std::fill_n(row.begin(), channels, at);
                        return row;
                    };
                };
                row_set with(how, 130, 32, 32, rows(odd)), without(how, 130, 32, 32, rows(0));
                std::byte* block = block_address(with.arena, with.blocks[60 / how.block_tokens]);
                for (const operand_layout* of : {&with.open.keys, &with.open.values}) {
                    for (uint32_t i = 0; of->plain() && i < channels; ++i) {
                        store_element(block + of->at(60 % how.block_tokens, 1, i), of->type, odd);
                    }
                }
                on_every_target([&] {
                    const std::vector<float> expected = score(without, 1, shape);
                    const std::vector<float> scores = score(with, 1, shape);
                    uint32_t different = 0;
                    for (uint32_t slot = 0; slot < 43; ++slot) {
                        different += scores[slot] != expected[slot] ? 1 : 0;
                    }
                    CHECK(different == 0);
                    CHECK(scores[60] == 0.0f);
                    CHECK(score(with, 1, shape, 1) == scores);
                });
            }
        }
    }
}
