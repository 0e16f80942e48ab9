#include "retention/rank.hpp"

#include <algorithm>
#include <limits>

namespace kvrt {

namespace {

constexpr uint32_t digit_bits = 11;
constexpr uint32_t digits = 1u << digit_bits;

/// Up to so many looks at a score, repeated scans beat clearing histograms.
constexpr uint64_t few_looks = 4096;

/// Keys that are set aside, on the stack.
constexpr uint32_t few_keys = 8192;

/// Key by key from the highest.
rank_bound find_by_scanning(const float* scores, const slot_ranges& candidates, uint32_t wanted) {
    rank_bound found{0xffffffffu, wanted};
    for (;;) {
        uint32_t highest = 0, count = 0;  // of the keys below the last one
        for (const slot_range& range : candidates) {
            for (uint32_t slot = range.first; slot < range.end; ++slot) {
                const uint32_t key = score_order(scores[slot]);
                if (key >= found.key || key < highest) continue;
                count = key == highest ? count + 1 : 1;
                highest = key;
            }
        }
        found.key = highest;
        if (count >= found.of_equals) return found;
        found.of_equals -= count;
    }
}

}  // namespace

rank_bound find_rank(const float* scores, const slot_ranges& candidates, uint32_t wanted) {
    if (wanted == 0) return {};
    if (uint64_t{wanted} * candidates.slots() <= few_looks) {
        return find_by_scanning(scores, candidates, wanted);
    }
    // Digit by digit from the top: a histogram of the keys that share the digits found so far,
    // which are set aside as soon as they are few.
    rank_bound found{0, wanted};
    uint32_t known = 0;  // mask of the digits found
    uint32_t aside[few_keys + 1];
    uint32_t count = 0;
    bool is_aside = false;
    const auto for_each_key = [&](const auto& body) {
        for (uint32_t i = 0; is_aside && i < count; ++i) body(aside[i], i);
        if (is_aside) return;
        for (const slot_range& range : candidates) {
            for (uint32_t slot = range.first; slot < range.end; ++slot) {
                body(score_order(scores[slot]), slot);
            }
        }
    };
    for (int shift = 32 - int{digit_bits}; known != 0xffffffffu; shift -= int{digit_bits}) {
        const uint32_t low = static_cast<uint32_t>(std::max(shift, 0));
        const uint32_t digit_mask = ~known >> low << low;
        uint32_t histogram[2][digits] = {};  // two, since neighbours share digits
        for_each_key([&](uint32_t key, uint32_t place) {
            const uint32_t same = (key & known) == found.key ? 1 : 0;
            histogram[place % 2][(key & digit_mask) >> low] += same;
        });
        uint32_t digit = digit_mask >> low, here = 0;
        for (;; --digit) {
            here = histogram[0][digit] + histogram[1][digit];
            if (here >= found.of_equals) break;
            found.of_equals -= here;
        }
        found.key |= digit << low;
        known |= digit_mask;
        if (is_aside || here > few_keys || known == 0xffffffffu) continue;
        for_each_key([&](uint32_t key, uint32_t) {
            aside[count] = key;
            count += (key & known) == found.key ? 1 : 0;
        });
        is_aside = true;
    }
    return found;
}

uint32_t count_at_least(const float* scores, const slot_ranges& candidates, float least) {
    uint32_t count = 0;
    for (const slot_range& range : candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) {
            count += scores[slot] >= least ? 1 : 0;
        }
    }
    return count;
}

void reserve_largest(const float* measure, const slot_ranges& candidates, uint32_t count,
                     float* scores) {
    rank_bound bound = find_rank(measure, candidates, std::min(count, candidates.slots()));
    for (const slot_range& range : candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) {
            const uint32_t key = score_order(measure[slot]);
            const bool equal = key == bound.key && bound.of_equals != 0;
            if (!equal && key <= bound.key) continue;
            bound.of_equals -= equal ? 1 : 0;
            scores[slot] = std::numeric_limits<float>::infinity();
        }
    }
}

uint32_t reserve_segments(const segment_quota& quota, const slot_positions& positions,
                          const slot_ranges& candidates, float* scores) {
    const uint64_t first = quota.range.first;
    const uint64_t length = std::min(quota.range.count, ~uint64_t{0} - first);
    const uint64_t whole = length / quota.segments, rest = length % quota.segments;
    uint32_t reserved = 0, begin = positions.find(first);
    for (uint64_t segment = 1; segment <= quota.segments; ++segment) {
        const uint64_t end_position = first + whole * segment + rest * segment / quota.segments;
        const uint32_t end = positions.find(end_position);
        const slot_ranges here = cut_ranges(candidates, begin, end);
        reserve_largest(scores, here, quota.each, scores);
        reserved += std::min(quota.each, here.slots());
        begin = end;
    }
    return reserved;
}

slot_ranges cut_ranges(const slot_ranges& candidates, uint32_t first, uint32_t end) {
    slot_ranges cut;
    for (const slot_range& range : candidates) {
        const slot_range part = {std::max(range.first, first), std::min(range.end, end)};
        if (part.first < part.end) cut.range[cut.count++] = part;
    }
    return cut;
}

}  // namespace kvrt
