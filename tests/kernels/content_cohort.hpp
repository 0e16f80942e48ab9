// Lanes of several sequences and formats, whose keys and values scorers look at.
#pragma once

#include "filled_lane.hpp"
#include "kernels/score.hpp"

namespace kernel_test {

namespace kernels = kvrt::kernels;

inline constexpr float untouched = -77.0f;
inline constexpr uint32_t most_slots = few_cases ? 400 : 2100;  // more than one part of sums
inline constexpr uint32_t blocks_each = (most_slots + 15) / 16;

/// Lanes of three sequences, and rows of scores for each of their KV heads.
struct content_cohort {
    lane_description what;
    uint32_t rows;  ///< of scores, of a KV head
    std::vector<uint32_t> slots = {most_slots, 37, 390};
    uint64_t stride = most_slots + 4;
    lane here;
    std::vector<kernels::score_lane> lanes;
    std::vector<float> scores;

    explicit content_cohort(const lane_description& of, uint32_t rows_of_head = 1)
        : what(of), rows(rows_of_head), here(of, 3, blocks_each) {
        fill_rows(here, 3, blocks_each * 16, 3);
        for (uint32_t i = 0; i < slots.size(); ++i) {
            lanes.push_back(
                {uint64_t{i} * blocks_each, i * what.kv_heads * rows * stride, 0, 0, slots[i], 0});
        }
    }
    void shorten(uint32_t most) {
        for (uint32_t i = 0; i < slots.size(); ++i) {
            lanes[i].slots = slots[i] = std::min(slots[i], most);
        }
    }
    uint32_t count() const { return static_cast<uint32_t>(slots.size()); }
    uint32_t heads() const { return count() * what.kv_heads; }
    std::vector<float> nothing() const {
        return std::vector<float>(heads() * rows * stride, untouched);
    }
    const float* row(uint32_t sequence, uint32_t head) const {
        return &scores[(sequence * what.kv_heads + head) * rows * stride];
    }
    template <class parameters>
    parameters make_call() const {
        parameters call;
        call.arena = here.arena.data();
        call.place = here.place;
        call.tables = here.tables.data();
        call.count = count();
        call.most_slots = most_slots;
        return call;
    }
    template <class body>
    void run(uint32_t blocks, uint32_t threads, uint32_t shared, thread_order order,
             const body& kernel) const {
        const launch_report report = launch(
            {.blocks = blocks, .threads = threads, .shared_bytes = shared, .order = order}, kernel);
        REQUIRE_MESSAGE(report.clean(), report.text());
    }
    uint32_t score_blocks() const {
        return kernels::score_blocks(count(), what.kv_heads, most_slots);
    }
    /// Nothing behind a row's slots was written.
    void check_ends() const {
        for (uint32_t i = 0; i < count(); ++i) {
            for (uint32_t r = 0; r < what.kv_heads * rows; ++r) {
                for (uint64_t slot = slots[i]; slot < stride; ++slot) {
                    REQUIRE(row(i, 0)[r * stride + slot] == untouched);
                }
            }
        }
    }
    template <class callable>
    void for_each_head(const callable& body) const {
        for (uint32_t i = 0; i < count(); ++i) {
            for (uint32_t head = 0; head < what.kv_heads; ++head) body(i, head);
        }
    }
};

inline std::vector<lane_description> some_lanes() {
    if (few_cases) return {{.kv_heads = 1}};
    return {
        {},
        {.order = tile_order::hnd,
         .kv_heads = 1,
         .key_dim = 72,
         .value_dim = 40,
         .key_format = KV_FORMAT_BF16,
         .value_format = KV_FORMAT_F32},
        {.key_format = KV_FORMAT_INT8_TOKEN, .value_format = KV_FORMAT_INT4_TOKEN},
        {.kv_heads = 1,
         .key_dim = 128,
         .value_dim = 256,
         .key_format = KV_FORMAT_Q4_1,
         .value_format = KV_FORMAT_Q8_0},
        {.order = tile_order::nhd,
         .block_tokens = 32,
         .kv_heads = 1,
         .key_format = KV_FORMAT_FP8_E4M3,
         .value_format = KV_FORMAT_MXFP4},
    };
}

/// Each lane in another order of threads.
template <class callable>
void for_each_lane(const callable& body) {
    uint32_t index = 0;
    for (const lane_description& what : some_lanes()) {
        CAPTURE(what.text());
        body(what, emulator::all_orders[index++ % std::size(emulator::all_orders)]);
    }
}

}  // namespace kernel_test
