// attend_decode.hpp and attend_join.hpp for the GPU: kvrt_attend_decode_<storage>_<most channels>.
#include "kernels/attend_decode.hpp"
#include "kernels/attend_join.hpp"
#include "kernels/attend_storages.cuh"

using namespace kvrt::kernels;

#define KVRT_ATTEND_DECODE(storage, tiles)                                             \
    extern "C" __global__ void __launch_bounds__(attend_threads, 1)                    \
        kvrt_attend_decode_##storage(const __grid_constant__ attend_parameters call) { \
        attend_pieces<cuda_context, tiles>(call);                                      \
    }

KVRT_FOR_STORAGES(KVRT_ATTEND_DECODE)

extern "C" __global__ void __launch_bounds__(attend_threads, 1)
    kvrt_attend_join(const __grid_constant__ attend_parameters call) {
    join_pieces<cuda_context>(call);
}
