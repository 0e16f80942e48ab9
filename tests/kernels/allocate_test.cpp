// What lanes would keep where scores say so: the numbers of the CPU's library, and of a sort.
#include "kernels/allocate.hpp"

#include <algorithm>
#include <tuple>

#include "retention/allocate.hpp"
#include "score_rows.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

constexpr uint32_t untouched = 0xffffffffu;

struct head {
    std::vector<float> scores;
    kvrt::guarded_slots guarded;
    uint32_t budget = 0, floor = 0;

    uint32_t places() const { return budget - std::min(budget, guarded.protected_slots); }
    uint32_t safe() const {
        const uint32_t above = floor - std::min(floor, guarded.protected_slots);
        return std::min({above, places(), guarded.candidates.slots()});
    }
};

/// Heads that compete, and counts of each by the library; or one lane's, and the lane's count.
struct counting {
    std::vector<float> scores;
    std::vector<kernels::guarded_slots> guarded;
    std::vector<kernels::counted_set> sets;
    std::vector<kernels::counted_group> groups;
    std::vector<uint32_t> expected;

    void add_heads(const std::vector<head>& heads) {
        for (const head& each : heads) {
            const uint32_t slots = static_cast<uint32_t>(each.scores.size());
            sets.push_back({scores.size(), guarded.size(), 4 * sets.size(), nullptr, slots,
                            each.budget, each.floor, 0});
            scores.insert(scores.end(), each.scores.begin(), each.scores.end());
            guarded.push_back(to_kernels(each.guarded));
        }
    }

    void add_competition(const std::vector<head>& heads, uint32_t extra) {
        groups.push_back(
            {sets.size(), static_cast<uint32_t>(heads.size()), extra, nullptr, 0, 0.0f});
        add_heads(heads);
        std::vector<kvrt::head_share> shares;
        uint64_t total = extra;
        for (const head& each : heads) {
            kvrt::head_share share;
            share.scores = each.scores.data();
            share.candidates = each.guarded.candidates;
            share.safe = each.safe();
            shares.push_back(share);
            total += each.places();
        }
        kvrt::allocate_heads(shares.data(), static_cast<uint32_t>(shares.size()), total);
        for (size_t i = 0; i < heads.size(); ++i) {
            expected.push_back(heads[i].guarded.protected_slots + shares[i].kept);
        }
        REQUIRE(std::equal(expected.end() - static_cast<std::ptrdiff_t>(heads.size()),
                           expected.end(), by_sorting(heads, total).begin()));
    }

    /// The best of each head are safe, then the best of all; slots are sorted.
    static std::vector<uint32_t> by_sorting(const std::vector<head>& heads, uint64_t total) {
        using candidate = std::tuple<bool, float, uint32_t, uint32_t>;  // NaN, score, head, slot
        const auto before = [](const candidate& a, const candidate& b) {
            if (std::get<0>(a) != std::get<0>(b)) return std::get<0>(b);
            if (!std::get<0>(a) && std::get<1>(a) != std::get<1>(b)) {
                return std::get<1>(a) > std::get<1>(b);
            }
            return std::tie(std::get<2>(a), std::get<3>(a)) <
                   std::tie(std::get<2>(b), std::get<3>(b));
        };
        std::vector<candidate> open;
        std::vector<uint32_t> kept;
        for (uint32_t h = 0; h < heads.size(); ++h) {
            std::vector<candidate> of_head;
            for (const kvrt::slot_range& range : heads[h].guarded.candidates) {
                for (uint32_t slot = range.first; slot < range.end; ++slot) {
                    const float score = heads[h].scores[slot];
                    of_head.emplace_back(std::isnan(score), score, h, slot);
                }
            }
            std::sort(of_head.begin(), of_head.end(), before);
            const uint32_t safe = heads[h].safe();
            open.insert(open.end(), of_head.begin() + safe, of_head.end());
            kept.push_back(heads[h].guarded.protected_slots + safe);
            total -= safe;
        }
        std::sort(open.begin(), open.end(), before);
        open.resize(std::min<uint64_t>(total, open.size()));
        for (const candidate& each : open) ++kept[std::get<2>(each)];
        return kept;
    }

