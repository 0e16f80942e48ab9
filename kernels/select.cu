// candidates.hpp, places.hpp, normalise.hpp, select.hpp, allocate.hpp and quota.hpp for the GPU.
#include "kernels/allocate.hpp"
#include "kernels/cuda_context.cuh"
#include "kernels/normalise.hpp"
#include "kernels/places.hpp"
#include "kernels/quota.hpp"
#include "kernels/select.hpp"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(guard_threads)
    kvrt_find_candidates(const __grid_constant__ guard_parameters call) {
    find_candidates<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(score_threads)
    kvrt_score_places(const __grid_constant__ place_parameters call) {
    score_places<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(normalise_threads)
    kvrt_normalise_and_reduce(const __grid_constant__ normalise_parameters call) {
    normalise_and_reduce<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(normalise_threads)
    kvrt_join_rows(const __grid_constant__ join_parameters call) {
    join_rows<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(select_threads)
    kvrt_select_survivors(const __grid_constant__ select_parameters call) {
    select_survivors<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(select_threads)
    kvrt_reserve_slots(const __grid_constant__ reserve_parameters call) {
    reserve_slots<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(select_threads)
    kvrt_count_reaching(const __grid_constant__ counting_parameters call) {
    count_reaching<cuda_context>(call);
}
/// Of a multiprocessor, at least. Told so, ptxas takes the registers there are, and spills none.
constexpr int blocks_at_once = 3;

extern "C" __global__ void __launch_bounds__(select_threads, blocks_at_once)
    kvrt_reserve_segments(const __grid_constant__ quota_parameters call) {
    reserve_segments<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(select_threads, blocks_at_once)
    kvrt_share_budgets(const __grid_constant__ counting_parameters call) {
    share_budgets<cuda_context>(call);
}
