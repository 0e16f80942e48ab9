// The open kernel: numbers of every format against the library's own decoders, each kind of tensor
// they go to, tiles and blocks that are not sealed yet.
#include "kernels/open.hpp"

#include "base/executor.hpp"
#include "format/retile.hpp"
#include "format/rows.hpp"
#include "lane_fixture.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

launch_report run(const kernels::open_parameters& call, uint32_t heads, number output,
                  thread_order order) {
    return launch({.blocks = kernels::open_blocks(call.rows, heads),
                   .threads = kernels::open_threads,
                   .order = order},
                  [&] {
                      switch (output) {
                          case number::f32:
                              return kernels::open_rows<context, number::f32>(call);
                          case number::f16:
                              return kernels::open_rows<context, number::f16>(call);
                          case number::bf16:
                              return kernels::open_rows<context, number::bf16>(call);
                      }
                  });
}

/// The same bits, or both NaN.
bool same(float a, float b) {
    return std::bit_cast<uint32_t>(a) == std::bit_cast<uint32_t>(b) ||
           (std::isnan(a) && std::isnan(b));
}

/// How many numbers of a tensor are not those of `expected`, [rows][heads][dim], stored once.
uint32_t differences(const device_tensor& tensor, const std::vector<float>& expected) {
    uint32_t count = 0;
    for (uint32_t row = 0; row < tensor.rows; ++row) {
        for (uint32_t head = 0; head < tensor.heads; ++head) {
            for (uint32_t i = 0; i < tensor.dim; ++i) {
                std::byte rounded[4];
                const float number = expected[(size_t{row} * tensor.heads + head) * tensor.dim + i];
                kvrt::store_element(rounded, tensor.view().type, number);
                const float wanted = kvrt::load_element(rounded, tensor.view().type);
                count += same(tensor.get(row, head, i), wanted) ? 0 : 1;
            }
        }
    }
    return count;
}

/// Rows of random bytes, which are rows in every format, NaNs and infinities among them.
struct open_case {
    lane_description lane;
    number output = number::f32;
    int64_t dim_stride = 1;
    bool stored_basis = false;
};

void check(const open_case& test, thread_order order) {
    CAPTURE(test.lane.text());
    constexpr uint32_t sequences = 2, blocks_each = 2;
    lane here(test.lane, sequences, blocks_each);
    const uint32_t heads = test.lane.kv_heads, tokens = test.lane.block_tokens;
    for (size_t i = 0; i < here.arena.size(); i += 61) here.arena[i] = std::byte{0};
    std::vector<kernels::row_source> sources;
    for (uint32_t i = 0; i < (few_cases ? 4u : 2 * tokens); ++i) {
        sources.push_back({i % sequences, i * 7 % (2 * tokens), 3000000 + 1000 * i});
    }
    sources[3].sequence = kernels::no_sequence;
    const uint32_t rows = static_cast<uint32_t>(sources.size());
    device_tensor keys(test.output, rows, heads, test.lane.key_dim, 3, test.dim_stride);
    device_tensor values(test.output, rows, heads, test.lane.value_dim, 0, test.dim_stride);
    keys.fill(1);
    values.fill(2);

    std::vector<float> expected[2];
    for (uint32_t part = 0; part < 2; ++part) {
        const kvrt::operand_layout& operand = part == 0 ? here.layout.keys : here.layout.values;
        const device_tensor& tensor = part == 0 ? keys : values;
        for (uint32_t r = 0; r < rows; ++r) {
            for (uint32_t head = 0; head < heads; ++head) {
                float row[kvrt::widest_row];
                const kernels::row_source from = sources[r];
                if (from.sequence == kernels::no_sequence) {
                    for (uint32_t i = 0; i < operand.dim; ++i) row[i] = tensor.get(r, head, i);
                } else {
                    const std::byte* block = kvrt::block_address(
                        here.arena.data(), here.table_of(from.sequence)[from.slot / tokens]);
                    (test.stored_basis ? kvrt::read_stored_row : kvrt::read_row)(
                        operand, block, from.slot % tokens, head, from.position, row);
                }
                expected[part].insert(expected[part].end(), row, row + operand.dim);
            }
        }
    }

    const device_array<kernels::row_source> on_device(sources);
    kernels::open_parameters call;
    call.arena = here.arena.data();
    call.place = here.place;
    call.tables = here.device_tables();
    call.sources = on_device.data();
    call.rows = rows;
    call.stored_basis = test.stored_basis;
    call.keys = keys.place;
    call.values = values.place;
    const launch_report report = run(call, heads, test.output, order);
    REQUIRE_MESSAGE(report.clean(), report.text());
    CHECK(differences(keys, expected[0]) == 0);
    CHECK(differences(values, expected[1]) == 0);
}

}  // namespace

