// Scores that are weighed from several rows, BLEND's and R-KV's, against their definitions in
// double; and survivors that are drawn, against the CPU's library.
#include "kernels/blend.hpp"

#include "kernels/sample.hpp"
#include "retention/sampling.hpp"
#include "score_rows.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

constexpr float untouched = -5.0f;

/// Rows of several heads, each with candidates of another kind.
struct blended_heads {
    uint32_t slots;
    uint64_t stride;
    std::vector<kvrt::guarded_slots> candidates;
    std::vector<kernels::guarded_slots> guarded;
    std::vector<kernels::normalise_head> heads;
    std::vector<float> scores, parts;  // [heads][2][stride]: unlike, observed

    blended_heads(uint32_t slots_of_row, std::mt19937& random)
        : slots(slots_of_row), stride(slots + 3) {
        for (const kvrt::guarded_slots& each : some_candidates(slots)) {
            const uint64_t head = heads.size();
            candidates.push_back(each);
            guarded.push_back(to_kernels(each));
            heads.push_back({head * stride, head * stride, head});
        }
        scores.assign(heads.size() * stride, untouched);
        parts.assign(2 * scores.size(), untouched);
        for (uint32_t head = 0; head < heads.size(); ++head) {
            for (uint32_t slot = 0; slot < slots; ++slot) {
                scores[head * stride + slot] = 3.0f * draw(scores_like::normal, random) + 1.0f;
                unlike(head)[slot] = draw(scores_like::normal, random);
                // Over powers of ten, and nothing for the last head but one.
                observed(head)[slot] =
                    head == 2 ? 0.0f : std::exp(4.0f * draw(scores_like::normal, random));
            }
        }
    }
    float* unlike(uint32_t head) { return &parts[2 * head * stride]; }
    float* observed(uint32_t head) { return &parts[(2 * head + 1) * stride]; }

