// The write kernel: every byte of the arena, and the counts of what saturated, against the
// library's own encoders for the CPU.
#include "kernels/write.hpp"

#include <cmath>
#include <limits>

#include "base/executor.hpp"
#include "lane_fixture.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

struct write_case {
    lane_description lane;
    number input;
    uint32_t gap;  // between rows of the tensors, in elements: an odd one breaks alignment
    int64_t dim_stride = 1;
};

template <bool elaborate>
void write(const kernels::write_parameters& call, number input) {
    switch (input) {
        case number::f32:
            return kernels::write_rows<context, number::f32, elaborate>(call);
        case number::f16:
            return kernels::write_rows<context, number::f16, elaborate>(call);
        case number::bf16:
            return kernels::write_rows<context, number::bf16, elaborate>(call);
    }
}

launch_report run(const kernels::write_parameters& call, number input,
                  thread_order order = thread_order::ascending) {
    const bool elaborate = kernels::is_elaborate(call.place.keys.codes);
    return launch({.blocks = kernels::write_blocks(call.rows, call.place.kv_heads),
                   .threads = kernels::write_threads,
                   .shared_bytes = kernels::write_shared_bytes,
                   .order = order},
                  [&] { elaborate ? write<true>(call, input) : write<false>(call, input); });
}

/// Rows that encoders find hard, in front of ordinary ones.
void put_hard_rows(device_tensor& tensor) {
    const float tiny = 0x1p-140f, f16_limit = 65504.0f;
    for (uint32_t head = 0; head < tensor.heads; ++head) {
        for (uint32_t i = 0; i < tensor.dim; ++i) {
            const float sign = i % 2 == 0 ? 1.0f : -1.0f;
            tensor.put(0, head, i, 0.0f * sign);                   // both zeros, 0 first
            tensor.put(1, head, i, -0.0f * sign);                  // -0 first
            tensor.put(2, head, i, tiny * static_cast<float>(i));  // no step has a reciprocal
            tensor.put(3, head, i, 3.0f);                          // all alike
            tensor.put(4, head, i, sign * f16_limit * (head == 0 ? 1.0f : 0.5f));
            tensor.put(5, head, i, i == 9 ? 1000.0f : 0.001f * sign);  // one far from the others
            tensor.put(7, head, i, i < 8 ? 0.0f : -0.0f);              // by lanes
            tensor.put(8, head, i, i < 24 ? -0.0f : 0.0f);
            tensor.put(6, head, i, (static_cast<float>(i) - 31.5f) / 2);  // halves between codes
        }
    }
    if (tensor.type == number::f16) return;
    for (uint32_t head = 0; head < tensor.heads; ++head) {
        for (uint32_t i = 0; i < tensor.dim; ++i) {
            tensor.put(4, head, i, (i % 3 == 0 ? -1.0f : 1.0f) * std::numeric_limits<float>::max());
            tensor.put(9, head, i, i % 2 == 0 ? 0x1.5p-126f : -0x1p-126f);  // the least scales
            tensor.put(10, head, i, 40000.0f * tensor.get(10, head, i));  // just beyond f16's steps
        }
    }
}

