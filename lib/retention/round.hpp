// The parts of one round, for compact.cpp: what is kept, how slots are scored, how a lane moves.
#pragma once

#include "retention/compact.hpp"
#include "retention/select.hpp"
#include "retention/triattention.hpp"

namespace kvrt {

struct round_plan {
    cache& store;
    retention_context& context;
    sequence& owner;
    const kv_policy& policy;
    uint32_t selection = KV_SELECT_PER_LAYER_PER_HEAD;  ///< resolved
    uint32_t keep = 0;                                  ///< slots a lane keeps, if it has more
};

guarded_slots guards_of(const round_plan& plan, uint32_t lane, uint32_t kv_head);

/// Fills scores row kv_head * group of every KV head of a lane: one number per candidate slot.
void score_lane(const round_plan& plan, uint32_t lane);

/// Where score_lane left the scores of a KV head: [slots].
float* lane_scores(const round_plan& plan, uint32_t lane, uint32_t kv_head);

/// Upper bound of the fresh blocks that compacting a lane takes.
uint32_t fresh_blocks_bound(const round_plan& plan, uint32_t lane);

/// Moves the survivors (context.survivors, row per KV head; one row for all when `common`) of a
/// lane to its front, and drops what is left over.
void compact_lane(const round_plan& plan, uint32_t lane, bool common, compaction_report& report);

}  // namespace kvrt