    void add_lane(const std::vector<head>& heads, float threshold, uint32_t most) {
        groups.push_back(
            {sets.size(), static_cast<uint32_t>(heads.size()), 0, nullptr, most, threshold});
        add_heads(heads);
        uint32_t wanted = 0;
        for (const head& each : heads) {
            uint32_t reaching = each.guarded.protected_slots;
            for (const kvrt::slot_range& range : each.guarded.candidates) {
                for (uint32_t slot = range.first; slot < range.end; ++slot) {
                    reaching += each.scores[slot] >= threshold ? 1 : 0;
                }
            }
            wanted = std::max(wanted, reaching);
        }
        expected.push_back(std::min(wanted, most));
    }

    enum class kernel { shares, counts };

    template <class Cx>
    launch_report run(kernel which, thread_order order, std::vector<uint32_t>& out) const {
        const device_array<float> on_scores(scores);
        const device_array<kernels::guarded_slots> on_guarded(guarded);
        device_array<uint32_t> on_counts(std::vector<uint32_t>(expected.size() + 1, untouched));
        device_array<kernels::safe_notes> on_notes(sets.size());
        std::vector<kernels::counted_set> all = sets;
        std::vector<kernels::counted_group> lanes = groups;
        for (size_t i = 0; i < all.size(); ++i) {
            all[i].count = which == kernel::shares ? on_counts.data() + i : nullptr;
        }
        for (size_t i = 0; i < lanes.size(); ++i) {
            lanes[i].count = which == kernel::counts ? on_counts.data() + i : nullptr;
        }
        const device_array<kernels::counted_set> on_sets(all);
        const device_array<kernels::counted_group> on_groups(lanes);
        kernels::counting_parameters call;
        call.scores = on_scores.data();
        call.notes = reinterpret_cast<uint32_t*>(on_notes.data());
        call.guarded = on_guarded.data();
        call.sets = on_sets.data();
        call.groups = on_groups.data();
        call.count = static_cast<uint32_t>(groups.size());
        const launch_report report = launch({.blocks = call.count,
                                             .threads = kernels::select_threads,
                                             .shared_bytes = kernels::select_shared_bytes,
                                             .order = order},
                                            [&] {
                                                if (which == kernel::shares) {
                                                    kernels::share_budgets<Cx>(call);
                                                } else {
                                                    kernels::count_reaching<Cx>(call);
                                                }
                                            });
        out = on_counts.copy();
        REQUIRE(out.back() == untouched);
        out.pop_back();
        return report;
    }

    void check(kernel which, thread_order order) const {
        std::vector<uint32_t> counts;
        const launch_report report = run<context>(which, order, counts);
        REQUIRE_MESSAGE(report.clean(), report.text());
        for (size_t i = 0; i < expected.size(); ++i) {
            CAPTURE(i);
            CHECK(counts[i] == expected[i]);
        }
    }
};

head some_head(scores_like kind, uint32_t slots, uint32_t guards, std::mt19937& random) {
    head made;
    made.scores = draw_row(kind, slots, random);
    made.guarded = some_candidates(slots)[guards];
    made.budget = static_cast<uint32_t>(random() % (slots + slots / 2 + 2));
    made.floor = made.budget / 5;
    return made;
}

std::vector<head> some_heads(scores_like kind, uint32_t count, uint32_t slots,
                             std::mt19937& random) {
    std::vector<head> heads;
    for (uint32_t h = 0; h < count; ++h) {
        heads.push_back(
            some_head(kind, slots + 7 * h, static_cast<uint32_t>(random() % 5), random));
    }
    return heads;
}

