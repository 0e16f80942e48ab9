// Which lanes of rounds on a device have survivors in common, and in what order lanes go there.
#pragma once

#include "step/device_rounds.hpp"

namespace kvrt {

inline bool is_common_to_layers(uint32_t selection) {
    return selection == KV_SELECT_UNION || selection == KV_SELECT_PER_HEAD;
}

/// Lanes and heads that share a set need the same tokens: INVALID where they may have others.
status check_sets_on_device(const round_plan& plan);

/// kvrt_round_lane::bundle of a layer's lanes.
uint32_t bundle_of(const device_rounds& rounds, const round_plan& plan, uint32_t layer);

/// A lane that is to be counted, with the others of its layer.
void bundle_counted(const round_plan& plan, uint32_t layer, kvrt_round_lane& made);

/// Of the planned lanes those of some rounds, into rounds.lanes: by kind, and bundles behind them,
/// whose sets are numbered. Returns how many.
uint32_t order_planned(step_context& context, uint32_t first_round, uint32_t rounds,
                       uint32_t planned);

}  // namespace kvrt
