// Compaction of lanes of tiles: survivors opened, then coded into other tiles, some blocks of every
// lane at a time; every byte of the arena against the library's own way of filling blocks.
#include "kernels/compact_tiles.hpp"

#include "two_layout_cohort.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

/// f32 rows in one piece.
kernels::block_place opened_as(const lane_description& what) {
    const kvrt::tile_layout layout = kvrt::make_tile_layout(
        tile_order::hnd, what.block_tokens, what.kv_heads, what.key_dim, what.value_dim,
        *kvrt::find_format(KV_FORMAT_F32, kvrt::operand_role::keys),
        *kvrt::find_format(KV_FORMAT_F32, kvrt::operand_role::values));
    kernels::block_place made;
    REQUIRE(kernels::describe(layout, made));
    return made;
}

void launch_tiles(two_layout_cohort& here, const kernels::compact_sealed_parameters& compact,
                  const kernels::block_place& opened, uint32_t blocks_each, thread_order order) {
    device_array<std::byte> out(size_t{here.count} * blocks_each * opened.block_bytes);
    kernels::compact_tiles_parameters call;
    kernels::open_survivors_parameters& from = call.from;
    from.what.arena = call.arena = compact.all.arena;
    from.what.place = compact.all.place;
    from.what.sealed = compact.sealed;
    from.what.out = out.data();
    from.what.opened = opened;
    from.what.tables = compact.all.tables;
    from.what.operands = (is_tile(compact.sealed.keys.codes) ? kernels::opened_keys : 0u) |
                         (is_tile(compact.sealed.values.codes) ? kernels::opened_values : 0u);
    from.what.count = here.count;
    from.what.most_slots = blocks_each * here.tokens;
    from.lanes = compact.all.lanes;
    from.more = compact.lanes;
    from.survivors = compact.all.survivors;
    from.survivor_stride = compact.all.survivor_stride;
    from.blocks_each = blocks_each;
    for (; from.first_slot < two_layout_cohort::blocks_each * here.tokens;
         from.first_slot += blocks_each * here.tokens) {
        const launch_report opens = launch({.blocks = kernels::open_lanes_blocks(from.what),
                                            .threads = kernels::open_lanes_threads,
                                            .shared_bytes = 0,
                                            .order = order},
                                           [&] { kernels::open_survivors<context>(from); });
        REQUIRE_MESSAGE(opens.clean(), opens.text());
        const launch_report fills = launch({.blocks = kernels::compact_tiles_blocks(call),
                                            .threads = kernels::seal_threads,
                                            .shared_bytes = kernels::seal_shared_bytes,
                                            .order = order},
                                           [&] { kernels::compact_tiles<context>(call); });
        REQUIRE_MESSAGE(fills.clean(), fills.text());
    }
}

void check(const lane_description& what, const std::vector<two_layout_case>& cases,
           uint32_t blocks_each, thread_order order) {
    CAPTURE(what.text());
    two_layout_cohort here(what, KV_FORMAT_F16, KV_FORMAT_F16, cases, false);
    const two_layout_cohort::outcome expected = here.expected();
    const kernels::compact_sealed_parameters call = here.parameters();
    launch_tiles(here, call, opened_as(what), blocks_each, order);
    const launch_report report = launch({.blocks = kernels::compact_blocks(here.count, here.heads),
                                         .threads = kernels::compact_threads,
                                         .shared_bytes = kernels::compact_sealed_shared_bytes,
                                         .order = order},
                                        [&] { kernels::compact_sealed_lanes<context>(call); });
    REQUIRE_MESSAGE(report.clean(), report.text());
    check_outcome(here.found(), expected);
}

}  // namespace

TEST_CASE("compact kernels of tiles: bytes, positions, sums and counts of a cohort") {
    std::vector<two_layout_case> cohort = {
        {300, 9, 5, 77, 3},                   // a tail that was sealed is opened
        {200, 6, 0, 140, 70},                 // the first two blocks stay as they are
        {150, 4, 0, 128, 40, 0, true},        // into fresh blocks, no tail
        {200, 2, 7, 170, 0},                  // full blocks that were not sealed yet
        {200, 6, 0, 100, 0, 0, false, true},  // nothing moves but the tail is opened
    };
    if (few_cases) cohort.resize(1);
    const lane_description kivi = {.block_tokens = 32,
                                   .key_dim = 40,
                                   .value_dim = 72,
                                   .key_format = KV_FORMAT_KIVI4,
                                   .value_format = KV_FORMAT_KIVI4};
    const lane_description kvarn = {.block_tokens = 32,
                                    .kv_heads = 2,
                                    .key_format = KV_FORMAT_KVARN4,
                                    .value_format = KV_FORMAT_KVARN2};
    for (const thread_order order : tested_orders) {
        check(kivi, cohort, 3, order);
        if (!few_cases) check(kvarn, cohort, 12, order);
    }
}
