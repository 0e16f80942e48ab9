// The seal kernel: every byte of the arena against the library's own way of filling blocks, the
// counts of what saturated, and explicit positions. Rows coded anew go through the open kernel.
#include "kernels/seal.hpp"

#include <cmath>
#include <limits>

#include "format/retile.hpp"
#include "format/rows.hpp"
#include "kernels/open.hpp"
#include "lane_fixture.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

struct seal_case {
    lane_description to;  // its order, blocks, heads and dims are those of the source, too
    uint32_t from_keys = KV_FORMAT_F16;
    uint32_t from_values = KV_FORMAT_F16;
};

/// Blocks in two layouts in one arena, behind each other, with the constants of a lane.
class two_layouts {
  public:
    two_layouts(const seal_case& what, uint32_t count)
        : to_lane_(what.to, 1, 1),
          to(to_lane_.layout),
          from(kvrt::make_tile_layout(
              what.to.order, what.to.block_tokens, what.to.kv_heads, what.to.key_dim,
              what.to.value_dim, *kvrt::find_format(what.from_keys, kvrt::operand_role::keys),
              *kvrt::find_format(what.from_values, kvrt::operand_role::values))),
          arena(size_t{count + 1} * from.block_bytes + size_t{count + 2} * to.block_bytes) {
        from.keys.share_constants(to.keys);
        from.values.share_constants(to.values);
        REQUIRE(kernels::describe(from, from_place));
        to_place = to_lane_.place;
        from_place.keys.scales = from_place.values.scales = to_place.keys.scales;
        std::mt19937 random(3);
        for (std::byte& each : arena) each = static_cast<std::byte>(random());
        const uint32_t behind = (count + 1) * from.block_bytes / kvrt::block_unit;
        for (uint32_t i = 0; i < count; ++i) {
            items.push_back({(i + 1) * from.block_bytes / kvrt::block_unit,
                             behind + (count - i) * to.block_bytes / kvrt::block_unit,
                             to.block_tokens});
        }
    }

    void put(bool value, uint32_t block, uint32_t head, uint32_t slot, uint32_t channel, float x) {
        const kvrt::operand_layout& operand = value ? from.values : from.keys;
        if (!operand.plain()) return;  // random bytes are records
        kvrt::store_element(kvrt::block_address(arena.data(), items[block].source) +
                                operand.at(slot, head, channel),
                            operand.type, x);
    }
    /// Normal numbers with channels that stand out, and what is hard to code.
    void fill_rows() {
        std::mt19937 random(11);
        std::normal_distribution<float> normal;
        const float infinity = std::numeric_limits<float>::infinity();
        for (uint32_t block = 0; block < items.size(); ++block) {
            for (const bool value : {false, true}) {
                const uint32_t dim = value ? to.values.dim : to.keys.dim;
                for (uint32_t head = 0; head < to.kv_heads; ++head) {
                    for (uint32_t slot = 0; slot < to.block_tokens; ++slot) {
                        for (uint32_t i = 0; i < dim; ++i) {
                            const float far = i % 31 == 5 ? 20.0f : 0.0f;
                            float x = far + normal(random) * (i % 7 == 0 ? 8.0f : 1.0f) *
                                                (slot % 13 == 4 ? 30.0f : 1.0f);
                            if (block == 1) x = hard(head, slot, i, x);
                            if (block == 2) x = slot % 5 == 0 ? infinity : i % 3 ? 0.0f : -0.0f;
                            if (block == 3) x = 0x1p-17f * static_cast<float>(i + slot % 3);
                            if (block == 4 && i == slot % dim) x = infinity;
                            if (block == 5 && slot != 7) x = infinity;
                            put(value, block, head, slot, i, x);
                        }
                    }
                }
            }
        }
    }

  private:
    /// Tokens and channels of their own kinds.
    static float hard(uint32_t head, uint32_t slot, uint32_t channel, float x) {
        const float sign = channel % 2 == 0 ? 1.0f : -1.0f;
        if (slot == 3 && channel == 8 * head) return std::nanf("");
        if (slot == 9) return 65504.0f * sign;
        if (slot == 10) return sign * 0x1p-24f;
        if (slot == 11 && channel == 1) return -std::numeric_limits<float>::infinity();
        if (channel == 4) return 7.5f;  // the same for all tokens
        if (channel == 6) return slot % 2 == 0 ? 0.0f : -0.0f;
        return x;
    }
    lane to_lane_;

