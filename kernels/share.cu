// share.hpp for the GPU.
#include "kernels/cuda_context.cuh"
#include "kernels/share.hpp"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(share_threads)
    kvrt_share_plans(const __grid_constant__ share_parameters call) {
    share_plans<cuda_context>(call);
}
