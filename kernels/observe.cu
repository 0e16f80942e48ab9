// observe.hpp, pool.hpp and give.hpp for the GPU.
#include "kernels/cuda_context.cuh"
#include "kernels/give.hpp"
#include "kernels/observe.hpp"
#include "kernels/pool.hpp"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(observe_threads, 8)
    kvrt_observe_rows(const __grid_constant__ observe_parameters call) {
    observe_rows<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(pool_threads)
    kvrt_pool_rows(const __grid_constant__ pool_parameters call) {
    pool_rows<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(score_threads)
    kvrt_give_scores(const __grid_constant__ give_parameters call) {
    give_scores<cuda_context>(call);
}