  public:
    kvrt::tile_layout to, from;
    kernels::block_place from_place, to_place;
    device_array<std::byte> arena;
    std::vector<kernels::seal_item> items;
};

struct head_counts {
    std::vector<uint64_t> keys, values;
};

/// Fills each target as the library does; slots are those of each source, in order.
head_counts fill_expected(const two_layouts& here, std::byte* arena) {
    head_counts counted{std::vector<uint64_t>(here.to.kv_heads, 5),
                        std::vector<uint64_t>(here.to.kv_heads, 6)};
    for (const kernels::seal_item& item : here.items) {
        const kvrt::block_run run{&here.from, &here.to, &item.source, 0};
        for (uint32_t head = 0; head < here.to.kv_heads; ++head) {
            kvrt::recoding recoded;
            kvrt::fill_block(run, arena, nullptr, 0, here.to.block_tokens, head, here.to,
                             item.target, 0, recoded);
            counted.keys[head] += recoded.saturated_keys;
            counted.values[head] += recoded.saturated_values;
        }
    }
    return counted;
}

launch_report run(const kernels::seal_parameters& call, thread_order order) {
    return launch({.blocks = kernels::seal_blocks(call.count, call.to.kv_heads),
                   .threads = kernels::seal_threads,
                   .shared_bytes = kernels::seal_shared_bytes,
                   .order = order},
                  [&] { kernels::seal_listed_blocks<context>(call); });
}

void check(const seal_case& test, uint32_t count, thread_order order) {
    CAPTURE(test.to.text());
    CAPTURE(test.from_keys);
    two_layouts here(test, count);
    here.fill_rows();
    std::vector<std::byte> expected = here.arena.copy();
    const head_counts expected_counts = fill_expected(here, expected.data());
    const device_array<kernels::seal_item> items(here.items);
    device_array<uint64_t> keys(std::vector<uint64_t>(here.to.kv_heads, 5));
    device_array<uint64_t> values(std::vector<uint64_t>(here.to.kv_heads, 6));
    kernels::seal_parameters call;
    call.source_arena = call.arena = here.arena.data();
    call.from = here.from_place;
    call.to = here.to_place;
    call.items = items.data();
    call.count = count;
    call.saturated_keys = keys.data();
    call.saturated_values = values.data();
    const launch_report report = run(call, order);
    REQUIRE_MESSAGE(report.clean(), report.text());
    const auto [mine, theirs] =
        std::mismatch(here.arena.begin(), here.arena.end(), expected.begin());
    for (const kernels::seal_item& item : here.items) {  // where a difference is
        const auto place = mine - here.arena.begin() - int64_t{item.target} * kvrt::block_unit;
        if (place < 0 || place >= here.to.block_bytes) continue;
        CAPTURE(item.target);
        CAPTURE(place);
        CHECK(mine == here.arena.end());
    }
    CHECK(mine == here.arena.end());
    CHECK(keys.copy() == expected_counts.keys);
    CHECK(values.copy() == expected_counts.values);
}

}  // namespace

TEST_CASE("seal kernel: the bytes of tiles are those of the CPU's") {
    const seal_case cases[] = {
        {{.block_tokens = 64,
          .kv_heads = 1,
          .key_dim = 64,
          .value_dim = 64,
          .key_format = KV_FORMAT_KVARN4,
          .value_format = KV_FORMAT_KVARN4}},
        {{.block_tokens = 32,
          .key_dim = 64,
          .value_dim = 72,
          .key_format = KV_FORMAT_KIVI4,
          .value_format = KV_FORMAT_KIVI4},
         KV_FORMAT_F16,
         KV_FORMAT_KIVI4},
        {{.order = tile_order::hnd,
          .block_tokens = 128,
          .kv_heads = 1,
          .key_dim = 72,
          .value_dim = 40,
          .key_format = KV_FORMAT_KIVI2,
          .value_format = KV_FORMAT_KIVI2},
         KV_FORMAT_F16,
         KV_FORMAT_KIVI2},
        {{.order = tile_order::nhd,
          .block_tokens = 64,
          .key_dim = 72,
          .value_dim = 128,
          .key_format = KV_FORMAT_KVARN2,
          .value_format = KV_FORMAT_KVARN4}},
        {{.block_tokens = 128,
          .kv_heads = 1,
          .key_dim = 128,
          .value_dim = 40,
          .key_format = KV_FORMAT_KVARN4,
          .value_format = KV_FORMAT_KVARN2}},
        // Rows that were coded before come as f32.
        {{.order = tile_order::hnd,
          .block_tokens = 64,
          .kv_heads = 1,
          .key_dim = 40,
          .value_dim = 256,
          .key_format = KV_FORMAT_KIVI4,
          .value_format = KV_FORMAT_KVARN2},
         KV_FORMAT_F32,
         KV_FORMAT_BF16},
    };
    for (const seal_case& each : cases) {
        if (few_cases) {  // one of kvarn, one of kivi
            check(each, 1, thread_order::shuffled);
            if (&each != cases) break;
            continue;
        }
        for (const thread_order& order : tested_orders) {  // all kinds of rows in the first
            check(each, &order == tested_orders ? 6 : 2, order);
        }
    }
}

