// write.hpp for the GPU.
#include "kernels/cuda_context.cuh"
#include "kernels/write.hpp"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(write_threads)
    kvrt_write_f32(const __grid_constant__ write_parameters call) {
    write_rows<cuda_context, number::f32, false>(call);
}
extern "C" __global__ void __launch_bounds__(write_threads)
    kvrt_write_f16(const __grid_constant__ write_parameters call) {
    write_rows<cuda_context, number::f16, false>(call);
}
extern "C" __global__ void __launch_bounds__(write_threads)
    kvrt_write_bf16(const __grid_constant__ write_parameters call) {
    write_rows<cuda_context, number::bf16, false>(call);
}
extern "C" __global__ void __launch_bounds__(write_threads)
    kvrt_write_elaborate_f32(const __grid_constant__ write_parameters call) {
    write_rows<cuda_context, number::f32, true>(call);
}
extern "C" __global__ void __launch_bounds__(write_threads)
    kvrt_write_elaborate_f16(const __grid_constant__ write_parameters call) {
    write_rows<cuda_context, number::f16, true>(call);
}
extern "C" __global__ void __launch_bounds__(write_threads)
    kvrt_write_elaborate_bf16(const __grid_constant__ write_parameters call) {
    write_rows<cuda_context, number::bf16, true>(call);
}
