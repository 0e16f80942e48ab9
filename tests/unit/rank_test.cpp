// The order of scores, reserves and budgets, against sorting.
#include "retention/rank.hpp"

#include <numeric>

#include "retention/allocate.hpp"
#include "scorer_fixture.hpp"

using namespace scorer_test;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

// Higher first, NaN last, the lower slot first among equals.
std::vector<uint32_t> sorted(const std::vector<float>& scores, const slot_ranges& candidates) {
    std::vector<uint32_t> slots = slots_of(candidates);
    std::stable_sort(slots.begin(), slots.end(), [&](uint32_t a, uint32_t b) {
        if (std::isnan(scores[b])) return !std::isnan(scores[a]);
        return scores[a] > scores[b];
    });
    return slots;
}

// Few distinct numbers, so that many are equal, and some that are none.
std::vector<float> crowded_scores(uint32_t count, std::mt19937& random) {
    std::vector<float> scores(count);
    for (float& score : scores) {
        const uint32_t kind = static_cast<uint32_t>(random() % 40);
        score = kind == 0   ? NAN
                : kind == 1 ? infinity
                : kind == 2 ? -infinity
                : kind == 3 ? -0.0f
                : kind < 20 ? static_cast<float>(int(random() % 9) - 4)
                            : static_cast<float>(int(random() % 20001) - 10000) * 1e-3f;
    }
    return scores;
}

std::vector<float> with_infinity(std::vector<float> scores, const std::vector<uint32_t>& slots) {
    for (uint32_t slot : slots) scores[slot] = infinity;
    return scores;
}

// NaN in the same places is equal, too.
bool same(const std::vector<float>& a, const std::vector<float>& b) {
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (a[i] != b[i] && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
    }
    return a.size() == b.size();
}

}  // namespace

TEST_CASE("the order of scores") {
    CHECK(score_order(NAN) == 0);
    CHECK(score_order(-NAN) == 0);
    CHECK(score_order(-0.0f) == score_order(0.0f));
    const float ascending[] = {-infinity, -3.5f, -1e-40f, 0.0f, 1e-40f, 2.0f, 2.5f, infinity};
    CHECK(score_order(ascending[0]) > 0);
    for (int i = 1; i < 8; ++i) CHECK(score_order(ascending[i]) > score_order(ascending[i - 1]));
    CHECK(score_order(infinity) < rank_bound().key);
}

TEST_CASE("the largest of a measure are reserved, however many and however equal") {
    std::mt19937 random(8);
    for (const slot_ranges& candidates :
         {ranges_of({{0, 3001}}), ranges_of({{5, 6}, {40, 71}, {900, 2999}}), ranges_of({{7, 40}}),
          slot_ranges()}) {
        const std::vector<float> measure = crowded_scores(3001, random);
        const std::vector<uint32_t> best = sorted(measure, candidates);
        for (uint32_t count : {0u, 1u, 2u, 31u, 100u, 1500u, 2130u, 3001u, 9999u}) {
            const std::vector<float> scores = crowded_scores(3001, random);
            const uint32_t all = static_cast<uint32_t>(best.size());
            const std::vector<uint32_t> chosen(best.begin(), best.begin() + std::min(count, all));
            std::vector<float> out = scores;
            reserve_largest(measure.data(), candidates, count, out.data());
            CHECK(same(out, with_infinity(scores, chosen)));
            out = measure;
            reserve_largest(out.data(), candidates, count, out.data());
            CHECK(same(out, with_infinity(measure, chosen)));
        }
    }
}

TEST_CASE("candidates at or above a threshold") {
    const float scores[] = {1, 2, NAN, 3, 2, -1, infinity, -infinity};
    CHECK(count_at_least(scores, ranges_of({{0, 8}}), 2) == 4);
    CHECK(count_at_least(scores, ranges_of({{1, 4}, {7, 8}}), 2) == 2);
    CHECK(count_at_least(scores, ranges_of({{0, 8}}), -infinity) == 7);
    CHECK(count_at_least(scores, ranges_of({{0, 8}}), NAN) == 0);
}

