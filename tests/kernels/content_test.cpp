// Scores of what keys and values are: the kernels of KeyDiff, LagKV, VaSE's sketch and Expected
// Attention against their definitions in double, and the CPU's scorers.
#include <complex>

#include "content_cohort.hpp"
#include "kernels/score_directions.hpp"
#include "kernels/score_expected.hpp"
#include "kernels/score_lag.hpp"
#include "kernels/score_sketch.hpp"
#include "retention/expected_attention.hpp"
#include "retention/lagkv.hpp"
#include "retention/sketch.hpp"
#include "retention/unit_keys.hpp"

using namespace kernel_test;
using complex = std::complex<double>;

static_assert(kernels::direction_part == kvrt::slots_per_part);
static_assert(kernels::sketch_directions == kvrt::sketch_directions);

TEST_CASE("KeyDiff's kernels: minus the cosine with the sum of all directions") {
    for_each_lane([](const lane_description& what, thread_order order) {
        content_cohort cohort(what);
        const uint64_t sums_stride = kernels::direction_parts(most_slots) * uint64_t{what.key_dim};
        device_array<double> sums(cohort.heads() * sums_stride);
        device_array<float> out(cohort.nothing());
        const device_array<kernels::score_lane> lanes(cohort.lanes);
        auto call = cohort.make_call<kernels::direction_parameters>();
        call.lanes = lanes.data();
        call.sums = sums.data();
        call.scores = out.data();
        call.sums_stride = sums_stride;
        call.score_stride = cohort.stride;
        cohort.run(kernels::direction_blocks(call.count, what.kv_heads, most_slots),
                   kernels::direction_threads, kernels::direction_shared_bytes(what.key_dim), order,
                   [&] { kernels::sum_directions<context>(call); });
        cohort.run(cohort.score_blocks(), kernels::score_threads,
                   kernels::total_shared_bytes(what.key_dim), order,
                   [&] { kernels::score_directions<context>(call); });
        cohort.scores = out.copy();
        cohort.check_ends();
        cohort.for_each_head([&](uint32_t i, uint32_t head) {
            const uint32_t slots = cohort.slots[i], dim = what.key_dim;
            std::vector<std::vector<double>> units;
            std::vector<double> total(dim);
            for (uint32_t slot = 0; slot < slots; ++slot) {
                units.push_back(row_of(cohort.here, false, i, slot, head));
                double square = 0;
                for (const double x : units.back()) square += x * x;
                for (uint32_t c = 0; c < dim; ++c) {
                    total[c] += units.back()[c] /= std::sqrt(square);
                }
            }
            double square = 0, worst = 0;
            for (const double x : total) square += x * x;
            std::vector<double> parts(sums_stride);
            std::vector<float> of_cpu(slots);
            const kvrt::stored_rows rows = rows_of(cohort.here, i, head);
            for (uint32_t first = 0; first < slots; first += kvrt::slots_per_part) {
                kvrt::sum_unit_keys(rows, first, std::min(first + kvrt::slots_per_part, slots),
                                    &parts[first / kvrt::slots_per_part * dim]);
            }
            kvrt::join_parts(parts.data(), kernels::direction_parts(slots), dim, parts.data());
            kvrt::score_keydiff(rows, 0, slots, parts.data(), of_cpu.data());
            for (uint32_t slot = 0; slot < slots; ++slot) {
                double dot = 0;
                for (uint32_t c = 0; c < dim; ++c) dot += units[slot][c] * total[c];
                const double expected = -dot / std::sqrt(square);
                worst = std::max(worst, std::abs(expected - double{cohort.row(i, head)[slot]}));
                if (cpu_fuses()) REQUIRE(cohort.row(i, head)[slot] == of_cpu[slot]);
            }
            CHECK(worst < 2e-5);
        });
    });
}

namespace {

/// Standard deviations of a part's rows, by the ranges of the next part, as softmax over its slots.
/// NaN has no part in ranges and sums.
std::vector<double> defined_lag(const lane& here, bool value, uint32_t sequence, uint32_t head,
                                uint32_t first) {
    const uint32_t lag = kernels::lag_slots;
    std::vector<double> least, greatest, found;
    for (uint32_t slot = first + lag; slot < first + 2 * lag; ++slot) {
        const std::vector<double> row = row_of(here, value, sequence, slot, head);
        least.resize(row.size(), INFINITY);
        greatest.resize(row.size(), -INFINITY);
        for (size_t c = 0; c < row.size(); ++c) {
            if (row[c] < least[c]) least[c] = row[c];
            if (row[c] > greatest[c]) greatest[c] = row[c];
        }
    }
    double sum = 0;
    for (uint32_t slot = first; slot < first + lag; ++slot) {
        std::vector<double> row = row_of(here, value, sequence, slot, head);
        double mean = 0, square = 0;
        for (size_t c = 0; c < row.size(); ++c) {
            row[c] = (row[c] - least[c]) / (greatest[c] - least[c]);
            mean += row[c] / static_cast<double>(row.size());
        }
        for (const double x : row) square += (x - mean) * (x - mean);
        found.push_back(std::exp(std::sqrt(square / static_cast<double>(row.size() - 1))));
        if (!std::isnan(found.back())) sum += found.back();
    }
    for (double& each : found) each /= sum;
    return found;
}

}  // namespace

