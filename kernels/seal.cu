// seal.hpp for the GPU.
#include "kernels/cuda_context.cuh"
#include "kernels/seal.hpp"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(seal_threads, 4)
    kvrt_seal_blocks(const __grid_constant__ seal_parameters call) {
    seal_listed_blocks<cuda_context>(call);
}
