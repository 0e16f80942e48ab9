// Sums of observed attention: the definition in double, from logits; and the CPU's, from the same
// kept weights.
#include "kernels/observe.hpp"

#include <cmath>
#include <limits>

#include "attention/kernels.hpp"
#include "lane_fixture.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

constexpr uint32_t heads = 2, group = 3, query_heads = heads * group;

struct sequence_case {
    uint32_t slots, rows, first_row, slots_before;
    float decay;
    bool before_decays = true;
};

/// Rows of one sequence: logits, and what attention keeps of them.
struct observed {
    sequence_case test;
    std::vector<double> logits;  // [vectors][slots]
    std::vector<float> log_sums;
    std::vector<float> before;  // [heads][stride]
    uint64_t stride;

    observed(const sequence_case& of, uint64_t sums_stride, std::mt19937& random)
        : test(of), logits(of.rows * query_heads * of.slots), stride(sums_stride) {
        std::normal_distribution<double> normal;
        std::uniform_real_distribution<float> mass(0.0f, 3.0f);
        for (uint64_t v = 0; v < of.rows * query_heads; ++v) {
            double total = std::exp(-1.0);  // of a sink
            for (uint32_t slot = 0; slot < of.slots; ++slot) {
                double& logit = logits[v * of.slots + slot];
                logit = 3.0 * normal(random) + 40.0;
                if (slot < seen_by(v)) total += std::exp(logit - 40.0);
            }
            log_sums.push_back(static_cast<float>(std::log(total) + 40.0));
        }
        for (uint64_t i = 0; i < heads * stride; ++i) before.push_back(mass(random));
        // Vectors whose sums are not finite count for nothing.
        if (of.rows > 2) {
            log_sums[(of.rows - 1) * query_heads] = std::numeric_limits<float>::quiet_NaN();
            log_sums[(of.rows - 2) * query_heads + 1] = -std::numeric_limits<float>::infinity();
        }
    }

    uint32_t row_of(uint64_t vector) const { return static_cast<uint32_t>(vector / query_heads); }
    uint32_t seen_by(uint64_t vector) const {
        return test.slots - (test.rows - 1 - row_of(vector));
    }
    float power(uint32_t exponent) const {
        return static_cast<float>(std::pow(double{test.decay}, static_cast<double>(exponent)));
    }

    /// Weights of rows [first, end) by [group][vectors][16], and their largest logits, which grow
    /// from run to run as attention meets them. What rows do not see is as it may be.
    void keep(uint32_t first, uint32_t end, bool clean, std::vector<uint16_t>& weights,
              std::vector<float>& largest) const {
        const uint32_t groups = (test.slots - (test.rows - end) + 15) / 16;
        const uint32_t vectors = (end - first) * query_heads;
        for (uint32_t g = 0; g < groups; ++g) {
            for (uint32_t v = 0; v < vectors; ++v) {
                const uint64_t vector = uint64_t{first} * query_heads + v;
                const double* const row = logits.data() + vector * test.slots;
                const uint32_t met = std::min((g / 4 + 1) * 64, seen_by(vector));
                const float above =
                    static_cast<float>(*std::max_element(row, row + met) * 1.4426950408889634);
                const bool unseen = g * 16 >= seen_by(vector);
                largest.push_back(unseen && !clean ? NAN : above);
                for (uint32_t i = 0; i < 16; ++i) {
                    const uint32_t slot = g * 16 + i;
                    if (slot >= seen_by(vector)) {
                        weights.push_back(clean ? 0 : 0x7e00);
                        continue;
                    }
                    const double weight = std::exp2(row[slot] * 1.4426950408889634 - double{above});
                    weights.push_back(kvrt::f32_to_f16(static_cast<float>(weight)));
                }
            }
        }
    }

    /// The definition; in `margin`, how far a count may be off since weights are near the
    /// threshold.
    std::vector<double> expected(bool counts, std::vector<double>& margin) const {
        std::vector<double> sums(heads * stride);
        margin.assign(sums.size(), 0.0);
        for (uint32_t head = 0; head < heads; ++head) {
            const uint32_t counted = test.rows - std::min(test.rows, test.first_row);
            const double factor = test.before_decays
                                      ? std::pow(double{test.decay}, static_cast<double>(counted))
                                      : 1.0;
            for (uint32_t slot = 0; slot < test.slots_before; ++slot) {
                sums[head * stride + slot] = factor * double{before[head * stride + slot]};
            }
            for (uint32_t row = test.first_row; row < test.rows; ++row) {
                const double counts_for =
                    std::pow(double{test.decay}, static_cast<double>(test.rows - 1 - row));
                for (uint32_t g = 0; g < group; ++g) {
                    const uint64_t vector = uint64_t{row} * query_heads + head * group + g;
                    const double log_sum = double{log_sums[vector]};
                    if (!std::isfinite(log_sum)) continue;
                    for (uint32_t slot = 0; slot < seen_by(vector); ++slot) {
                        double& sum = sums[head * stride + slot];
                        const double weight =
                            std::exp(logits[vector * test.slots + slot] - log_sum);
                        if (!counts) {
                            sum += counts_for * weight;
                            continue;
                        }
                        const double relative = weight * seen_by(vector);
                        sum += relative >= 1.0 ? counts_for : 0.0;
                        if (std::abs(relative - 1.0) < 2e-3) {
                            margin[head * stride + slot] += counts_for;
                        }
                    }
                }
            }
        }
        return sums;
    }