TEST_CASE("LagKV's kernels: ranks by deviations, by the ranges of the part that follows") {
    for_each_lane([](const lane_description& what, thread_order order) {
        const uint32_t sinks = what.kv_heads == 1 ? 4 : 9;
        content_cohort cohort(what);
        put_nan(cohort.here, 3, 160, 5);
        device_array<float> deviations(cohort.heads() * 2 * cohort.stride);
        device_array<float> out(cohort.nothing());
        const device_array<kernels::score_lane> lanes(cohort.lanes);
        auto call = cohort.make_call<kernels::lag_parameters>();
        call.lanes = lanes.data();
        call.deviations = deviations.data();
        call.scores = out.data();
        call.stride = cohort.stride;
        call.sinks = sinks;
        cohort.run(kernels::lag_blocks(call.count, what.kv_heads, sinks, most_slots),
                   kernels::lag_threads,
                   kernels::lag_shared_bytes(std::max(what.key_dim, what.value_dim)), order,
                   [&] { kernels::measure_deviations<context>(call); });
        cohort.run(kernels::rank_blocks(call.count, what.kv_heads, sinks, most_slots),
                   kernels::lag_threads, kernels::rank_shared_bytes, order,
                   [&] { kernels::rank_lag_parts<context>(call); });
        cohort.scores = out.copy();
        cohort.check_ends();
        cohort.for_each_head([&](uint32_t i, uint32_t head) {
            const uint32_t slots = cohort.slots[i], lag = kernels::lag_slots;
            const float* const got = cohort.row(i, head);
            const kvrt::lag_shape shape{lag, sinks};
            const uint32_t parts = kvrt::lag_parts(shape, slots);
            REQUIRE(parts == kernels::lag_parts(sinks, slots));
            std::vector<float> of_cpu(slots);
            std::vector<double> scratch(kvrt::lag_scratch_bytes(shape) / 8 + 1);
            kvrt::score_lag_parts(rows_of(cohort.here, i, head), shape, 0, parts, scratch.data(),
                                  of_cpu.data());
            kvrt::score_lag_kept(shape, slots, of_cpu.data());
            uint32_t different = 0, disordered = 0;
            for (uint32_t slot = 0; slot < slots; ++slot) {
                different += got[slot] != of_cpu[slot] ? 1 : 0;
            }
            // Rounding may swap what is as good as equal.
            CHECK(different <= slots / 100);
            for (uint32_t part = 0; part < parts; ++part) {
                const uint32_t first = sinks + part * lag;
                const auto keys = defined_lag(cohort.here, false, i, head, first);
                const auto values = defined_lag(cohort.here, true, i, head, first);
                for (uint32_t a = 0; a < lag; ++a) {
                    for (uint32_t b = 0; b < lag; ++b) {
                        const bool above =
                            (keys[a] + values[a]) > (keys[b] + values[b]) * (1 + 1e-6);
                        disordered += above && !(got[first + a] > got[first + b]) ? 1 : 0;
                    }
                }
            }
            CHECK(disordered == 0);
        });
    });
}