    template <class callable>
    std::vector<float> run(thread_order order, const callable& kernel) const {
        device_array<float> on_scores(scores), on_parts(parts);
        const device_array<kernels::guarded_slots> on_guarded(guarded);
        const device_array<kernels::normalise_head> on_heads(heads);
        kernels::blend_parameters call;
        call.scores = on_scores.data();
        call.observed = on_parts.data() + stride;
        call.unlike = on_parts.data();
        call.guarded = on_guarded.data();
        call.heads = on_heads.data();
        call.parts_stride = 2 * stride;
        call.count = static_cast<uint32_t>(heads.size());
        call.prior_share = 0.1f;
        call.redundancy = 0.3f;
        const launch_report report = launch({.blocks = call.count,
                                             .threads = kernels::normalise_threads,
                                             .shared_bytes = kernels::blend_shared_bytes,
                                             .order = order},
                                            [&] { kernel(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        return on_scores.copy();
    }
    /// `defined(head, values)`: the scores of the candidates, from those of rows of doubles.
    template <class callable>
    void compare(const std::vector<float>& out, double bound, const callable& defined) {
        for (uint32_t head = 0; head < heads.size(); ++head) {
            CAPTURE(head);
            std::vector<uint32_t> at;
            std::vector<double> row, seen, other;
            std::vector<float> expected(scores.begin() + static_cast<int64_t>(head * stride),
                                        scores.begin() + static_cast<int64_t>((head + 1) * stride));
            for (const kvrt::slot_range& range : candidates[head].candidates) {
                for (uint32_t slot = range.first; slot < range.end; ++slot) {
                    at.push_back(slot);
                    row.push_back(double{expected[slot]});
                    seen.push_back(double{observed(head)[slot]});
                    other.push_back(double{unlike(head)[slot]});
                }
            }
            const std::vector<double> made = defined(row, seen, other);
            double worst = 0.0;
            for (std::size_t i = 0; i < at.size(); ++i) {
                const double got = double{out[head * stride + at[i]]};
                worst = std::max(worst, std::abs(got - made[i]));
                if (std::isnan(got)) worst = INFINITY;
                expected[at[i]] = out[head * stride + at[i]];
            }
            CHECK(worst < bound);
            // What is no candidate is as it was.
            CHECK(std::memcmp(expected.data(), &out[head * stride], stride * sizeof(float)) == 0);
        }
    }
};

double sum_of(const std::vector<double>& row) {
    double sum = 0.0;
    for (const double each : row) sum += each;
    return sum;
}

std::vector<double> z_scores(std::vector<double> row) {
    const double count = static_cast<double>(row.size()), mean = sum_of(row) / count;
    double square = 0.0;
    for (const double each : row) square += (each - mean) * (each - mean);
    const double deviation = std::max(std::sqrt(square / count), 1e-6);
    for (double& each : row) each = (each - mean) / deviation;
    return row;
}

}  // namespace

TEST_CASE("BLEND's kernel: z-scores of the prior, of logarithms, and of key differences, weighed") {
    std::mt19937 random(11);
    for (const uint32_t slots : {few_cases ? 70u : 400u, 17u}) {
        blended_heads all(slots, random);
        for (const thread_order order : orders()) {
            const std::vector<float> out = all.run(
                order, [](const auto& call) { kernels::blend_rows<kernel_test::context>(call); });
            all.compare(out, 2e-5, [](const auto& row, auto seen, const auto& other) {
                const double mean = sum_of(seen) / static_cast<double>(seen.size());
                for (double& each : seen) {
                    if (mean > 0.0) each = std::log(each / mean + std::exp2(-10));
                }
                std::vector<double> prior = z_scores(row);
                const std::vector<double> observed = z_scores(seen);
                for (std::size_t i = 0; i < prior.size(); ++i) {
                    const double asked = 0.1 * prior[i] + 0.9 * observed[i];
                    prior[i] = 0.7 * asked + 0.3 * other[i];
                }
                return prior;
            });
        }
    }
}

TEST_CASE("R-KV's kernel: shares of what was observed less softmax of redundancy, weighed") {
    std::mt19937 random(12);
    blended_heads all(few_cases ? 70 : 400, random);
    for (const thread_order order : orders()) {
        const std::vector<float> out = all.run(
            order, [](const auto& call) { kernels::mix_redundancy<kernel_test::context>(call); });
        all.compare(out, 2e-6, [](const auto& row, const auto& seen, const auto&) {
            std::vector<double> powers;
            for (const double each : row) powers.push_back(std::exp(each));
            const double total = sum_of(powers), mass = sum_of(seen);
            for (std::size_t i = 0; i < powers.size(); ++i) {
                const double share = mass > 0.0 ? seen[i] / mass : 0.0;
                powers[i] = 0.7 * share - 0.3 * powers[i] / total;
            }
            return powers;
        });
    }
}

TEST_CASE("drawing kernel: scores become what the CPU's do, by seed, round, layer and position") {
    std::mt19937 random(13);
    const uint32_t slots = few_cases ? 1100 : 2100;  // more than one stretch
    const uint64_t stride = slots + 1;
    std::vector<kernels::sample_set> sets;
    std::vector<kernels::guarded_slots> guarded;
    std::vector<float> scores, expected;
    for (const scores_like kind : {scores_like::normal, scores_like::odd}) {
        for (const kvrt::guarded_slots& each : some_candidates(slots)) {
            if (few_cases && sets.size() == 2) break;  // four blocks
            const uint32_t index = static_cast<uint32_t>(sets.size());
            kernels::sample_set set{};
            set.scores = index * stride;
            set.guarded = index;
            set.next_position = 5000 + index;
            set.seed = 99;
            set.round = index % 3;
            set.owner = uint64_t{index} << 32 | 2;
            set.slots = slots;
            sets.push_back(set);
            guarded.push_back(to_kernels(each));
            std::vector<float> row = draw_row(kind, stride, random);
            scores.insert(scores.end(), row.begin(), row.end());
            kvrt::slot_positions at;
            at.slots = slots;
            at.next_position = set.next_position;
            kvrt::random_key key;
            key.seed = set.seed;
            key.round = set.round;
            key.layer = index;
            key.head = 2;
            kvrt::sample_scores(key, at, each.candidates, row.data());
            expected.insert(expected.end(), row.begin(), row.end());
        }
    }
    const device_array<kernels::sample_set> on_sets(sets);
    const device_array<kernels::guarded_slots> on_guarded(guarded);
    for (const thread_order order : orders()) {
        device_array<float> on_scores(scores);
        kernels::sample_parameters call;
        call.scores = on_scores.data();
        call.guarded = on_guarded.data();
        call.sets = on_sets.data();
        call.count = static_cast<uint32_t>(sets.size());
        call.most_slots = slots;
        const launch_report report =
            launch({.blocks = kernels::join_blocks(call.count, slots),
                    .threads = kernels::normalise_threads,
                    .order = order},
                   [&] { kernels::sample_scores<kernel_test::context>(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        CHECK(same_bits(on_scores.copy(), expected));
    }
}
