// What the host knows of positions that a device has chosen: never wrong, and exact where guards
// stay what they were.
#include "sequence/spans.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <vector>

using namespace kvrt;

namespace {

/// A head's retained positions, and what is known of them.
struct known_head {
    std::vector<uint32_t> positions;
    position_spans spans;
    uint32_t placed = 0;
    uint64_t next = 0;

    retained_spans retained() const {
        return {spans, static_cast<uint32_t>(positions.size()), placed, next};
    }
    uint32_t count(uint64_t first, uint64_t end) const {
        return static_cast<uint32_t>(
            std::count_if(positions.begin(), positions.end(),
                          [&](uint32_t at) { return at >= first && at < end; }));
    }
    void append(uint32_t tokens) {
        for (; tokens != 0; --tokens) positions.push_back(static_cast<uint32_t>(next++));
    }
    static bool holds(const std::vector<held_range>& held, uint32_t position) {
        return std::any_of(held.begin(), held.end(), [&](const held_range& range) {
            return position >= range.first && position < range.end;
        });
    }
    /// Leaves what is held and any `places` others, or the newest.
    void round(const std::vector<held_range>& held, uint32_t places, bool newest,
               std::mt19937& random) {
        std::vector<uint32_t> others, kept;
        for (const uint32_t at : positions) (holds(held, at) ? kept : others).push_back(at);
        if (newest) std::reverse(others.begin(), others.end());
        if (!newest) std::shuffle(others.begin(), others.end(), random);
        others.resize(std::min<std::size_t>(places, others.size()));
        kept.insert(kept.end(), others.begin(), others.end());
        std::sort(kept.begin(), kept.end());
        const position_spans after =
            spans_after_round(retained(), held.data(), static_cast<uint32_t>(held.size()),
                              static_cast<uint32_t>(kept.size()), newest);
        spans = after;
        positions = kept;
        placed = static_cast<uint32_t>(kept.size());
    }
    /// Bounds hold everywhere; the number of all slots is among them.
    void check(std::mt19937& random) const {
        REQUIRE(spans.count <= position_spans::capacity);
        for (uint32_t i = 0; i < 20; ++i) {
            const uint64_t first = random() % (next + 2), end = first + random() % (next + 2);
            const slot_count found = count_between(retained(), first, end);
            const uint32_t truth = count(first, end);
            REQUIRE(found.least <= truth);
            REQUIRE(truth <= found.most);
        }
        std::vector<uint32_t> listed(positions.size());
        if (list_known_positions(retained(), listed.size(), listed.data())) {
            REQUIRE(listed == positions);
        }
    }
};

/// Ascending, disjoint: a front, pinned ranges, the newest.
std::vector<held_range> draw_guards(uint64_t next, std::mt19937& random) {
    std::vector<uint64_t> ends;
    for (uint32_t i = 0; i < 2 * (1 + random() % 6); ++i) ends.push_back(random() % (next + 1));
    std::sort(ends.begin(), ends.end());
    ends.erase(std::unique(ends.begin(), ends.end()), ends.end());
    std::vector<held_range> held;
    for (std::size_t i = 0; i + 1 < ends.size(); i += 2) held.push_back({ends[i], ends[i + 1]});
    return held;
}

}  // namespace

TEST_CASE("what is known of retained positions is true, whatever guards and rounds come") {
    std::mt19937 random(5);
    uint32_t exact = 0, asked = 0;
    for (uint32_t run = 0; run < 200; ++run) {
        CAPTURE(run);
        known_head head;
        for (uint32_t round = 0; round < 12; ++round) {
            head.append(1 + random() % 40);
            head.check(random);
            const std::vector<held_range> held = draw_guards(head.next, random);
            uint32_t guarded = 0;
            for (const held_range& range : held) {
                const slot_count here = count_between(head.retained(), range.first, range.end);
                exact += here.exact() ? 1 : 0;
                ++asked;
                guarded += head.count(range.first, range.end);
            }
            const uint32_t others = static_cast<uint32_t>(head.positions.size()) - guarded;
            if (others == 0) continue;
            head.round(held, random() % others, random() % 3 == 0, random);
            head.check(random);
        }
    }
    CHECK(exact > asked / 10);  // guards are drawn anew each time
}

TEST_CASE("guards that stay where they are are counted exactly, and STREAMING's positions known") {
    std::mt19937 random(6);
    for (const bool newest : {false, true}) {
        CAPTURE(newest);
        known_head head;
        head.append(100);
        for (uint32_t round = 0; round < 20; ++round) {
            CAPTURE(round);
            const std::vector<held_range> held = {{0, 4}, {30, 37}, {head.next - 10, head.next}};
            for (const held_range& range : held) {
                const slot_count found = count_between(head.retained(), range.first, range.end);
                REQUIRE(found.exact());
                REQUIRE(found.least == head.count(range.first, range.end));
            }
            head.round(held, 40, newest, random);
            head.check(random);
            if (newest) REQUIRE(list_known_positions(head.retained(), 0, nullptr));
            if (!newest) REQUIRE_FALSE(list_known_positions(head.retained(), 0, nullptr));
            head.append(1 + random() % 9);
        }
        CHECK(head.spans.count <= 8);
    }
}

TEST_CASE("one piece between guards has what the others have not") {
    known_head head;
    head.append(50);
    const std::vector<held_range> held = {{0, 5}, {40, 50}};
    std::mt19937 random(7);
    head.round(held, 12, false, random);
    const slot_count between = count_between(head.retained(), 5, 40);
    CHECK(between.least == 12);
    CHECK(between.most == 12);
    const slot_count half = count_between(head.retained(), 5, 10);
    CHECK(half.least == 0);
    CHECK(half.most == 5);
}

TEST_CASE("lanes have the same tokens where that is known, or where one set says so") {
    std::mt19937 random(8);
    known_head a, b;
    a.append(60);
    b.append(60);
    CHECK(surely_same(a.retained(), b.retained(), false));
    const std::vector<held_range> held = {{0, 5}, {50, 60}};
    a.round(held, 10, true, random);
    CHECK_FALSE(surely_same(a.retained(), b.retained(), false));
    b.round({{0, 3}, {3, 5}, {50, 60}}, 10, true, random);
    CHECK(surely_same(a.retained(), b.retained(), false));
    a.append(3);
    CHECK_FALSE(surely_same(a.retained(), b.retained(), false));
    b.append(3);
    CHECK(surely_same(a.retained(), b.retained(), false));
    a.round(held, 6, false, random);
    b.round(held, 6, false, random);
    CHECK_FALSE(surely_same(a.retained(), b.retained(), false));
    CHECK_FALSE(surely_same(a.retained(), a.retained(), false));  // heads of one lane
    a.spans.set = b.spans.set = 7;
    CHECK(surely_same(a.retained(), b.retained(), false));
    a.spans.by_head = b.spans.by_head = true;  // each head by itself
    CHECK_FALSE(surely_same(a.retained(), b.retained(), false));
    CHECK(surely_same(a.retained(), b.retained(), true));
}
