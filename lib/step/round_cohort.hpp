// Rounds of policies in pools on a device. The host decides what depends on numbers: which
// sequences and lanes are due, and how many slots of each stay, for guards are positions and what
// they hold always stays (sequence/spans.hpp). The device decides which stay, and moves them,
// behind the step's work on its stream. So tables shrink at once, and nobody waits.
//
// Sequences of a step go together, as far as they share no block that moves (round_targets.hpp).
#pragma once

#include "step/device_rounds.hpp"
#include "step/round_targets.hpp"

namespace kvrt {

/// Who hears what became of a round.
struct round_listener {
    void* user = nullptr;
    void (*told)(void* user, sequence& owner, status verdict, const compaction_report& report);
};

/// Rounds that are enqueued for one step, in order: as part of it, after its end.
class round_cohort {
  public:
    /// `number`: of a step that has just ended, or a new one.
    round_cohort(step_context& context, uint64_t number, const round_listener& listener);
    round_cohort(const round_cohort&) = delete;
    round_cohort& operator=(const round_cohort&) = delete;

    /// Plans a round. It is enqueued with others, by the next flush at the latest.
    void add(sequence& owner, const kv_policy& policy);
    void flush();
    /// The step takes more work from now on; flush does that where there is a round.
    status open();
    /// Behind all of them. Errors of the device.
    status finish();

  private:
    bool plan(sequence& owner, const kv_policy& policy, bool& alone);
    bool plan_count_first(round_plan& plan, status& verdict, bool& alone);
    bool plan_move(round_plan& plan, status& verdict, bool& alone);
    fresh_blocks choose_fresh(round_plan& plan) const;
    status take_fresh(const round_plan& plan, const fresh_blocks& fresh);
    void plan_phases(const round_plan& plan, double* phases) const;
    void plan_lanes(const round_plan& plan);
    void plan_lane(const round_plan& plan, uint32_t lane, const double* phases);
    void plan_sealed(const round_plan& plan, uint32_t lane, kvrt_round_lane& made) const;
    void plan_gathered(const round_plan& plan, const lane_geometry& lane,
                       kvrt_round_scores& scores) const;
    status enqueue(kvrt_round& call);
    bool launch(uint32_t first_round, uint32_t rounds);
    void settle(uint32_t index, const kvrt_round& call, status verdict);
    void settle_count(uint32_t index, const kvrt_round& call, status verdict);
    void move_lanes(const round_plan& plan, uint32_t index);
    /// The table to be of a pending round's lane, where some of it is fresh.
    block_id* targets_of(uint32_t index, uint32_t lane) const;

    step_context& context_;
    device_rounds& rounds_;
    uint64_t number_;
    round_listener listener_;
    bool open_ = false;
    uint32_t count_ = 0;       ///< of pending rounds
    uint32_t lane_count_ = 0;  ///< planned
    uint64_t used_targets_ = 0;
};

/// kv_compress outside of steps, on a stream of the device's own.
status compress_on_device(step_context& context, sequence& owner, const kv_policy& policy,
                          compaction_report& report);

}  // namespace kvrt
