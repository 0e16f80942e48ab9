// What scores by content, and gathers statistics of queries: gather_queries.hpp, transform.hpp and
// score_*.hpp but score.hpp, for the GPU.
#include "kernels/blend.hpp"
#include "kernels/cuda_context.cuh"
#include "kernels/gather_queries.hpp"
#include "kernels/sample.hpp"
#include "kernels/score_directions.hpp"
#include "kernels/score_expected.hpp"
#include "kernels/score_lag.hpp"
#include "kernels/score_similar.hpp"
#include "kernels/score_sketch.hpp"
#include "kernels/transform.hpp"

using namespace kvrt::kernels;

extern "C" __global__ void __launch_bounds__(gather_threads, 4)
    kvrt_gather_queries(const __grid_constant__ query_parameters call) {
    gather_queries<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(gather_threads, 4)
    kvrt_make_moments(const __grid_constant__ moments_parameters call) {
    make_moments<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(direction_threads, 2)
    kvrt_sum_directions(const __grid_constant__ direction_parameters call) {
    sum_directions<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(score_threads, 4)
    kvrt_score_directions(const __grid_constant__ direction_parameters call) {
    score_directions<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(similar_threads, 2)
    kvrt_compare_keys(const __grid_constant__ similarity_parameters call) {
    compare_keys<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(score_threads, 8)
    kvrt_spare_newest(const __grid_constant__ similarity_parameters call) {
    spare_newest<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(lag_threads, 4)
    kvrt_measure_deviations(const __grid_constant__ lag_parameters call) {
    measure_deviations<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(lag_threads, 4)
    kvrt_rank_lag_parts(const __grid_constant__ lag_parameters call) {
    rank_lag_parts<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(sketch_threads)
    kvrt_draw_sketches(const __grid_constant__ sketch_parameters call) {
    draw_sketches<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(score_threads, 4)
    kvrt_score_sketches(const __grid_constant__ sketch_parameters call) {
    score_sketches<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(score_threads, 3)
    kvrt_score_expected(const __grid_constant__ expected_parameters call) {
    score_expected<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(normalise_threads, 8)
    kvrt_soften_rows(const __grid_constant__ transform_parameters call) {
    soften_rows<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(normalise_threads, 8)
    kvrt_share_rows(const __grid_constant__ transform_parameters call) {
    share_rows<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(normalise_threads)
    kvrt_blend_rows(const __grid_constant__ blend_parameters call) {
    blend_rows<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(normalise_threads)
    kvrt_mix_redundancy(const __grid_constant__ blend_parameters call) {
    mix_redundancy<cuda_context>(call);
}
extern "C" __global__ void __launch_bounds__(normalise_threads)
    kvrt_sample_scores(const __grid_constant__ sample_parameters call) {
    sample_scores<cuda_context>(call);
}
