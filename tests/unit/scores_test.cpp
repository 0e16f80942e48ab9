// Simple scorers and the way from query heads' scores to one ranking.
#include "retention/scores.hpp"

#include <doctest/doctest.h>

#include <limits>
#include <set>

#include "paged_fixture.hpp"

using namespace kvrt;
using namespace paged_test;

namespace {

slot_ranges ranges_of(std::initializer_list<slot_range> list) {
    slot_ranges ranges;
    for (const slot_range& range : list) ranges.range[ranges.count++] = range;
    return ranges;
}

std::vector<uint32_t> slots_of(const slot_ranges& ranges) {
    std::vector<uint32_t> slots;
    for (const slot_range& range : ranges) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) slots.push_back(slot);
    }
    return slots;
}

// Consecutive positions that end at `next`.
slot_positions consecutive(uint32_t slots, uint64_t next) {
    slot_positions positions;
    positions.slots = slots;
    positions.next_position = next;
    return positions;
}

}  // namespace

TEST_CASE("z-scores are over the candidates, and the group keeps its maximum") {
    constexpr uint32_t slots = 5000, stride = 5003, heads = 3;
    std::mt19937 random(3);
    std::normal_distribution<float> normal;
    std::vector<float> scores(heads * stride);
    for (uint32_t i = 0; i < scores.size(); ++i) {
        scores[i] = normal(random) * 7.0f + 100.0f * float(i / stride);
    }
    for (const slot_ranges& candidates :
         {ranges_of({{0, slots}}), ranges_of({{3, 4}, {17, 40}, {41, 4999}}),
          ranges_of({{9, 10}})}) {
        std::vector<double> expected(slots, -1e9);
        const std::vector<uint32_t> chosen = slots_of(candidates);
        for (uint32_t h = 0; h < heads; ++h) {
            long double sum = 0, squares = 0;
            for (uint32_t slot : chosen) sum += scores[h * stride + slot];
            const double mean = double(sum / chosen.size());
            for (uint32_t slot : chosen) {
                squares += (scores[h * stride + slot] - mean) * (scores[h * stride + slot] - mean);
            }
            const double deviation = std::max(1e-6, std::sqrt(double(squares / chosen.size())));
            for (uint32_t slot : chosen) {
                expected[slot] =
                    std::max(expected[slot], (scores[h * stride + slot] - mean) / deviation);
            }
        }
        std::vector<float> out(slots, 55.0f);
        normalise_and_reduce(scores.data(), stride, heads, candidates, out.data());
        for (uint32_t slot = 0; slot < slots; ++slot) {
            if (expected[slot] == -1e9) {
                CHECK(out[slot] == 55.0f);
            } else {
                CHECK(out[slot] == doctest::Approx(expected[slot]).epsilon(1e-5).scale(1.0));
            }
        }
        std::vector<float> in_place = scores;
        normalise_and_reduce(in_place.data(), stride, heads, candidates, in_place.data());
        for (uint32_t slot : chosen) CHECK(in_place[slot] == out[slot]);
    }
}

TEST_CASE("equal scores give zero, and the deviation is not divided by when it vanishes") {
    std::vector<float> scores(40, 3.25f), out(40, 9.0f);
    normalise_and_reduce(scores.data(), 40, 1, ranges_of({{0, 40}}), out.data());
    for (float z : out) CHECK(z == 0.0f);
}

