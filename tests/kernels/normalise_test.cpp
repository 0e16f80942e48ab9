// z-scores and joined rows: the bits are those of the CPU's library.
#include "kernels/normalise.hpp"

#include "retention/scores.hpp"
#include "score_rows.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

/// Rows of several KV heads, normalised.
struct normalisation {
    uint32_t group;
    uint64_t stride;
    std::vector<float> scores, expected;
    std::vector<kernels::guarded_slots> guarded;
    std::vector<kernels::normalise_head> heads;

    normalisation(uint32_t rows, uint32_t slots, std::mt19937& random)
        : group(rows), stride(slots + 1) {
        for (uint32_t kind = 0; kind < static_cast<uint32_t>(scores_like::count); ++kind) {
            for (const kvrt::guarded_slots& each : some_candidates(slots)) {
                add(draw_row(static_cast<scores_like>(kind), group * stride, random), each);
                if (few_cases) break;
            }
        }
    }
    void add(std::vector<float> rows, const kvrt::guarded_slots& candidates) {
        const bool in_place = heads.size() % 2 == 0;
        const uint64_t first = scores.size();
        // Elsewhere: a row of its own behind those of the head.
        heads.push_back({first, in_place ? first : first + group * stride, guarded.size()});
        guarded.push_back(to_kernels(candidates));
        rows.resize((group + 1) * stride, -5.0f);
        scores.insert(scores.end(), rows.begin(), rows.end());
        kvrt::normalise_and_reduce(rows.data(), stride, group, candidates.candidates,
                                   rows.data() + (in_place ? 0 : group * stride));
        expected.insert(expected.end(), rows.begin(), rows.end());
    }
    template <class Cx>
    launch_report run(thread_order order, std::vector<float>& out) const {
        device_array<float> on_scores(scores);
        const device_array<kernels::guarded_slots> on_guarded(guarded);
        const device_array<kernels::normalise_head> on_heads(heads);
        kernels::normalise_parameters call;
        call.scores = on_scores.data();
        call.guarded = on_guarded.data();
        call.heads = on_heads.data();
        call.stride = stride;
        call.group = group;
        call.count = static_cast<uint32_t>(heads.size());
        const launch_report report = launch({.blocks = call.count,
                                             .threads = kernels::normalise_threads,
                                             .shared_bytes = kernels::normalise_shared_bytes(group),
                                             .order = order},
                                            [&] { kernels::normalise_and_reduce<Cx>(call); });
        out = on_scores.copy();
        return report;
    }
};

}  // namespace

TEST_CASE("normalising kernel: the bits are the CPU's, and z-scores by definition") {
    std::mt19937 random(5);
    const std::pair<uint32_t, uint32_t> shapes[] = {{4, 300}, {1, 40}, {12, 150}};
    for (const auto& [group, slots] : shapes) {
        CAPTURE(group);
        const normalisation all(group, few_cases ? 40 : slots, random);
        for (const thread_order order : orders()) {
            std::vector<float> out;
            const launch_report report = all.run<context>(order, out);
            REQUIRE_MESSAGE(report.clean(), report.text());
            CHECK(same_bits(out, all.expected));
        }
        if (few_cases) break;
    }
    // By hand: mean 2, population deviation sqrt(2); the second row is its mirror image.
    normalisation hand(2, 4, random);
    hand.heads.clear();
    hand.guarded.clear();
    hand.scores.clear();
    hand.expected.clear();
    hand.add({9, 0, 2, 4, 2, 9, 4, 2, 0, 2}, guarded_of(5, {{1, 5}}));
    std::vector<float> out;
    const launch_report report = hand.run<context>(thread_order::ascending, out);
    REQUIRE_MESSAGE(report.clean(), report.text());
    const float greatest[] = {9, 1.41421356f, 0, 1.41421356f, 0};
    for (int i = 0; i < 5; ++i) CHECK(out[i] == doctest::Approx(greatest[i]));
}

TEST_CASE("normalising kernel: its barrier is needed") {
    std::mt19937 random(6);
    normalisation one(12, few_cases ? 30 : 150, random);
    if (few_cases) one.heads.resize(1);
    check_barriers(
        {"normalising kernel: its barrier is needed", kernels::normalise_threads, {0}, {0}},
        [&](thread_order order) {
            std::vector<float> out;
            return one.run<without_barrier>(order, out).clean() && same_bits(out, one.expected);
        });
}

TEST_CASE("joining kernel: sums and maxima of rows as on the CPU") {
    std::mt19937 random(7);
    const uint32_t stride = few_cases ? 130 : 1300, rows = 6;
    std::vector<float> scores;
    for (uint32_t row = 0; row < rows; ++row) {
        const auto kind = row % 3 == 2 ? scores_like::odd : scores_like::normal;
        const std::vector<float> drawn = draw_row(kind, stride, random);
        scores.insert(scores.end(), drawn.begin(), drawn.end());
    }
    scores.resize((rows + 1) * stride, -5.0f);  // and a row for totals
    const auto row_at = [&](std::vector<float>& of, uint32_t row) {
        return of.data() + row * stride;
    };
    const std::vector<kvrt::guarded_slots> candidates = some_candidates(stride);
    for (const bool greatest : {false, true}) {
        std::vector<float> expected = scores;
        // The first set goes to a row of its own, the second to one of its members.
        const std::vector<std::vector<uint32_t>> members = {{0, 2, 4}, {5, 1, 3}};
        const uint32_t outs[] = {rows, 1};
        std::vector<kernels::score_join> joins;
        std::vector<uint64_t> places;
        std::vector<kernels::guarded_slots> guarded;
        for (uint32_t set = 0; set < 2; ++set) {
            const kvrt::slot_ranges& here = candidates[set + 1].candidates;
            std::vector<float> total(stride);
            kvrt::fill_scores(here, greatest ? -infinity : 0.0f, total.data());
            joins.push_back({uint64_t{outs[set]} * stride, places.size(), set, 3, 0});
            guarded.push_back(to_kernels(candidates[set + 1]));
            for (const uint32_t member : members[set]) {
                places.push_back(uint64_t{member} * stride);
                const float* const part = row_at(scores, member);
                greatest ? kvrt::raise_scores(here, part, total.data())
                         : kvrt::add_scores(here, part, total.data());
            }
            for (const kvrt::slot_range& range : here) {
                std::copy(total.begin() + range.first, total.begin() + range.end,
                          row_at(expected, outs[set]) + range.first);
            }
        }
        for (const thread_order order : orders()) {
            device_array<float> on_scores(scores);
            const device_array<kernels::guarded_slots> on_guarded(guarded);
            const device_array<kernels::score_join> on_joins(joins);
            const device_array<uint64_t> on_members(places);
            kernels::join_parameters call;
            call.scores = on_scores.data();
            call.guarded = on_guarded.data();
            call.joins = on_joins.data();
            call.members = on_members.data();
            call.count = 2;
            call.most_slots = stride;
            call.greatest = greatest;
            const launch_report report = launch({.blocks = kernels::join_blocks(2, stride),
                                                 .threads = kernels::normalise_threads,
                                                 .order = order},
                                                [&] { kernels::join_rows<context>(call); });
            REQUIRE_MESSAGE(report.clean(), report.text());
            const std::vector<float> got = on_scores.copy();
            for (size_t i = 0; i < got.size(); ++i) {
                REQUIRE((got[i] == expected[i] || (std::isnan(got[i]) && std::isnan(expected[i]))));
            }
        }
    }
}
