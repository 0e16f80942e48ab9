// Undoing what reserve did to a sequence's tables.
#pragma once

#include "step/step.hpp"

namespace kvrt {

/// Puts lanes [0, lane_count) of an item back to before reserve.
void undo_lanes(step& target, uint32_t item_index, uint32_t lane_count);

}  // namespace kvrt
