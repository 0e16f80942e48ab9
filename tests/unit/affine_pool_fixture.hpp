// affine4 in a pool, through the C interface: steps of drawn rows, the arena's records as the test
// decodes them, attention by its definition in double.
#pragma once

#include <doctest/doctest.h>

#include <string>

#include "affine_reference.hpp"

namespace affine_test {

using namespace format_test;

inline constexpr uint32_t kv_heads = 2, query_heads = 4, group = 2;

inline void require_ok(kv_status status) {
    char message[512];
    kv_last_error(message, sizeof message);
    REQUIRE_MESSAGE(status == KV_OK, kv_status_name(status), ": ", message);
}

struct pool_shape {
    uint32_t layout = KV_LAYOUT_NATIVE;
    uint32_t dim = 64;
    rope_facts rope = rope_facts(KV_ROPE_HALF, 64, 10000.0, 1.0);
    uint32_t key_format = KV_FORMAT_AFFINE4;
    uint32_t value_format = KV_FORMAT_F32;
    uint32_t window = 0;
    uint32_t layers = 1;
    uint32_t block_tokens = 0;  // 0: as the library wants it
    uint32_t flags = 0;         // KV_LAYER_*

    bool by_slot() const { return (flags & KV_LAYER_CACHE_POSITIONS) != 0; }
    rope_facts key_rope() const { return by_slot() ? rope_facts() : rope; }  // as they are stored
};

/// Constants of all heads, as kv_storage takes them.
struct layer_channels {
    std::vector<channel_facts> heads;
    std::vector<float> means, scales;

    layer_channels(uint32_t dim, std::mt19937& random) {
        for (uint32_t head = 0; head < kv_heads; ++head) {
            heads.emplace_back(dim, random);
            means.insert(means.end(), heads[head].means.begin(), heads[head].means.end());
            scales.insert(scales.end(), heads[head].scales.begin(), heads[head].scales.end());
        }
    }
    kv_storage describe(uint32_t dim) const {
        kv_storage storage = KV_INIT(kv_storage);
        storage.channel_means = means.data();
        storage.channel_scales = scales.data();
        storage.channel_heads = kv_heads;
        storage.channel_dim = dim;
        return storage;
    }
};

/// Rows [tokens][heads][dim] of one layer.
struct rows_of_layer {
    std::vector<float> keys, values, queries;
};

struct live_pool {
    pool_shape shape;
    kv_pool* handle = nullptr;
    kv_seq sequence = 0;

    live_pool(const pool_shape& wanted, const layer_channels& channels, uint32_t threads = 1)
        : shape(wanted) {
        const kv_storage storage = channels.describe(shape.dim);
        const kv_rope rope = shape.rope.describe();
        kv_layer layer = KV_INIT(kv_layer);
        layer.query_heads = query_heads;
        layer.kv_heads = kv_heads;
        layer.key_dim = shape.dim;
        layer.value_dim = 32;
        layer.key_format = shape.key_format;
        layer.value_format = shape.value_format;
        layer.window = shape.window;
        layer.window_sinks = shape.window != 0 ? 5 : 0;
        layer.rope = &rope;
        layer.flags = shape.flags;
        if (shape.key_format == KV_FORMAT_AFFINE4) layer.key_storage = &storage;
        const std::vector<kv_layer> layers(shape.layers, layer);
        kv_model model = KV_INIT(kv_model);
        model.layers = layers.data();
        model.layer_count = shape.layers;
        kv_pool_config config = KV_INIT(kv_pool_config);
        config.arena_bytes = uint64_t{16} << 20;
        config.layout = shape.layout;
        config.block_tokens = shape.block_tokens;
        config.max_tokens_per_sequence = 2048;
        config.max_sequences = 4;
        config.threads = threads;
        require_ok(kv_pool_create(&config, &model, &handle));
        require_ok(kv_seq_create(handle, nullptr, &sequence));
    }
    live_pool(const live_pool&) = delete;
    live_pool& operator=(const live_pool&) = delete;
    ~live_pool() { kv_pool_release(handle); }