TEST_CASE("seal kernel: the bytes of demoted rows are those of the CPU's") {
    const seal_case cases[] = {
        {{.key_format = KV_FORMAT_INT8_TOKEN, .value_format = KV_FORMAT_INT4_TOKEN, .rotate = true},
         KV_FORMAT_F16,
         KV_FORMAT_F16},
        {{.order = tile_order::hnd,
          .block_tokens = 32,
          .key_dim = 128,
          .value_dim = 72,
          .key_format = KV_FORMAT_Q4_0,
          .value_format = KV_FORMAT_NVFP4},
         KV_FORMAT_BF16,
         KV_FORMAT_F32},
        {{.order = tile_order::nhd,
          .key_dim = 72,
          .value_dim = 256,
          .key_format = KV_FORMAT_TURBO3,
          .value_format = KV_FORMAT_KIVI2},
         KV_FORMAT_F32,
         KV_FORMAT_F16},
        {{.key_format = KV_FORMAT_FP8_E4M3, .value_format = KV_FORMAT_F16},
         KV_FORMAT_F32,
         KV_FORMAT_F16},
        {{.key_format = KV_FORMAT_F16, .value_format = KV_FORMAT_BF16},
         KV_FORMAT_F32,
         KV_FORMAT_F32},
    };
    for (const seal_case& each : cases) {
        for (const thread_order order : tested_orders) check(each, few_cases ? 1 : 4, order);
        if (few_cases) break;
    }
}

TEST_CASE("seal kernel: leading slots of sealed blocks are opened to the bytes of the CPU's") {
    const seal_case cases[] = {
        {{.block_tokens = 32,
          .key_dim = 64,
          .value_dim = 72,
          .key_format = KV_FORMAT_KIVI4,
          .value_format = KV_FORMAT_KIVI4},
         KV_FORMAT_F16,
         KV_FORMAT_KIVI4},
        {{.order = tile_order::hnd,
          .block_tokens = 64,
          .key_dim = 72,
          .value_dim = 128,
          .key_format = KV_FORMAT_KVARN2,
          .value_format = KV_FORMAT_KVARN4}},
        {{.key_format = KV_FORMAT_INT8_TOKEN, .value_format = KV_FORMAT_NVFP4, .rotate = true},
         KV_FORMAT_F32,
         KV_FORMAT_BF16},
        {{.order = tile_order::nhd,
          .key_dim = 128,
          .value_dim = 72,
          .key_format = KV_FORMAT_TURBO4,
          .value_format = KV_FORMAT_F16},
         KV_FORMAT_F32,
         KV_FORMAT_F16},
        {{.key_format = KV_FORMAT_F16, .value_format = KV_FORMAT_Q4_1},
         KV_FORMAT_F32,
         KV_FORMAT_F16},
    };
    for (const seal_case& each : cases) {
        for (const thread_order order : tested_orders) {
            CAPTURE(each.to.text());
            two_layouts here(each, 1);
            here.fill_rows();
            (void)fill_expected(here, here.arena.data());
            const kernels::seal_item sealed = here.items[0];
            const uint32_t slots = here.to.block_tokens - 3;
            std::byte* const raw = kvrt::block_address(here.arena.data(), sealed.source);
            std::fill_n(raw, here.from.block_bytes, std::byte{0x5a});
            std::vector<std::byte> expected = here.arena.copy();
            const kvrt::block_run run_of_lane{&here.from, &here.to, &sealed.target, 1};
            for (uint32_t head = 0; head < here.to.kv_heads; ++head) {
                kvrt::recoding recoded;
                kvrt::fill_block(run_of_lane, expected.data(), nullptr, 0, slots, head, here.from,
                                 sealed.source, 0, recoded);
            }
            const device_array<kernels::seal_item> items{{sealed.target, sealed.source, slots}};
            kernels::seal_parameters call;
            call.source_arena = call.arena = here.arena.data();
            call.from = here.to_place;
            call.to = here.from_place;
            call.items = items.data();
            call.count = 1;
            const launch_report report = run(call, order);
            REQUIRE_MESSAGE(report.clean(), report.text());
            CHECK(here.arena.copy() == expected);
        }
        if (few_cases) break;
    }
}

