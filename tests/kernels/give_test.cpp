// Scores of the host's, by position, in the sums of their slots: what was given before stays, and
// new slots without a score have +infinity.
#include "kernels/give.hpp"

#include "placed_lanes.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

constexpr uint32_t heads = placed_lanes::heads;
constexpr uint64_t stride = 1088;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// One call for one of the lanes: all their heads, or, of a lane for each head, two lanes.
struct given_case {
    uint64_t first, tokens;
    uint32_t known;
};

/// What is there before, everywhere.
float sum_before(uint64_t place) { return -1.0f - static_cast<float>(place); }

void check(uint32_t index, const given_case& given, bool lane_per_head) {
    placed_lanes of;
    const device_array<uint32_t> tables(of.tables), stored(of.stored);
    std::vector<float> scores(heads * given.tokens), sums(2 * heads * stride);
    for (size_t i = 0; i < scores.size(); ++i) scores[i] = 0.5f * static_cast<float>(i);
    scores.back() = std::numeric_limits<float>::quiet_NaN();
    for (size_t i = 0; i < sums.size(); ++i) sums[i] = sum_before(i);
    std::vector<kernels::given_lane> listed;
    for (uint32_t lane = 0; lane < (lane_per_head ? heads : 1); ++lane) {
        listed.push_back({of.table_of(index), (lane_per_head ? 2 * lane : 1) * stride,
                          lane * given.tokens, of.slots[index], of.stored_slots[index], given.known,
                          0});
    }
    const device_array<kernels::given_lane> lanes(listed);
    const device_array<float> on_device(scores);
    for (const thread_order order : tested_orders) {
        device_array<float> out(sums);
        kernels::give_parameters call;
        call.positions = kernels::describe(of.store(), const_cast<uint32_t*>(stored.data()));
        call.tables = tables.data();
        call.lanes = lanes.data();
        call.scores = on_device.data();
        call.sums = out.data();
        call.sums_stride = stride;
        call.next_position = of.next_position(index);
        call.first_position = given.first;
        call.tokens = given.tokens;
        call.count = static_cast<uint32_t>(listed.size());
        call.kv_heads = lane_per_head ? 1 : heads;
        call.most_slots = of.slots[index];
        const launch_report report =
            launch({.blocks = kernels::score_blocks(call.count, call.kv_heads, call.most_slots),
                    .threads = kernels::score_threads,
                    .order = order},
                   [&] { kernels::give_scores<context>(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        std::vector<float> expected = sums;
        for (uint32_t head = 0; head < heads; ++head) {
            // A lane for each head has its positions as head 0.
            const kvrt::slot_positions at = of.positions(index, lane_per_head ? 0 : head);
            float* const row = expected.data() + (lane_per_head ? 2 * head : 1 + head) * stride;
            for (uint32_t slot = 0; slot < of.slots[index]; ++slot) {
                const uint64_t position = at.at(slot);
                if (position >= given.first && position < given.first + given.tokens) {
                    row[slot] = scores[head * given.tokens + position - given.first];
                } else if (slot >= given.known) {
                    row[slot] = infinity;
                }
            }
        }
        CHECK(std::memcmp(out.copy().data(), expected.data(), sums.size() * sizeof(float)) == 0);
    }
}

}  // namespace

TEST_CASE("scores by position go to the slots that have it, in each head") {
    for (const bool lane_per_head : {false, true}) {
        CAPTURE(lane_per_head);
        check(0, {0, 127, 0}, lane_per_head);         // all of a short lane, for the first time
        check(0, {100, 20, 10}, lane_per_head);       // some, behind some that were given before
        check(1, {1500, 1400, 1069}, lane_per_head);  // from stored positions to the others
        check(1, {3216, 1, 1069}, lane_per_head);     // the newest: whole stretches have nothing
        check(1, {4, 1, 1070}, lane_per_head);        // one head may have it, the other not
    }
}
