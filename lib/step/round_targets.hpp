// Into which blocks the survivors of a round on a device go: most of them in place. Fresh ones take
// the places of those that others read, and of those whose layout changes: of a lane that seals,
// how much is sealed afterwards.
//
// Of tiles that follows from how many slots stay. Of demoted rows, which never are opened, each
// block up to the last of them is a demoted one, as on the CPU. How many of them stay, scores say,
// but for what guards hold: where that is all that is not demoted, the number is known; else it is
// the most that it may be, and some rows are demoted early.
#pragma once

#include "retention/round.hpp"

namespace kvrt {

/// Of a lane's table to be.
struct round_target {
    uint32_t first = 0;  ///< block that may change
    uint32_t kept_blocks = 0;
    uint32_t sealed_blocks = 0;
    uint32_t opened_slots = 0;  ///< as in lane_state
};
round_target round_target_of(const round_plan& plan, uint32_t lane);

/// May the bytes of a block change behind all that was enqueued? Not while others have it, and with
/// host fences not before the host's kernels are done.
bool may_change(const cache& store, const sequence& owner, block_id id);

/// Do the newest stay, besides what guards hold? Not where some others are held by their values, or
/// as the best of their segment.
bool keeps_newest(const kv_policy& policy);

/// Calls visit(lane, index in its table, class, does another read what is there) for each fresh
/// block of the chosen lanes.
template <class callable>
void for_each_fresh(const round_plan& plan, const callable& visit) {
    const cache& store = plan.store;
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        if (!plan.chosen(lane)) continue;
        const lane_geometry& geometry = store.model.lanes[lane];
        const lane_state& state = plan.owner.lanes[lane];
        const round_target target = round_target_of(plan, lane);
        for (uint32_t i = target.first; i < target.kept_blocks; ++i) {
            const bool sealed = i < target.sealed_blocks;
            const bool stays = may_change(store, plan.owner, state.table[i]);
            if (stays && sealed == (i < state.sealed_blocks)) continue;
            visit(lane, i, sealed ? geometry.sealed_class_index : geometry.class_index, !stays);
        }
    }
}

struct fresh_blocks {
    uint64_t count = 0;
    uint64_t needed[max_block_classes] = {};
    uint64_t entries = 0;  ///< of the tables that have some
    bool shared = false;   ///< others read what they replace
};
fresh_blocks count_fresh(const round_plan& plan);

/// A lane that seals has moved: its table follows.
void settle_sealed(const round_plan& plan, uint32_t lane, compaction_report& report);

}  // namespace kvrt
