// Survivors and reserves are those of the CPU's library, and of a stable sort.
#include "kernels/select.hpp"

#include "retention/rank.hpp"
#include "score_rows.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

/// Sets of rows, and what selection makes of them.
struct selection {
    std::vector<float> scores;
    std::vector<kernels::guarded_slots> guarded;
    std::vector<kernels::select_set> sets;
    std::vector<std::vector<uint32_t>> expected;  // by the library
    std::vector<std::vector<uint32_t>> sorted;    // by a sort
    uint64_t survivors = 0;

    void add(const std::vector<float>& row, const kvrt::guarded_slots& candidates, uint32_t keep) {
        const uint32_t slots = static_cast<uint32_t>(row.size());
        sets.push_back({scores.size(), survivors, guarded.size(), slots, keep});
        scores.insert(scores.end(), row.begin(), row.end());
        guarded.push_back(to_kernels(candidates));
        survivors += keep + 1;  // an entry behind, which nobody writes
        std::vector<uint32_t> of_cpu(keep + 1, 0xffffffffu);
        REQUIRE(kvrt::select_top(row.data(), candidates.candidates, slots, keep, of_cpu.data()) ==
                keep);
        expected.push_back(of_cpu);

        std::vector<uint32_t> stay, order;
        for (uint32_t slot = 0, range = 0; slot < slots; ++slot) {
            const kvrt::slot_ranges& ranges = candidates.candidates;
            while (range < ranges.count && slot >= ranges.range[range].end) ++range;
            const bool may_go = range < ranges.count && slot >= ranges.range[range].first;
            (may_go ? order : stay).push_back(slot);
        }
        std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
            return !std::isnan(row[a]) && (std::isnan(row[b]) || row[a] > row[b]);
        });
        stay.insert(stay.end(), order.begin(), order.begin() + (keep - stay.size()));
        std::sort(stay.begin(), stay.end());
        stay.push_back(0xffffffffu);
        sorted.push_back(stay);
    }

    void add_all_kinds(uint32_t slots, std::mt19937& random) {
        for (uint32_t kind = 0; kind < static_cast<uint32_t>(scores_like::count); ++kind) {
            for (const kvrt::guarded_slots& each : some_candidates(slots)) {
                const uint32_t held = each.protected_slots, free = slots - held;
                for (const uint32_t more : {0u, 1u, free / 3, free - 1, free}) {
                    if (more > free) continue;
                    add(draw_row(static_cast<scores_like>(kind), slots, random), each, held + more);
                }
            }
        }
    }

    template <class Cx>
    launch_report run(thread_order order, std::vector<uint32_t>& out) const {
        const device_array<float> on_scores(scores);
        const device_array<kernels::guarded_slots> on_guarded(guarded);
        const device_array<kernels::select_set> on_sets(sets);
        device_array<uint32_t> on_survivors(survivors);
        kernels::select_parameters call;
        call.scores = on_scores.data();
        call.survivors = on_survivors.data();
        call.guarded = on_guarded.data();
        call.sets = on_sets.data();
        call.count = static_cast<uint32_t>(sets.size());
        const launch_report report = launch({.blocks = call.count,
                                             .threads = kernels::select_threads,
                                             .shared_bytes = kernels::select_shared_bytes,
                                             .order = order},
                                            [&] { kernels::select_survivors<Cx>(call); });
        out = on_survivors.copy();
        return report;
    }

    /// Of set i.
    std::vector<uint32_t> survivors_of(const std::vector<uint32_t>& all, size_t i) const {
        const auto first = all.begin() + static_cast<std::ptrdiff_t>(sets[i].survivors);
        return {first, first + sets[i].keep + 1};
    }
    bool is_right(const std::vector<uint32_t>& all) const {
        for (size_t i = 0; i < sets.size(); ++i) {
            if (survivors_of(all, i) != expected[i]) return false;
        }
        return true;
    }
};

}  // namespace

TEST_CASE("selecting kernel: the survivors are the CPU's, and those of a sort") {
    std::mt19937 random(1);
    const std::pair<uint32_t, uint32_t> lengths[] = {{1, 2500}, {2, 300}, {40, 1024}};
    for (const thread_order order : orders()) {
        selection all;
        if (few_cases) {
            all.add(draw_row(scores_like::ties, 1100, random), some_candidates(1100)[2], 700);
        } else {
            const auto& [few, many] = lengths[static_cast<uint32_t>(order)];
            all.add_all_kinds(few, random);
            all.add_all_kinds(many, random);
        }
        std::vector<uint32_t> survivors;
        const launch_report report = all.run<context>(order, survivors);
        REQUIRE_MESSAGE(report.clean(), report.text());
        for (size_t i = 0; i < all.sets.size(); ++i) {
            CAPTURE(i);
            REQUIRE(all.survivors_of(survivors, i) == all.expected[i]);
            REQUIRE(all.survivors_of(survivors, i) == all.sorted[i]);
        }
    }
}

