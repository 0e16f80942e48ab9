// Observed attention on the device: memory of its sums, and the launch that adds them up.
#pragma once

#include "device/plugin.h"
#include "driver/buffer.hpp"
#include "driver/functions.hpp"
#include "kernels/observe.hpp"

namespace kvrt::cuda {

class observed_sums {
  public:
    observed_sums() = default;
    observed_sums(const observed_sums&) = delete;
    observed_sums& operator=(const observed_sums&) = delete;

    /// Once.
    status create(device_context& device, kvrt_sums_memory& memory);
    /// Of a step: before the first one nothing has been written.
    status begin(stream_handle stream);

  private:
    device_context* device_ = nullptr;
    device_buffer sums_, marks_;
    uint64_t mark_bytes_ = 0;
    bool begun_ = false;
};

/// Where attention keeps weights.
kernels::kept_weights kept_of(const kvrt_attend_rows& rows);

/// What rows of a wave pay to slots, from the weights that its attention has kept. `captured`: in
/// whatever step.
status launch_observe(kernel_functions& functions, stream_handle stream, bool captured,
                      const kvrt_attend_rows& rows, uint32_t wave);

}  // namespace kvrt::cuda
