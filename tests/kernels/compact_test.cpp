// Compaction of cohorts: every byte of the arena against move_slots of the CPU's library, positions
// and sums against what the survivors say.
#include "kernels/compact.hpp"

#include "format/move.hpp"
#include "lane_fixture.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

struct lane_case {
    uint32_t slots;
    uint32_t kept;      // of the slots
    uint32_t prompt;    // these stay where they are
    bool fresh_blocks;  // targets are others than the sources
};

std::vector<uint32_t> draw_survivors(const lane_case& lane, std::mt19937& random) {
    std::vector<uint32_t> all;
    for (uint32_t slot = lane.prompt; slot < lane.slots; ++slot) all.push_back(slot);
    std::shuffle(all.begin(), all.end(), random);
    all.resize(lane.kept - lane.prompt);
    for (uint32_t slot = 0; slot < lane.prompt; ++slot) all.push_back(slot);
    std::sort(all.begin(), all.end());
    return all;
}

void check(const lane_description& what, const std::vector<lane_case>& cohort, thread_order order) {
    CAPTURE(what.text());
    constexpr uint32_t blocks_each = 16, stride = 256;
    const uint32_t count = static_cast<uint32_t>(cohort.size());
    const uint32_t heads = what.kv_heads;
    // Sequences count .. 2 count hold the fresh blocks.
    lane here(what, 2 * count, blocks_each);
    std::mt19937 random(11);

    std::vector<uint32_t> tables = here.ids;
    std::vector<uint32_t> survivors(size_t{count} * heads * stride);
    std::vector<kernels::compact_lane> lanes;
    for (uint32_t i = 0; i < count; ++i) {
        const lane_case& each = cohort[i];
        REQUIRE(each.slots <= blocks_each * what.block_tokens);
        const uint64_t source = uint64_t{i} * blocks_each;
        uint64_t target = source;
        // A race to the thread sanitizer, if both were written.
        if (i == 1) tables[source] = tables[0];
        if (each.fresh_blocks) {
            target = uint64_t{count + i} * blocks_each;
            for (uint32_t b = 0; b < each.prompt / what.block_tokens; ++b) {
                tables[target + b] = tables[source + b];
            }
        }
        for (uint32_t head = 0; head < heads; ++head) {
            const std::vector<uint32_t> drawn = draw_survivors(each, random);
            std::copy(drawn.begin(), drawn.end(),
                      survivors.begin() + (size_t{i} * heads + head) * stride);
        }
        lanes.push_back({source, target, uint64_t{i} * heads * stride,
                         i == 1 ? kernels::no_sums : uint64_t{i} * heads * stride, each.kept,
                         each.slots, each.slots / 2, each.slots + 1000});
        if (i == 1) continue;
        lanes[i].sums_slots = each.slots - each.slots / 8;  // the newest have none yet
        if (i == 0) continue;
        lanes[i].before = uint64_t{count + i} * heads * stride;
        lanes[i].before_slots = each.slots / 2;
    }

    const kvrt::block_numbering numbering(here.layout.block_bytes / kvrt::block_unit);
    const uint32_t most_id = *std::max_element(tables.begin(), tables.end());
    device_array<uint32_t> positions((numbering.index(most_id) + 1) * heads * what.block_tokens);
    device_array<float> sums(size_t{2} * count * heads * stride);
    for (uint32_t& each : positions) each = static_cast<uint32_t>(random());
    for (float& each : sums) each = static_cast<float>(random() % 1000);
    kvrt::position_store store{positions.data(), numbering, heads * what.block_tokens,
                               what.block_tokens};

    // What should be, from what is.
    std::vector<std::byte> expected = here.arena.copy();
    std::vector<uint32_t> expected_positions = positions.copy();
    std::vector<float> expected_sums = sums.copy();
    kvrt::position_store expected_store = store;
    expected_store.base = expected_positions.data();
    for (uint32_t i = 0; i < count; ++i) {
        for (uint32_t head = 0; head < heads; ++head) {
            const uint32_t* const from = tables.data() + lanes[i].source_table;
            const uint32_t* const to = tables.data() + lanes[i].target_table;
            const uint32_t* const kept = survivors.data() + (size_t{i} * heads + head) * stride;
            kvrt::move_slots(here.layout, expected.data(), {from, to, kept, lanes[i].count, head});
            for (uint32_t slot = 0; slot < lanes[i].count; ++slot) {
                const uint32_t old = kept[slot];
                expected_store.of(to[slot / what.block_tokens], head)[slot % what.block_tokens] =
                    old < lanes[i].explicit_slots
                        ? store.of(from[old / what.block_tokens], head)[old % what.block_tokens]
                        : lanes[i].next_position - lanes[i].slots + old;
                if (i == 1) continue;
                const auto move = [&](uint64_t place, uint32_t known) {
                    const size_t row = place + head * stride;
                    expected_sums[row + slot] = old < known ? sums[row + old] : 0.0f;
                };
                move(lanes[i].sums, lanes[i].sums_slots);
                if (i != 0) move(lanes[i].before, lanes[i].before_slots);
            }
        }
    }

    const device_array<uint32_t> on_tables(tables), on_survivors(survivors);
    const device_array<kernels::compact_lane> on_lanes(lanes);
    kernels::compact_parameters call;
    call.arena = here.arena.data();
    call.place = here.place;
    call.positions = kernels::describe(store, positions.data());
    call.lanes = on_lanes.data();
    call.tables = on_tables.data();
    call.survivors = on_survivors.data();
    call.survivor_stride = stride;
    call.sums = sums.data();
    call.sums_stride = stride;
    call.count = count;
    const launch_report report = launch({.blocks = kernels::compact_blocks(count, heads),
                                         .threads = kernels::compact_threads,
                                         .shared_bytes = kernels::compact_shared_bytes,
                                         .order = order},
                                        [&] { kernels::compact_lanes<context>(call); });
    REQUIRE_MESSAGE(report.clean(), report.text());
    CHECK(here.arena.copy() == expected);
    CHECK(positions.copy() == expected_positions);
    CHECK(sums.copy() == expected_sums);
}

}  // namespace

TEST_CASE("compact kernel: bytes, positions and sums of a cohort") {
    std::vector<lane_case> cohort = {
        {200, 77, 32, false},  // the first slots are shared with the next
        {256, 130, 40, true},  //
        {90, 90, 90, false},   // all stay
        {150, 64, 37, false},  // a prompt that ends within a group
        {120, 50, 0, false},   //
        {40, 1, 0, true},
    };
    lane_description cases[] = {
        {.key_format = KV_FORMAT_INT4_TOKEN, .value_format = KV_FORMAT_INT8_TOKEN},
        {.key_dim = 128, .value_dim = 128},
        {.order = tile_order::nhd, .kv_heads = 3, .key_dim = 72, .key_format = KV_FORMAT_FP8_TOKEN},
        {.order = tile_order::hnd, .block_tokens = 32, .value_format = KV_FORMAT_INT4_TOKEN},
        {.kv_heads = 1,
         .key_dim = 256,
         .value_dim = 256,
         .key_format = KV_FORMAT_F32,
         .value_format = KV_FORMAT_F32},
    };
    if (few_cases) cohort.resize(2);
    for (lane_description& each : cases) {
        if (few_cases) each.kv_heads = 1;
        for (const thread_order order : tested_orders) check(each, cohort, order);
        if (few_cases) break;
    }
}