namespace {

std::vector<float> normal_row() {
    std::mt19937 random(2);
    return draw_row(scores_like::normal, few_cases ? 300 : 2500, random);
}

void check_barriers_of(const barrier_test& test, const selection& one) {
    check_barriers(test, [&](thread_order order) {
        std::vector<uint32_t> survivors;
        return one.run<without_barrier>(order, survivors).clean() && one.is_right(survivors);
    });
}

}  // namespace

TEST_CASE("selecting kernel: each of its barriers is needed") {
    const std::vector<float> row = normal_row();
    const uint32_t slots = static_cast<uint32_t>(row.size());
    selection one;
    one.add(row, some_candidates(slots)[2], slots / 2);
    // One for the candidates, four for each of four digits, one for each tile.
    check_barriers_of({"selecting kernel: each of its barriers is needed",
                       kernels::select_threads,
                       {1, 2, 3, 4, 5, 17},
                       {2, 3, 17, 18}},
                      one);
}

TEST_CASE("selecting kernel: its first barrier is needed") {
    const std::vector<float> row = normal_row();
    const kvrt::guarded_slots candidates = some_candidates(static_cast<uint32_t>(row.size()))[2];
    selection one;
    one.add(row, candidates, candidates.protected_slots);
    check_barriers_of(
        {"selecting kernel: its first barrier is needed", kernels::select_threads, {0, 1}, {0, 1}},
        one);
}

TEST_CASE("selecting kernel: more slots held than kept writes no more than that") {
    selection one;
    one.add(std::vector<float>(50, 1.0f), guarded_of(50, {{20, 30}}), 40);
    one.sets[0].keep = 35;
    std::vector<uint32_t> survivors;
    const launch_report report = one.run<context>(thread_order::shuffled, survivors);
    REQUIRE_MESSAGE(report.clean(), report.text());
    CHECK(survivors[34] == 44);
    CHECK(survivors[35] == 0xffffffffu);
}

TEST_CASE("reserving kernel: the largest measures get +infinity, as on the CPU") {
    std::mt19937 random(3);
    std::vector<float> measures, scores, expected;
    std::vector<kernels::guarded_slots> guarded;
    std::vector<kernels::reserve_set> sets;
    for (const uint32_t slots : few_cases ? std::vector{70u} : std::vector{5u, 1500u}) {
        for (uint32_t kind = 0; kind < static_cast<uint32_t>(scores_like::count); ++kind) {
            for (const kvrt::guarded_slots& each : some_candidates(slots)) {
                const uint32_t keep = random() % (slots + 3);
                sets.push_back(
                    {measures.size(), scores.size(), guarded.size(), slots, slots, keep});
                guarded.push_back(to_kernels(each));
                const std::vector<float> measure =
                    draw_row(static_cast<scores_like>(kind), slots, random);
                std::vector<float> row(slots, 2.0f);
                measures.insert(measures.end(), measure.begin(), measure.end());
                scores.insert(scores.end(), row.begin(), row.end());
                kvrt::reserve_largest(measure.data(), each.candidates, keep, row.data());
                expected.insert(expected.end(), row.begin(), row.end());
                if (few_cases) break;
            }
            if (few_cases) break;
        }
    }
    const device_array<kernels::guarded_slots> on_guarded(guarded);
    const device_array<kernels::reserve_set> on_sets(sets);
    for (const thread_order order : orders()) {
        const device_array<float> on_measures(measures);
        device_array<float> on_scores(scores);
        kernels::reserve_parameters call;
        call.measures = on_measures.data();
        call.scores = on_scores.data();
        call.guarded = on_guarded.data();
        call.sets = on_sets.data();
        call.count = static_cast<uint32_t>(sets.size());
        const launch_report report = launch({.blocks = call.count,
                                             .threads = kernels::select_threads,
                                             .shared_bytes = kernels::select_shared_bytes,
                                             .order = order},
                                            [&] { kernels::reserve_slots<context>(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        CHECK(same_bits(on_scores.copy(), expected));
    }
}

TEST_CASE("reserving kernel: scores may be their own measure") {
    std::mt19937 random(4);
    std::vector<float> row = draw_row(scores_like::ties, few_cases ? 300 : 3000, random);
    const uint32_t slots = static_cast<uint32_t>(row.size());
    const kvrt::guarded_slots candidates = some_candidates(slots)[2];
    device_array<float> scores(row);
    const device_array<kernels::guarded_slots> guarded({to_kernels(candidates)});
    const device_array<kernels::reserve_set> sets({{0, 0, 0, slots, slots, slots / 2}});
    kernels::reserve_parameters call;
    call.measures = scores.data();
    call.scores = scores.data();
    call.guarded = guarded.data();
    call.sets = sets.data();
    call.count = 1;
    const launch_report report = launch({.threads = kernels::select_threads,
                                         .shared_bytes = kernels::select_shared_bytes,
                                         .order = thread_order::descending},
                                        [&] { kernels::reserve_slots<context>(call); });
    REQUIRE_MESSAGE(report.clean(), report.text());
    kvrt::reserve_largest(row.data(), candidates.candidates, slots / 2, row.data());
    CHECK(same_bits(scores.copy(), row));
}
