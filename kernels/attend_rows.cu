// attend_rows.hpp for the GPU: kvrt_attend_rows_<storage>_<most channels>.
#include "kernels/attend_rows.hpp"
#include "kernels/attend_storages.cuh"

using namespace kvrt::kernels;

/// Blocks of threads that registers of a multiprocessor are shared out to.
template <class tiles>
constexpr uint32_t residents = tiles::channels <= 64 && !tiles::coded ? 2 : 1;

#define KVRT_ATTEND_ROWS(storage, tiles)                                           \
    extern "C" __global__ void __launch_bounds__(rows_threads, residents<tiles>)   \
        kvrt_attend_rows_##storage(const __grid_constant__ rows_parameters call) { \
        attend_rows<cuda_context, tiles>(call);                                    \
    }

KVRT_FOR_STORAGES(KVRT_ATTEND_ROWS)
