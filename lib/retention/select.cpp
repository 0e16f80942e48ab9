#include "retention/select.hpp"

#include <algorithm>

#include "retention/rank.hpp"

namespace kvrt {

namespace {

/// Appends [first, end) without empty ranges.
void append(slot_ranges& ranges, uint32_t first, uint32_t end) {
    if (first < end) ranges.range[ranges.count++] = {first, end};
}

}  // namespace

held_positions held_by(const guard_rules& rules, uint64_t next_position) {
    held_positions held;
    const auto add = [&](uint64_t first, uint64_t end) {
        end = std::min(end, next_position);
        if (first < end) held.range[held.count++] = {first, end};
    };
    add(0, std::max(rules.prompt_tokens, rules.sinks));
    for (uint32_t i = 0; i < std::min(rules.pinned_count, max_pinned_ranges); ++i) {
        const position_range& range = rules.pinned[i];
        add(range.first, range.first + std::min(range.count, ~uint64_t{0} - range.first));
    }
    add(next_position - std::min(rules.recent, next_position), next_position);
    std::sort(held.range.begin(), held.range.begin() + held.count,
              [](const held_range& a, const held_range& b) { return a.first < b.first; });
    uint32_t count = 0;
    for (uint32_t i = 0; i < held.count; ++i) {
        if (count != 0 && held.range[i].first <= held.range[count - 1].end) {
            held.range[count - 1].end = std::max(held.range[count - 1].end, held.range[i].end);
        } else {
            held.range[count++] = held.range[i];
        }
    }
    held.count = count;
    return held;
}

guarded_slots apply_guards(const guard_rules& rules, const slot_positions& positions) {
    guarded_slots guarded;
    guarded.prompt_slots = positions.find(rules.prompt_tokens);
    const uint32_t head = std::max(guarded.prompt_slots, positions.find(rules.sinks));
    const uint64_t recent_start =
        positions.next_position - std::min(rules.recent, positions.next_position);
    const uint32_t tail = positions.find(recent_start);

    // Pinned slots in ascending order; a handful, so sorting by insertion.
    std::array<slot_range, max_pinned_ranges> pinned = {};
    uint32_t count = 0;
    for (uint32_t i = 0; i < std::min(rules.pinned_count, max_pinned_ranges); ++i) {
        const position_range& range = rules.pinned[i];
        const uint64_t end = range.first + std::min(range.count, ~uint64_t{0} - range.first);
        const slot_range slots = {positions.find(range.first), positions.find(end)};
        uint32_t place = count++;
        for (; place > 0 && pinned[place - 1].first > slots.first; --place) {
            pinned[place] = pinned[place - 1];
        }
        pinned[place] = slots;
    }

    uint32_t next = head;
    for (uint32_t i = 0; i < count; ++i) {
        append(guarded.candidates, next, std::min(pinned[i].first, tail));
        next = std::max(next, pinned[i].end);
    }
    append(guarded.candidates, next, tail);
    guarded.protected_slots = positions.slots - guarded.candidates.slots();
    return guarded;
}

uint32_t retained_after_round(uint32_t slots, uint32_t budget, bool prompt_on_top,
                              const guarded_slots& guarded) {
    uint64_t keep = budget;
    if (prompt_on_top) keep += guarded.prompt_slots;
    keep = std::max(keep, uint64_t{guarded.protected_slots});
    return static_cast<uint32_t>(std::min(keep, uint64_t{slots}));
}

uint32_t select_top(const float* scores, const slot_ranges& candidates, uint32_t slots,
                    uint32_t keep, uint32_t* survivors) {
    const uint32_t wanted = keep - (slots - candidates.slots());
    // Nothing can reach a key beyond the highest: then no candidate stays.
    rank_bound least{0xffffffffu, 0};
    if (wanted != 0) least = find_rank(scores, candidates, wanted);

    uint32_t count = 0, next = 0;
    for (const slot_range& range : candidates) {
        for (; next < range.first; ++next) survivors[count++] = next;
        // Written without a branch on the score. Once `keep` are found, no slot is left to take.
        for (; next < range.end && count < keep; ++next) {
            const uint32_t key = score_order(scores[next]);
            const uint32_t equal = key == least.key && least.of_equals != 0 ? 1 : 0;
            least.of_equals -= equal;
            survivors[count] = next;
            count += equal | (key > least.key ? 1 : 0);
        }
        next = range.end;
    }
    for (; next < slots; ++next) survivors[count++] = next;
    return count;
}

}  // namespace kvrt