TEST_CASE("a NaN or infinite score does not spoil the others") {
    std::vector<float> scores = {1, 2, NAN, 3, INFINITY, 4, -INFINITY};
    std::vector<float> out(7);
    normalise_and_reduce(scores.data(), 7, 1, ranges_of({{0, 7}}), out.data());
    const double deviation = std::sqrt(1.25);  // of 1, 2, 3, 4
    CHECK(out[0] == doctest::Approx(-1.5 / deviation));
    CHECK(out[5] == doctest::Approx(1.5 / deviation));
    CHECK(std::isnan(out[2]));
    CHECK(out[4] == INFINITY);
    CHECK(out[6] == -INFINITY);

    // A number of one head wins over the NaN of another, in either order.
    const std::vector<float> two_heads = {NAN, 1, 2, 5, 3, NAN};
    normalise_and_reduce(two_heads.data(), 3, 2, ranges_of({{0, 3}}), out.data());
    CHECK(out[0] == doctest::Approx(1.0));
    CHECK(out[1] == doctest::Approx(-1.0));
    CHECK(out[2] == doctest::Approx(1.0));
}

TEST_CASE("sums and maxima over layers touch candidates only") {
    const slot_ranges candidates = ranges_of({{1, 3}, {4, 5}});
    std::vector<float> total(6, 7.0f);
    const std::vector<float> part = {1, 2, NAN, 4, -5, 6};
    fill_scores(candidates, -INFINITY, total.data());
    raise_scores(candidates, part.data(), total.data());
    CHECK(total == std::vector<float>{7, 2, -INFINITY, 7, -5, 7});
    const std::vector<float> higher = {9, 1, 3, 9, 5, 9};
    raise_scores(candidates, higher.data(), total.data());
    CHECK(total == std::vector<float>{7, 2, 3, 7, 5, 7});
    fill_scores(candidates, 0.0f, total.data());
    add_scores(candidates, higher.data(), total.data());
    add_scores(candidates, higher.data(), total.data());
    CHECK(total == std::vector<float>{7, 2, 6, 7, 10, 7});
}

TEST_CASE("random scores: uniform, and of key and position alone") {
    constexpr uint32_t slots = 20000;
    const slot_ranges all = ranges_of({{0, slots}});
    random_key key;
    key.seed = 11;
    key.round = 2;
    key.layer = 3;
    key.head = 1;
    std::vector<float> scores(slots), again(slots);
    score_random(key, consecutive(slots, 50000), all, scores.data());

    double sum = 0, squares = 0;
    std::vector<int> histogram(10);
    for (float score : scores) {
        REQUIRE(score >= 0.0f);
        REQUIRE(score < 1.0f);
        sum += score;
        squares += double{score} * score;
        ++histogram[static_cast<std::size_t>(score * 10)];
    }
    CHECK(sum / slots == doctest::Approx(0.5).epsilon(0.02));
    CHECK(squares / slots - 0.25 == doctest::Approx(1.0 / 12).epsilon(0.05));
    for (int count : histogram) CHECK(std::abs(count - 2000) < 200);  // 4.7 deviations

    // The same token elsewhere: 100 slots earlier, because others went.
    score_random(key, consecutive(slots - 100, 50000), ranges_of({{0, slots - 100}}), again.data());
    for (uint32_t s = 0; s < slots - 100; ++s) REQUIRE(again[s] == scores[s + 100]);

    // Any other part of the key draws anew.
    for (int part = 0; part < 4; ++part) {
        random_key other = key;
        (part == 0 ? other.seed : part == 1 ? other.round : other.round) += part < 2 ? 1 : 0;
        other.layer += part == 2 ? 1 : 0;
        other.head += part == 3 ? 1 : 0;
        score_random(other, consecutive(slots, 50000), all, again.data());
        double product = 0;
        for (uint32_t s = 0; s < slots; ++s) product += (scores[s] - 0.5) * (again[s] - 0.5);
        CHECK(std::abs(product / slots * 12) < 0.035);  // correlation; 5 deviations
    }
}

TEST_CASE("streaming prefers the later slot") {
    std::vector<float> scores(10, -1.0f);
    score_streaming(ranges_of({{2, 5}, {7, 8}}), scores.data());
    CHECK(scores[1] == -1.0f);
    CHECK(scores[5] == -1.0f);
    CHECK(scores[2] < scores[3]);
    CHECK(scores[3] < scores[4]);
    CHECK(scores[4] < scores[7]);
}
