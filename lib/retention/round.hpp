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

/// May the bytes of a block in the sequence's tables change? Not while others read it, and not
/// before the fences of the last steps that read it: this sequence's, and those of sequences that
/// have let go of it.
bool is_private(const round_plan& plan, block_id id);

/// Survivors of a KV head: [keep], ascending.
inline const uint32_t* survivors_of(const round_plan& plan, uint32_t head, bool common) {
    return plan.context.survivors.data() + (common ? 0 : head) * plan.context.slot_stride;
}

/// The first slot that some head's survivors may leave, or keep: what guards hold at the front does
/// not move, whatever the scores.
uint32_t first_moving_bound(const round_plan& plan, uint32_t lane);

/// The first slot that some head's survivors leave, or keep.
uint32_t first_moving(const round_plan& plan, uint32_t lane, bool common);

/// Survivors' positions of a KV head go with them, to `target`, a table whose blocks are of the
/// classes that `store` says.
void move_positions(const round_plan& plan, uint32_t lane, const uint32_t* survivors,
                    uint32_t kv_head, const lane_positions& store, const block_id* target);

/// Puts `target` in the place of a lane's table, and drops what is left over.
void replace_table(const round_plan& plan, uint32_t lane, const block_id* target,
                   compaction_report& report);

/// Adds upper bounds of the fresh blocks that compacting a lane takes, by class.
void bound_fresh_blocks(const round_plan& plan, uint32_t lane, uint64_t* needed);

/// Moves the survivors (context.survivors, row per KV head; one row for all when `common`) of a
/// lane to its front, and drops what is left over.
void compact_lane(const round_plan& plan, uint32_t lane, bool common, compaction_report& report);

/// The same for lanes with tile-local formats, whose survivors are coded anew, once.
void bound_fresh_tiles(const round_plan& plan, uint32_t lane, uint64_t* needed);
void compact_tiles(const round_plan& plan, uint32_t lane, bool common, compaction_report& report);

}  // namespace kvrt