TEST_CASE("seal kernel: what saturates in rows that were coded before is not counted again") {
    two_layouts here({{.key_format = KV_FORMAT_FP8_E4M3, .value_format = KV_FORMAT_FP8_E5M2},
                      KV_FORMAT_F32,
                      KV_FORMAT_F32},
                     1);
    here.fill_rows();
    here.items[0].coded = 5;
    for (uint32_t slot : {1u, 4u, 5u, 9u}) {
        for (uint32_t channel : {0u, 40u}) here.put(false, 0, 1, slot, channel, 1e6f);
        here.put(true, 0, 1, slot, 3, 1e9f);
    }
    const device_array<kernels::seal_item> items(here.items);
    device_array<uint64_t> keys(std::vector<uint64_t>(2)), values(std::vector<uint64_t>(2));
    kernels::seal_parameters call;
    call.source_arena = call.arena = here.arena.data();
    call.from = here.from_place;
    call.to = here.to_place;
    call.items = items.data();
    call.count = 1;
    call.saturated_keys = keys.data();
    call.saturated_values = values.data();
    const launch_report report = run(call, thread_order::shuffled);
    REQUIRE_MESSAGE(report.clean(), report.text());
    kvrt::recoding recoded;
    const kvrt::block_run run_of_lane{&here.from, &here.to, &here.items[0].source, 0};
    kvrt::fill_block(run_of_lane, here.arena.data(), nullptr, 0, here.to.block_tokens, 1, here.to,
                     here.items[0].target, 5, recoded);
    CHECK(keys[1] == recoded.saturated_keys);
    CHECK(values[1] == recoded.saturated_values);
    CHECK(values[1] == 2);
    CHECK(keys[1] >= 4);
}

TEST_CASE("seal kernel: positions go along") {
    two_layouts here({{.key_format = KV_FORMAT_Q8_0, .value_format = KV_FORMAT_Q8_0}}, 2);
    here.fill_rows();
    const uint32_t heads = here.to.kv_heads, entries = heads * here.to.block_tokens;
    const kvrt::block_numbering raw(here.from.block_bytes / kvrt::block_unit);
    const kvrt::block_numbering small(here.to.block_bytes / kvrt::block_unit);
    device_array<uint32_t> from((raw.index(here.items[1].source) + 1) * entries);
    device_array<uint32_t> to((small.index(here.items[0].target) + 1) * entries);
    for (uint32_t i = 0; i < from.size(); ++i) from[i] = 100 + i;
    const auto store_of = [&](uint32_t* base, const kvrt::block_numbering& numbering) {
        return kvrt::position_store{base, numbering, entries, here.to.block_tokens};
    };
    std::vector<uint32_t> expected = to.copy();
    for (const kernels::seal_item& item : here.items) {
        std::copy_n(store_of(from.data(), raw).of(item.source, 0), entries,
                    store_of(expected.data(), small).of(item.target, 0));
    }
    const device_array<kernels::seal_item> items(here.items);
    kernels::seal_parameters call;
    call.source_arena = call.arena = here.arena.data();
    call.from = here.from_place;
    call.to = here.to_place;
    call.from_positions = kernels::describe(store_of(from.data(), raw), from.data());
    call.to_positions = kernels::describe(store_of(to.data(), small), to.data());
    call.items = items.data();
    call.count = 2;
    const launch_report report = run(call, thread_order::shuffled);
    REQUIRE_MESSAGE(report.clean(), report.text());
    CHECK(to.copy() == expected);
}

