// Scores of keys: TriAttention against its definition in double and against the CPU's scorer,
// norms and ranges of rows against sums in double.
#include "attention/attend.hpp"
#include "retention/measures.hpp"
#include "score_cohort.hpp"

using namespace kernel_test;

namespace {

/// Whether that instruction set multiplies and adds at once.
bool fuses(const std::string& target) {
    return target.find("AVX") != std::string::npos || target.find("NEON") != std::string::npos;
}

void check(const score_case& test, const std::vector<uint32_t>& slots, thread_order order) {
    CAPTURE(test.lane.text());
    scored_cohort cohort(test, slots);
    std::vector<float> scores;
    const launch_report report = cohort.run<context>(order, scores);
    REQUIRE_MESSAGE(report.clean(), report.text());
    // Sums of some hundred products of about 1 to 5, in f32.
    const std::vector<float> of_cpu = cohort.cpu_scores();
    CHECK(worst_distance(scores, of_cpu) < 2e-4);
    if (fuses(kvrt::attend_target_name())) CHECK(scores == of_cpu);

    CHECK(worst_to_definition(cohort, scores) < 3e-4);
}

}  // namespace

TEST_CASE("TriAttention's kernel: the definition, and the CPU's scorer") {
    std::vector<uint32_t> slots = {75, 530, 1};
    std::vector<score_case> cases = {
        {{}, 64},
        {{.key_dim = 128, .key_format = KV_FORMAT_INT8_TOKEN}, 48, KV_ROPE_HALF, 7, false, 1.3},
        {{.kv_heads = 1, .key_format = KV_FORMAT_BF16}, 32, KV_ROPE_INTERLEAVED, 2, true, 0.9},
        {{.order = tile_order::hnd, .key_dim = 72}, 72, KV_ROPE_INTERLEAVED, 1},
        {{.order = tile_order::nhd,
          .block_tokens = 32,
          .kv_heads = 3,
          .key_format = KV_FORMAT_BF16},
         64,
         KV_ROPE_HALF,
         4},
        // 10 bands: eight channels of a run lie on no multiple of 8
        {{.order = tile_order::hnd, .key_format = KV_FORMAT_F16}, 20, KV_ROPE_HALF, 12},
        {{.kv_heads = 1, .key_dim = 72, .key_format = KV_FORMAT_INT4_TOKEN}, 20, KV_ROPE_HALF, 3},
        {{.order = tile_order::nhd,
          .kv_heads = 1,
          .key_dim = 256,
          .key_format = KV_FORMAT_INT4_TOKEN},
         256},
        {{.kv_heads = 1, .key_dim = 40, .key_format = KV_FORMAT_F32}, 0, KV_ROPE_NONE, 2},
        {{.order = tile_order::hnd, .kv_heads = 1, .key_format = KV_FORMAT_F32},
         64,
         KV_ROPE_HALF,
         2},
        {{.kv_heads = 1, .key_format = KV_FORMAT_FP8_TOKEN}, 64},
        {{.order = tile_order::hnd, .kv_heads = 1, .key_format = KV_FORMAT_FP8_E4M3}, 64},
        {{.kv_heads = 1, .key_format = KV_FORMAT_FP8_E5M2}, 64, KV_ROPE_HALF, 8},
    };
    if (few_cases) {
        slots = {75, 130};
        cases = {{{.kv_heads = 1}, 64, KV_ROPE_HALF, 2, true}};
    }
    uint32_t number_of_case = 0;
    for (const score_case& each : cases) {
        // The first in every order, others in one.
        for (const thread_order order : emulator::all_orders) {
            const uint32_t index = static_cast<uint32_t>(order);
            if (number_of_case == 0 || number_of_case % 3 == index) check(each, slots, order);
        }
        ++number_of_case;
    }
}

TEST_CASE("TriAttention's kernel: each of its barriers is needed") {
    // Each variant, for each 8 of 12 heads, brings new weights: a barrier before and one behind.
    scored_cohort cohort({{.kv_heads = 1}, 16, KV_ROPE_HALF, 12, true}, {few_cases ? 20u : 140u});
    const std::vector<float> expected = cohort.cpu_scores();
    check_barriers({"TriAttention's kernel: each of its barriers is needed",
                    kernels::score_threads,
                    {1, 2, 3, 4, 5},  // before the first nobody has read
                    {1, 2, 3, 4, 5}},
                   [&](thread_order order) {
                       std::vector<float> scores;
                       return cohort.run<without_barrier>(order, scores).clean() &&
                              worst_distance(scores, expected) < 2e-4;
                   });
}

