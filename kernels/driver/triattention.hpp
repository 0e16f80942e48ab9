// How keys of a cohort are scored by TriAttention: by the kernel that sums itself (score.hpp), or
// by matrix products (score_products.hpp), or by whichever was faster on this device. The kernel,
// until a host asks for something else.
#pragma once

#include "device/plugin.h"
#include "driver/measured_choice.hpp"
#include "driver/score_products.hpp"
#include "kvrt/kv_cuda.h"

namespace kvrt::cuda {

class triattention_scorer {
  public:
    /// Loads the library and takes the workspace when products are first asked for; both stay.
    /// After an error everything is as it was.
    status set(device_context& device, kernel_functions& functions, const kvrt_scoring& wanted);

    /// `sums` and `gather`: kernels of the keys' format; `sums` of heads_at_once(call.group).
    status launch(kernel_functions& functions, stream_handle stream,
                  kernels::triattention_parameters& call, kernel_function& sums,
                  kernel_function& gather);

    void report(kvrt_scoring_report& out) const;

  private:
    status sum(kernel_functions& functions, stream_handle stream,
               kernels::triattention_parameters& call, kernel_function& sums);
    status multiply(stream_handle stream, kernels::triattention_parameters& call,
                    kernel_function& gather);
    status measure(kernel_functions& functions, stream_handle stream,
                   kernels::triattention_parameters& call, kernel_function& sums,
                   kernel_function& gather);

    uint32_t method_ = KV_CUDA_SCORE_KERNEL;
    uint32_t flags_ = 0;
    product_scorer products_;
    measured_choice choice_;
    uint64_t summed_ = 0, multiplied_ = 0;  ///< cohorts
    char reason_[128] = {};                 ///< why products were last ruled out
};

}  // namespace kvrt::cuda
