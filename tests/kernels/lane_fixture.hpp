// A lane in the emulated device's memory: an arena of random bytes, shuffled block tables of some
// sequences, and the library's layout beside the kernels'.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "emulator/context.hpp"
#include "format/encode.hpp"
#include "format/tile.hpp"
#include "kernels/describe.hpp"

namespace kernel_test {

using emulator::context;
using emulator::device_array;
using emulator::launch;
using emulator::launch_report;
using emulator::thread_order;
using kvrt::tile_order;
using kvrt::kernels::number;

// What sanitizers find does not depend on the order of threads, and they are slow: one order each,
// and of all cases the first under the thread sanitizer, which is some hundred times slower.
#if defined(KVRT_EMULATE_THREAD)
inline constexpr bool few_cases = true;
#else
inline constexpr bool few_cases = false;
#endif
#if defined(KVRT_EMULATE_THREAD) || defined(KVRT_EMULATE_ADDRESS)
inline constexpr thread_order tested_orders[] = {thread_order::shuffled};
#else
inline constexpr thread_order tested_orders[] = {thread_order::ascending, thread_order::descending,
                                                 thread_order::shuffled};
#endif

struct lane_description {
    tile_order order = tile_order::native;
    uint32_t block_tokens = 16, kv_heads = 2;
    uint32_t key_dim = 64, value_dim = 64;
    uint32_t key_format = KV_FORMAT_F16, value_format = KV_FORMAT_F16;
    bool rotate = false;         ///< keys and values, where their formats do not say so
    uint32_t turned_pairs = 24;  ///< of affine4's keys
    bool interleaved = false;

    std::string text() const {
        return "order " + std::to_string(static_cast<uint32_t>(order)) + ", blocks of " +
               std::to_string(block_tokens) + ", " + std::to_string(kv_heads) + " heads, dims " +
               std::to_string(key_dim) + " and " + std::to_string(value_dim) + ", formats " +
               std::to_string(key_format) + " and " + std::to_string(value_format) +
               (rotate ? ", rotated" : "");
    }
};

class lane {
  public:
    lane(const lane_description& what, uint32_t sequences, uint32_t blocks_each, uint32_t seed = 1)
        : layout(kvrt::make_tile_layout(
              what.order, what.block_tokens, what.kv_heads, what.key_dim, what.value_dim,
              *kvrt::find_format(what.key_format, kvrt::operand_role::keys),
              *kvrt::find_format(what.value_format, kvrt::operand_role::values))),
          blocks_each_(blocks_each),
          arena(size_t{sequences * blocks_each + 2} * layout.block_bytes),
          ids(shuffled_ids(sequences * blocks_each, seed)),
          tables(ids),
          host_scales(what.kv_heads),
          scales(what.kv_heads),
          host_means(size_t{what.kv_heads} * what.key_dim),
          host_channel_scales(host_means.size()),
          host_turning(kvrt::turning_table_floats(what.turned_pairs)),
          means(host_means.size()),
          channel_scales(host_means.size()),
          turning(host_turning.size()) {
        std::mt19937 random(seed);
        for (std::byte& each : arena) each = static_cast<std::byte>(random());
        for (uint32_t head = 0; head < what.kv_heads; ++head) {
            scales[head] = host_scales[head] = 0.01f * static_cast<float>(head + 1);
        }
        layout.keys.rotated |= what.rotate;
        layout.values.rotated |= what.rotate;
        if (layout.keys.format->needs_channels) level_keys(what);
        REQUIRE(kvrt::kernels::describe(layout, place));
        layout.keys.scales = layout.values.scales = host_scales.data();
        place.keys.scales = place.values.scales = scales.data();
        place.keys.channel_means = means.data();
        place.keys.channel_scales = channel_scales.data();
        place.keys.turning.table = turning.data();
    }

    const uint32_t* table_of(uint32_t sequence) const {
        return ids.data() + size_t{sequence} * blocks_each_;
    }
    kvrt::kernels::block_tables device_tables() const { return {tables.data(), blocks_each_}; }

