// score_products.hpp for the GPU.
#include "kernels/cuda_context.cuh"
#include "kernels/score_products.hpp"

using namespace kvrt::kernels;

#define KVRT_GATHER(name, codes, type)                                             \
    extern "C" __global__ void __launch_bounds__(score_threads, 4)                 \
        kvrt_gather_keys_##name(const __grid_constant__ product_parameters call) { \
        gather_keys<cuda_context, codes, type>(call);                              \
    }

KVRT_GATHER(f32, coding::plain, number::f32)
KVRT_GATHER(f16, coding::plain, number::f16)
KVRT_GATHER(bf16, coding::plain, number::bf16)
KVRT_GATHER(int8_token, coding::int8_token, number::f32)
KVRT_GATHER(int4_token, coding::int4_token, number::f32)
KVRT_GATHER(fp8_token, coding::fp8_token, number::f32)
KVRT_GATHER(fp8_e4m3, coding::fp8_e4m3, number::f32)
KVRT_GATHER(fp8_e5m2, coding::fp8_e5m2, number::f32)

extern "C" __global__ void __launch_bounds__(score_threads, 4)
    kvrt_weigh_heads(const __grid_constant__ product_parameters call) {
    weigh_heads<cuda_context>(call);
}

extern "C" __global__ void __launch_bounds__(score_threads, 4)
    kvrt_take_greatest(const __grid_constant__ product_parameters call) {
    take_greatest<cuda_context>(call);
}
