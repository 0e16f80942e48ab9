// select.hpp for the GPU.
#include "kernels/cuda_context.cuh"
#include "kernels/select.hpp"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(select_threads)
    kvrt_select_survivors(const __grid_constant__ select_parameters call) {
    select_survivors<cuda_context>(call);
}
