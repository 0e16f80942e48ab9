// attend_rows.hpp for the GPU: kvrt_attend_rows_<storage>_<most channels>.
#include "kernels/attend_rows.hpp"
#include "kernels/attend_storages.cuh"

using namespace kvrt::kernels;

#define KVRT_ATTEND_ROWS(storage, tiles)                                           \
    extern "C" __global__ void __launch_bounds__(rows_threads, 1)                  \
        kvrt_attend_rows_##storage(const __grid_constant__ rows_parameters call) { \
        attend_rows<cuda_context, tiles>(call);                                    \
    }

KVRT_FOR_STORAGES(KVRT_ATTEND_ROWS)
