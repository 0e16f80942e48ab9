// Scores that the host gives to sequences of a pool on a device (KV_SCORER_HOST): by position, from
// the host's memory or the device's, into the sequence's sums there, behind all that was enqueued.
#pragma once

#include "device/plugin.h"
#include "sequence/cache.hpp"

namespace kvrt {

struct step_context;

/// Scores of all KV heads of a layer, one head behind the other.
struct given_scores {
    uint32_t layer = 0;
    uint64_t first_position = 0, tokens = 0;
    const float* scores = nullptr;
    bool on_device = false;  ///< behind all that `stream` has
    void* stream = nullptr;  ///< null: that of an open step, or of the last, or the pool's own
};

struct device_given {
    bool prepared = false;
    host_array<kvrt_given_lane> lanes;  ///< of one layer
    uint64_t number = 0;                ///< of the last step that was begun for scores,
    void* stream = nullptr;             ///< on this stream of the host's

    /// When a sequence first has such a policy: memory of the device and of the host. NO_MEMORY; it
    /// can be called again then.
    status prepare(step_context& context);
};

/// AGAIN: there is no room for them to go up, and nothing has changed.
status give_on_device(step_context& context, const sequence& owner, const given_scores& given);

}  // namespace kvrt
