// Scores that follow from where tokens stand: those of the CPU's library, bit for bit.
#include "kernels/places.hpp"

#include "lane_fixture.hpp"
#include "retention/scores.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

constexpr uint32_t heads = 2, block_tokens = 16, block_units = 3;
constexpr uint64_t stride = 1088;

/// Two lanes, of one stretch and of more, part of whose positions are stored.
struct placed_lanes {
    std::vector<uint32_t> slots = {40, 1070}, known = {0, 700};
    kvrt::block_numbering numbering{block_units};
    std::vector<uint32_t> tables, stored;
    std::vector<kernels::place_lane> lanes;

    placed_lanes() {
        constexpr uint32_t blocks = 80;
        for (uint32_t i = 0; i < 2 * blocks; ++i) tables.push_back(i * block_units);
        std::mt19937 random(9);
        std::shuffle(tables.begin(), tables.end(), random);
        stored.assign((numbering.index((2 * blocks - 1) * block_units) + 1) * heads * block_tokens,
                      0xeeeeeeeeu);
        for (uint32_t i = 0; i < 2; ++i) {
            kernels::place_lane lane{};
            lane.table = uint64_t{i} * blocks;
            lane.scores = i * heads * stride;
            lane.next_position = uint64_t{3} * slots[i] + 7;
            lane.seed = 0x1234567890abcdefu + i;
            lane.round = 5 + i;
            lane.layer = 3 * i;
            lane.first_head = 2 * i;
            lane.slots = slots[i];
            lane.explicit_slots = known[i];
            lanes.push_back(lane);
            for (uint32_t head = 0; head < heads; ++head) {
                for (uint32_t slot = 0; slot < known[i]; ++slot) {
                    store().of(tables[lane.table + slot / block_tokens],
                               head)[slot % block_tokens] = 3 * slot + head;
                }
            }
        }
    }
    kvrt::position_store store() {
        return {stored.data(), numbering, heads * block_tokens, block_tokens};
    }
    void expect(uint32_t i, uint32_t head, bool draws, bool one_draw, float* scores) {
        kvrt::slot_positions at;
        at.store.open = store();
        at.blocks = tables.data() + lanes[i].table;
        at.kv_head = head;
        at.slots = slots[i];
        at.explicit_slots = known[i];
        at.next_position = lanes[i].next_position;
        kvrt::slot_ranges all;
        all.range[all.count++] = {0, slots[i]};
        if (!draws) return kvrt::score_streaming(all, scores);
        const uint32_t drawn_for = lanes[i].first_head + (one_draw ? 0 : head);
        kvrt::score_random({lanes[i].seed, lanes[i].round, lanes[i].layer, drawn_for}, at, all,
                           scores);
    }
};

}  // namespace

TEST_CASE("scores by place have the bits of the CPU's: slots, and draws by position") {
    placed_lanes of;
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