TEST_CASE("VaSE's kernels: squares of keys times squares of values in drawn directions") {
    for_each_lane([](const lane_description& what, thread_order order) {
        content_cohort cohort(what);
        const uint32_t dim = std::max(what.key_dim, what.value_dim);
        std::vector<kernels::place_lane> described;
        for (const kernels::score_lane& each : cohort.lanes) {
            described.push_back({each.table, each.scores, 1000, 77, 5,
                                 static_cast<uint32_t>(described.size()), 3, each.slots, 0});
        }
        const device_array<kernels::place_lane> lanes(described);
        device_array<float> sketches(cohort.count() * uint64_t{kernels::sketch_floats(dim)});
        device_array<float> out(cohort.nothing());
        auto call = cohort.make_call<kernels::sketch_parameters>();
        call.lanes = lanes.data();
        call.sketches = sketches.data();
        call.scores = out.data();
        call.stride = cohort.stride;
        cohort.run(call.count, kernels::sketch_threads, 0, order,
                   [&] { kernels::draw_sketches<context>(call); });
        cohort.run(cohort.score_blocks(), kernels::score_threads, kernels::sketch_shared_bytes(dim),
                   order, [&] { kernels::score_sketches<context>(call); });
        cohort.scores = out.copy();
        cohort.check_ends();
        const std::vector<float> drawn = sketches.copy();
        cohort.for_each_head([&](uint32_t i, uint32_t head) {
            std::vector<float> sketch(kvrt::sketch_count(dim));
            kvrt::draw_sketch({77, 5, i, 0}, dim, sketch.data());
            for (size_t at = 0; at < sketch.size(); ++at) {
                REQUIRE(drawn[i * sketch.size() + at] == sketch[at]);
            }
            double worst = 0;
            for (uint32_t slot = 0; slot < cohort.slots[i]; slot += 1 + slot % 7) {
                double product = 1;
                for (const bool value : {false, true}) {
                    const std::vector<double> row = row_of(cohort.here, value, i, slot, head);
                    double square = 0;
                    for (uint32_t c = 0; c < kvrt::sketch_directions; ++c) {
                        double along = 0;
                        for (size_t k = 0; k < row.size(); ++k) {
                            along += row[k] * double{sketch[k * kvrt::sketch_directions + c]};
                        }
                        square += along * along;
                    }
                    product *= square;
                }
                worst = std::max(worst, std::abs(double{cohort.row(i, head)[slot]} / product - 1));
            }
            CHECK(worst < 1e-5);
        });
    });
}

namespace {

struct expected_case {
    lane_description lane;
    uint32_t rotated_dims;
    uint32_t style = KV_ROPE_HALF;
    uint32_t group = 4;
    double factor = 1.0;
    bool spread = true;
};

/// Means and covariances of queries, by query head of one lane: [6][query heads][bands].
std::vector<float> draw_moments(uint32_t query_heads, uint32_t bands, std::mt19937& random) {
    std::normal_distribution<float> normal;
    const size_t length = size_t{query_heads} * bands;
    std::vector<float> made(6 * length);
    for (size_t i = 0; i < length; ++i) {
        made[i] = normal(random);
        made[length + i] = normal(random);
        made[2 * length + i] = std::hypot(made[i], made[length + i]) + 0.5f;
        const float a = std::abs(normal(random)), b = std::abs(normal(random));
        made[3 * length + i] = a;
        made[4 * length + i] = b;
        made[5 * length + i] = std::sqrt(a * b) * std::sin(normal(random));
    }
    return made;
}

/// By the mean rotation of positions to come.
double defined_logit(const kvrt::rope_description& rope, const kvrt::expected_shape& shape,
                     uint64_t next, const float* moments, size_t length, bool spread,
                     const std::vector<double>& key) {
    const uint32_t rotated = rope.rotated_bands(), bands = rope.bands(shape.key_dim);
    const double dim = shape.key_dim;
    double dot = 0, square = 0;
    for (uint32_t f = 0; f < bands; ++f) {
        const auto moment = [&](uint32_t which) { return double{moments[which * length + f]}; };
        if (f >= rotated) {
            const double k = key[rotated + f];
            dot += moment(0) * k;
            if (spread) square += moment(3) * k * k;
            continue;
        }
        const bool half = rope.style == KV_ROPE_HALF;
        const complex k(key[half ? f : 2 * f], key[half ? f + rotated : 2 * f + 1]);
        complex turn = 0;
        for (uint32_t t = 0; t < shape.positions; ++t) {
            turn += std::polar(1.0, rope.inverse_frequencies[f] * static_cast<double>(next + t));
        }
        turn *= rope.attention_factor / shape.positions;
        // The key turned back meets the queries as they are before rotation.
        const complex back = k * std::conj(turn);
        dot += moment(0) * back.real() + moment(1) * back.imag();
        if (!spread) continue;
        square += moment(3) * back.real() * back.real() + moment(4) * back.imag() * back.imag() +
                  2 * moment(5) * back.real() * back.imag();
    }
    return dot / std::sqrt(dim) + square / (2 * dim);
}

void check_expected(const expected_case& test, thread_order order) {
    CAPTURE(test.lane.text());
    content_cohort cohort(test.lane, test.group);
    const uint32_t heads = test.lane.kv_heads, query_heads = heads * test.group;
    kvrt::rope_description rope;
    rope.style = test.style;
    rope.dimensions = test.rotated_dims;
    rope.attention_factor = test.factor;
    for (uint32_t f = 0; f < test.rotated_dims / 2; ++f) {
        rope.inverse_frequencies[f] = std::pow(1e4, -2.0 * f / test.rotated_dims);
    }
    kvrt::expected_shape shape;
    shape.key_dim = test.lane.key_dim;
    shape.group = test.group;
    const uint32_t bands = rope.bands(shape.key_dim);
    const uint64_t phase_count = kvrt::expected_phase_count(rope);
    const size_t length = size_t{query_heads} * bands;
    std::mt19937 random(5);
    const std::vector<float> moments = draw_moments(query_heads, bands, random);
    std::vector<double> phases(phase_count * cohort.count() + 1);
    const uint64_t next_positions[] = {2100, 100000, 390};
    for (uint32_t i = 0; i < cohort.count(); ++i) {
        kvrt::expected_phases(shape, rope, next_positions[i], &phases[i * phase_count]);
        cohort.lanes[i].phases = i * phase_count;
    }
    const device_array<float> on_moments(moments);
    const device_array<double> on_phases(phases);
    const device_array<kernels::score_lane> lanes(cohort.lanes);
    device_array<float> out(cohort.nothing());
    device_array<float> norms(cohort.heads() * cohort.stride);
    auto call = cohort.make_call<kernels::expected_parameters>();
    call.lanes = lanes.data();
    call.moments = on_moments.data();
    call.moment_stride = length;
    call.phases = on_phases.data();
    call.scores = out.data();
    call.norms = norms.data();
    call.stride = cohort.stride;
    call.attention_factor = rope.attention_factor;
    call.group = test.group;
    call.rotated = rope.rotated_bands();
    call.interleaved = rope.style == KV_ROPE_INTERLEAVED;
    call.spread = test.spread;
    REQUIRE(call.bands() == bands);
    cohort.run(cohort.score_blocks(), kernels::score_threads, kernels::expected_shared_bytes(bands),
               order, [&] { kernels::score_expected<context>(call); });
    cohort.scores = out.copy();
    cohort.check_ends();
    const std::vector<float> of_values = norms.copy();
    cohort.for_each_head([&](uint32_t i, uint32_t head) {
        const uint32_t slots = cohort.slots[i];
        const size_t at = size_t{head} * test.group * bands;
        const auto array = [&](uint32_t which) { return &moments[which * length + at]; };
        kvrt::query_covariances covariances;
        if (test.spread) covariances = {array(3), array(4), array(5)};
        std::vector<float> weights(kvrt::expected_weight_count(shape, rope, test.spread));
        kvrt::expected_weights(shape, rope, &phases[i * phase_count],
                               {array(0), array(1), array(2)}, covariances, weights.data());
        std::vector<float> of_cpu(test.group * cohort.stride);
        kvrt::score_expected_logits(rows_of(cohort.here, i, head), 0, slots, shape, rope,
                                    weights.data(), test.spread, of_cpu.data(), cohort.stride);
        double worst = 0, worst_norm = 0;
        for (uint32_t slot = 0; slot < slots; ++slot) {
            for (uint32_t g = 0; g < test.group; ++g) {
                const size_t place = g * cohort.stride + slot;
                if (cpu_fuses()) REQUIRE(cohort.row(i, head)[place] == of_cpu[place]);
                if (slot % 97 != 0) continue;
                const double expected =
                    defined_logit(rope, shape, next_positions[i], array(0) + g * bands, length,
                                  test.spread, row_of(cohort.here, false, i, slot, head));
                worst = std::max(worst, std::abs(expected - double{cohort.row(i, head)[place]}));
            }
            double square = 0;
            for (const double x : row_of(cohort.here, true, i, slot, head)) square += x * x;
            const double norm = of_values[(i * heads + head) * cohort.stride + slot];
            worst_norm = std::max(worst_norm, std::abs(norm / std::sqrt(square) - 1));
        }
        CHECK(worst < 1e-4);
        CHECK(worst_norm < 1e-5);
    });
}

}  // namespace

