// Scores that the host gives for rounds of KV_SCORER_HOST, from its memory or the device's, into
// the sums of their sequence: what goes up for that has pinned memory of its own.
#pragma once

#include "device/plugin.h"
#include "driver/functions.hpp"
#include "driver/staging.hpp"

namespace kvrt::cuda {

class score_giver {
  public:
    score_giver() : give_{"kvrt_give_scores"} {}
    score_giver(const score_giver&) = delete;
    score_giver& operator=(const score_giver&) = delete;

    /// Once, for so many bytes in flight; after a failure it can be called again.
    status create(device_context& device, kernel_functions& functions, uint64_t bytes);

    /// AGAIN: nothing was enqueued.
    status run(kernel_functions& functions, stream_handle stream, const kvrt_given_scores& given);

  private:
    staging_ring ring_;
    kernel_function give_;
};

}  // namespace kvrt::cuda
