// copy.hpp for the GPU.
#include "kernels/copy.hpp"
#include "kernels/cuda_context.cuh"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(copy_threads)
    kvrt_copy_blocks(const __grid_constant__ copy_parameters call) {
    copy_blocks<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(copy_threads)
    kvrt_gather_blocks(const __grid_constant__ gather_parameters call) {
    gather_blocks<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(copy_threads)
    kvrt_scatter_blocks(const __grid_constant__ gather_parameters call) {
    scatter_blocks<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(copy_threads)
    kvrt_zero_blocks(const __grid_constant__ gather_parameters call) {
    zero_blocks<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(spread_threads)
    kvrt_spread_lines(const __grid_constant__ spread_parameters call) {
    spread_lines<cuda_context>(call);
}