TEST_CASE("Expected Attention's kernel: the definition, and the CPU's logits") {
    std::vector<expected_case> cases = {
        {{}, 64},
        {{.kv_heads = 1, .key_dim = 128, .key_format = KV_FORMAT_INT8_TOKEN},
         48,
         KV_ROPE_HALF,
         7,
         1.3},
        // 10 bands: second halves lie on no multiple of 8.
        {{.order = tile_order::hnd, .kv_heads = 1, .key_format = KV_FORMAT_BF16},
         20,
         KV_ROPE_HALF,
         2},
        {{.kv_heads = 1, .key_format = KV_FORMAT_Q4_1, .value_format = KV_FORMAT_Q8_0},
         32,
         KV_ROPE_INTERLEAVED,
         5,
         0.9,
         false},
        {{.order = tile_order::hnd, .kv_heads = 1, .key_dim = 72}, 72, KV_ROPE_INTERLEAVED, 1},
        {{.kv_heads = 1, .key_dim = 40, .key_format = KV_FORMAT_F32}, 0, KV_ROPE_NONE, 2},
    };
    if (few_cases) cases = {{{.kv_heads = 1}, 16, KV_ROPE_HALF, 5}};
    uint32_t index = 0;
    for (const expected_case& each : cases) {
        check_expected(each, emulator::all_orders[index++ % 3]);
    }
}