TEST_CASE("measuring kernel: norms and ranges of keys and values") {
    std::vector<lane_description> cases = {
        {.value_format = KV_FORMAT_INT4_TOKEN},
        {.order = tile_order::hnd, .key_dim = 72, .value_dim = 40, .key_format = KV_FORMAT_BF16},
        {.order = tile_order::nhd,
         .block_tokens = 32,
         .kv_heads = 3,
         .key_format = KV_FORMAT_INT8_TOKEN,
         .value_format = KV_FORMAT_F32},
    };
    std::vector<uint32_t> slots = {40, 640, 512};
    if (few_cases) {
        cases.resize(1);
        slots = {40};
    }
    const uint32_t most = *std::max_element(slots.begin(), slots.end());
    for (const lane_description& what : cases) {
        CAPTURE(what.text());
        lane here(what, static_cast<uint32_t>(slots.size()), blocks_each);
        fill_rows(here, static_cast<uint32_t>(slots.size()), most, 9);
        const uint64_t stride = most;
        std::vector<kernels::score_lane> lanes;
        for (uint32_t i = 0; i < slots.size(); ++i) {
            lanes.push_back(
                {uint64_t{i} * blocks_each, i * what.kv_heads * stride, 0, 0, slots[i], 0});
        }
        const device_array<kernels::score_lane> on_lanes(lanes);
        for (const bool values : {false, true}) {
            for (const thread_order order : emulator::all_orders) {
                const size_t length = slots.size() * what.kv_heads * stride;
                device_array<float> norm(std::vector<float>(length, untouched));
                device_array<float> range(std::vector<float>(length, untouched));
                kernels::measure_parameters call;
                call.arena = here.arena.data();
                call.place = here.place;
                call.lanes = on_lanes.data();
                call.tables = here.tables.data();
                call.norm = norm.data();
                call.range = values ? range.data() : nullptr;
                call.stride = stride;
                call.count = static_cast<uint32_t>(slots.size());
                call.most_slots = most;
                call.values = values;
                call.negates = !values;
                const launch_report report =
                    launch({.blocks = kernels::score_blocks(call.count, what.kv_heads, most),
                            .threads = kernels::score_threads,
                            .order = order},
                           [&] {
                               with_format(values ? call.place.values : call.place.keys,
                                           [&]<kernels::coding codes, number type>() {
                                               kernels::measure_rows<context, codes, type>(call);
                                           });
                           });
                REQUIRE_MESSAGE(report.clean(), report.text());
                double worst = 0, worst_to_cpu = 0;
                for (uint32_t i = 0; i < slots.size(); ++i) {
                    for (uint32_t head = 0; head < what.kv_heads; ++head) {
                        const uint64_t at = (i * what.kv_heads + head) * stride;
                        std::vector<float> cpu_norm(slots[i]), cpu_range(slots[i]);
                        kvrt::stored_rows rows;
                        rows.open = &here.layout;
                        rows.arena = here.arena.data();
                        rows.blocks = here.table_of(i);
                        rows.kv_head = head;
                        kvrt::slot_measures cpu;
                        (values ? cpu.value_norm : cpu.key_norm) = cpu_norm.data();
                        if (values) cpu.value_range = cpu_range.data();
                        kvrt::measure_slots(rows, 0, slots[i], cpu);
                        for (uint32_t slot = 0; slot < slots[i]; ++slot) {
                            const std::vector<double> row = row_of(here, values, i, slot, head);
                            double sum = 0;
                            for (const double x : row) sum += x * x;
                            const double got = (values ? 1 : -1) * double{norm[at + slot]};
                            worst = std::max(worst, std::abs(got / std::sqrt(sum) - 1));
                            worst_to_cpu =
                                std::max(worst_to_cpu, std::abs(got / double{cpu_norm[slot]} - 1));
                            if (!values) continue;
                            const auto [least, greatest] =
                                std::minmax_element(row.begin(), row.end());
                            REQUIRE(range[at + slot] == static_cast<float>(*greatest - *least));
                            REQUIRE(range[at + slot] == cpu_range[slot]);
                        }
                        for (uint64_t slot = slots[i]; slot < stride; ++slot) {
                            REQUIRE(norm[at + slot] == untouched);
                        }
                    }
                }
                CHECK(worst < 1e-5);
                CHECK(worst_to_cpu < 1e-5);
            }
        }
    }
}