TEST_CASE("seal kernel: survivors of tiles, opened and sealed anew") {
    // Each head has survivors of its own; of a lane of three sealed blocks one is left.
    for (const uint32_t format : {KV_FORMAT_KIVI2, KV_FORMAT_KVARN4}) {
        CAPTURE(format);
        if (few_cases && format != KV_FORMAT_KIVI2) break;
        constexpr uint32_t tokens = few_cases ? 32 : 64, heads = few_cases ? 1 : 2;
        constexpr uint32_t dim = 40, sealed = 3;
        lane here({.block_tokens = tokens,
                   .kv_heads = heads,
                   .key_dim = dim,
                   .value_dim = dim,
                   .key_format = format,
                   .value_format = format},
                  1, sealed + 1);
        const uint32_t* const table = here.table_of(0);
        std::vector<uint32_t> slots(heads * tokens);
        std::vector<kernels::row_source> sources;
        for (uint32_t i = 0; i < slots.size(); ++i) {
            slots[i] = i / tokens + i % tokens * 2 + i % tokens / 3;
            sources.push_back({0, slots[i]});
        }
        for (uint32_t block = 0; block < sealed; ++block) {  // tiles of ordinary numbers
            std::mt19937 random(block);
            std::normal_distribution<float> normal;
            std::vector<float> rows(tokens * dim);
            for (uint32_t head = 0; head < heads; ++head) {
                for (const bool value : {false, true}) {
                    const kvrt::operand_layout& operand =
                        value ? here.layout.values : here.layout.keys;
                    for (float& each : rows) each = normal(random);
                    std::byte* const at = kvrt::block_address(here.arena.data(), table[block]);
                    if (operand.tiled()) {
                        operand.format->tile.seal(rows.data(), tokens, dim,
                                                  at + operand.tile_at(head));
                        continue;
                    }
                    for (uint32_t slot = 0; slot < tokens; ++slot) {
                        kvrt::store_row(operand, at, slot, head, rows.data() + slot * dim);
                    }
                }
            }
        }
        std::vector<std::byte> expected = here.arena.copy();
        const kvrt::tile_layout plain = kvrt::make_tile_layout(
            tile_order::nhd, tokens, heads, dim, dim, kvrt::element::f32, kvrt::element::f32);
        const kvrt::block_run run_of_lane{&plain, &here.layout, table, sealed};
        for (uint32_t head = 0; head < heads; ++head) {
            kvrt::recoding recoded;
            kvrt::fill_block(run_of_lane, expected.data(), slots.data() + head * tokens, 0, tokens,
                             head, here.layout, table[sealed], 3 * tokens, recoded);
        }

        // A plain block beside the arena.
        device_array<std::byte> opened(plain.block_bytes);
        const device_array<kernels::row_source> on_device(sources);
        kernels::open_parameters open;
        open.arena = here.arena.data();
        open.place = open.sealed = here.place;
        open.tables = here.device_tables();
        open.sources = on_device.data();
        open.source_stride = tokens;
        open.rows = tokens;
        open.stored_basis = true;
        open.keys = open.values = {opened.data(), heads * dim, dim, 1};
        open.values.data += plain.values.offset;
        const launch_report of_opening = launch(
            {.blocks = kernels::open_blocks(tokens, heads), .threads = kernels::open_threads},
            [&] { kernels::open_rows<context, number::f32>(open); });
        REQUIRE_MESSAGE(of_opening.clean(), of_opening.text());

        const device_array<kernels::seal_item> items{{0, table[sealed], tokens}};
        kernels::seal_parameters call;
        call.source_arena = opened.data();
        call.arena = here.arena.data();
        REQUIRE(kernels::describe(plain, call.from));
        call.to = here.place;
        call.items = items.data();
        call.count = 1;
        const launch_report report = run(call, thread_order::ascending);
        REQUIRE_MESSAGE(report.clean(), report.text());
        const int64_t block = int64_t{table[sealed]} * kvrt::block_unit;
        for (uint32_t head = 0; head < heads; ++head) {
            for (const kvrt::operand_layout* operand : {&here.layout.keys, &here.layout.values}) {
                if (!operand->tiled()) continue;  // rows that the library moves
                const auto first = block + operand->tile_at(head);
                CHECK(std::equal(here.arena.begin() + first,
                                 here.arena.begin() + first + operand->tile_bytes,
                                 expected.begin() + first));
            }
        }
    }
}
