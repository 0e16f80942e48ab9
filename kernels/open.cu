// open.hpp for the GPU.
#include "kernels/cuda_context.cuh"
#include "kernels/open.hpp"

using namespace kvrt::kernels;

/// Of a multiprocessor, at least. Told so, ptxas takes the registers there are, and spills none.
constexpr int open_blocks_at_once = 4;

extern "C" __global__ void __launch_bounds__(open_threads, open_blocks_at_once)
    kvrt_open_f32(const __grid_constant__ open_parameters call) {
    open_rows<cuda_context, number::f32>(call);
}
extern "C" __global__ void __launch_bounds__(open_threads, open_blocks_at_once)
    kvrt_open_f16(const __grid_constant__ open_parameters call) {
    open_rows<cuda_context, number::f16>(call);
}
extern "C" __global__ void __launch_bounds__(open_threads, open_blocks_at_once)
    kvrt_open_bf16(const __grid_constant__ open_parameters call) {
    open_rows<cuda_context, number::bf16>(call);
}
