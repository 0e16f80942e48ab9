// compact.hpp for the GPU.
#include "kernels/compact.hpp"
#include "kernels/cuda_context.cuh"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(compact_threads, 3)
    kvrt_compact_lanes(const __grid_constant__ compact_parameters call) {
    compact_lanes<cuda_context>(call);
}
