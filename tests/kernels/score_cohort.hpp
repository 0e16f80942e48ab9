// Lanes whose keys are scored by TriAttention, for tests of kernels that do so: what they read, the
// definition in double, and the CPU's scorer.
#pragma once

#include <cmath>
#include <complex>

#include "base/executor.hpp"
#include "format/rows.hpp"
#include "kernels/score.hpp"
#include "retention/triattention.hpp"
#include "without_barrier.hpp"

namespace kernel_test {

namespace kernels = kvrt::kernels;
using complex = std::complex<double>;

inline constexpr uint32_t blocks_each = 48;  // of 16 slots or more

struct score_case {
    lane_description lane;
    uint32_t rotated_dims;
    uint32_t style = KV_ROPE_HALF;
    uint32_t group = 4;
    bool maximum = false;
    double factor = 1.0;
};

inline kvrt::rope_description make_rope(const score_case& test) {
    kvrt::rope_description rope;
    rope.style = test.style;
    rope.dimensions = test.rotated_dims;
    rope.attention_factor = test.factor;
    for (uint32_t f = 0; f < test.rotated_dims / 2; ++f) {
        rope.inverse_frequencies[f] = std::pow(1e4, -2.0 * f / test.rotated_dims);
    }
    return rope;
}

/// Rows of normal numbers in all slots of all sequences, whose spread differs by slot.
inline void fill_rows(lane& here, uint32_t sequences, uint32_t slots, uint32_t seed) {
    const kvrt::tile_layout& layout = here.layout;
    const uint32_t rows = sequences * slots;
    device_tensor keys(number::f32, rows, layout.kv_heads, layout.keys.dim);
    device_tensor values(number::f32, rows, layout.kv_heads, layout.values.dim);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (device_tensor* tensor : {&keys, &values}) {
        for (uint32_t row = 0; row < rows; ++row) {
            const float spread = std::exp(0.5f * normal(random));
            for (uint32_t head = 0; head < tensor->heads; ++head) {
                for (uint32_t i = 0; i < tensor->dim; ++i) {
                    tensor->put(row, head, i, spread * normal(random));
                }
            }
        }
    }
    std::vector<kvrt::write_item> items;
    for (uint32_t s = 0; s < sequences; ++s) {
        items.push_back({here.table_of(s), 0, s * slots, slots, 0});
    }
    std::vector<uint64_t> saturated(layout.kv_heads);
    kvrt::executor threads;
    kvrt::write_rows(layout, here.arena.data(), items.data(), sequences, keys.view(), values.view(),
                     {saturated.data(), saturated.data()}, threads);
}

inline std::vector<double> row_of(const lane& here, bool value, uint32_t sequence, uint32_t slot,
                                  uint32_t head) {
    const kvrt::operand_layout& operand = value ? here.layout.values : here.layout.keys;
    const uint32_t tokens = here.layout.block_tokens;
    std::vector<float> row(operand.dim);
    kvrt::read_row(operand,
                   kvrt::block_address(here.arena.data(), here.table_of(sequence)[slot / tokens]),
                   slot % tokens, head, 0, row.data());
    return {row.begin(), row.end()};
}

/// Means of random queries, by query head of one lane.
struct drawn_means {
    std::vector<float> real, imaginary, magnitude;

