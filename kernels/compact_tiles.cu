// compact_tiles.hpp for the GPU.
#include "kernels/compact_tiles.hpp"
#include "kernels/cuda_context.cuh"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(seal_threads, 4)
    kvrt_compact_tiles(const __grid_constant__ compact_tiles_parameters call) {
    compact_tiles<cuda_context>(call);
}