    kv_tensor tensor(std::vector<float>& numbers, uint32_t rows, uint32_t heads,
                     uint32_t dim) const {
        kv_tensor made = KV_INIT(kv_tensor);
        made.data = numbers.data();
        made.dtype = KV_DTYPE_F32;
        made.rows = rows;
        made.heads = heads;
        made.dim = dim;
        return made;
    }
    std::vector<uint32_t> positions(uint32_t head) const {
        uint64_t count = 0;
        require_ok(kv_seq_get_positions(handle, sequence, 0, head, 0, nullptr, &count));
        std::vector<uint32_t> out(count);
        require_ok(kv_seq_get_positions(handle, sequence, 0, head, count, out.data(), &count));
        return out;
    }
    uint64_t next_position() const {
        kv_seq_info info = KV_INIT(kv_seq_info);
        require_ok(kv_seq_get_info(handle, sequence, &info));
        return info.accepted;
    }
};

inline rows_of_layer draw_rows(const live_pool& pool, const layer_channels& channels,
                               uint64_t first, uint32_t rows, std::mt19937& random) {
    rows_of_layer drawn;
    for (uint32_t r = 0; r < rows; ++r) {
        for (uint32_t head = 0; head < kv_heads; ++head) {
            const std::vector<float> key =
                channels.heads[head].key(pool.shape.key_rope(), first + r, random);
            drawn.keys.insert(drawn.keys.end(), key.begin(), key.end());
        }
    }
    drawn.values = gauss_row(rows * kv_heads * 32, random);
    drawn.queries = gauss_row(rows * query_heads * pool.shape.dim, random);
    for (float& x : drawn.queries) x *= 0.3f;
    return drawn;
}

/// The bytes of every retained record while a step is open, [head][slot][words], and the values.
struct stored_rows {
    std::vector<std::vector<std::byte>> records[kv_heads];
    std::vector<std::vector<float>> values[kv_heads];
    std::vector<uint32_t> positions[kv_heads];
    uint64_t key_identity = 0;
};

inline stored_rows read_arena(kv_step* step) {
    std::vector<int32_t> table(256), slot_positions(kv_heads * 2048);
    int32_t kv_len = 0, slot_indptr[2];
    kv_tables tables = KV_INIT(kv_tables);
    tables.block_table = table.data();
    tables.block_table_stride = tables.block_table_capacity = table.size();
    tables.kv_len = &kv_len;
    tables.slot_indptr = slot_indptr;
    tables.slot_positions = slot_positions.data();
    tables.slot_positions_capacity = slot_positions.size();
    tables.item_capacity = 1;
    require_ok(kv_step_export(step, 0, &tables));
    stored_rows stored;
    stored.key_identity = tables.key_identity;
    const uint32_t slots = static_cast<uint32_t>(kv_len);
    for (uint32_t head = 0; head < kv_heads; ++head) {
        for (uint32_t slot = 0; slot < slots; ++slot) {
            const std::byte* block = static_cast<const std::byte*>(tables.base) +
                                     table[slot / tables.block_tokens] * tables.block_stride;
            const int64_t place = slot % tables.block_tokens, in_group = place % tables.slot_group;
            const int64_t of_group = place / tables.slot_group;
            std::vector<std::byte> record(tables.key_words * tables.key_word_bytes);
            for (uint32_t word = 0; word < tables.key_words; ++word) {
                const int64_t at = of_group * tables.key_stride_group +
                                   in_group * tables.key_stride_slot +
                                   head * tables.key_stride_head + word * tables.key_stride_dim;
                std::memcpy(record.data() + word * tables.key_word_bytes,
                            block + tables.key_offset + at * tables.key_word_bytes,
                            tables.key_word_bytes);
            }
            stored.records[head].push_back(record);
            std::vector<float> value(32);
            for (uint32_t i = 0; i < 32; ++i) {
                const int64_t at = of_group * tables.value_stride_group +
                                   in_group * tables.value_stride_slot +
                                   head * tables.value_stride_head + i * tables.value_stride_dim;
                std::memcpy(&value[i], block + tables.value_offset + at * 4, 4);
            }
            stored.values[head].push_back(value);
            stored.positions[head].push_back(
                static_cast<uint32_t>(slot_positions[head * slots + slot]));
        }
    }
    return stored;
}

/// Attention of the step's rows by its definition, on what lies in the arena.
inline std::vector<double> attend_by_definition(const live_pool& pool,
                                                const layer_channels& channels,
                                                const stored_rows& stored,
                                                const rows_of_layer& step, uint64_t first_position,
                                                uint32_t rows) {
    const uint32_t dim = pool.shape.dim;
    std::vector<double> out;
    std::vector<std::vector<double>> keys[kv_heads];
    for (uint32_t head = 0; head < kv_heads; ++head) {
        for (std::size_t slot = 0; slot < stored.records[head].size(); ++slot) {
            keys[head].push_back(decode_affine(stored.records[head][slot].data(),
                                               channels.heads[head], pool.shape.key_rope(),
                                               stored.positions[head][slot]));
            if (pool.shape.by_slot()) {
                keys[head].back() = pool.shape.rope.turned(keys[head].back(), slot, 1);
            }
        }
    }
    for (uint32_t r = 0; r < rows; ++r) {
        for (uint32_t query_head = 0; query_head < query_heads; ++query_head) {
            const uint32_t head = query_head / group;
            const float* first_of_query =
                step.queries.data() + (r * query_heads + query_head) * dim;
            std::vector<double> query(first_of_query, first_of_query + dim);
            if (pool.shape.by_slot()) {
                query = pool.shape.rope.turned(query, keys[head].size() - rows + r, 1);
            }
            std::vector<double> sums(32);
            double denominator = 0;
            for (std::size_t slot = 0; slot < keys[head].size(); ++slot) {
                const uint64_t position = stored.positions[head][slot];
                if (position > first_position + r) continue;
                if (pool.shape.window != 0 && position >= 5 &&
                    position + pool.shape.window <= first_position + r) {
                    continue;
                }
                double dot = 0;
                for (uint32_t i = 0; i < dim; ++i) dot += query[i] * keys[head][slot][i];
                const double weight = std::exp(dot / std::sqrt(static_cast<double>(dim)));
                denominator += weight;
                for (uint32_t i = 0; i < 32; ++i) sums[i] += weight * stored.values[head][slot][i];
            }
            for (const double sum : sums) out.push_back(sum / denominator);
        }
    }
    return out;
}

/// The last slots hold the step's keys, as exactly as 4 bits can.
inline void check_keys(const live_pool& pool, const layer_channels& channels,
                       const stored_rows& stored, const rows_of_layer& step, uint32_t rows) {
    const uint32_t dim = pool.shape.dim;
    for (uint32_t head = 0; head < kv_heads; ++head) {
        double off = 0, size = 0;
        const std::size_t first = stored.records[head].size() - rows;
        for (uint32_t r = 0; r < rows; ++r) {
            const std::vector<double> back =
                decode_affine(stored.records[head][first + r].data(), channels.heads[head],
                              pool.shape.key_rope(), stored.positions[head][first + r]);
            for (uint32_t i = 0; i < dim; ++i) {
                const double key = double{step.keys[(r * kv_heads + head) * dim + i]};
                off += (back[i] - key) * (back[i] - key);
                size += key * key;
            }
        }
        CHECK(std::sqrt(off / size) < 0.15);
    }
}

/// A step of `rows` tokens; its output is compared with the definition.
inline stored_rows run_step(const live_pool& pool, const layer_channels& channels, uint32_t rows,
                            std::mt19937& random) {
    const uint64_t first = pool.next_position();
    rows_of_layer drawn = draw_rows(pool, channels, first, rows, random);
    kv_step* step = nullptr;
    require_ok(kv_step_begin(pool.handle, &step));
    require_ok(kv_seq_append(step, pool.sequence, nullptr, rows, nullptr));
    require_ok(kv_step_reserve(step, nullptr));
    std::vector<float> out(rows * query_heads * 32);
    const kv_tensor keys = pool.tensor(drawn.keys, rows, kv_heads, pool.shape.dim);
    const kv_tensor values = pool.tensor(drawn.values, rows, kv_heads, 32);
    const kv_tensor queries = pool.tensor(drawn.queries, rows, query_heads, pool.shape.dim);
    const kv_tensor target = pool.tensor(out, rows, query_heads, 32);
    for (uint32_t layer = 0; layer < pool.shape.layers; ++layer) {
        require_ok(kv_write(step, layer, &keys, &values));
    }
    require_ok(kv_attend(step, 0, &queries, &target, nullptr));
    stored_rows stored;
    if (pool.shape.key_format == KV_FORMAT_AFFINE4) {
        stored = read_arena(step);
        check_keys(pool, channels, stored, drawn, rows);
        const std::vector<double> expected =
            attend_by_definition(pool, channels, stored, drawn, first, rows);
        double off = 0, size = 0;
        for (std::size_t i = 0; i < out.size(); ++i) {
            off += (out[i] - expected[i]) * (out[i] - expected[i]);
            size += expected[i] * expected[i];
        }
        CHECK(std::sqrt(off / size) < 1e-5);
    }
    require_ok(kv_step_end(step, nullptr));
    return stored;
}

inline void compress(const live_pool& pool, uint32_t scorer, uint32_t budget) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = scorer;
    policy.budget = budget;
    policy.seed = 7;
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    require_ok(kv_compress(pool.handle, pool.sequence, &options, &report));
    REQUIRE(report.outcome == KV_COMPRESS_DONE);
    require_ok(kv_pool_check(pool.handle));
}

inline std::vector<rope_facts> ropes() {
    return {rope_facts(KV_ROPE_HALF, 64, 10000.0, 1.0),
            rope_facts(KV_ROPE_INTERLEAVED, 64, 500000.0, 1.2),
            rope_facts(KV_ROPE_HALF, 40, 10000.0, 1.0), rope_facts()};
}

}  // namespace affine_test