    kvrt::tile_layout layout;
    kvrt::kernels::block_place place;

  private:
    /// The constants of affine4.
    void level_keys(const lane_description& what) {
        std::mt19937 random(5);
        std::normal_distribution<float> normal;
        for (size_t i = 0; i < host_means.size(); ++i) {
            means[i] = host_means[i] = 2.0f * normal(random);
            channel_scales[i] = host_channel_scales[i] = std::exp(0.5f * normal(random));
        }
        std::vector<double> frequencies(what.turned_pairs);
        for (uint32_t b = 0; b < what.turned_pairs; ++b) {
            frequencies[b] = std::pow(10000.0, -static_cast<double>(b) / what.turned_pairs);
        }
        kvrt::fill_turning_table(frequencies.data(), what.turned_pairs, host_turning.data());
        std::copy(host_turning.begin(), host_turning.end(), turning.begin());
        host_rotation = {what.turned_pairs, what.interleaved, 1.25f, host_turning.data(), nullptr};
        layout.keys.channel_means = host_means.data();
        layout.keys.channel_scales = host_channel_scales.data();
        layout.keys.turning = &host_rotation;
    }
    std::vector<uint32_t> shuffled_ids(uint32_t count, uint32_t seed) const {
        std::vector<uint32_t> made(count);
        for (uint32_t i = 0; i < count; ++i) {
            made[i] = (i + 1) * (layout.block_bytes / kvrt::block_unit);
        }
        std::mt19937 random(seed);
        std::shuffle(made.begin(), made.end(), random);
        return made;
    }
    uint32_t blocks_each_;

  public:
    device_array<std::byte> arena;  ///< a block before those of the tables, and one behind
    std::vector<uint32_t> ids;
    device_array<uint32_t> tables;
    std::vector<float> host_scales;
    device_array<float> scales;
    std::vector<float> host_means, host_channel_scales, host_turning;
    device_array<float> means, channel_scales, turning;
    kvrt::position_rotation host_rotation;
};

/// A tensor of the caller on the device; rows are `gap` elements apart.
struct device_tensor {
    device_tensor(number tensor_type, uint32_t tensor_rows, uint32_t tensor_heads,
                  uint32_t tensor_dim, uint32_t gap = 0, int64_t dim_stride = 1)
        : type(tensor_type),
          rows(tensor_rows),
          heads(tensor_heads),
          dim(tensor_dim),
          bytes((size_t{tensor_heads} * tensor_dim * static_cast<size_t>(dim_stride) + gap) *
                tensor_rows * kvrt::kernels::number_bytes(tensor_type)) {
        place.data = bytes.data();
        place.dim_stride = dim_stride;
        place.head_stride = int64_t{tensor_dim} * dim_stride;
        place.row_stride = place.head_stride * int64_t{tensor_heads} + int64_t{gap};
    }

    kvrt::tensor_view view() const {
        kvrt::tensor_view made;
        made.data = place.data;
        made.type = static_cast<kvrt::element>(type);
        made.row_stride = place.row_stride;
        made.head_stride = place.head_stride;
        made.dim_stride = place.dim_stride;
        return made;
    }
    void put(uint32_t row, uint32_t head, uint32_t channel, float value) {
        kvrt::store_element(view().at(row, head, channel), view().type, value);
    }
    float get(uint32_t row, uint32_t head, uint32_t channel) const {
        return kvrt::load_element(view().at(row, head, channel), view().type);
    }
    /// Normal numbers, with `spread` and, now and then, something odd.
    void fill(uint32_t seed, float spread = 1.0f) {
        std::mt19937 random(seed);
        std::normal_distribution<float> normal;
        for (uint32_t row = 0; row < rows; ++row) {
            for (uint32_t head = 0; head < heads; ++head) {
                for (uint32_t i = 0; i < dim; ++i) put(row, head, i, spread * normal(random));
            }
        }
    }

    number type;
    uint32_t rows, heads, dim;
    device_array<std::byte> bytes;
    kvrt::kernels::tensor_place place;
};

}  // namespace kernel_test
