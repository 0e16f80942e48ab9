// Scores that follow from where tokens stand: those of the CPU's library, bit for bit.
#include "kernels/places.hpp"

#include "placed_lanes.hpp"
#include "retention/scores.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

constexpr uint32_t heads = placed_lanes::heads;
constexpr uint64_t stride = 1088;

/// The same as the kernel is told of them.
struct scored_lanes : placed_lanes {
    std::vector<kernels::place_lane> lanes;

    scored_lanes() {
        for (uint32_t i = 0; i < 2; ++i) {
            kernels::place_lane lane{};
            lane.table = table_of(i);
            lane.scores = i * heads * stride;
            lane.next_position = next_position(i);
            lane.seed = 0x1234567890abcdefu + i;
            lane.round = 5 + i;
            lane.layer = 3 * i;
            lane.first_head = 2 * i;
            lane.slots = slots[i];
            lane.explicit_slots = stored_slots[i];
            lanes.push_back(lane);
        }
    }
    void expect(uint32_t i, uint32_t head, bool draws, bool one_draw, float* scores) {
        kvrt::slot_ranges all;
        all.range[all.count++] = {0, slots[i]};
        if (!draws) return kvrt::score_streaming(all, scores);
        const uint32_t drawn_for = lanes[i].first_head + (one_draw ? 0 : head);
        kvrt::score_random({lanes[i].seed, lanes[i].round, lanes[i].layer, drawn_for},
                           positions(i, head), all, scores);
    }
};

}  // namespace

TEST_CASE("scores by place have the bits of the CPU's: slots, and draws by position") {
    scored_lanes of;
    const device_array<uint32_t> tables(of.tables), stored(of.stored);
    const device_array<kernels::place_lane> lanes(of.lanes);
    for (const uint32_t mode : {0u, 1u, 2u}) {
        CAPTURE(mode);
        const bool draws = mode != 0, one_draw = mode == 2;
        device_array<float> scores(2 * heads * stride);
        kernels::place_parameters call;
        call.positions = kernels::describe(of.store(), const_cast<uint32_t*>(stored.data()));
        call.tables = tables.data();
        call.lanes = lanes.data();
        call.scores = scores.data();
        call.stride = stride;
        call.count = 2;
        call.kv_heads = heads;
        call.most_slots = 1070;
        call.draws = draws;
        call.one_draw = one_draw;
        for (const thread_order order : tested_orders) {
            const launch_report report =
                launch({.blocks = kernels::score_blocks(call.count, heads, call.most_slots),
                        .threads = kernels::score_threads,
                        .order = order},
                       [&] { kernels::score_places<context>(call); });
            REQUIRE_MESSAGE(report.clean(), report.text());
        }
        const std::vector<float> found = scores.copy();
        for (uint32_t i = 0; i < 2; ++i) {
            for (uint32_t head = 0; head < heads; ++head) {
                std::vector<float> expected(of.slots[i]);
                of.expect(i, head, draws, one_draw, expected.data());
                const float* const row = found.data() + of.lanes[i].scores + head * stride;
                CHECK(std::memcmp(row, expected.data(), expected.size() * sizeof(float)) == 0);
                CHECK(std::isnan(row[of.slots[i]]));  // nothing behind the last slot
            }
        }
        // Positions of the first lane's heads are the same: draws are not, unless they are one.
        CHECK((found[0] == found[stride]) == (mode != 1));
    }
}
