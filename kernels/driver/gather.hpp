// Statistics of queries on the device: their memory, and what gathers them as kv_attend is called.
#pragma once

#include "device/plugin.h"
#include "driver/buffer.hpp"
#include "driver/functions.hpp"
#include "kernels/gather_queries.hpp"

namespace kvrt::cuda {

kernels::query_memory query_memory_of(const kvrt_query_memory& memory);

class query_gatherer {
  public:
    query_gatherer() : gather_{"kvrt_gather_queries"} {}
    query_gatherer(const query_gatherer&) = delete;
    query_gatherer& operator=(const query_gatherer&) = delete;

    /// Once; after a failure it can be called again.
    status create(device_context& device, kernel_functions& functions, uint64_t places,
                  kvrt_query_memory& memory);

    status run(kernel_functions& functions, stream_handle stream,
               const kvrt_gather_queries& gathered);

  private:
    device_buffer memory_;
    kernel_function gather_;
};

}  // namespace kvrt::cuda
