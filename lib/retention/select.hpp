// From scores to survivors: guards say which slots may go, selection says which of them stay.
#pragma once

#include <cstdint>

#include "sequence/slots.hpp"
#include "sequence/spans.hpp"

namespace kvrt {

struct guard_rules {
    uint64_t prompt_tokens = 0;  ///< positions below stay; 0: the prompt is not protected
    uint64_t sinks = 0;          ///< positions below stay
    uint64_t recent = 0;         ///< positions >= next_position - recent stay
    const position_range* pinned = nullptr;
    uint32_t pinned_count = 0;  ///< at most max_pinned_ranges, in any order, may overlap
};

struct guarded_slots {
    slot_ranges candidates;        ///< what may go
    uint32_t protected_slots = 0;  ///< all other slots
    uint32_t prompt_slots = 0;     ///< of those: held by the prompt rule (for PROMPT_ON_TOP)
};

/// The same as positions below next_position: ascending and disjoint.
struct held_positions {
    std::array<held_range, max_pinned_ranges + 2> range = {};
    uint32_t count = 0;

    const held_range* begin() const { return range.data(); }
    const held_range* end() const { return range.data() + count; }
};
held_positions held_by(const guard_rules& rules, uint64_t next_position);

/// Which slots of one lane and KV head may go. Logarithmic in the number of slots.
guarded_slots apply_guards(const guard_rules& rules, const slot_positions& positions);

/// How many slots a round keeps: at most `slots`, never less than what is protected, and `budget`
/// in between; on top of that the protected prompt when it does not count.
uint32_t retained_after_round(uint32_t slots, uint32_t budget, bool prompt_on_top,
                              const guarded_slots& guarded);

/// Writes the survivors of [0, slots) in ascending order: every slot that is no candidate, and the
/// candidates with the highest scores[slot] so that `keep` slots stay in all. Among equal scores
/// the lowest slot wins; -0 equals 0; NaN ranks behind all numbers. Exact, deterministic, linear,
/// no heap. protected <= keep <= slots. `survivors` has room for `keep`. Returns `keep`.
uint32_t select_top(const float* scores, const slot_ranges& candidates, uint32_t slots,
                    uint32_t keep, uint32_t* survivors);

}  // namespace kvrt
