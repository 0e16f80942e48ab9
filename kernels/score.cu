// score.hpp for the GPU.
#include "kernels/cuda_context.cuh"
#include "kernels/score.hpp"

using namespace kvrt::kernels;

#define KVRT_SCORE_HEADS(name, codes, type, heads)                                               \
    extern "C" __global__ void __launch_bounds__(score_threads, 4)                               \
        kvrt_score_keys_##name##_##heads(const __grid_constant__ triattention_parameters call) { \
        score_keys<cuda_context, codes, type, heads>(call);                                      \
    }
#define KVRT_SCORE(name, codes, type)                                               \
    KVRT_SCORE_HEADS(name, codes, type, 2)                                          \
    KVRT_SCORE_HEADS(name, codes, type, 4)                                          \
    KVRT_SCORE_HEADS(name, codes, type, 8)                                          \
    extern "C" __global__ void __launch_bounds__(score_threads, 4)                  \
        kvrt_measure_rows_##name(const __grid_constant__ measure_parameters call) { \
        measure_rows<cuda_context, codes, type>(call);                              \
    }

KVRT_SCORE(f32, coding::plain, number::f32)
KVRT_SCORE(f16, coding::plain, number::f16)
KVRT_SCORE(bf16, coding::plain, number::bf16)
KVRT_SCORE(int8_token, coding::int8_token, number::f32)
KVRT_SCORE(int4_token, coding::int4_token, number::f32)
KVRT_SCORE(fp8_token, coding::fp8_token, number::f32)
KVRT_SCORE(fp8_e4m3, coding::fp8_e4m3, number::f32)
KVRT_SCORE(fp8_e5m2, coding::fp8_e5m2, number::f32)
