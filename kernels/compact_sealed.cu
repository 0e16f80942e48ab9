// compact_sealed.hpp for the GPU.
#include "kernels/compact_sealed.hpp"
#include "kernels/cuda_context.cuh"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(compact_threads, 3)
    kvrt_compact_sealed_lanes(const __grid_constant__ compact_sealed_parameters call) {
    compact_sealed_lanes<cuda_context>(call);
}
