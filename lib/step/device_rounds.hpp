// What rounds of policies on a device work with: memory there, what the host plans in, and which
// policies there are. round_cohort.hpp runs them.
#pragma once

#include "retention/compact.hpp"
#include "retention/round.hpp"
#include "step/counted_rounds.hpp"

namespace kvrt {

struct step_context;

/// Doubles of phases that a round of TriAttention may have for a layer.
uint64_t most_phases(const cache& store, uint32_t layer);

/// Scores that a number of each slot goes into: the sum of observed attention, or the host's.
bool goes_by_observation(uint32_t scorer);

struct device_rounds {
    struct pending_round {
        sequence* owner = nullptr;
        kv_policy policy;
        compaction_report report;
        kvrt_round_guards guards;
        bool stays_demoted = false;  ///< as round_plan
        bool fresh = false;          ///< some lanes go to blocks of `targets`
        uint32_t counts = 0;         ///< KV_ALLOCATE_*: lanes are counted; 0: they move
    };
    /// Which lane of which pending round one of the launch is.
    struct origin {
        uint32_t round = 0, lane = 0;
    };

    bool prepared = false;
    uint64_t moments_word = 0;     ///< in the device's table: query_moments that the host gave
    uint64_t moments_written = 0;  ///< as statistics_store::given_changes
    uint32_t most_rounds = 0;      ///< at once
    uint64_t phase_stride = 0;
    uint64_t sets = 0;                    ///< numbered so far, as position_spans::set
    host_array<uint32_t> kind_of;         ///< [lanes]: alike in how they are stored and scored
    host_array<uint32_t> run_of;          ///< [lanes]: of one kind side by side, in their order
    host_array<uint64_t> first_phase;     ///< [layers]: those of layers that rotate alike are one
    host_array<pending_round> pending;    ///< [most_rounds]
    host_array<kvrt_round_lane> planned;  ///< [most_rounds * lanes]
    host_array<kvrt_round_lane> lanes;    ///< the same, as they go together
    host_array<origin> planned_origins, origins;
    host_array<uint32_t> order;      ///< [most_rounds * lanes]: of planned lanes
    host_array<uint32_t> first_set;  ///< [most_rounds]: in the bundle at hand
    host_array<double> phases;       ///< [most_rounds][phase_stride]
    host_array<block_id> targets;    ///< tables to be of pending rounds, lane by lane
    host_array<uint64_t> target_at;  ///< [most_rounds][lanes]: where
    counted_rounds counted;

    /// Before the device's table is created: where the words for this are.
    void measure(const step_context& context, uint64_t& words);
    /// When the pool is created: what attention reads after rounds, it may capture before.
    status create(step_context& context);
    /// When a sequence first has a policy: memory of the device and of the host. NO_MEMORY; it can
    /// be called again then.
    status prepare(step_context& context);

    /// Into the device's table, where the host has given others: they go up with the next upload.
    void write_moments(step_context& context);

    /// Explicit positions of a lane, at addresses of the device, in blocks that are sealed or not.
    position_store positions_of(const step_context& context, uint32_t lane, bool sealed) const;
};

/// Explicit positions of a lane's KV head, the first `count`, from the device: waits for it.
status read_positions(step_context& context, const sequence& owner, uint32_t lane, uint32_t head,
                      uint64_t count, uint32_t* positions);

/// UNSUPPORTED, by name, what rounds on a device do not do; of a policy that check_policy likes.
status check_policy_on_device(const step_context& context, const kv_policy& policy);
/// And what its rounds work in is there.
status prepare_policy_on_device(step_context& context, const kv_policy& policy);

}  // namespace kvrt
