// Rounds on a device whose allocators go by scores (ADAPTIVE, THRESHOLD). How many slots a lane
// keeps only the device can say, tables shrink only when the host knows it, and nobody waits. So
// such a round takes two goes:
//
//   counted   lanes are scored, and what each would keep goes to words of the host
//   moved     once that has come, at the end of the sequence's next step, or when somebody asks
//             again: each lane keeps as many, the best by their scores of then
//
// In between the sequence may grow, and keeps as many as were counted all the same. A count does
// not outlive its policy, another round, or a truncation.
#pragma once

#include "retention/round.hpp"

namespace kvrt {

struct counted_rounds {
    /// Of one sequence's place.
    struct count {
        uint64_t step = 0;  ///< that writes the words; 0: none does
        bool holds = false;
        uint32_t generation = 0;   ///< of the sequence that it is of,
        uint32_t compactions = 0;  ///< after so many of it
        kv_policy policy;
    };

    host_array<count> counts;   ///< [max sequences]
    uint32_t* words = nullptr;  ///< [max sequences][lanes], of the host

    bool prepared() const { return words != nullptr; }
    status prepare(cache& store, uint32_t* memory);

    uint32_t* words_of(const cache& store, const sequence& owner) const;

    /// Has somebody counted for this sequence, and it still holds?
    const count* find(const cache& store, const sequence& owner) const;
    /// The words of `owner` are written by `step`, for a round of this policy.
    void begin(const cache& store, const sequence& owner, const kv_policy& policy, uint64_t step);
    void forget(const cache& store, const sequence& owner);
    /// But for rounds of this policy, which may be NULL.
    void forget_others(const cache& store, const sequence& owner, const kv_policy* policy);
};

enum class count_state { none, on_its_way, here };

/// What is known for a round of this policy.
count_state find_count(const round_plan& plan, const counted_rounds& rounds);

/// Lanes keep what was counted; those that keep all are dropped from the round. False where that
/// leaves none.
bool apply_count(const round_plan& plan, const counted_rounds& rounds);

/// A round that was counted at an earlier step's end, or for a host that has not asked again, and
/// can move now: its policy. Null: there is none.
const kv_policy* policy_to_move(const cache& store, const counted_rounds& rounds,
                                const sequence& owner);

/// What a lane's count is made of.
void plan_count(const round_plan& plan, uint32_t lane, const counted_rounds& rounds,
                kvrt_round_lane& made);

}  // namespace kvrt
