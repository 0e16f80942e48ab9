// From sums of observed attention to scores, for a whole cohort in one launch: the windows that
// count are added up, and neighbours share what they have, up to the recent slots (pool_mean and
// pool_max of retention/transform.hpp, bit for bit).
#pragma once

#include "kernels/candidates.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t pool_threads = 128;

/// One KV head of a lane. Slots without a sum in the present window have `unknown`; in the one
/// before, nothing.
struct pool_row {
    uint64_t present;   ///< place of slot 0's sum
    uint64_t previous;  ///< likewise, of the window before
    uint64_t scores;    ///< place of slot 0's score, written for all slots
    uint64_t guarded;   ///< place of what says where the recent begin
    uint32_t slots;
    uint32_t present_slots;
    uint32_t previous_slots;  ///< 0: there is no window before
    uint32_t unused;
};

/// Launch with pool_blocks(count, most_slots) blocks of pool_threads threads. Sums and scores are
/// apart.
struct pool_parameters {
    const float* sums = nullptr;
    float* scores = nullptr;
    const guarded_slots* guarded = nullptr;
    const pool_row* rows = nullptr;  ///< [count]
    uint32_t count = 0;
    uint32_t most_slots = 0;
    uint32_t width = 1;     ///< odd: of a window of slots around each
    bool greatest = false;  ///< of a window, instead of the mean; NaN loses
    float unknown = 0.0f;
};

KVRT_BOTH constexpr uint32_t pool_stretches(uint32_t most_slots) {
    return most_slots / pool_threads + (most_slots % pool_threads != 0 ? 1 : 0);
}
constexpr uint32_t pool_blocks(uint32_t rows, uint32_t most_slots) {
    return rows * pool_stretches(most_slots);
}

/// What attention gave a slot.
template <class Cx>
struct observed_row {
    const float* present;
    const float* previous;
    uint32_t present_slots;
    uint32_t previous_slots;
    float unknown;

    KVRT_DEVICE float at(uint32_t slot) const {
        float sum = unknown;
        if (slot < present_slots) sum = Cx::template load_constant<float>(present + slot);
        if (slot < previous_slots) sum += Cx::template load_constant<float>(previous + slot);
        return sum;
    }
};

/// The kernel.
template <class Cx>
KVRT_DEVICE void pool_rows(const pool_parameters& call) {
    const uint32_t stretches = pool_stretches(call.most_slots);
    const uint32_t slot = Cx::block() % stretches * pool_threads + Cx::thread();
    const uint32_t index = Cx::block() / stretches;
    if (index >= call.count) return;
    const pool_row& row = call.rows[index];
    const uint32_t slots = Cx::template load_constant<uint32_t>(&row.slots);
    if (slot >= slots) return;
    const observed_row<Cx> observed{call.sums + Cx::template load_constant<uint64_t>(&row.present),
                                    call.sums + Cx::template load_constant<uint64_t>(&row.previous),
                                    Cx::template load_constant<uint32_t>(&row.present_slots),
                                    Cx::template load_constant<uint32_t>(&row.previous_slots),
                                    call.unknown};
    const guarded_slots* const guarded =
        call.guarded + Cx::template load_constant<uint64_t>(&row.guarded);
    const uint32_t end = Cx::template load_constant<uint32_t>(&guarded->before_recent);
    float score = 0.0f;
    if (slot >= end || call.width == 1) {
        score = observed.at(slot);
    } else {
        const float outside = call.greatest ? Cx::bits_to_f32(0xff800000u) : 0.0f;
        for (uint32_t i = 0; i < call.width; ++i) {
            const uint32_t place = slot + i;  // and half the width
            const bool inside = place >= call.width / 2 && place - call.width / 2 < end;
            const float other = inside ? observed.at(place - call.width / 2) : outside;
            if (i == 0) {
                score = other;
            } else if (call.greatest) {
                score = score >= other || other != other ? score : other;
            } else {
                score += other;
            }
        }
        if (!call.greatest) score *= 1.0f / static_cast<float>(call.width);
    }
    Cx::store(call.scores + Cx::template load_constant<uint64_t>(&row.scores) + slot, score);
}

}  // namespace kvrt::kernels