    drawn_means(uint32_t query_heads, uint32_t bands, uint32_t rotated, std::mt19937& random) {
        std::normal_distribution<float> normal;
        for (uint32_t i = 0; i < query_heads * bands; ++i) {
            real.push_back(normal(random));
            imaginary.push_back(i % bands < rotated ? normal(random) : 0.0f);
            const float mean = std::hypot(real.back(), imaginary.back());
            // Of some the rounding of a sum has left less than the mean.
            magnitude.push_back(i % 7 == 0 ? 0.999f * mean
                                           : mean * (1.0f + 0.3f * std::abs(normal(random))));
        }
    }
};

/// The definition, from a key as it is cached and where it stands (eviction by TriAttention: terms
/// of angles between positions).
inline double defined_score(const kvrt::rope_description& rope, const drawn_means& means,
                            uint64_t at, const std::vector<double>& row, double position,
                            double next_position, uint32_t offset_max, bool maximum) {
    const uint32_t rotated = rope.rotated_bands();
    const uint32_t bands = rope.bands(static_cast<uint32_t>(row.size()));
    double norm = 0, sum = 0, best = -INFINITY;
    std::vector<complex> keys, queries;
    std::vector<double> frequencies;
    for (uint32_t f = 0; f < bands; ++f) {
        const bool turns = f < rotated;
        const bool half = rope.style == KV_ROPE_HALF;
        const double factor = turns ? rope.attention_factor : 1.0;
        const complex stored =
            turns ? complex(row[half ? f : 2 * f], row[half ? f + rotated : 2 * f + 1])
                  : complex(row[rotated + f]);
        frequencies.push_back(turns ? rope.inverse_frequencies[f] : 0.0);
        keys.push_back(stored * factor * std::polar(1.0, -frequencies[f] * position));
        queries.emplace_back(means.real[at + f], means.imaginary[at + f]);
        norm += std::max(0.0, double{means.magnitude[at + f]} - std::abs(queries[f])) *
                std::abs(keys[f]);
    }
    int offsets = 0;
    for (uint64_t offset = 1; offset <= offset_max; offset *= 2, ++offsets) {
        double trig = 0;
        for (uint32_t f = 0; f < bands; ++f) {
            const double angle =
                frequencies[f] * (next_position - position + static_cast<double>(offset)) +
                std::arg(queries[f]) - std::arg(keys[f]);
            trig += std::abs(queries[f]) * std::abs(keys[f]) * std::cos(angle);
        }
        sum += trig;
        best = std::max(best, trig);
    }
    return (maximum ? best : sum / offsets) + norm;
}

template <class Cx, kernels::coding codes, number type>
void run_heads(const kernels::triattention_parameters& call, uint32_t heads) {
    switch (heads) {
        case 2:
            return kernels::score_keys<Cx, codes, type, 2>(call);
        case 4:
            return kernels::score_keys<Cx, codes, type, 4>(call);
        default:
            return kernels::score_keys<Cx, codes, type, 8>(call);
    }
}

/// Calls run with the format that an operand is stored in, known to the compiler.
template <class callable>
void with_format(const kernels::operand_place& operand, const callable& run) {
    using kernels::coding;
    switch (operand.codes) {
        case coding::plain:
            if (operand.type == number::f32)
                return run.template operator()<coding::plain, number::f32>();
            if (operand.type == number::f16)
                return run.template operator()<coding::plain, number::f16>();
            return run.template operator()<coding::plain, number::bf16>();
        case coding::int8_token:
            return run.template operator()<coding::int8_token, number::f32>();
        case coding::int4_token:
            return run.template operator()<coding::int4_token, number::f32>();
        case coding::fp8_token:
            return run.template operator()<coding::fp8_token, number::f32>();
        case coding::fp8_e4m3:
            return run.template operator()<coding::fp8_e4m3, number::f32>();
        case coding::fp8_e5m2:
            return run.template operator()<coding::fp8_e5m2, number::f32>();
        default:
            FAIL("no kernel scores keys that are stored so");
    }
}

inline constexpr float untouched = -77.0f;

/// A cohort of lanes, and everything that a launch over it reads and writes.
struct scored_cohort {
    score_case test;
    std::vector<uint32_t> slots;  // of each lane; more than one stretch, less than a group
    std::vector<uint64_t> next_positions;
    uint32_t heads, query_heads;
    uint64_t stride;
    kvrt::rope_description rope;
    kvrt::triattention_shape shape;
    lane here;
    std::vector<double> phases;
    std::vector<drawn_means> means;
    std::vector<kernels::score_lane> lanes;

    scored_cohort(const score_case& of, const std::vector<uint32_t>& slots_of_lanes)
        : test(of),
          slots(slots_of_lanes),
          heads(of.lane.kv_heads),
          query_heads(of.lane.kv_heads * of.group),
          stride(*std::max_element(slots.begin(), slots.end()) + 3),
          rope(make_rope(of)),
          here(of.lane, static_cast<uint32_t>(slots.size()), blocks_each) {
        const uint32_t most = *std::max_element(slots.begin(), slots.end());
        REQUIRE(most <= blocks_each * of.lane.block_tokens);
        fill_rows(here, static_cast<uint32_t>(slots.size()), most, 3);
        shape.key_dim = of.lane.key_dim;
        shape.group = of.group;
        shape.offset_max = 4096;
        shape.maximum = of.maximum;
        const uint64_t phase_count = kvrt::triattention_phase_count(shape, rope);
        const uint32_t bands = rope.bands(shape.key_dim);
        std::mt19937 random(5);
        phases.resize(phase_count * slots.size());
        for (uint32_t i = 0; i < slots.size(); ++i) {
            next_positions.push_back(uint64_t{3000} + 1000000 * i);
            kvrt::triattention_phases(shape, rope, next_positions[i],
                                      phases.data() + i * phase_count);
            means.emplace_back(query_heads, bands, rope.rotated_bands(), random);
            lanes.push_back({uint64_t{i} * blocks_each, i * query_heads * stride,
                             uint64_t{i} * query_heads * bands, i * phase_count, slots[i], 0});
        }
    }

