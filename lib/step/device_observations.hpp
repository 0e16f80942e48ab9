// Observed attention of pools on a device: sums per slot lie there, what is known of them (which
// array, of how many slots and queries) is the host's, as ever. Attention keeps the weights of
// rows that reserve has listed, and adds them up behind its output.
#pragma once

#include "attention/attend.hpp"
#include "device/plugin.h"
#include "retention/observations.hpp"

namespace kvrt {

struct step;
struct step_context;

/// Rows of a step's item that are listed together, and of which weights are kept.
struct kept_part {
    uint32_t item = 0;
    uint32_t first_row = 0, end_row = 0;  ///< of the item
    uint32_t kept = 0;                    ///< where, as kvrt_attend_sequence has it
    uint32_t wave = 0;
};

struct device_observations {
    host_array<uint32_t> rows;             ///< [places][items]: the last ones that may be observed
    host_array<kept_part> parts;           ///< [places][place_parts], of views that lead
    uint32_t place_parts = 0;              ///< 0: the pool does not observe
    uint32_t part_count = 0;               ///< of the step that is planned
    host_array<kvrt_observe_item> listed;  ///< of one lane
    host_array<uint32_t> listed_items;     ///< items that are among them

    status create(const step_context& context, uint32_t places, uint32_t most_parts_of_view);
    /// Before views are planned.
    void plan(const step& target);
    /// What a view's waves keep.
    uint32_t note_kept(const step& target, const kvrt_attend_plan& plan);
};

/// What kv_attend is to observe over a lane, from the parts of its view.
void observe_on_device(step& target, uint32_t lane, const kept_part* parts, uint32_t part_count,
                       kvrt_attend_rows& rows);
/// It has been enqueued.
void note_observed_on_device(step& target, uint32_t lane, const kvrt_attend_rows& rows);

/// Sums go with a fork, behind all that was enqueued.
status copy_sums(step_context& context, const sequence& parent, const kv_seq* children,
                 uint32_t count);

/// As read_observations: waits for the device.
status read_sums(step_context& context, const sequence& owner, uint32_t lane, uint32_t kv_head,
                 uint32_t slots, float* scores);

/// Where a round finds them.
kvrt_round_sums sums_of(const observation_store& observations, const sequence& owner,
                        uint32_t lane);

}  // namespace kvrt
