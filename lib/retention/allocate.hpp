// How many slots each layer, or each head, keeps.
#pragma once

#include "retention/rank.hpp"

namespace kvrt {

/// PyramidKV (arXiv 2406.02069, as kvpress has it): from the first layer to the last budgets fall
/// on a line, around `budget`.
struct pyramid_shape {
    uint32_t layers = 1;
    uint32_t slots = 0;   ///< cached before the round
    uint32_t budget = 0;  ///< mean of the layers, at most `slots`
    uint32_t window = 64;
    uint32_t steepness = 20;  ///< beta, 1 to 4096: the last layer gets budget / beta
};

/// budgets[layers], none above `slots`, whose sum is layers * budget. Numbers between integers are
/// rounded down, and what is missing goes to those that lost most, the lowest layer first.
/// All are `budget` unless slots >= greatest >= least >= window.
void allocate_pyramid(const pyramid_shape& shape, uint32_t* budgets);

/// One head's part in Ada-KV (arXiv 2407.11550).
struct head_share {
    const float* scores = nullptr;  ///< in
    slot_ranges candidates;         ///< in
    uint32_t safe = 0;              ///< in: its best so many stay, whatever others have
    uint32_t kept = 0;              ///< out: candidates that this head keeps, its best ones
    rank_bound safeguard;           ///< what the safe ones reach
};

/// int(alpha * kept) of kvpress's safeguard, less what a head's guards hold anyway.
uint32_t safe_candidates(double alpha, uint32_t kept_slots, uint32_t protected_slots);

/// Fills `kept` of all heads of a layer, in sum `total` or all candidates: the safe ones, then the
/// best of all heads. Among equal scores the lowest head wins, and in it the lowest slot. The safe
/// ones, of which no head asks for more than it has candidates, are at most `total`.
void allocate_heads(head_share* heads, uint32_t count, uint64_t total);

}  // namespace kvrt
