// Pooled sums of observed attention: the bits are those of the CPU's library.
#include "kernels/pool.hpp"

#include <cmath>
#include <cstring>
#include <limits>

#include "lane_fixture.hpp"
#include "retention/transform.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

struct row_case {
    uint32_t slots, present_slots, previous_slots, before_recent;
};

/// What lib/retention makes of a row: windows are added, then pooled.
std::vector<float> expected_of(const row_case& test, const float* present, const float* previous,
                               const kernels::pool_parameters& how) {
    std::vector<float> row(test.slots, how.unknown);
    for (uint32_t slot = 0; slot < test.slots; ++slot) {
        if (slot < test.present_slots) row[slot] = present[slot];
        if (slot < test.previous_slots) row[slot] += previous[slot];
    }
    if (how.width == 1) return row;
    if (how.greatest) {
        kvrt::pool_max(row.data(), test.before_recent, how.width, row.data());
    } else {
        kvrt::pool_mean(row.data(), test.before_recent, how.width, row.data());
    }
    return row;
}

}  // namespace

TEST_CASE("pooling kernel: windows are added and shared as on the CPU") {
    std::vector<row_case> cases = {
        {300, 290, 200, 260}, {40, 40, 0, 40}, {7, 3, 7, 5}, {150, 0, 0, 100}, {20, 20, 20, 0}};
    if (few_cases) cases = {{140, 130, 20, 120}};
    constexpr uint64_t stride = 301;
    constexpr float untouched = -7.0f;
    std::mt19937 random(1);
    std::vector<float> sums(2 * cases.size() * stride);
    for (float& each : sums) each = static_cast<float>(random() % 10000) / 7.0f;
    sums[5] = NAN;
    std::vector<kernels::pool_row> rows;
    std::vector<kernels::guarded_slots> guarded;
    uint32_t most_slots = 0;
    for (uint64_t i = 0; i < cases.size(); ++i) {
        const row_case& test = cases[i];
        rows.push_back({2 * i * stride, (2 * i + 1) * stride, i * stride, i, test.slots,
                        test.present_slots, test.previous_slots, 0});
        guarded.push_back({});
        guarded[i].before_recent = test.before_recent;
        most_slots = std::max(most_slots, test.slots);
    }
    const device_array<float> on_sums(sums);
    const device_array<kernels::pool_row> on_rows(rows);
    const device_array<kernels::guarded_slots> on_guarded(guarded);
    const std::vector<uint32_t> widths = {1, 5, 7, 127};
    for (const uint32_t width : few_cases ? std::vector<uint32_t>{5} : widths) {
        for (const bool greatest : {false, true}) {
            CAPTURE(width);
            CAPTURE(greatest);
            device_array<float> scores(std::vector<float>(cases.size() * stride, untouched));
            kernels::pool_parameters call;
            call.sums = on_sums.data();
            call.scores = scores.data();
            call.guarded = on_guarded.data();
            call.rows = on_rows.data();
            call.count = static_cast<uint32_t>(rows.size());
            call.most_slots = most_slots;
            call.width = width;
            call.greatest = greatest;
            call.unknown = greatest ? std::numeric_limits<float>::infinity() : 0.0f;
            const thread_order order = emulator::all_orders[(width + (greatest ? 1 : 0)) % 3];
            const launch_report report =
                launch({.blocks = kernels::pool_blocks(call.count, most_slots),
                        .threads = kernels::pool_threads,
                        .order = order},
                       [&] { kernels::pool_rows<context>(call); });
            REQUIRE_MESSAGE(report.clean(), report.text());
            for (uint64_t i = 0; i < cases.size(); ++i) {
                CAPTURE(i);
                const std::vector<float> expected =
                    expected_of(cases[i], &sums[2 * i * stride], &sums[(2 * i + 1) * stride], call);
                for (uint32_t slot = 0; slot < stride; ++slot) {
                    const float got = scores[i * stride + slot];
                    const float wanted = slot < cases[i].slots ? expected[slot] : untouched;
                    REQUIRE((got == wanted || (std::isnan(got) && std::isnan(wanted))));
                }
            }
        }
    }
}
