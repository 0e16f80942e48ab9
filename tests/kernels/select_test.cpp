// Selection of survivors, against select_top of the CPU's library.
#include "kernels/select.hpp"

#include <cmath>
#include <limits>

#include "lane_fixture.hpp"
#include "retention/select.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

struct select_case {
    uint32_t slots;
    std::vector<kernels::slot_range> ranges;
    uint32_t candidates_kept;
    uint32_t distinct;  ///< values that scores have; 0: as many as there are
};

float draw(const select_case& test, std::mt19937& random) {
    if (test.distinct != 0) {
        // Among them both zeros, both infinities and NaN.
        constexpr float odd[] = {0.0f, -0.0f, 1.5f, -2.0f, HUGE_VALF, -HUGE_VALF, NAN, 1.5000001f};
        return odd[random() % test.distinct];
    }
    return std::normal_distribution<float>(0.0f, 1e-3f)(random);
}

}  // namespace

TEST_CASE("select kernel: the survivors are those of the CPU") {
    std::vector<select_case> cases = {
        {300, {{10, 290}}, 100, 0},  {1000, {{0, 400}, {500, 501}, {700, 1000}}, 333, 4},
        {1, {{0, 1}}, 0, 0},         {257, {}, 0, 0},
        {600, {{4, 600}}, 596, 8},   {600, {{4, 600}}, 0, 8},
        {513, {{0, 513}}, 1, 8},     {900, {{100, 800}}, 350, 8},
        {900, {{100, 800}}, 350, 2},
    };
    if (few_cases) cases.resize(2);
    std::mt19937 random(3);
    std::vector<kernels::select_head> heads;
    std::vector<kernels::slot_range> ranges;
    std::vector<float> scores;
    std::vector<uint32_t> expected;
    for (const select_case& each : cases) {
        kvrt::slot_ranges candidates;
        for (const kernels::slot_range& range : each.ranges) {
            candidates.range[candidates.count++] = {range.first, range.end};
        }
        const uint32_t keep = each.slots - candidates.slots() + each.candidates_kept;
        heads.push_back({scores.size(), expected.size(), each.slots, keep,
                         static_cast<uint32_t>(ranges.size()),
                         static_cast<uint32_t>(each.ranges.size())});
        ranges.insert(ranges.end(), each.ranges.begin(), each.ranges.end());
        for (uint32_t slot = 0; slot < each.slots; ++slot) scores.push_back(draw(each, random));
        expected.resize(expected.size() + keep);
        kvrt::select_top(scores.data() + heads.back().scores, candidates, each.slots, keep,
                         expected.data() + heads.back().survivors);
    }
    const device_array<float> on_scores(scores);
    const device_array<kernels::slot_range> on_ranges(ranges);
    const device_array<kernels::select_head> on_heads(heads);
    for (const thread_order order : tested_orders) {
        device_array<uint32_t> survivors(expected.size());
        const kernels::select_parameters call{on_scores.data(), survivors.data(), on_ranges.data(),
                                              on_heads.data(), static_cast<uint32_t>(heads.size())};
        const launch_report report = launch({.blocks = call.count,
                                             .threads = kernels::select_threads,
                                             .shared_bytes = kernels::select_shared_bytes,
                                             .order = order},
                                            [&] { kernels::select_survivors<context>(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        CHECK(survivors.copy() == expected);
    }
}
