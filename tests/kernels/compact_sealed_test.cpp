// Compaction of lanes whose first blocks are demoted: every byte of the arena against the library's
// own way of filling blocks, positions and sums against what the survivors say, and counts.
#include "two_layout_cohort.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

struct demotion_case {
    lane_description to;
    uint32_t raw_keys = KV_FORMAT_F16, raw_values = KV_FORMAT_F16;
};

void check(const demotion_case& what, const std::vector<two_layout_case>& cases,
           thread_order order) {
    CAPTURE(what.to.text());
    two_layout_cohort here(what.to, what.raw_keys, what.raw_values, cases, true);
    const two_layout_cohort::outcome expected = here.expected();
    const kernels::compact_sealed_parameters call = here.parameters();
    const launch_report report = launch({.blocks = kernels::compact_blocks(here.count, here.heads),
                                         .threads = kernels::compact_threads,
                                         .shared_bytes = kernels::compact_sealed_shared_bytes,
                                         .order = order},
                                        [&] { kernels::compact_sealed_lanes<context>(call); });
    REQUIRE_MESSAGE(report.clean(), report.text());
    check_outcome(here.found(), expected);
}

}  // namespace

TEST_CASE("compact kernel of demoted lanes: bytes, positions, sums and counts of a cohort") {
    std::vector<two_layout_case> cohort = {
        {180, 8, 5, 77, 3},            // heads differ in how many of what was demoted stay
        {180, 8, 0, 140, 40, 9},       // more is demoted than need be
        {150, 9, 0, 60, 20, 0, true},  // into fresh blocks
        {90, 0, 0, 50, 0},             // nothing is demoted yet
        {96, 6, 0, 33, 1},             // all is
    };
    demotion_case cases[] = {
        {{.key_format = KV_FORMAT_INT8_TOKEN, .value_format = KV_FORMAT_INT4_TOKEN}},
        {{.order = tile_order::nhd,
          .kv_heads = 1,
          .key_dim = 72,
          .key_format = KV_FORMAT_FP8_E4M3,
          .value_format = KV_FORMAT_F16}},
        {{.order = tile_order::hnd, .key_format = KV_FORMAT_Q4_0, .value_format = KV_FORMAT_BF16},
         KV_FORMAT_F32,
         KV_FORMAT_F32},
    };
    if (few_cases) cohort.resize(1);
    for (const demotion_case& each : cases) {
        for (const thread_order order : tested_orders) check(each, cohort, order);
        if (few_cases) break;
    }
}