    /// The CPU's, of all rows at once.
    std::vector<float> of_cpu(bool counts) const {
        std::vector<uint16_t> weights;
        std::vector<float> largest;
        keep(0, test.rows, true, weights, largest);
        const uint32_t vectors = test.rows * query_heads, groups = (test.slots + 15) / 16;
        const uint32_t group_stride = ((groups + 15) / 16 / 2 * 2 + 1) * 16;
        std::vector<float> by_vector(vectors * group_stride + 16);
        std::vector<uint16_t> by_run(uint64_t{(groups + 3) / 4} * vectors * kvrt::run_slots);
        std::vector<float> joined = log_sums;
        const kvrt::kept_weights kept = {by_run.data(), by_vector.data(), joined.data(), vectors,
                                         group_stride};
        for (uint32_t g = 0; g < groups; ++g) {
            for (uint32_t v = 0; v < vectors; ++v) {
                *kept.largest_at(v, g * 16) =
                    static_cast<float>(double{largest[g * vectors + v]} * 0.6931471805599453);
                std::copy_n(weights.data() + (uint64_t{g} * vectors + v) * 16, 16,
                            kept.weights_at(v, g * 16));
            }
        }
        struct alignas(64) line {
            float floats[16];
        };
        std::vector<line> memory(heads * stride / 16);
        kvrt::attend_observer observer;
        observer.sums = memory[0].floats;
        observer.before = test.slots_before == 0 ? nullptr : before.data();
        observer.stride = stride;
        observer.slots_before = test.slots_before;
        observer.first_row = test.first_row;
        observer.decay = test.decay;
        observer.before_decays = test.before_decays;
        observer.counts = counts;
        kvrt::attend_item item;
        item.rows = test.rows;
        item.slots = test.slots;
        item.observer = &observer;
        kvrt::observed_rows rows{&item, query_heads, group, 0, test.rows, {}};
        rows.kept = kept;
        for (uint32_t first = 0; first < test.slots; first += kvrt::observed_slots) {
            kvrt::observe_rows(&rows, 1, heads, first,
                               std::min(test.slots, first + kvrt::observed_slots), true);
        }
        const float* const sums = memory[0].floats;
        return {sums, sums + heads * stride};
    }
};

constexpr float untouched = -7.0f;

