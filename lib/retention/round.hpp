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
    uint64_t recent = 0;  ///< resolved: the newest so many positions stay
    /// As many blocks at the front stay demoted as there are, also where others' rows come: blocks
    /// for these are missing.
    bool stays_demoted = false;

    bool chosen(uint32_t lane) const { return context.chosen_lanes[lane] != 0; }
    uint32_t keep(uint32_t lane) const { return context.keep[lane]; }
    bool any_chosen(const layer_geometry& layer) const {
        bool any = false;
        for (uint32_t lane = layer.first_lane; layer.stores && lane < layer.end_lane(); ++lane) {
            any = any || chosen(lane);
        }
        return any;
    }
};

/// What a policy says of a sequence, resolved; no lanes are chosen yet.
round_plan plan_of(cache& store, retention_context& context, sequence& owner,
                   const kv_policy& policy);

/// Whether every lane of the round has what its scorer wants to have observed, by these rules.
bool has_observations(const round_plan& plan);

/// Scores, selects and moves, in the lanes that context.chosen_lanes says: each is left with
/// context.keep of it, which is less than it has and no less than its guards hold. Lanes that share
/// a set of survivors keep the same number. Errors as of compact_sequence; INTERNAL for a number
/// that cannot be kept.
status run_round(round_plan& plan, compaction_report& report);

/// What a round leaves behind, whoever moves the survivors. Its parts, in order: begin, then
/// find_nothing, or for each layer note_history before the tables change, and end_round;
/// note_outcome in any case.
void begin_round(const round_plan& plan, compaction_report& report);
void find_nothing(const round_plan& plan, compaction_report& report);
void note_history(const round_plan& plan, const layer_geometry& layer, compaction_report& report);
void end_round(const round_plan& plan, compaction_report& report);
void note_outcome(const round_plan& plan, status verdict, const compaction_report& report);

/// Runs body(lane, head of the lane) for the KV heads of a layer's chosen lanes, on all threads.
template <class callable>
void for_each_head(const round_plan& plan, const layer_geometry& layer, const callable& body) {
    plan.store.threads.for_each(layer.kv_heads, [&](uint32_t kv_head) {
        const head_place place = layer.place_of(kv_head);
        if (plan.chosen(place.lane)) body(place.lane, place.head);
    });
}

guard_rules guard_rules_of(const round_plan& plan);
guarded_slots guards_of(const round_plan& plan, uint32_t lane, uint32_t kv_head);

/// Positions that they hold, below next_position.
held_positions held_by_guards(const round_plan& plan);

/// Fills scores row kv_head * group of every KV head of a layer's chosen lanes: one number per
/// candidate slot.
void score_layer(const round_plan& plan, const layer_geometry& layer);

/// Candidates that are kept for their values' range, of each set.
uint32_t value_reserve_of(const kv_policy& policy);

/// What a policy does to scores, whoever made them: draws, reserves, quotas. Of a layer whose heads
/// have sets of their own, or one for all.
void adjust_scores(const round_plan& plan, const layer_geometry& layer);

/// The same for sets common to layers, whose scores joined in totals_of. `place` is a head of a
/// set; its values' ranges are the widest of all layers and heads that share it.
void begin_ranges(const round_plan& plan, const head_place& place);
void note_ranges(const round_plan& plan, const layer_geometry& layer);
void adjust_totals(const round_plan& plan, const head_place& place);

/// Scores of a set common to layers: [slots].
float* totals_of(const round_plan& plan, uint32_t set);

/// Where score_layer left the scores of a lane's KV head: [slots].
float* lane_scores(const round_plan& plan, uint32_t lane, uint32_t kv_head);

/// May the bytes of a block in the sequence's tables change? Not while others read it, and not
/// before the fences of the last steps that read it: this sequence's, and those of sequences that
/// have let go of it.
bool is_private(const round_plan& plan, block_id id);

/// Which set of survivors a lane's KV head has: of those of its layer, of all layers' heads, or the
/// one there is.
inline uint32_t set_of(const round_plan& plan, uint32_t lane, uint32_t kv_head) {
    const bool one = plan.selection == KV_SELECT_UNION || plan.selection == KV_SELECT_PER_LAYER;
    return one ? 0 : plan.store.model.lanes[lane].first_head + kv_head;
}

/// On a device, which alone knows what positions its slots have: between what and what the next
/// number is, which is then the least.
slot_count budget_on_device(const round_plan& plan, uint32_t lane, uint32_t budget);

/// What a lane keeps of a budget, and what it would if it had as many slots: its heads hold
/// different tokens, and all keep the same number.
uint32_t budget_of(const round_plan& plan, uint32_t lane, uint32_t budget);
uint32_t kept_of(const round_plan& plan, uint32_t lane, uint32_t budget);

/// The number of candidates that a set of survivors keeps, where scores do not say less.
uint32_t places_of(const round_plan& plan, uint32_t lane, uint32_t kv_head);

/// Chooses the lanes that have more than they are to keep, and sets what each keeps; where that
/// depends on scores, the most that it may be. False when there is nothing to remove.
bool choose_lanes(round_plan& plan);

/// Whether what lanes keep depends on scores; then, once a layer is scored, sets it, and drops the
/// lanes that keep all from the round.
bool allocates_by_scores(const round_plan& plan);
void allocate_layer(const round_plan& plan, const layer_geometry& layer);

/// Survivors of a lane's KV head: [keep], ascending.
inline uint32_t* survivors_of(const round_plan& plan, uint32_t lane, uint32_t kv_head) {
    return plan.context.survivors.data() + set_of(plan, lane, kv_head) * plan.context.slot_stride;
}

/// The first slot that some head's survivors may leave, or keep: what guards hold at the front does
/// not move, whatever the scores.
uint32_t first_moving_bound(const round_plan& plan, uint32_t lane);

/// The first slot that some head's survivors leave, or keep.
uint32_t first_moving(const round_plan& plan, uint32_t lane);

/// Survivors' observations and positions of a KV head go with them, the latter to `target`, a table
/// whose blocks are of the classes that `store` says.
void move_notes(const round_plan& plan, uint32_t lane, uint32_t kv_head,
                const lane_positions& store, const block_id* target);

/// Begins a lane's move: a table to be, as long as what is kept, so far the same as that there is.
lane_move& begin_move(const round_plan& plan, uint32_t lane);
/// That of a lane of the layer at hand.
lane_move& move_of(const round_plan& plan, uint32_t lane);

/// Puts the table to be in the place of a lane's, and drops what is left over.
void replace_table(const round_plan& plan, uint32_t lane, compaction_report& report);

/// Adds upper bounds of the fresh blocks that compacting a lane takes, by class.
void bound_fresh_blocks(const round_plan& plan, uint32_t lane, uint64_t* needed);

/// Moves the survivors of a layer's chosen lanes to their front, and drops what is left over.
void compact_lanes(const round_plan& plan, const layer_geometry& layer, compaction_report& report);

/// The same for lanes with two layouts: survivors of tile-local formats are coded anew, once.
void bound_fresh_tiles(const round_plan& plan, uint32_t lane, uint64_t* needed);
void compact_tiles(const round_plan& plan, const layer_geometry& layer, compaction_report& report);

}  // namespace kvrt
