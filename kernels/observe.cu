// observe.hpp for the GPU.
#include "kernels/cuda_context.cuh"
#include "kernels/observe.hpp"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(observe_threads, 8)
    kvrt_observe_rows(const __grid_constant__ observe_parameters call) {
    observe_rows<cuda_context>(call);
}
