// Lanes whose slots hold rows of normal numbers, and those rows as the CPU reads them.
#pragma once

#include "attention/attend.hpp"
#include "base/executor.hpp"
#include "format/rows.hpp"
#include "lane_fixture.hpp"
#include "retention/stored_rows.hpp"

namespace kernel_test {

/// Rows of normal numbers in all slots of all sequences, whose spread differs by slot.
inline void fill_rows(lane& here, uint32_t sequences, uint32_t slots, uint32_t seed) {
    const kvrt::tile_layout& layout = here.layout;
    const uint32_t rows = sequences * slots;
    device_tensor keys(number::f32, rows, layout.kv_heads, layout.keys.dim);
    device_tensor values(number::f32, rows, layout.kv_heads, layout.values.dim);
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (device_tensor* tensor : {&keys, &values}) {
        for (uint32_t row = 0; row < rows; ++row) {
            const float spread = std::exp(0.5f * normal(random));
            for (uint32_t head = 0; head < tensor->heads; ++head) {
                for (uint32_t i = 0; i < tensor->dim; ++i) {
                    tensor->put(row, head, i, spread * normal(random));
                }
            }
        }
    }
    std::vector<kvrt::write_item> items;
    for (uint32_t s = 0; s < sequences; ++s) {
        items.push_back({here.table_of(s), 0, s * slots, slots, 0});
    }
    std::vector<uint64_t> saturated(layout.kv_heads);
    kvrt::executor threads;
    kvrt::write_rows(layout, here.arena.data(), items.data(), sequences, keys.view(), values.view(),
                     {saturated.data(), saturated.data()}, threads);
}

/// NaN in a channel of one slot of all sequences, of keys and values; coded formats have it in all
/// channels of the row, or of a group.
inline void put_nan(lane& here, uint32_t sequences, uint32_t slot, uint32_t channel) {
    const kvrt::tile_layout& layout = here.layout;
    device_tensor keys(number::f32, 1, layout.kv_heads, layout.keys.dim);
    device_tensor values(number::f32, 1, layout.kv_heads, layout.values.dim);
    for (device_tensor* tensor : {&keys, &values}) {
        for (uint32_t head = 0; head < tensor->heads; ++head) {
            for (uint32_t i = 0; i < tensor->dim; ++i) {
                tensor->put(0, head, i, i == channel ? NAN : 0.01f * static_cast<float>(i));
            }
        }
    }
    std::vector<uint64_t> saturated(layout.kv_heads);
    kvrt::executor threads;
    for (uint32_t s = 0; s < sequences; ++s) {
        const kvrt::write_item item{here.table_of(s), slot, 0, 1, slot};
        kvrt::write_rows(layout, here.arena.data(), &item, 1, keys.view(), values.view(),
                         {saturated.data(), saturated.data()}, threads);
    }
}

inline std::vector<double> row_of(const lane& here, bool value, uint32_t sequence, uint32_t slot,
                                  uint32_t head) {
    const kvrt::operand_layout& operand = value ? here.layout.values : here.layout.keys;
    const uint32_t tokens = here.layout.block_tokens;
    std::vector<float> row(operand.dim);
    kvrt::read_row(operand,
                   kvrt::block_address(here.arena.data(), here.table_of(sequence)[slot / tokens]),
                   slot % tokens, head, 0, row.data());
    return {row.begin(), row.end()};
}

/// The same as the CPU's passes over rows want them.
inline kvrt::stored_rows rows_of(const lane& here, uint32_t sequence, uint32_t head) {
    kvrt::stored_rows rows;
    rows.open = &here.layout;
    rows.arena = here.arena.data();
    rows.blocks = here.table_of(sequence);
    rows.kv_head = head;
    return rows;
}

/// Whether the CPU's passes multiply and add at once, as kernels do.
inline bool cpu_fuses() {
    const std::string target = kvrt::attend_target_name();
    return target.find("AVX") != std::string::npos || target.find("NEON") != std::string::npos;
}

}  // namespace kernel_test
