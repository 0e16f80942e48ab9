// Plans of lanes that are made from another lane's, against tables filled by hand; what is beside
// them must stay as it was.
#include "kernels/share.hpp"

#include "lane_fixture.hpp"

using namespace kernel_test;
namespace kernels = kvrt::kernels;

namespace {

constexpr uint32_t line = kernels::line_words;

/// A table of some lines, and what it is to become.
struct shared_table {
    device_array<uint32_t> words;
    std::vector<uint32_t> expected;

    explicit shared_table(uint32_t lines) : words(size_t{lines} * line) {
        for (uint32_t i = 0; i < lines * line; ++i) words[i] = 7'000'000 + i;
        expected = words.copy();
    }
    void set(uint32_t at, uint32_t word) { words[at] = expected[at] = word; }

    void run(kernels::share_parameters call, const std::vector<kernels::line_share>& shares,
             const std::vector<kernels::lane_mapping>& mappings, thread_order order) {
        const device_array<kernels::line_share> listed(shares);
        const device_array<kernels::lane_mapping> mapped(mappings);
        call.table = words.data();
        call.shares = listed.data();
        call.mappings = mapped.data();
        call.share_count = static_cast<uint32_t>(shares.size());
        call.lanes = static_cast<uint32_t>(mappings.size());
        const launch_report report = launch({.blocks = kernels::share_blocks(call),
                                             .threads = kernels::share_threads,
                                             .order = order},
                                            [&] { kernels::share_plans<context>(call); });
        REQUIRE_MESSAGE(report.clean(), report.text());
        CHECK(words.copy() == expected);
    }
};

}  // namespace

TEST_CASE("share kernel: lines, fewer and more than a block of threads has") {
    for (const thread_order order : tested_orders) {
        constexpr uint32_t most = 2 * kernels::share_lines + 3;
        shared_table table(1000);
        const std::vector<kernels::line_share> shares = {
            {2, 300, most, 0}, {500, 1, 1, 0}, {400 + most, 600, kernels::share_lines, 0}};
        for (const kernels::line_share& share : shares) {
            std::copy_n(table.expected.begin() + share.source * line, share.lines * line,
                        table.expected.begin() + share.target * line);
        }
        kernels::share_parameters call;
        call.most_lines = most;
        table.run(call, shares, {}, order);
    }
}

TEST_CASE("share kernel: where rows of lanes go, by one plan and each lane's block table") {
    constexpr uint32_t block_tokens = 16, stride = 2 * line;
    for (const thread_order order : tested_orders) {
        for (const uint32_t rows : {5u, kernels::share_threads + 9}) {
            CAPTURE(rows);
            const uint32_t target_lines = (3 * rows + line - 1) / line;
            const uint32_t mapping_lines = (2 * rows + line - 1) / line;
            // Line 0 is nobody's; targets, then each lane's mapping and block table of 3 items.
            const uint32_t lane_lines = mapping_lines + 3 * stride / line;
            shared_table table(1 + target_lines + 2 * lane_lines);
            std::vector<kernels::lane_mapping> mappings;
            for (uint32_t lane = 0; lane < 2; ++lane) {
                const uint32_t first = 1 + target_lines + lane * lane_lines;
                mappings.push_back({1, first, first + mapping_lines, 0});
            }
            for (uint32_t row = 0; row < rows; ++row) {
                const bool there = row % 7 != 4;  // rows that the step before had
                const uint32_t item = there ? row % 3 : 0xffffffffu;
                const uint32_t slot = there ? (row * 37) % (stride * block_tokens) : 0xffffffffu;
                const uint32_t at = line + 3 * row;
                table.set(at, item);
                table.set(at + 1, slot);
                table.set(at + 2, there ? 100 + row : 0xffffffffu);
                for (uint32_t lane = 0; lane < 2; ++lane) {
                    const uint32_t id = 0x90000000u + lane * 100'000 + item * 1'000 + slot / 16;
                    const uint64_t place = there ? uint64_t{id} * 16 + slot % 16 : ~uint64_t{0};
                    if (there) {
                        table.set(mappings[lane].block_table * line + item * stride + slot / 16,
                                  id);
                    }
                    uint32_t* const to = table.expected.data() + mappings[lane].mapping * line;
                    to[2 * row] = static_cast<uint32_t>(place);
                    to[2 * row + 1] = static_cast<uint32_t>(place >> 32);
                }
            }
            kernels::share_parameters call;
            call.most_lines = 1;
            call.rows = rows;
            call.stride = stride;
            call.block_shift = 4;
            table.run(call, {}, mappings, order);
        }
    }
}