TEST_CASE("each segment of positions keeps its best") {
    // Slots 0 to 9 stand at 100 to 109. Ten positions in three segments: 100-102, 103-105, 106-109.
    std::vector<float> scores = {1, 5, 2, 4, 3, 9, 7, 7, 8, 6};
    const segment_quota quota{{100, 10}, 3, 1};
    CHECK(reserve_segments(quota, consecutive(10, 110), ranges_of({{0, 10}}), scores.data()) == 3);
    CHECK(scores == std::vector<float>{1, infinity, 2, 4, 3, infinity, 7, 7, infinity, 6});

    // The same against sorting: segments that hold few or none, several each, a range within.
    std::mt19937 random(5);
    for (uint32_t round = 0; round < 30; ++round) {
        const uint32_t slots = 700;
        const slot_positions positions = consecutive(slots, 5000);  // 4300 and on
        const slot_ranges candidates =
            round % 2 != 0 ? ranges_of({{0, slots}}) : ranges_of({{3, 50}, {60, 61}, {200, 650}});
        const segment_quota drawn{{4200 + random() % 300, 1 + random() % 900},
                                  1 + static_cast<uint32_t>(random() % 60),
                                  static_cast<uint32_t>(random() % 9)};
        const std::vector<float> before = crowded_scores(slots, random);
        std::vector<uint32_t> chosen;
        for (uint32_t s = 0; s < drawn.segments; ++s) {
            const uint64_t first = drawn.range.first + drawn.range.count * s / drawn.segments;
            const uint64_t end = drawn.range.first + drawn.range.count * (s + 1) / drawn.segments;
            uint32_t taken = 0;
            for (uint32_t slot : sorted(before, candidates)) {
                const uint64_t position = 4300 + slot;
                if (position < first || position >= end || taken == drawn.each) continue;
                chosen.push_back(slot);
                ++taken;
            }
        }
        std::vector<float> out = before;
        CHECK(reserve_segments(drawn, positions, candidates, out.data()) == chosen.size());
        CHECK(same(out, with_infinity(before, chosen)));
    }
}

TEST_CASE("a range to the end of all positions is cut without overflow") {
    std::vector<float> scores(4, 1.0f);
    const segment_quota quota{{10, ~uint64_t{0}}, 3, 2};
    CHECK(reserve_segments(quota, consecutive(4, 20), ranges_of({{0, 4}}), scores.data()) == 2);
    CHECK(scores == std::vector<float>{infinity, infinity, 1, 1});
}

TEST_CASE("pyramid budgets: worked by hand, and the mean is kept exactly") {
    // max = 200 - 5 = 195, min = 5, window 4: a step of 190 / 4 from layer to layer, no remainders.
    uint32_t budgets[5];
    allocate_pyramid({5, 1000, 100, 4, 20}, budgets);
    CHECK(std::vector<uint32_t>(budgets, budgets + 5) ==
          std::vector<uint32_t>{195, 148, 100, 52, 5});  // 147.5 and 52.5: the first gets the slot
    // max is cut to 150 - 10 = 140, so min = 60.
    allocate_pyramid({5, 150, 100, 10, 20}, budgets);
    CHECK(std::vector<uint32_t>(budgets, budgets + 5) ==
          std::vector<uint32_t>{140, 120, 100, 80, 60});
    // min below the window: all alike. So with one layer, or with less cached than the window.
    allocate_pyramid({5, 1000, 100, 6, 20}, budgets);
    for (uint32_t budget : budgets) CHECK(budget == 100);
    allocate_pyramid({1, 1000, 100, 0, 20}, budgets);
    CHECK(budgets[0] == 100);
    allocate_pyramid({5, 30, 20, 64, 1}, budgets);
    for (uint32_t budget : budgets) CHECK(budget == 20);

    std::mt19937 random(4);
    uint32_t sloped = 0;
    for (int round = 0; round < 2000; ++round) {
        pyramid_shape shape;
        shape.layers = 1 + static_cast<uint32_t>(random() % 60);
        shape.slots = 1 + static_cast<uint32_t>(random() % 5000);
        shape.budget = static_cast<uint32_t>(random() % (shape.slots + 1));
        shape.window = static_cast<uint32_t>(random() % 70);
        shape.steepness = 1 + static_cast<uint32_t>(random() % 40);
        std::vector<uint32_t> out(shape.layers);
        allocate_pyramid(shape, out.data());
        CHECK(std::accumulate(out.begin(), out.end(), uint64_t{0}) ==
              uint64_t{shape.layers} * shape.budget);
        // kvpress, in floating point, before it rounds.
        double least = double(shape.budget) / shape.steepness, most = 2.0 * shape.budget - least;
        const double room = double(shape.slots) - shape.window;
        if (most >= room) {
            most = room;
            least = 2.0 * shape.budget - most;
        }
        const bool uniform =
            !(shape.slots >= most && most >= least && least >= shape.window) || shape.layers == 1;
        sloped += uniform ? 0 : 1;
        for (uint32_t layer = 0; layer < shape.layers; ++layer) {
            const double due =
                uniform ? shape.budget : most - layer * (most - least) / (shape.layers - 1);
            CHECK(std::abs(out[layer] - due) < 1.0 - 1e-9);
            CHECK(out[layer] <= shape.slots);
        }
    }
    CHECK(sloped > 500);
}

