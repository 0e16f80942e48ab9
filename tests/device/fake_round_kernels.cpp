// Kernels of rounds of eviction on the fake driver.
#include <algorithm>

#include "fake_context.hpp"
#include "fake_kernels.hpp"
#include "kernels/places.hpp"
#include "kernels/pool.hpp"
#include "kernels/sample.hpp"
#include "kernels/score_directions.hpp"
#include "kernels/score_expected.hpp"
#include "kernels/score_lag.hpp"
#include "kernels/score_similar.hpp"
#include "kernels/score_sketch.hpp"
#include "kernels/transform.hpp"

namespace kvrt::cuda {

namespace {

using namespace kernels;

template <coding codes, number type, uint32_t heads>
void score(const triattention_parameters& call) {
    score_keys<fake_context, codes, type, heads>(call);
}
template <coding codes, number type>
void gather(const product_parameters& call) {
    gather_keys<fake_context, codes, type>(call);
}
template <coding codes, number type>
void measure(const measure_parameters& call) {
    measure_rows<fake_context, codes, type>(call);
}

/// Of what the tests store; the others are found, and report a violation when they run.
constexpr const char* not_here[] = {"int4_token", "fp8_token", "fp8_e4m3", "fp8_e5m2"};
/// But these, which only measure.
constexpr const char* measures_here[] = {"kvrt_measure_rows_int4_token",
                                         "kvrt_measure_rows_fp8_e4m3"};

template <coding codes, number type>
void add_reader(fake_driver& fake, const char* (&names)[5],
                const std::function<bool(triattention_parameters&)>& change,
                const std::function<bool(product_parameters&)>& product) {
    add<triattention_parameters>(fake, names[0], score<codes, type, 2>, change);
    add<triattention_parameters>(fake, names[1], score<codes, type, 4>, change);
    add<triattention_parameters>(fake, names[2], score<codes, type, 8>, change);
    add<measure_parameters>(fake, names[3], measure<codes, type>);
    add<product_parameters>(fake, names[4], gather<codes, type>, product);
}

}  // namespace

void add_round_kernels(fake_driver& fake, const kernel_faults& faults) {
    add<guard_parameters>(fake, "kvrt_find_candidates", find_candidates<fake_context>,
                          changing(faults.guard));
    add<place_parameters>(fake, "kvrt_score_places", score_places<fake_context>);
    add<pool_parameters>(fake, "kvrt_pool_rows", pool_rows<fake_context>, changing(faults.pool));
    add<give_parameters>(fake, "kvrt_give_scores", give_scores<fake_context>,
                         changing(faults.give));
    add<normalise_parameters>(fake, "kvrt_normalise_and_reduce",
                              normalise_and_reduce<fake_context>);
    add<join_parameters>(fake, "kvrt_join_rows", join_rows<fake_context>, changing(faults.join));
    add<quota_parameters>(fake, "kvrt_reserve_segments", reserve_segments<fake_context>,
                          changing(faults.quota));
    add<reserve_parameters>(fake, "kvrt_reserve_slots", reserve_slots<fake_context>);
    add<counting_parameters>(fake, "kvrt_share_budgets", share_budgets<fake_context>,
                             changing(faults.counting));
    add<counting_parameters>(fake, "kvrt_count_reaching", count_reaching<fake_context>,
                             changing(faults.counting));
    add<select_parameters>(fake, "kvrt_select_survivors", select_survivors<fake_context>,
                           changing(faults.select));
    add<compact_parameters>(fake, "kvrt_compact_lanes", compact_lanes<fake_context>,
                            changing(faults.compact));
    add<compact_sealed_parameters>(fake, "kvrt_compact_sealed_lanes",
                                   compact_sealed_lanes<fake_context>,
                                   changing(faults.compact_sealed));
    add<open_lanes_parameters>(fake, "kvrt_open_lanes", open_lanes<fake_context>,
                               changing(faults.open_lanes));
    add<open_survivors_parameters>(fake, "kvrt_open_survivors", open_survivors<fake_context>);
    add<compact_tiles_parameters>(fake, "kvrt_compact_tiles", compact_tiles<fake_context>,
                                  changing(faults.compact_tiles));
    add<query_parameters>(fake, "kvrt_gather_queries", gather_queries<fake_context>,
                          changing(faults.gather));
    add<moments_parameters>(fake, "kvrt_make_moments", make_moments<fake_context>);
    add<direction_parameters>(fake, "kvrt_sum_directions", sum_directions<fake_context>);
    add<direction_parameters>(fake, "kvrt_score_directions", score_directions<fake_context>);
    add<similarity_parameters>(fake, "kvrt_compare_keys", compare_keys<fake_context>);
    add<similarity_parameters>(fake, "kvrt_spare_newest", spare_newest<fake_context>);
    add<lag_parameters>(fake, "kvrt_measure_deviations", measure_deviations<fake_context>,
                        changing(faults.lag));
    add<lag_parameters>(fake, "kvrt_rank_lag_parts", rank_lag_parts<fake_context>);
    add<sketch_parameters>(fake, "kvrt_draw_sketches", draw_sketches<fake_context>);
    add<sketch_parameters>(fake, "kvrt_score_sketches", score_sketches<fake_context>);
    add<expected_parameters>(fake, "kvrt_score_expected", score_expected<fake_context>,
                             changing(faults.expected));
    add<transform_parameters>(fake, "kvrt_soften_rows", soften_rows<fake_context>);
    add<transform_parameters>(fake, "kvrt_share_rows", share_rows<fake_context>);
    add<blend_parameters>(fake, "kvrt_blend_rows", blend_rows<fake_context>,
                          changing(faults.blend));
    add<blend_parameters>(fake, "kvrt_mix_redundancy", mix_redundancy<fake_context>,
                          changing(faults.blend));
    add<sample_parameters>(fake, "kvrt_sample_scores", sample_scores<fake_context>,
                           changing(faults.sample));
    const auto change = changing(faults.score);
    const auto product = changing(faults.product);
    add<product_parameters>(fake, "kvrt_weigh_heads", weigh_heads<fake_context>, product);
    add<product_parameters>(fake, "kvrt_take_greatest", take_greatest<fake_context>, product);
    static const char* f32[] = {"kvrt_score_keys_f32_2", "kvrt_score_keys_f32_4",
                                "kvrt_score_keys_f32_8", "kvrt_measure_rows_f32",
                                "kvrt_gather_keys_f32"};
    static const char* f16[] = {"kvrt_score_keys_f16_2", "kvrt_score_keys_f16_4",
                                "kvrt_score_keys_f16_8", "kvrt_measure_rows_f16",
                                "kvrt_gather_keys_f16"};
    static const char* bf16[] = {"kvrt_score_keys_bf16_2", "kvrt_score_keys_bf16_4",
                                 "kvrt_score_keys_bf16_8", "kvrt_measure_rows_bf16",
                                 "kvrt_gather_keys_bf16"};
    static const char* int8[] = {"kvrt_score_keys_int8_token_2", "kvrt_score_keys_int8_token_4",
                                 "kvrt_score_keys_int8_token_8", "kvrt_measure_rows_int8_token",
                                 "kvrt_gather_keys_int8_token"};
    add_reader<coding::plain, number::f32>(fake, f32, change, product);
    add_reader<coding::plain, number::f16>(fake, f16, change, product);
    add_reader<coding::plain, number::bf16>(fake, bf16, change, product);
    add_reader<coding::int8_token, number::f32>(fake, int8, change, product);
    add<measure_parameters>(fake, measures_here[0], measure<coding::int4_token, number::f32>,
                            changing(faults.measure));
    add<measure_parameters>(fake, measures_here[1], measure<coding::fp8_e4m3, number::f32>);
    const auto leave_out = [&fake](const std::string& name, std::size_t bytes) {
        fake.add_kernel(name.c_str(), {bytes}, [&fake, name](const kernel_launch&) {
            fake.violations.push_back(name + " is not in these tests");
        });
    };
    for (const std::string name : not_here) {
        for (const char* heads : {"_2", "_4", "_8"}) {
            leave_out("kvrt_score_keys_" + name + heads, sizeof(triattention_parameters));
        }
        const std::string measures = "kvrt_measure_rows_" + name;
        if (std::find(std::begin(measures_here), std::end(measures_here), measures) ==
            std::end(measures_here)) {
            leave_out(measures, sizeof(measure_parameters));
        }
        leave_out("kvrt_gather_keys_" + name, sizeof(product_parameters));
    }
}

}  // namespace kvrt::cuda
