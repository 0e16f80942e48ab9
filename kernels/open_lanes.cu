// open_lanes.hpp for the GPU.
#include "kernels/cuda_context.cuh"
#include "kernels/open_lanes.hpp"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(open_lanes_threads, 4)
    kvrt_open_lanes(const __grid_constant__ open_lanes_parameters call) {
    open_lanes<cuda_context>(call);
}

extern "C" __global__ void __launch_bounds__(open_lanes_threads, 4)
    kvrt_open_survivors(const __grid_constant__ open_survivors_parameters call) {
    open_survivors<cuda_context>(call);
}
