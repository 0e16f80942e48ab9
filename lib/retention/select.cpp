#include "retention/select.hpp"

#include <algorithm>
#include <bit>

namespace kvrt {

namespace {

/// Appends [first, end) without empty ranges.
void append(slot_ranges& ranges, uint32_t first, uint32_t end) {
    if (first < end) ranges.range[ranges.count++] = {first, end};
}

/// A key that orders as the score does, with -0 as 0 and NaN below everything.
uint32_t order_of(float score) {
    const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
    const uint32_t negative = 0u - (bits >> 31);  // signs are as good as random: no branch
    const uint32_t number = score == score ? 0xffffffffu : 0u;
    return (bits ^ (negative | 0x80000000u)) & number;
}

constexpr uint32_t digit_bits = 11;
constexpr uint32_t digits = 1u << digit_bits;

/// The key of the wanted-th highest score (1 is the highest), and how many with that very key are
/// wanted. Digit by digit from the top: a histogram of the keys that share the digits found so far.
struct threshold {
    uint32_t key = 0;
    uint32_t of_equals = 0;
};

threshold find_threshold(const float* scores, const slot_ranges& candidates, uint32_t wanted) {
    threshold found{0, wanted};
    uint32_t known = 0;  // mask of the digits found
    for (int shift = 32 - int{digit_bits}; known != 0xffffffffu; shift -= int{digit_bits}) {
        const uint32_t low = static_cast<uint32_t>(std::max(shift, 0));
        const uint32_t digit_mask = ~known >> low << low;
        // Two of them, for neighbours: most scores share a few digits, and one counter could be
        // raised only as fast as a store is seen by the next load.
        uint32_t histogram[2][digits] = {};
        for (const slot_range& range : candidates) {
            for (uint32_t slot = range.first; slot < range.end; ++slot) {
                const uint32_t key = order_of(scores[slot]);
                const uint32_t same = (key & known) == found.key ? 1 : 0;
                histogram[slot % 2][(key & digit_mask) >> low] += same;
            }
        }
        for (uint32_t digit = 0; digit < digits; ++digit)
            histogram[0][digit] += histogram[1][digit];
        uint32_t digit = digit_mask >> low;
        while (histogram[0][digit] < found.of_equals) found.of_equals -= histogram[0][digit--];
        found.key |= digit << low;
        known |= digit_mask;
    }
    return found;
}

}  // namespace

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
    threshold least{0xffffffffu, 0};
    if (wanted != 0) least = find_threshold(scores, candidates, wanted);

    uint32_t count = 0, next = 0;
    for (const slot_range& range : candidates) {
        for (; next < range.first; ++next) survivors[count++] = next;
        // Written without a branch on the score. Once `keep` are found, no slot is left to take.
        for (; next < range.end && count < keep; ++next) {
            const uint32_t key = order_of(scores[next]);
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
