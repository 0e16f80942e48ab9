// Guards and selection against a sort.
#include "retention/select.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <random>
#include <vector>

using namespace kvrt;

namespace {

slot_ranges ranges_of(std::initializer_list<slot_range> list) {
    slot_ranges ranges;
    for (const slot_range& range : list) ranges.range[ranges.count++] = range;
    return ranges;
}

bool is_candidate(const slot_ranges& ranges, uint32_t slot) {
    return std::any_of(ranges.begin(), ranges.end(),
                       [&](slot_range r) { return slot >= r.first && slot < r.end; });
}

// Protected slots, and the best candidates of a stable sort.
std::vector<uint32_t> sorted_survivors(const std::vector<float>& scores,
                                       const slot_ranges& candidates, uint32_t keep) {
    std::vector<uint32_t> survivors, order;
    for (uint32_t slot = 0; slot < scores.size(); ++slot) {
        (is_candidate(candidates, slot) ? order : survivors).push_back(slot);
    }
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
        if (std::isnan(scores[a])) return false;
        return std::isnan(scores[b]) || scores[a] > scores[b];
    });
    order.resize(keep - survivors.size());
    survivors.insert(survivors.end(), order.begin(), order.end());
    std::sort(survivors.begin(), survivors.end());
    return survivors;
}

void check_selection(const std::vector<float>& scores, const slot_ranges& candidates) {
    const uint32_t slots = static_cast<uint32_t>(scores.size());
    const uint32_t held = slots - candidates.slots();
    for (uint32_t keep : {held, held + 1, held + candidates.slots() / 3, slots - 1, slots}) {
        if (keep < held || keep > slots) continue;
        std::vector<uint32_t> survivors(keep + 1, 12345678u);
        REQUIRE(select_top(scores.data(), candidates, slots, keep, survivors.data()) == keep);
        CHECK(survivors.back() == 12345678u);
        survivors.pop_back();
        CHECK(survivors == sorted_survivors(scores, candidates, keep));
    }
}

// Slots with explicit positions in a store of blocks of 16, for KV head 1 of 2.
struct stored_positions {
    std::vector<uint32_t> storage;
    std::vector<block_id> blocks;
    slot_positions view;

    stored_positions(const std::vector<uint32_t>& positions, uint32_t more, uint64_t next) {
        const uint32_t count = static_cast<uint32_t>(positions.size());
        const uint32_t block_count = (count + more + 15) / 16;
        storage.assign(block_count * 32, 0xeeeeeeeeu);
        view.store.open.base = storage.data();
        view.store.open.numbering = block_numbering(4);
        view.store.open.block_stride = 32;
        view.store.open.block_tokens = 16;
        for (uint32_t i = 0; i < block_count; ++i) blocks.push_back((block_count - 1 - i) * 4);
        for (uint32_t s = 0; s < count; ++s) {
            storage[(block_count - 1 - s / 16) * 32 + 16 + s % 16] = positions[s];
        }
        view.blocks = blocks.data();
        view.kv_head = 1;
        view.slots = count + more;
        view.explicit_slots = count;
        view.next_position = next;
    }
};

}  // namespace

TEST_CASE("the best candidates stay, ties by the lowest slot, NaN last") {
    std::mt19937 random(1);
    std::normal_distribution<float> normal;
    for (int round = 0; round < 60; ++round) {
        const uint32_t slots = 1 + random() % 700;
        std::vector<float> scores(slots);
        for (float& score : scores) {
            switch (round % 6) {
                case 0:
                    score = normal(random);
                    break;
                case 1:
                    score = static_cast<float>(random() % 4);
                    break;  // many ties
                case 2:
                    score = std::bit_cast<float>(static_cast<uint32_t>(random()));
                    break;
                case 3:
                    score = 0.25f;
                    break;
                case 4:
                    score = random() % 2 ? 0.0f : -0.0f;
                    break;  // equal
                default:
                    score = random() % 3 ? NAN : -INFINITY;
            }
        }
        const uint32_t a = slots / 5, b = slots / 2, c = slots - slots / 7;
        check_selection(scores, ranges_of({{0, slots}}));
        if (a < b && b + 1 < c) check_selection(scores, ranges_of({{a, b}, {b + 1, c}}));
        check_selection(scores, slot_ranges());
    }
}

