#include "retention/allocate.hpp"

#include <algorithm>

namespace kvrt {

void allocate_pyramid(const pyramid_shape& shape, uint32_t* budgets) {
    std::fill(budgets, budgets + shape.layers, shape.budget);
    // Everything times steepness, so that all numbers are whole.
    const uint64_t beta = shape.steepness, slots = beta * shape.slots;
    const uint64_t both = 2 * beta * shape.budget;
    const uint64_t window = beta * shape.window;
    if (shape.layers < 2 || shape.slots < shape.window) return;
    uint64_t least = shape.budget, greatest = both - least;
    if (greatest >= slots - window) {
        greatest = slots - window;
        if (both < greatest) return;
        least = both - greatest;
    }
    if (slots < greatest || greatest < least || least < window) return;

    // Layer l is due numerator(l) / divisor.
    const uint64_t divisor = beta * (shape.layers - 1);
    const auto numerator = [&](uint64_t layer) {
        return greatest * (shape.layers - 1) - layer * (greatest - least);
    };
    uint64_t missing = uint64_t{shape.layers} * shape.budget;
    for (uint32_t layer = 0; layer < shape.layers; ++layer) {
        budgets[layer] = static_cast<uint32_t>(numerator(layer) / divisor);
        missing -= budgets[layer];
    }
    // One more for those that lost most. A layer has had its turn when it has more than it lost.
    for (; missing != 0; --missing) {
        uint32_t chosen = shape.layers;
        for (uint32_t layer = 0; layer < shape.layers; ++layer) {
            if (budgets[layer] * divisor > numerator(layer)) continue;
            if (chosen == shape.layers ||
                numerator(layer) % divisor > numerator(chosen) % divisor) {
                chosen = layer;
            }
        }
        ++budgets[chosen];
    }
}

uint32_t safe_candidates(double alpha, uint32_t kept_slots, uint32_t protected_slots) {
    const double safe = std::clamp(alpha, 0.0, 1.0) * kept_slots;
    const uint32_t whole = static_cast<uint32_t>(safe);
    return whole > protected_slots ? whole - protected_slots : 0;
}

namespace {

constexpr uint32_t digit_bits = 11;
constexpr uint32_t digits = 1u << digit_bits;

/// Calls body(key, how many) for all candidates of a head that are not safe.
template <class callable>
void for_each_open(const head_share& head, const callable& body) {
    uint32_t equals = 0;
    for (const slot_range& range : head.candidates) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) {
            const uint32_t key = score_order(head.scores[slot]);
            equals += key == head.safeguard.key ? 1 : 0;
            body(key, key < head.safeguard.key ? 1 : 0);
        }
    }
    // Beyond all keys, without safe ones, there are no equals.
    if (equals != 0) body(head.safeguard.key, equals - head.safeguard.of_equals);
}

/// The bound of the `wanted` highest of all heads' candidates that are not safe.
rank_bound find_rank_among(const head_share* heads, uint32_t count, uint64_t wanted) {
    uint32_t key = 0, known = 0;
    for (int shift = 32 - int{digit_bits}; known != 0xffffffffu; shift -= int{digit_bits}) {
        const uint32_t low = static_cast<uint32_t>(std::max(shift, 0));
        const uint32_t digit_mask = ~known >> low << low;
        uint32_t histogram[digits] = {};
        for (uint32_t head = 0; head < count; ++head) {
            for_each_open(heads[head], [&](uint32_t of, uint32_t times) {
                histogram[(of & digit_mask) >> low] += (of & known) == key ? times : 0;
            });
        }
        uint32_t digit = digit_mask >> low;
        while (histogram[digit] < wanted) wanted -= histogram[digit--];
        key |= digit << low;
        known |= digit_mask;
    }
    return {key, static_cast<uint32_t>(wanted)};
}

}  // namespace

void allocate_heads(head_share* heads, uint32_t count, uint64_t total) {
    uint64_t open = 0, free = total;  // candidates that are not safe; places for them
    for (uint32_t head = 0; head < count; ++head) {
        head_share& share = heads[head];
        share.safeguard = find_rank(share.scores, share.candidates, share.safe);
        share.kept = share.safe;
        open += share.candidates.slots() - share.safe;
        free -= share.safe;
    }
    free = std::min(free, open);
    if (free == 0) return;
    rank_bound bound = find_rank_among(heads, count, free);
    for (uint32_t head = 0; head < count; ++head) {
        head_share& share = heads[head];
        for_each_open(share, [&](uint32_t key, uint32_t times) {
            const uint32_t equal = key == bound.key ? std::min(times, bound.of_equals) : 0;
            bound.of_equals -= equal;
            share.kept += key > bound.key ? times : equal;
        });
    }
}

}  // namespace kvrt
