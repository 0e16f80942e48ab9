// Pools on KV_DEVICE_CUDA over the fake driver, and a host that has kernels of its own.
#pragma once

#include <doctest/doctest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "device/plugin_device.hpp"
#include "fake_driver.hpp"
#include "kvrt/kv_cuda.h"

extern "C" const kvrt_plugin* kvrt_cuda_plugin(void);

namespace kvrt::cuda {

inline bool message_has(const char* part) {
    std::string text(kv_last_error(nullptr, 0), '\0');
    kv_last_error(text.data(), text.size() + 1);
    return text.find(part) != std::string::npos;
}

/// A driver in whose process the library's plugin is, with a host that has a context of its own.
struct cuda_host {
    fake_driver fake;
    stream_handle stream = fake.make_stream();
    stream_handle other = fake.make_stream();
    context_handle own = fake.make_context("the host's");

    explicit cuda_host(const fake_driver::options& settings = {}) : fake(settings) {
        fake.set_current(own);
        replace_driver(&fake.table());
        replace_cuda_plugin(kvrt_cuda_plugin());
    }
    cuda_host(const cuda_host&) = delete;
    cuda_host& operator=(const cuda_host&) = delete;
    ~cuda_host() {
        for (const std::string& violation : fake.violations) FAIL_CHECK(violation);
        for (const std::string& leak : fake.leaks()) FAIL_CHECK(leak);
        CHECK(fake.current() == own);
        CHECK(fake.capture_mode() == 0);
        CHECK(fake.physical_bytes() == 0);
        replace_cuda_plugin(nullptr);
        replace_driver(nullptr);
    }
};

inline CUstream_st* as_stream(stream_handle stream) {
    return reinterpret_cast<CUstream_st*>(stream);
}

inline kv_pool_config small_config(uint32_t flags = 0) {
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.device = KV_DEVICE_CUDA;
    config.flags = flags;
    config.arena_bytes = uint64_t{8} << 20;
    config.max_sequences = 12;
    config.max_tokens_per_sequence = 512;
    config.max_step_sequences = 6;
    config.max_step_tokens = 256;
    config.layout = KV_LAYOUT_NHD;
    config.threads = 1;
    return config;
}

/// A full layer, and one with a window; so many times.
struct small_model {
    std::vector<kv_layer> layers;
    kv_model description = KV_INIT(kv_model);

    explicit small_model(uint32_t times = 1) {
        kv_layer layer = KV_INIT(kv_layer);
        layer.query_heads = 2;
        layer.kv_heads = 2;
        layer.key_dim = 64;
        layer.key_format = KV_FORMAT_F16;
        layers.assign(2, layer);
        layers[1].window = 48;
        layers[1].window_sinks = 4;
        for (uint32_t i = 2; i < 2 * times; ++i) layers.push_back(layers[i - 2]);
        description.layers = layers.data();
        description.layer_count = 2 * times;
    }
    small_model(const small_model&) = delete;
    small_model& operator=(const small_model&) = delete;
};

struct cuda_pool {
    small_model model;
    kv_pool* handle = nullptr;

    explicit cuda_pool(const kv_pool_config& config, uint32_t layer_pairs = 1)
        : model(layer_pairs) {
        const kv_status verdict = kv_pool_create(&config, &model.description, &handle);
        REQUIRE_MESSAGE(verdict == KV_OK, message_buffer());
    }
    cuda_pool(const cuda_pool&) = delete;
    cuda_pool& operator=(const cuda_pool&) = delete;
    ~cuda_pool() { kv_pool_release(handle); }
    operator kv_pool*() const { return handle; }

    kv_seq create_sequence() const {
        const kv_seq_config config = KV_INIT(kv_seq_config);
        kv_seq seq = 0;
        REQUIRE(kv_seq_create(handle, &config, &seq) == KV_OK);
        return seq;
    }
    kv_step* begin(stream_handle stream) const {
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(handle, &step) == KV_OK);
        REQUIRE(kv_cuda_step_use_stream(step, as_stream(stream)) == KV_OK);
        return step;
    }
    kv_pool_stats stats() const {
        kv_pool_stats stats = KV_INIT(kv_pool_stats);
        REQUIRE(kv_pool_get_stats(handle, &stats) == KV_OK);
        return stats;
    }
    uint64_t memory() const {
        uint64_t bytes = 0;
        REQUIRE(kv_cuda_pool_memory(handle, &bytes) == KV_OK);
        return bytes;
    }
};

/// What a step's kernels are told of a layer.
struct layer_tables {
    kv_tables tables = KV_INIT(kv_tables);
    std::vector<int32_t> block_table, query_start, kv_len, positions, slot_positions, slot_indptr;
    std::vector<int64_t> slot_mapping;

    /// Without slots' positions, where only the device knows them.
    void fill(kv_step* step, uint32_t layer, bool with_slots = true) {
        constexpr uint64_t items = 6, blocks = 40, tokens = 256;
        block_table.resize(items * blocks);
        query_start.resize(items + 1);
        kv_len.resize(items);
        slot_indptr.resize(items + 1);
        slot_mapping.resize(tokens);
        positions.resize(tokens);
        tables.positions = positions.data();
        slot_positions.resize(2 * items * 640);
        tables.block_table = block_table.data();
        tables.block_table_stride = blocks;
        tables.block_table_capacity = block_table.size();
        tables.query_start = query_start.data();
        tables.kv_len = kv_len.data();
        tables.slot_indptr = slot_indptr.data();
        if (with_slots) tables.slot_positions = slot_positions.data();
        tables.slot_positions_capacity = slot_positions.size();
        tables.item_capacity = items;
        tables.slot_mapping = slot_mapping.data();
        tables.token_capacity = tokens;
        REQUIRE(kv_step_export(step, layer, &tables) == KV_OK);
    }
    device_pointer row(int64_t id, uint32_t slot) const {
        return reinterpret_cast<device_pointer>(tables.base) +
               static_cast<uint64_t>(id * tables.block_stride + tables.key_offset) +
               uint64_t{2} *
                   static_cast<uint64_t>(slot / tables.slot_group * tables.key_stride_group +
                                         slot % tables.slot_group * tables.key_stride_slot);
    }
};

/// One sequence with `tokens` more, in a step of its own.
inline kv_status append(const cuda_pool& pool, stream_handle stream, kv_seq seq, uint32_t tokens) {
    kv_step* step = pool.begin(stream);
    REQUIRE(kv_seq_append(step, seq, nullptr, tokens, nullptr) == KV_OK);
    const kv_status verdict = kv_step_reserve(step, nullptr);
    if (verdict < 0) {
        REQUIRE(kv_step_cancel(step) == KV_OK);
        return verdict;
    }
    layer_tables tables;
    for (uint32_t layer = 0; layer < 2; ++layer) tables.fill(step, layer);
    return kv_step_end(step, nullptr);
}

}  // namespace kvrt::cuda