TEST_CASE("slots are shared out among heads as the best of all of them, behind the safe ones") {
    CHECK(safe_candidates(0.2, 104, 0) == 20);
    CHECK(safe_candidates(0.2, 104, 15) == 5);
    CHECK(safe_candidates(0.2, 104, 30) == 0);
    CHECK(safe_candidates(7.0, 10, 0) == 10);

    // By hand: three places of six go to the safe ones, the others to 9, 8 and the first 7.
    const float first[] = {9, 8, 7, 1}, second[] = {7, 7, 2, 3}, third[] = {0, 1, 0, 0};
    head_share shares[3];
    const float* rows[] = {first, second, third};
    for (int h = 0; h < 3; ++h) {
        shares[h].scores = rows[h];
        shares[h].candidates = ranges_of({{0, 4}});
        shares[h].safe = 1;
    }
    allocate_heads(shares, 3, 6);
    CHECK(shares[0].kept == 3);  // 9 safe, 8, 7
    CHECK(shares[1].kept == 2);  // 7 safe, 7
    CHECK(shares[2].kept == 1);  // 1 safe
    allocate_heads(shares, 3, 5);
    CHECK(shares[0].kept == 3);
    CHECK(shares[1].kept == 1);
    CHECK(shares[2].kept == 1);

    std::mt19937 random(6);
    for (int round = 0; round < 60; ++round) {
        constexpr uint32_t slots = 400;
        const uint32_t heads = 1 + static_cast<uint32_t>(random() % 9);
        std::vector<std::vector<float>> scores;
        std::vector<head_share> out(heads);
        // (key, head, slot) of those that compete; what is safe is out of the race.
        struct entry {
            float score;
            uint32_t head;
        };
        std::vector<entry> race;
        uint64_t safe = 0, all = 0;
        for (uint32_t h = 0; h < heads; ++h) scores.push_back(crowded_scores(slots, random));
        for (uint32_t h = 0; h < heads; ++h) {
            out[h].scores = scores[h].data();
            out[h].candidates = random() % 2 != 0 ? ranges_of({{0, slots}})
                                                  : ranges_of({{3, 30}, {50, 51}, {90, 390}});
            const uint32_t count = out[h].candidates.slots();
            out[h].safe = static_cast<uint32_t>(random() % (round % 3 == 0 ? 2 : count / 2));
            const std::vector<uint32_t> best = sorted(scores[h], out[h].candidates);
            for (uint32_t i = out[h].safe; i < count; ++i) race.push_back({scores[h][best[i]], h});
            safe += out[h].safe;
            all += count;
        }
        std::stable_sort(race.begin(), race.end(), [](const entry& a, const entry& b) {
            if (std::isnan(b.score)) return !std::isnan(a.score);
            return a.score > b.score;
        });
        const uint64_t total = safe + random() % (all - safe + 50);
        std::vector<uint32_t> expected(heads);
        for (uint32_t h = 0; h < heads; ++h) expected[h] = out[h].safe;
        for (uint64_t i = 0; i < std::min<uint64_t>(total - safe, race.size()); ++i) {
            ++expected[race[i].head];
        }
        allocate_heads(out.data(), heads, total);
        for (uint32_t h = 0; h < heads; ++h) CHECK(out[h].kept == expected[h]);
    }
}

TEST_CASE("heads' shares are those of kvpress's AdaKVPress, step by step") {
    std::mt19937 random(17);
    std::normal_distribution<float> normal;
    for (const double ratio : {0.25, 0.5, 0.875}) {
        constexpr uint32_t heads = 8, slots = 301;
        const uint32_t kept = static_cast<uint32_t>(slots * (1 - ratio));
        const uint32_t safe = static_cast<uint32_t>(kept * 0.2);
        std::vector<std::vector<float>> scores(heads, std::vector<float>(slots));
        for (uint32_t h = 0; h < heads; ++h) {
            for (float& score : scores[h]) score = std::abs(normal(random)) * float(1 + h);
        }
        // Each head's best get the greatest number, then the lowest of the whole layer are masked.
        std::vector<std::pair<float, uint32_t>> layer;
        for (uint32_t h = 0; h < heads; ++h) {
            std::vector<float> raised = scores[h];
            std::sort(raised.begin(), raised.end(), std::greater<float>());
            std::fill_n(raised.begin(), safe, std::numeric_limits<float>::max());
            for (float score : raised) layer.emplace_back(score, h);
        }
        std::sort(layer.begin(), layer.end());
        std::vector<uint32_t> expected(heads, slots);
        for (uint32_t i = 0; i < heads * (slots - kept); ++i) --expected[layer[i].second];

        std::vector<head_share> shares(heads);
        for (uint32_t h = 0; h < heads; ++h) {
            shares[h].scores = scores[h].data();
            shares[h].candidates = ranges_of({{0, slots}});
            shares[h].safe = safe_candidates(0.2, kept, 0);
        }
        allocate_heads(shares.data(), heads, uint64_t{heads} * kept);
        for (uint32_t h = 0; h < heads; ++h) CHECK(shares[h].kept == expected[h]);
        CHECK(shares[0].kept < shares[7].kept);
    }
}