TEST_CASE("open kernel: the numbers are those of the CPU's decoders") {
    constexpr uint32_t formats[] = {
        KV_FORMAT_F16,    KV_FORMAT_F32,       KV_FORMAT_BF16,       KV_FORMAT_FP8_E4M3,
        KV_FORMAT_TURBO3, KV_FORMAT_FP8_TOKEN, KV_FORMAT_INT8_TOKEN, KV_FORMAT_INT4_TOKEN,
        KV_FORMAT_Q8_0,   KV_FORMAT_Q4_0,      KV_FORMAT_Q4_1,       KV_FORMAT_NVFP4,
        KV_FORMAT_MXFP4,  KV_FORMAT_TURBO4,    KV_FORMAT_FP8_E5M2,   KV_FORMAT_AFFINE4,
        KV_FORMAT_KIVI4,  KV_FORMAT_KIVI2,     KV_FORMAT_KVARN4,     KV_FORMAT_KVARN2,
    };
    uint32_t turn = 0;
    for (const uint32_t format : formats) {
        ++turn;
        if (few_cases && turn % 8 != 1) continue;
        open_case test;
        test.lane.order = static_cast<tile_order>(turn % 3);
        test.lane.key_dim = turn % 2 == 0 ? 72 : 128;
        test.lane.value_dim = turn % 2 == 0 ? 256 : 40;
        test.lane.key_format = format;
        test.lane.value_format = format == KV_FORMAT_AFFINE4 ? uint32_t{KV_FORMAT_Q4_1} : format;
        const bool kivi = format == KV_FORMAT_KIVI4 || format == KV_FORMAT_KIVI2;
        const bool kvarn = format == KV_FORMAT_KVARN4 || format == KV_FORMAT_KVARN2;
        test.lane.block_tokens = kvarn || kivi ? 64 : 16;
        test.lane.interleaved = turn % 4 == 0;
        test.lane.rotate = format == KV_FORMAT_INT8_TOKEN || format == KV_FORMAT_FP8_E4M3;
        for (const thread_order order : tested_orders) check(test, order);
        if (few_cases) continue;
        test.output = turn % 2 == 0 ? number::f16 : number::bf16;
        test.stored_basis = true;
        test.dim_stride = turn % 3 == 0 ? 2 : 1;
        check(test, thread_order::ascending);
    }
}

TEST_CASE("open kernel: heads of their own slots, blocks in two layouts") {
    const lane_description what{
        .block_tokens = 32, .key_format = KV_FORMAT_KIVI2, .value_format = KV_FORMAT_Q8_0};
    lane here(what, 2, 3);
    lane_description raw = what;
    raw.key_format = KV_FORMAT_F16;
    const kvrt::tile_layout raw_layout = kvrt::make_tile_layout(
        raw.order, 32, 2, 64, 64, *kvrt::find_format(KV_FORMAT_F16, kvrt::operand_role::keys),
        *here.layout.values.format);
    kernels::block_place raw_place;
    REQUIRE(kernels::describe(raw_layout, raw_place));
    // Sequence 0 has two sealed blocks, sequence 1 none. Raw blocks are longer, but lie apart here.
    lane raw_lane(raw, 2, 3);
    const device_array<uint32_t> sealed{2, 0};

    for (const uint32_t sequence : {0u, 1u}) {
        const uint32_t first_raw = sequence == 0 ? 2 : 0;
        // Ids of the sealed blocks, then of raw ones, in one arena: the raw lane's is large enough.
        std::vector<uint32_t> ids(6, 0);
        for (uint32_t i = 0; i < 3; ++i) ids[sequence * 3 + i] = raw_lane.table_of(sequence)[i];
        const device_array<uint32_t> table(ids);
        std::vector<kernels::row_source> sources;  // [heads][4]
        for (const uint32_t slot : {0u, 33u, 70u, 95u}) sources.push_back({sequence, slot});
        for (const uint32_t slot : {5u, 6u, 64u, 65u}) sources.push_back({sequence, slot});
        const device_array<kernels::row_source> on_device(sources);
        device_tensor keys(number::f32, 4, 2, 64), values(number::f32, 4, 2, 64);
        kernels::open_parameters call;
        call.arena = raw_lane.arena.data();
        call.place = raw_place;
        call.sealed = here.place;
        call.tables = {table.data(), 3};
        call.sealed_blocks = sealed.data();
        call.sources = on_device.data();
        call.source_stride = 4;
        call.rows = 4;
        call.keys = keys.place;
        call.values = values.place;
        const launch_report report = run(call, 2, number::f32, thread_order::shuffled);
        REQUIRE_MESSAGE(report.clean(), report.text());
        std::vector<float> expected[2];
        for (uint32_t r = 0; r < 4; ++r) {
            for (uint32_t head = 0; head < 2; ++head) {
                const uint32_t slot = sources[head * 4 + r].slot;
                const kvrt::tile_layout& layout = slot / 32 < first_raw ? here.layout : raw_layout;
                const std::byte* block =
                    kvrt::block_address(raw_lane.arena.data(), ids[sequence * 3 + slot / 32]);
                float row[64];
                kvrt::read_row(layout.keys, block, slot % 32, head, 0, row);
                expected[0].insert(expected[0].end(), row, row + 64);
                kvrt::read_row(layout.values, block, slot % 32, head, 0, row);
                expected[1].insert(expected[1].end(), row, row + 64);
            }
        }
        CHECK(differences(keys, expected[0]) == 0);
        CHECK(differences(values, expected[1]) == 0);
    }
}