    /// What `launched` does with the call; `scores` are what it has left.
    template <class callable>
    launch_report with_call(const callable& launched, std::vector<float>& scores) {
        std::vector<float> real, imaginary, magnitude;
        for (const drawn_means& each : means) {
            real.insert(real.end(), each.real.begin(), each.real.end());
            imaginary.insert(imaginary.end(), each.imaginary.begin(), each.imaginary.end());
            magnitude.insert(magnitude.end(), each.magnitude.begin(), each.magnitude.end());
        }
        const device_array<float> on_real(real), on_imaginary(imaginary), on_magnitude(magnitude);
        const device_array<double> on_phases(phases);
        const device_array<kernels::score_lane> on_lanes(lanes);
        device_array<float> out(std::vector<float>(slots.size() * query_heads * stride, untouched));
        kernels::triattention_parameters call;
        call.arena = here.arena.data();
        call.place = here.place;
        call.lanes = on_lanes.data();
        call.tables = here.tables.data();
        call.mean_real = on_real.data();
        call.mean_imaginary = on_imaginary.data();
        call.mean_magnitude = on_magnitude.data();
        call.phases = on_phases.data();
        call.scores = out.data();
        call.score_stride = stride;
        call.attention_factor = rope.attention_factor;
        call.count = static_cast<uint32_t>(slots.size());
        call.most_slots = *std::max_element(slots.begin(), slots.end());
        call.group = test.group;
        call.rotated = rope.rotated_bands();
        call.variants = shape.variants();
        call.interleaved = rope.style == KV_ROPE_INTERLEAVED;
        const launch_report report = launched(call);
        scores = out.copy();
        return report;
    }

    template <class Cx>
    launch_report run(thread_order order, std::vector<float>& scores) {
        return with_call(
            [&](const kernels::triattention_parameters& call) {
                const uint32_t at_once = kernels::heads_at_once(test.group);
                return launch({.blocks = kernels::score_blocks(call.count, heads, call.most_slots),
                               .threads = kernels::score_threads,
                               .shared_bytes = kernels::score_shared_bytes(call.bands(), at_once),
                               .order = order},
                              [&] {
                                  with_format(call.place.keys,
                                              [&]<kernels::coding codes, number type>() {
                                                  run_heads<Cx, codes, type>(call, at_once);
                                              });
                              });
            },
            scores);
    }

    std::vector<float> cpu_scores() const {
        std::vector<float> scores(slots.size() * query_heads * stride, untouched);
        std::vector<float> weights(kvrt::triattention_weight_count(shape, rope));
        const uint64_t phase_count = kvrt::triattention_phase_count(shape, rope);
        const uint32_t per_group = test.group * rope.bands(shape.key_dim);
        for (uint32_t i = 0; i < slots.size(); ++i) {
            for (uint32_t head = 0; head < heads; ++head) {
                const uint32_t at = head * per_group;
                kvrt::triattention_weights(
                    shape, rope, phases.data() + i * phase_count,
                    {&means[i].real[at], &means[i].imaginary[at], &means[i].magnitude[at]},
                    weights.data());
                kvrt::stored_rows rows;
                rows.open = &here.layout;
                rows.arena = here.arena.data();
                rows.blocks = here.table_of(i);
                rows.kv_head = head;
                kvrt::score_triattention(
                    rows, 0, slots[i], shape, rope, weights.data(),
                    scores.data() + (i * query_heads + head * test.group) * stride, stride);
            }
        }
        return scores;
    }
};

inline double worst_distance(const std::vector<float>& a, const std::vector<float>& b) {
    double worst = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        const double distance = std::abs(double{a[i]} - double{b[i]});
        worst = std::isnan(distance) ? INFINITY : std::max(worst, distance);
    }
    return worst;
}

/// From the definition, over some slots; what lies behind a lane's slots is untouched.
inline double worst_to_definition(const scored_cohort& cohort, const std::vector<float>& scores) {
    const score_case& test = cohort.test;
    const uint32_t bands = cohort.rope.bands(test.lane.key_dim);
    double worst = 0;
    for (uint32_t i = 0; i < cohort.slots.size(); ++i) {
        for (uint32_t row = 0; row < cohort.query_heads; ++row) {
            const float* const got = &scores[(i * cohort.query_heads + row) * cohort.stride];
            for (uint32_t slot = 0; slot < cohort.slots[i]; slot += slot % 13 == 5 ? 29 : 1) {
                const double expected =
                    defined_score(cohort.rope, cohort.means[i], row * bands,
                                  row_of(cohort.here, false, i, slot, row / test.group), 4.0 * slot,
                                  static_cast<double>(cohort.next_positions[i]),
                                  cohort.shape.offset_max, test.maximum);
                const double distance = std::abs(expected - double{got[slot]});
                worst = std::isnan(distance) ? INFINITY : std::max(worst, distance);
            }
            for (uint64_t slot = cohort.slots[i]; slot < cohort.stride; ++slot) {
                REQUIRE(got[slot] == untouched);
            }
        }
    }
    return worst;
}

}  // namespace kernel_test
