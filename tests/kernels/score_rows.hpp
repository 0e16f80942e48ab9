// What tests of scores and survivors share: candidates and rows of several kinds, as the CPU's
// library and the kernels have them.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/candidates.hpp"
#include "retention/select.hpp"
#include "without_barrier.hpp"

namespace kernel_test {

inline constexpr float infinity = std::numeric_limits<float>::infinity();

inline kvrt::guarded_slots guarded_of(uint32_t slots, std::vector<kvrt::slot_range> list) {
    kvrt::guarded_slots guarded;
    for (const kvrt::slot_range& range : list) {
        if (range.first < range.end) guarded.candidates.range[guarded.candidates.count++] = range;
    }
    guarded.protected_slots = slots - guarded.candidates.slots();
    return guarded;
}

inline kvrt::kernels::guarded_slots to_kernels(const kvrt::guarded_slots& from) {
    kvrt::kernels::guarded_slots to{};
    for (const kvrt::slot_range& range : from.candidates) {
        to.range[to.count++] = {range.first, range.end};
    }
    to.protected_slots = from.protected_slots;
    to.prompt_slots = from.prompt_slots;
    return to;
}

/// Candidates of several kinds.
inline std::vector<kvrt::guarded_slots> some_candidates(uint32_t slots) {
    const uint32_t third = slots / 3;
    std::vector<kvrt::slot_range> many;
    for (uint32_t i = 0; i < kvrt::max_slot_ranges; ++i) {
        const uint32_t step = slots / (kvrt::max_slot_ranges + 1);
        many.push_back({i * step + i % 3, i * step + step / 2 + 1});
    }
    return {guarded_of(slots, {{0, slots}}), guarded_of(slots, {{third, slots - third}}),
            guarded_of(slots, {{1, third}, {third + 1, slots - 1}}), guarded_of(slots, {}),
            guarded_of(slots, slots > 100 ? many : std::vector<kvrt::slot_range>{{0, 1}})};
}

/// Under the thread sanitizer one will do.
inline std::vector<thread_order> orders() {
    if (few_cases) return {thread_order::shuffled};
    return {std::begin(emulator::all_orders), std::end(emulator::all_orders)};
}

enum class scores_like { normal, ties, equal, odd, count };
inline float draw(scores_like kind, std::mt19937& random) {
    switch (kind) {
        case scores_like::normal:
            return std::normal_distribution<float>()(random);
        case scores_like::ties:
            return static_cast<float>(random() % 5) - 2.0f;
        case scores_like::equal:
            return 0.25f;
        default: {
            const float odd[] = {0.0f,      -0.0f,     NAN,        -NAN, infinity,
                                 -infinity, 0x1p-149f, -0x1p-149f, 1.0f, -3e38f};
            return odd[random() % std::size(odd)];
        }
    }
}

inline std::vector<float> draw_row(scores_like kind, size_t count, std::mt19937& random) {
    std::vector<float> row(count);
    for (float& each : row) each = draw(kind, random);
    return row;
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace kernel_test