void check(const write_case& test, thread_order order) {
    CAPTURE(test.lane.text());
    CAPTURE(static_cast<uint32_t>(test.input));
    constexpr uint32_t sequences = 3, blocks_each = 3;
    lane here(test.lane, sequences, blocks_each);
    const uint32_t heads = test.lane.kv_heads;

    // Some slots of each sequence, those of two of them across blocks, and rows that go nowhere.
    std::vector<kernels::row_target> targets;
    std::vector<kvrt::write_item> items;
    const uint32_t counts[] = {few_cases ? 3u : 19u, 1u, few_cases ? 4u : 8u};
    const uint32_t first_slots[] = {test.lane.block_tokens - 2, 0, 11};
    const uint32_t first_positions[] = {250, 70000, 0x7ff00000};
    for (uint32_t s = 0; s < sequences; ++s) {
        items.push_back({here.table_of(s), first_slots[s], static_cast<uint32_t>(targets.size()),
                         counts[s], first_positions[s]});
        for (uint32_t i = 0; i < counts[s]; ++i) {
            targets.push_back({s, first_slots[s] + i, first_positions[s] + i});
        }
        targets.push_back({kernels::no_sequence, 7});
    }
    const uint32_t rows = static_cast<uint32_t>(targets.size());
    device_tensor keys(test.input, rows, heads, test.lane.key_dim, test.gap, test.dim_stride);
    device_tensor values(test.input, rows, heads, test.lane.value_dim, test.gap, test.dim_stride);
    keys.fill(7, 2.0f);
    values.fill(8, 2.0f);
    if (rows > 10) {
        put_hard_rows(keys);
        put_hard_rows(values);
    }

    std::vector<std::byte> expected = here.arena.copy();
    std::vector<uint64_t> expected_keys(heads, 5), expected_values(heads, 6);
    kvrt::executor threads;
    kvrt::write_rows(here.layout, expected.data(), items.data(), sequences, keys.view(),
                     values.view(), {expected_keys.data(), expected_values.data()}, threads);

    const device_array<kernels::row_target> on_device(targets);
    device_array<uint64_t> counted_keys(std::vector<uint64_t>(heads, 5));
    device_array<uint64_t> counted_values(std::vector<uint64_t>(heads, 6));
    kernels::write_parameters call;
    call.arena = here.arena.data();
    call.place = here.place;
    call.tables = here.device_tables();
    call.targets = on_device.data();
    call.rows = rows;
    call.keys = keys.place;
    call.values = values.place;
    call.saturated_keys = counted_keys.data();
    call.saturated_values = counted_values.data();
    const launch_report report = run(call, test.input, order);
    REQUIRE_MESSAGE(report.clean(), report.text());
    const auto [mine, theirs] =
        std::mismatch(here.arena.begin(), here.arena.end(), expected.begin());
    const auto place = mine - here.arena.begin();
    CAPTURE(place);
    CAPTURE(place % here.layout.block_bytes);
    CHECK(mine == here.arena.end());
    CHECK(counted_keys.copy() == expected_keys);
    CHECK(counted_values.copy() == expected_values);
}

}  // namespace

