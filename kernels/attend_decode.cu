// attend_decode.hpp and attend_join.hpp for the GPU: kvrt_attend_decode_<storage>_<most channels>.
#include "kernels/attend_codes.hpp"
#include "kernels/attend_decode.hpp"
#include "kernels/attend_join.hpp"
#include "kernels/cuda_context.cuh"

using namespace kvrt::kernels;

#define KVRT_ATTEND_DECODE(name, tiles)                             \
    extern "C" __global__ void __launch_bounds__(attend_threads, 1) \
        name(const __grid_constant__ attend_parameters call) {      \
        attend_pieces<cuda_context, tiles>(call);                   \
    }

using f16_64 = half_tiles<cuda_context, number::f16, 64>;
using f16_128 = half_tiles<cuda_context, number::f16, 128>;
using f16_256 = half_tiles<cuda_context, number::f16, 256>;
using bf16_64 = half_tiles<cuda_context, number::bf16, 64>;
using bf16_128 = half_tiles<cuda_context, number::bf16, 128>;
using bf16_256 = half_tiles<cuda_context, number::bf16, 256>;
using bytes_64 = code_tiles<cuda_context, false, false, 64>;
using bytes_128 = code_tiles<cuda_context, false, false, 128>;
using bytes_256 = code_tiles<cuda_context, false, false, 256>;
using nibbles_64 = code_tiles<cuda_context, true, true, 64>;
using nibbles_128 = code_tiles<cuda_context, true, true, 128>;
using nibbles_256 = code_tiles<cuda_context, true, true, 256>;
using bytes_nibbles_64 = code_tiles<cuda_context, false, true, 64>;
using bytes_nibbles_128 = code_tiles<cuda_context, false, true, 128>;
using bytes_nibbles_256 = code_tiles<cuda_context, false, true, 256>;

KVRT_ATTEND_DECODE(kvrt_attend_decode_f16_64, f16_64)
KVRT_ATTEND_DECODE(kvrt_attend_decode_f16_128, f16_128)
KVRT_ATTEND_DECODE(kvrt_attend_decode_f16_256, f16_256)
KVRT_ATTEND_DECODE(kvrt_attend_decode_bf16_64, bf16_64)
KVRT_ATTEND_DECODE(kvrt_attend_decode_bf16_128, bf16_128)
KVRT_ATTEND_DECODE(kvrt_attend_decode_bf16_256, bf16_256)
KVRT_ATTEND_DECODE(kvrt_attend_decode_bytes_64, bytes_64)
KVRT_ATTEND_DECODE(kvrt_attend_decode_bytes_128, bytes_128)
KVRT_ATTEND_DECODE(kvrt_attend_decode_bytes_256, bytes_256)
KVRT_ATTEND_DECODE(kvrt_attend_decode_nibbles_64, nibbles_64)
KVRT_ATTEND_DECODE(kvrt_attend_decode_nibbles_128, nibbles_128)
KVRT_ATTEND_DECODE(kvrt_attend_decode_nibbles_256, nibbles_256)
KVRT_ATTEND_DECODE(kvrt_attend_decode_bytes_nibbles_64, bytes_nibbles_64)
KVRT_ATTEND_DECODE(kvrt_attend_decode_bytes_nibbles_128, bytes_nibbles_128)
KVRT_ATTEND_DECODE(kvrt_attend_decode_bytes_nibbles_256, bytes_nibbles_256)

extern "C" __global__ void __launch_bounds__(attend_threads, 1)
    kvrt_attend_join(const __grid_constant__ attend_parameters call) {
    join_pieces<cuda_context>(call);
}