void check_barriers_of(const barrier_test& test, counting::kernel which, const counting& one) {
    check_barriers(test, [&](thread_order order) {
        std::vector<uint32_t> counts;
        return one.run<without_barrier>(which, order, counts).clean() && counts == one.expected;
    });
}

}  // namespace

TEST_CASE("allocating kernel: heads that compete keep what they do on the CPU, and by a sort") {
    std::mt19937 random(5);
    for (const thread_order order : orders()) {
        counting all;
        for (uint32_t kind = 0; kind < static_cast<uint32_t>(scores_like::count); ++kind) {
            const auto like = static_cast<scores_like>(kind);
            if (few_cases && like != scores_like::ties) continue;
            all.add_competition(some_heads(like, 3, 40, random), 0);
            if (few_cases) continue;
            for (const uint32_t heads : {1u, 2u, 5u}) {
                for (uint32_t again = 0; again < 4; ++again) {
                    const uint32_t slots = again == 0 ? 1200 : 1 + random() % 90;
                    all.add_competition(some_heads(like, heads, slots, random),
                                        again == 3 ? 11 : 0);
                }
            }
        }
        all.check(counting::kernel::shares, order);
    }
}

TEST_CASE("allocating kernel: the best head takes what the others' floors leave") {
    // Three heads of 40 candidates with budgets of 10: one is better in all it has.
    std::vector<head> heads(3);
    for (uint32_t h = 0; h < 3; ++h) {
        heads[h].scores.assign(40, h == 1 ? 2.0f : 1.0f);
        heads[h].guarded = guarded_of(40, {{0, 40}});
        heads[h].budget = 10;
        heads[h].floor = 2;
    }
    counting one;
    one.add_competition(heads, 0);
    CHECK(one.expected == std::vector<uint32_t>{2, 26, 2});
    one.check(counting::kernel::shares, thread_order::shuffled);
}

TEST_CASE("counting kernel: of a lane's heads the one that reaches most counts") {
    std::mt19937 random(6);
    for (const thread_order order : orders()) {
        counting all;
        for (uint32_t kind = 0; kind < static_cast<uint32_t>(scores_like::count); ++kind) {
            const auto like = static_cast<scores_like>(kind);
            for (const float threshold : {-infinity, -1.0f, -0.0f, 0.0f, 0.25f, 1.5f, infinity}) {
                const uint32_t slots = few_cases ? 33 : 1 + random() % 700;
                all.add_lane(some_heads(like, 1 + random() % 3, slots, random), threshold,
                             random() % (slots + 50));
                if (few_cases) break;
            }
            if (few_cases) break;
        }
        all.check(counting::kernel::counts, order);
    }
}

namespace {

std::vector<head> two_heads() {
    std::mt19937 random(7);
    std::vector<head> heads = some_heads(scores_like::normal, 2, few_cases ? 300 : 1500, random);
    for (head& each : heads) {
        each.guarded = some_candidates(static_cast<uint32_t>(each.scores.size()))[2];
        each.budget = each.guarded.protected_slots + 60;
        each.floor = each.guarded.protected_slots + 20;
    }
    return heads;
}

}  // namespace

TEST_CASE("allocating kernel: each of its barriers is needed") {
    counting one;
    one.add_competition(two_heads(), 0);
    // Of each head one for the candidates, four for each of four digits, two to count equals; then
    // for each digit of all two for each head, and two; of each head three again.
    check_barriers_of({"allocating kernel: each of its barriers is needed",
                       kernels::select_threads,
                       {17, 18, 36, 38, 39, 40, 41, 42, 43, 64, 65},
                       {}},
                      counting::kernel::shares, one);
}

TEST_CASE("counting kernel: each of its barriers is needed") {
    counting one;
    one.add_lane(two_heads(), 0.5f, 5000);
    check_barriers_of({"counting kernel: each of its barriers is needed",
                       kernels::select_threads,
                       {1, 2, 3, 4, 5},
                       {}},
                      counting::kernel::counts, one);
}
