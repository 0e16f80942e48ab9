// Copies of whole blocks, against copies made by hand; what is beside them must stay as it was.
#include "kernels/copy.hpp"

#include "lane_fixture.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

// Just above a stretch, so that blocks have two, the second short.
constexpr uint32_t block_bytes = kernels::stretch_bytes + 192;
constexpr uint32_t units = block_bytes / kernels::block_unit_bytes;
constexpr uint32_t blocks = 9;

struct blocks_on_device {
    device_array<std::byte> arena{size_t{blocks} * block_bytes};
    std::vector<std::byte> expected;

    blocks_on_device() {
        std::mt19937 random(5);
        for (std::byte& each : arena) each = static_cast<std::byte>(random());
        expected = arena.copy();
    }
    template <class function>
    void run(uint32_t count, thread_order order, function body) {
        const launch_report report = launch({.blocks = count * kernels::copy_stretches(block_bytes),
                                             .threads = kernels::copy_threads,
                                             .order = order},
                                            body);
        REQUIRE_MESSAGE(report.clean(), report.text());
    }
    auto block(std::vector<std::byte>& bytes, uint32_t index) {
        return bytes.begin() + static_cast<std::ptrdiff_t>(size_t{index} * block_bytes);
    }
};

}  // namespace

TEST_CASE("copy kernels: whole blocks") {
    const uint32_t order_of[] = {7 * units, 0, 3 * units};
    for (const thread_order order : tested_orders) {
        blocks_on_device here;
        const device_array<kernels::block_copy> copies{{0, 5 * units}, {8 * units, 2 * units}};
        const kernels::copy_parameters call{here.arena.data(), copies.data(), 2, block_bytes};
        here.run(2, order, [&] { kernels::copy_blocks<context>(call); });
        std::copy_n(here.block(here.expected, 0), block_bytes, here.block(here.expected, 5));
        std::copy_n(here.block(here.expected, 8), block_bytes, here.block(here.expected, 2));
        CHECK(here.arena.copy() == here.expected);

        device_array<std::byte> piece(3 * block_bytes);
        const device_array<uint32_t> ids{order_of[0], order_of[1], order_of[2]};
        kernels::gather_parameters gather{here.arena.data(), piece.data(), ids.data(), 3,
                                          block_bytes};
        here.run(3, order, [&] { kernels::gather_blocks<context>(gather); });
        CHECK(here.arena.copy() == here.expected);
        std::vector<std::byte> gathered;
        for (const uint32_t index : {7u, 0u, 3u}) {
            gathered.insert(gathered.end(), here.block(here.expected, index),
                            here.block(here.expected, index + 1));
        }
        CHECK(piece.copy() == gathered);

        here.run(2, order, [&] {
            kernels::gather_parameters two = gather;
            two.count = 2;
            kernels::zero_blocks<context>(two);
        });
        std::fill_n(here.block(here.expected, 7), block_bytes, std::byte{0});
        std::fill_n(here.block(here.expected, 0), block_bytes, std::byte{0});
        CHECK(here.arena.copy() == here.expected);

        here.run(3, order, [&] { kernels::scatter_blocks<context>(gather); });
        std::copy_n(gathered.begin(), block_bytes, here.block(here.expected, 7));
        std::copy_n(gathered.begin() + block_bytes, block_bytes, here.block(here.expected, 0));
        CHECK(here.arena.copy() == here.expected);
    }
}

TEST_CASE("copy kernels: places beyond 32 bits") {
    // Addresses alone: nothing lies there.
    std::byte* const arena = reinterpret_cast<std::byte*>(uint64_t{4096});
    CHECK(reinterpret_cast<uintptr_t>(kernels::block_at(arena, 0xfffffffeu)) ==
          4096 + uint64_t{0xfffffffeu} * 64);
    const kernels::block_tables tables{reinterpret_cast<const uint32_t*>(arena), 1u << 20};
    CHECK(reinterpret_cast<uintptr_t>(tables.of(1u << 20)) == 4096 + (uint64_t{1} << 40) * 4);
}

TEST_CASE("copy kernels: lines of tables, few and more than a block of threads has") {
    for (const uint32_t count : {1u, 16u, 17u, 50u}) {
        CAPTURE(count);
        device_array<uint32_t> table(300 * kernels::line_words);
        std::vector<uint32_t> expected = table.copy();
        std::vector<uint32_t> batch;
        for (uint32_t i = 0; i < count; ++i) batch.push_back(i * 7 % 300);
        batch.resize(kernels::spread_words_at(count) / sizeof(uint32_t));
        for (uint32_t i = 0; i < count * kernels::line_words; ++i) {
            batch.push_back(1000 + i);
            expected[batch[i / kernels::line_words] * kernels::line_words +
                     i % kernels::line_words] = 1000 + i;
        }
        const device_array<uint32_t> on_device(batch);
        const kernels::spread_parameters call{
            table.data(), reinterpret_cast<const std::byte*>(on_device.data()), count};
        const launch_report report =
            launch({.blocks = kernels::spread_blocks(count), .threads = kernels::spread_threads},
                   [&] { kernels::spread_lines<context>(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        CHECK(table.copy() == expected);
    }
}