/// Rows [0, cut) of each sequence are listed in front of the others, in a launch of their own or in
/// one; no cut: all are listed together.
std::vector<float> observe(const std::vector<observed>& cohort, bool counts, uint32_t cut,
                           bool in_waves, uint32_t blocks, thread_order order) {
    const uint32_t sequences = static_cast<uint32_t>(cohort.size());
    const uint64_t length = heads * cohort[0].stride, marks_stride = cohort[0].stride / 256 + 1;
    std::vector<float> all(sequences * length, untouched);
    for (const observed& each : cohort) {
        all.insert(all.end(), each.before.begin(), each.before.end());
    }
    device_array<float> sums(all);
    device_array<uint32_t> marks(std::vector<uint32_t>(2 * sequences * heads * marks_stride));
    const uint32_t parts = cut == 0 ? 1 : 2;
    for (uint32_t wave = 0; wave < (in_waves ? parts : 1u); ++wave) {
        std::vector<uint16_t> weights;
        std::vector<float> largest;
        std::vector<kernels::attend_sequence> listed;
        std::vector<kernels::observe_item> items = {{}};  // of a wave before
        std::vector<kernels::observe_wave> waves = {{0, 1, 1, 0}, {1, sequences, 0, 7}};
        for (uint32_t i = 0; i < sequences; ++i) {
            const observed& each = cohort[i];
            const sequence_case& test = each.test;
            kernels::observe_item item = {};
            item.array = i;
            item.before = test.slots_before == 0 ? kernels::no_array : sequences + i;
            item.slots = test.slots;
            item.slots_before = test.slots_before;
            item.rows_of_decay =
                test.before_decays ? test.rows - std::min(test.rows, test.first_row) : 0;
            item.first_sequence = static_cast<uint32_t>(listed.size());
            item.first_stretch = waves[1].stretches;
            item.counts = counts ? 1 : 0;
            item.log2_decay = std::log2(test.decay);
            waves[1].stretches += kernels::observe_stretches(test.slots);
            const uint32_t middle = cut == 0 ? test.rows : std::min(cut, test.rows);
            for (uint32_t part = in_waves ? wave : 0; part < (in_waves ? wave + 1 : parts);
                 ++part) {
                const uint32_t begin = part == 0 ? 0 : middle;
                const uint32_t end = part == 0 ? middle : test.rows;
                const uint32_t first = std::clamp(test.first_row, begin, end);
                kernels::attend_sequence sequence = {};
                sequence.rows = end - begin;
                sequence.slots = test.slots - (test.rows - end);
                sequence.kept = static_cast<uint32_t>(largest.size() / query_heads);
                sequence.kept_rows = end - first;
                each.keep(first, end, false, weights, largest);
                largest.insert(largest.end(), each.log_sums.begin() + first * query_heads,
                               each.log_sums.begin() + end * query_heads);
                weights.resize(largest.size() * 16, 0x7e00);
                listed.push_back(sequence);
                ++item.sequences;
            }
            items.push_back(item);
        }
        const device_array<uint16_t> on_weights(weights);
        const device_array<float> on_largest(largest);
        const device_array<kernels::attend_sequence> on_listed(listed);
        const device_array<kernels::observe_item> on_items(items);
        const device_array<kernels::observe_wave> on_waves(waves);
        kernels::observe_parameters call;
        call.kept = {const_cast<uint16_t*>(on_weights.data()),
                     const_cast<float*>(on_largest.data())};
        call.sums = sums.data();
        call.sums_stride = cohort[0].stride;
        call.array_stride = length;
        call.marks = marks.data();
        call.marks_stride = marks_stride;
        call.marks_array_stride = heads * marks_stride;
        call.sequences = on_listed.data();
        call.items = on_items.data();
        call.wave = on_waves.data() + 1;
        call.kv_heads = heads;
        call.group = group;
        call.blocks = blocks != 0 ? blocks : kernels::observe_blocks(waves[1].stretches, heads);
        const launch_report report =
            launch({.blocks = call.blocks, .threads = kernels::observe_threads, .order = order},
                   [&] { kernels::observe_rows<context>(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
    }
    return sums.copy();
}

}  // namespace

TEST_CASE("observing kernel: the definition, the CPU's sums, one launch or two, any blocks") {
    std::vector<sequence_case> cases = {
        {300, 1, 0, 299, 0.97f},      // one token
        {70, 9, 2, 40, 0.9f},         // not all rows count
        {515, 5, 0, 0, 1.0f},         // nothing before
        {33, 4, 1, 20, 0.5f, false},  //
        {21, 21, 0, 0, 0.8f},         // the first row sees one slot
        {40, 3, 7, 30, 0.8f},         // no row counts
    };
    if (few_cases) cases = {cases[1]};
    std::mt19937 random(1);
    std::vector<observed> cohort;
    for (const sequence_case& each : cases) cohort.emplace_back(each, 576, random);
    const thread_order ascending = thread_order::ascending, descending = thread_order::descending;
    for (const bool counts : {false, true}) {
        const std::vector<float> sums = observe(cohort, counts, 0, false, 0, ascending);
        CHECK(sums == observe(cohort, counts, 3, true, 0, thread_order::shuffled));
        if (!few_cases) CHECK(sums == observe(cohort, counts, 1, false, 3, descending));
        for (uint32_t i = 0; i < cohort.size(); ++i) {
            CAPTURE(i);
            const observed& each = cohort[i];
            std::vector<double> margin;
            const std::vector<double> expected = each.expected(counts, margin);
            const std::vector<float> of_cpu = each.of_cpu(counts);
            double worst = 0, worst_to_cpu = 0;
            for (uint32_t head = 0; head < heads; ++head) {
                for (uint32_t slot = 0; slot < each.stride; ++slot) {
                    const uint64_t at = head * each.stride + slot;
                    const double got = double{sums[i * heads * each.stride + at]};
                    if (slot >= each.test.slots) {
                        REQUIRE(got == double{untouched});
                        continue;
                    }
                    const double size = std::max(1.0, expected[at]);
                    const double off = std::max(0.0, std::abs(got - expected[at]) - margin[at]);
                    worst = std::max(worst, off / size);
                    const double between =
                        std::max(0.0, std::abs(got - double{of_cpu[at]}) - margin[at]);
                    worst_to_cpu = std::max(worst_to_cpu, between / size);
                }
            }
            CHECK(worst < 6e-4);  // weights are kept in f16
            CHECK(worst_to_cpu < 2e-5);
        }
    }
}