TEST_CASE("selection among more scores of like size than are set aside, and as many") {
    std::mt19937 random(5);
    for (const uint32_t slots : {8191u, 8192u, 8193u, 20000u}) {
        CAPTURE(slots);
        const slot_ranges all = ranges_of({{0, slots}});
        // All equal; alike but for the last bits; alike but for the middle ones.
        check_selection(std::vector<float>(slots, 0.75f), all);
        for (const uint32_t mask : {0x3ffu, 0x1ffc00u}) {
            std::vector<float> scores(slots);
            for (float& score : scores) {
                const uint32_t bits = static_cast<uint32_t>(random()) & mask;
                score = std::bit_cast<float>(std::bit_cast<uint32_t>(1.0f) | bits);
            }
            check_selection(scores, all);
            check_selection(scores, ranges_of({{3, 4000}, {4100, slots - 1}}));
        }
    }
}

TEST_CASE("guards hold the prompt, sinks, the recent window and pinned ranges") {
    // 100 consecutive tokens, positions 0 to 99.
    slot_positions positions;
    positions.slots = 100;
    positions.next_position = 100;
    guard_rules rules;
    guarded_slots guarded = apply_guards(rules, positions);
    CHECK(guarded.protected_slots == 0);
    CHECK(guarded.candidates.slots() == 100);

    rules.prompt_tokens = 10;
    rules.sinks = 4;
    rules.recent = 20;
    const position_range pinned[] = {{60, 5}, {30, 2}, {62, 10}, {75, 1000}, {2, 3}, {50, 0}};
    rules.pinned = pinned;
    rules.pinned_count = 6;
    guarded = apply_guards(rules, positions);
    CHECK(guarded.prompt_slots == 10);
    CHECK(guarded.protected_slots == 10 + 2 + 12 + 25);
    for (uint32_t slot = 0; slot < 100; ++slot) {
        const bool held =
            slot < 10 || slot >= 75 || slot == 30 || slot == 31 || (slot >= 60 && slot < 72);
        CAPTURE(slot);
        CHECK(is_candidate(guarded.candidates, slot) == !held);
    }
    rules.sinks = 40;  // reaches behind the prompt
    CHECK(apply_guards(rules, positions).candidates.range[0].first == 40);
    rules.recent = ~uint64_t{0};
    CHECK(apply_guards(rules, positions).protected_slots == 100);
    rules.recent = 0;
    rules.prompt_tokens = 500;
    CHECK(apply_guards(rules, positions).protected_slots == 100);
}

TEST_CASE("guards go by position where tokens have gone before") {
    std::mt19937 random(9);
    for (int round = 0; round < 40; ++round) {
        std::vector<uint32_t> kept;
        for (uint32_t p = 0; p < 900; ++p) {
            if (random() % 5 == 0) kept.push_back(p);
        }
        const uint32_t more = random() % 40;
        const stored_positions stored(kept, more, 900 + more);
        std::vector<uint64_t> positions(kept.begin(), kept.end());
        for (uint32_t i = 0; i < more; ++i) positions.push_back(900 + i);

        std::vector<position_range> pinned(random() % (max_pinned_ranges + 1));
        for (position_range& range : pinned) range = {random() % 950, random() % 60};
        guard_rules rules;
        rules.prompt_tokens = random() % 200;
        rules.sinks = random() % 100;
        rules.recent = random() % 150;
        rules.pinned = pinned.data();
        rules.pinned_count = static_cast<uint32_t>(pinned.size());
        const guarded_slots guarded = apply_guards(rules, stored.view);

        uint32_t held_count = 0, prompt_count = 0, last = 0;
        for (uint32_t slot = 0; slot < positions.size(); ++slot) {
            const uint64_t p = positions[slot];
            REQUIRE(stored.view.at(slot) == p);
            bool held =
                p < rules.prompt_tokens || p < rules.sinks || p + rules.recent >= 900 + more;
            for (const position_range& range : pinned) {
                held = held || (p >= range.first && p < range.first + range.count);
            }
            held_count += held;
            prompt_count += p < rules.prompt_tokens;
            CHECK(is_candidate(guarded.candidates, slot) == !held);
        }
        CHECK(guarded.protected_slots == held_count);
        CHECK(guarded.prompt_slots == prompt_count);
        for (const slot_range& range : guarded.candidates) {
            CHECK(range.first < range.end);
            CHECK(range.first >= last);
            last = range.end;
        }
    }
}

TEST_CASE("a round keeps the budget, what is protected, and never more than there is") {
    guarded_slots guarded;
    guarded.protected_slots = 30;
    guarded.prompt_slots = 20;
    CHECK(retained_after_round(1000, 100, false, guarded) == 100);
    CHECK(retained_after_round(1000, 100, true, guarded) == 120);
    CHECK(retained_after_round(1000, 10, false, guarded) == 30);
    CHECK(retained_after_round(1000, 5, true, guarded) == 30);
    CHECK(retained_after_round(80, 100, false, guarded) == 80);
    CHECK(retained_after_round(110, 100, true, guarded) == 110);
    CHECK(retained_after_round(1000, 0xffffffffu, true, guarded) == 1000);
}