TEST_CASE("write kernel: the bytes are those of the CPU's encoders") {
    const write_case cases[] = {
        {{.key_format = KV_FORMAT_BF16, .value_format = KV_FORMAT_INT4_TOKEN}, number::bf16, 8},
        {{.key_dim = 128, .key_format = KV_FORMAT_INT8_TOKEN, .value_format = KV_FORMAT_FP8_E4M3},
         number::f32,
         0},
        {{.key_format = KV_FORMAT_F32, .value_format = KV_FORMAT_F16}, number::f32, 3},
        {{.order = tile_order::hnd, .key_dim = 72, .value_dim = 256}, number::f16, 0},
        {{.order = tile_order::nhd,
          .block_tokens = 32,
          .key_dim = 256,
          .value_dim = 40,
          .key_format = KV_FORMAT_INT4_TOKEN,
          .value_format = KV_FORMAT_INT8_TOKEN},
         number::f32,
         1},
        {{.block_tokens = 32,
          .kv_heads = 3,
          .key_format = KV_FORMAT_FP8_TOKEN,
          .value_format = KV_FORMAT_FP8_TOKEN},
         number::f32,
         0},
        {{.order = tile_order::hnd,
          .kv_heads = 1,
          .key_format = KV_FORMAT_FP8_E5M2,
          .value_format = KV_FORMAT_BF16},
         number::f16,
         0,
         2},
        {{.key_dim = 72, .key_format = KV_FORMAT_INT4_TOKEN, .value_format = KV_FORMAT_F32},
         number::f16,
         0},
        {{.key_dim = 128, .key_format = KV_FORMAT_Q8_0, .value_format = KV_FORMAT_Q4_0},
         number::f32,
         0},
        {{.order = tile_order::hnd,
          .key_dim = 72,
          .value_dim = 128,
          .key_format = KV_FORMAT_Q8_0,
          .value_format = KV_FORMAT_Q4_1},
         number::f32,
         0},
        {{.order = tile_order::nhd,
          .key_dim = 88,
          .value_dim = 256,
          .key_format = KV_FORMAT_Q4_0,
          .value_format = KV_FORMAT_Q4_0},
         number::f16,
         0},
        {{.key_dim = 72,
          .value_dim = 256,
          .key_format = KV_FORMAT_NVFP4,
          .value_format = KV_FORMAT_MXFP4},
         number::f32,
         0},
        {{.order = tile_order::hnd,
          .key_dim = 104,
          .value_dim = 120,
          .key_format = KV_FORMAT_MXFP4,
          .value_format = KV_FORMAT_NVFP4},
         number::bf16,
         0},
        {{.key_dim = 128, .key_format = KV_FORMAT_TURBO4, .value_format = KV_FORMAT_TURBO4},
         number::f32,
         0},
        {{.key_dim = 72,
          .value_dim = 256,
          .key_format = KV_FORMAT_TURBO3,
          .value_format = KV_FORMAT_TURBO3},
         number::f32,
         0},
        {{.order = tile_order::nhd,
          .key_dim = 256,
          .value_dim = 72,
          .key_format = KV_FORMAT_TURBO3,
          .value_format = KV_FORMAT_TURBO3},
         number::f16,
         0},
        {{.key_format = KV_FORMAT_AFFINE4, .value_format = KV_FORMAT_Q4_1}, number::f32, 0},
        {{.order = tile_order::hnd,
          .key_dim = 96,
          .key_format = KV_FORMAT_AFFINE4,
          .value_format = KV_FORMAT_KIVI2,
          .turned_pairs = 48,
          .interleaved = true},
         number::f16,
         0},
        {{.key_dim = 128,
          .value_dim = 88,
          .key_format = KV_FORMAT_F16,
          .value_format = KV_FORMAT_KIVI2},
         number::f32,
         0},
        {{.value_dim = 72, .key_format = KV_FORMAT_F16, .value_format = KV_FORMAT_KIVI4},
         number::f32,
         0},
        {{.order = tile_order::hnd,
          .key_dim = 256,
          .value_dim = 72,
          .key_format = KV_FORMAT_INT8_TOKEN,
          .value_format = KV_FORMAT_INT4_TOKEN,
          .rotate = true},
         number::f32,
         0},
        // Raw rows of tiles that are rotated.
        {{.key_dim = 128, .value_dim = 96, .rotate = true}, number::f32, 0},
    };
    for (const write_case& each : cases) {
        for (const thread_order order : tested_orders) check(each, order);
        if (few_cases) break;
    }
}

TEST_CASE("write kernel: rows that are not finite") {
    // The records of formats with steps, and codes of those without.
    for (const uint32_t format :
         {KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT4_TOKEN, KV_FORMAT_FP8_TOKEN, KV_FORMAT_FP8_E4M3,
          KV_FORMAT_FP8_E5M2, KV_FORMAT_Q8_0, KV_FORMAT_Q4_0, KV_FORMAT_Q4_1, KV_FORMAT_NVFP4,
          KV_FORMAT_MXFP4, KV_FORMAT_TURBO4, KV_FORMAT_TURBO3}) {
        CAPTURE(format);
        const bool packed_in_all_ways = format == KV_FORMAT_Q4_1 || format == KV_FORMAT_TURBO3;
        if (few_cases && !packed_in_all_ways) continue;
        lane here({.kv_heads = 1, .key_format = format, .value_format = format}, 1, 1);
        device_tensor rows(number::f32, 3, 1, 64);
        rows.fill(3);
        rows.put(0, 0, 5, std::nanf(""));
        rows.put(1, 0, 63, std::numeric_limits<float>::infinity());
        rows.put(2, 0, 0, -std::numeric_limits<float>::infinity());
        std::vector<std::byte> expected = here.arena.copy();
        const kvrt::write_item item{here.table_of(0), 4, 0, 3, 4};
        kvrt::executor threads;
        kvrt::write_rows(here.layout, expected.data(), &item, 1, rows.view(), rows.view(), {},
                         threads);
        const device_array<kernels::row_target> targets{{0, 4}, {0, 5}, {0, 6}};
        kernels::write_parameters call;
        call.arena = here.arena.data();
        call.place = here.place;
        call.tables = here.device_tables();
        call.targets = targets.data();
        call.rows = 3;
        call.keys = call.values = rows.place;
        const launch_report report = run(call, number::f32);
        REQUIRE_MESSAGE(report.clean(), report.text());
        CHECK(here.arena.copy() == expected);
    }
}
