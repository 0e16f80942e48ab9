// A pool with tile-local formats, a host that writes rows drawn by position, and what each slot
// must hold then: followed beside the library, the rows coded tile by tile as the codec codes them.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "api/handles.hpp"
#include "format/rotation.hpp"
#include "format/rows.hpp"
#include "sequence/seal.hpp"

namespace tiles_test {

using namespace kvrt;

struct shape {
    uint32_t key_format, value_format;
    uint32_t kv_heads = 2, dim = 64;
    uint32_t window = 0;
    uint32_t group = 2;  ///< query heads of a KV head
    uint32_t demoted_keys = 0, demoted_values = 0, demote_after = 0;
    bool demoted_rotated = false;
    bool lane_per_head = false;
};

inline constexpr uint32_t window_sinks = 3;

struct pool_options {
    uint32_t block_tokens = 64;
    uint32_t flags = KV_POOL_DEBUG;
    uint32_t layout = KV_LAYOUT_NATIVE;
    uint32_t slabs = 16;
    uint32_t max_tokens = 1024;
    uint32_t pressure_percent = 100;  // that is, never
    bool by_slot = false;             // KV_LAYER_CACHE_POSITIONS, KV_ROPE_HALF with theta 10000
};

inline void ok(kv_status status) {
    char text[512] = {};
    kv_last_error(text, sizeof text);
    REQUIRE_MESSAGE(status == KV_OK, kv_status_name(status), ": ", text);
}

/// What was written for a token, [heads][dim] in f32; keys have a mean per channel, as real ones
/// do.
inline std::vector<float> written(uint32_t tokens_seed, uint32_t layer, bool value, uint32_t heads,
                                  uint32_t dim, uint64_t position) {
    std::mt19937 draw(tokens_seed * 7919u + layer * 104729u + (value ? 1u : 0u) +
                      static_cast<uint32_t>(position) * 31u);
    std::normal_distribution<float> noise;
    std::vector<float> row(heads * dim);
    for (uint32_t i = 0; i < row.size(); ++i) {
        row[i] = noise(draw) + (value ? 0.0f : static_cast<float>(i % 7) - 3.0f);
    }
    return row;
}

/// A pool, and a host that writes rows drawn by position.
struct world {
    std::vector<shape> shapes;
    kv_pool* pool = nullptr;

    world(std::vector<shape> layers, const pool_options& options) : shapes(std::move(layers)) {
        kv_storage rotated = KV_INIT(kv_storage);
        rotated.flags = KV_STORAGE_ROTATE;
        std::vector<kv_layer> model_layers;
        kv_rope rope = KV_INIT(kv_rope);
        rope.style = KV_ROPE_HALF;
        for (const shape& one : shapes) {
            kv_layer layer = KV_INIT(kv_layer);
            layer.query_heads = one.group * one.kv_heads;
            layer.kv_heads = one.kv_heads;
            layer.key_dim = one.dim;
            layer.key_format = one.key_format;
            layer.value_format = one.value_format;
            layer.window = one.window;
            layer.window_sinks = one.window != 0 ? window_sinks : 0;
            layer.demoted_key_format = one.demoted_keys;
            layer.demoted_value_format = one.demoted_values;
            layer.demote_after = one.demote_after;
            if (one.demoted_rotated) {
                layer.demoted_key_storage = layer.demoted_value_storage = &rotated;
            }
            if (one.lane_per_head) layer.flags |= KV_LAYER_LANE_PER_HEAD;
            if (options.by_slot) layer.flags |= KV_LAYER_CACHE_POSITIONS;
            layer.rope = options.by_slot ? &rope : nullptr;
            model_layers.push_back(layer);
        }
        kv_model model = KV_INIT(kv_model);
        model.layers = model_layers.data();
        model.layer_count = static_cast<uint32_t>(model_layers.size());
        kv_pool_config config = KV_INIT(kv_pool_config);
        config.arena_bytes = options.slabs * slab_bytes;
        config.block_tokens = options.block_tokens;
        config.flags = options.flags;
        config.layout = options.layout;
        config.max_sequences = 8;
        config.max_tokens_per_sequence = options.max_tokens;
        config.max_step_tokens = 512;
        config.threads = 2;
        config.pressure_percent = options.pressure_percent;
        ok(kv_pool_create(&config, &model, &pool));
    }
    ~world() { kv_pool_release(pool); }
    world(const world&) = delete;

    kv_seq create() const {
        kv_seq made = 0;
        ok(kv_seq_create(pool, nullptr, &made));
        return made;
    }

    void write(kv_step* step, uint32_t seed, uint64_t first, uint32_t count) const {
        for (uint32_t l = 0; l < shapes.size(); ++l) {
            kv_tensor tensors[2];
            std::vector<float> numbers[2];
            for (int value = 0; value < 2; ++value) {
                for (uint32_t r = 0; r < count; ++r) {
                    const auto row =
                        written(seed, l, value == 1, shapes[l].kv_heads, shapes[l].dim, first + r);
                    numbers[value].insert(numbers[value].end(), row.begin(), row.end());
                }
                tensors[value] = KV_INIT(kv_tensor);
                tensors[value].data = numbers[value].data();
                tensors[value].dtype = KV_DTYPE_F32;
                tensors[value].rows = count;
                tensors[value].heads = shapes[l].kv_heads;
                tensors[value].dim = shapes[l].dim;
            }
            ok(kv_write(step, l, &tensors[0], &tensors[1]));
        }
    }

    /// One step of `count` tokens of which `accepted` stay; cancelled if that is asked.
    kv_status step(kv_seq seq, uint32_t seed, uint32_t count, uint32_t accepted,
                   bool cancel = false, kv_step_report* report = nullptr) const {
        kv_step* open = nullptr;
        ok(kv_step_begin(pool, &open));
        kv_append_info info = KV_INIT(kv_append_info);
        ok(kv_seq_append(open, seq, nullptr, count, &info));
        const kv_status reserved = kv_step_reserve(open, nullptr);
        if (reserved != KV_OK) {
            ok(kv_step_cancel(open));
            return reserved;
        }
        write(open, seed, info.first_position, count);
        if (cancel) {
            ok(kv_step_cancel(open));
            return KV_OK;
        }
        if (accepted != count) ok(kv_step_accept(open, seq, accepted));
        ok(kv_step_end(open, report));
        return KV_OK;
    }

    const sequence& inside(kv_seq seq) const { return *pool->store.sequences.find(seq); }
    head_place place(uint32_t layer, uint32_t head) const {
        return pool->store.model.layers[layer].place_of(head);
    }
    const lane_state& lane(kv_seq seq, uint32_t layer, uint32_t head = 0) const {
        return inside(seq).lanes[place(layer, head).lane];
    }

    std::vector<float> stored(kv_seq seq, uint32_t layer, bool value, uint32_t head,
                              uint32_t slot) const {
        const lane_geometry& geometry = pool->store.model.lanes[place(layer, head).lane];
        const lane_state& state = lane(seq, layer, head);
        const uint32_t tokens = pool->store.model.block_tokens;
        const tile_layout& layout =
            slot / tokens < state.sealed_blocks ? geometry.sealed_layout : geometry.layout;
        std::vector<float> row(shapes[layer].dim);
        read_row(value ? layout.values : layout.keys,
                 block_address(pool->store.blocks.arena(), state.table[slot / tokens]),
                 slot % tokens, place(layer, head).head, 0, row.data());
        return row;
    }

    void check() const { ok(kv_pool_check(pool)); }
    uint64_t live_bytes() const {
        kv_pool_stats stats = KV_INIT(kv_pool_stats);
        ok(kv_pool_get_stats(pool, &stats));
        return stats.live_bytes;
    }
};

inline float rounded(float x) { return f16_to_f32(f32_to_f16(x)); }

/// A head's rows of positions [first, first + count) as the codec of an operand leaves them.
inline std::vector<std::vector<float>> sealed_rows(const world& w, uint32_t seed, uint32_t layer,
                                                   bool value, uint32_t head,
                                                   const std::vector<uint64_t>& positions) {
    const lane_geometry& geometry = w.pool->store.model.lanes[layer];
    const operand_layout& operand =
        value ? geometry.sealed_layout.values : geometry.sealed_layout.keys;
    const uint32_t dim = operand.dim;
    std::vector<float> rows;
    for (const uint64_t position : positions) {
        const auto all = written(seed, layer, value, w.shapes[layer].kv_heads, dim, position);
        std::vector<float> row(all.begin() + head * dim, all.begin() + (head + 1) * dim);
        if (operand.rotated) rotate_row(row.data(), dim);
        for (float& x : row) x = rounded(x);
        rows.insert(rows.end(), row.begin(), row.end());
    }
    std::vector<std::byte> tile(operand.tile_bytes);
    const uint32_t tokens = static_cast<uint32_t>(positions.size());
    operand.format->tile.seal(rows.data(), tokens, dim, tile.data());
    operand.format->tile.open(tile.data(), tokens, dim, 0, tokens, rows.data());
    std::vector<std::vector<float>> made;
    for (uint32_t t = 0; t < tokens; ++t) {
        std::vector<float> row(rows.begin() + t * dim, rows.begin() + (t + 1) * dim);
        if (operand.rotated) rotate_row(row.data(), dim);
        made.push_back(row);
    }
    return made;
}

inline bool tiled(const world& w, uint32_t layer, bool value) {
    const tile_layout& layout = w.pool->store.model.lanes[layer].sealed_layout;
    return value ? layout.values.tiled() : layout.keys.tiled();
}

/// Every slot of a sequence whose tiles hold consecutive tokens: sealed ones as the codec leaves
/// them, bit by bit; raw ones as f16.
inline void check_consecutive(const world& w, kv_seq seq, uint32_t seed, uint32_t tokens) {
    const uint32_t block_tokens = w.pool->store.model.block_tokens;
    for (uint32_t layer = 0; layer < w.shapes.size(); ++layer) {
        const lane_state& state = w.lane(seq, layer);
        REQUIRE(state.slots == tokens);
        const bool seals = w.pool->store.model.lanes[layer].seals;
        CHECK(state.sealed_blocks == (seals ? tokens / block_tokens : 0));
        for (int value = 0; value < 2; ++value) {
            if (!tiled(w, layer, value == 1)) continue;
            for (uint32_t head = 0; head < w.shapes[layer].kv_heads; ++head) {
                uint32_t wrong = 0;
                for (uint32_t first = 0; first + block_tokens <= tokens; first += block_tokens) {
                    std::vector<uint64_t> positions;
                    for (uint32_t i = 0; i < block_tokens; ++i) positions.push_back(first + i);
                    const auto rows = sealed_rows(w, seed, layer, value == 1, head, positions);
                    for (uint32_t i = 0; i < block_tokens; ++i) {
                        if (w.stored(seq, layer, value == 1, head, first + i) != rows[i]) ++wrong;
                    }
                }
                CHECK(wrong == 0);
                for (uint32_t slot = tokens / block_tokens * block_tokens; slot < tokens; ++slot) {
                    const auto all = written(seed, layer, value == 1, w.shapes[layer].kv_heads,
                                             w.shapes[layer].dim, slot);
                    const auto row = w.stored(seq, layer, value == 1, head, slot);
                    for (uint32_t i = 0; i < row.size(); ++i) {
                        REQUIRE(
                            row[i] ==
                            doctest::Approx(all[head * row.size() + i]).epsilon(0.002).scale(1.0));
                    }
                }
            }
        }
    }
}

inline const std::vector<shape> mixed = {
    {KV_FORMAT_KIVI4, KV_FORMAT_KIVI4},      {KV_FORMAT_KVARN4, KV_FORMAT_KVARN2},
    {KV_FORMAT_F16, KV_FORMAT_F16},          {KV_FORMAT_Q4_0, KV_FORMAT_KVARN4},
    {KV_FORMAT_KIVI2, KV_FORMAT_INT8_TOKEN},
};

inline void compress(const world& w, kv_seq seq, uint32_t scorer, uint32_t budget,
                     kv_compress_report& report) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = scorer;
    policy.budget = budget;
    policy.recent = 8;
    policy.sinks = 4;
    policy.seed = budget;
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    report = KV_INIT(kv_compress_report);
    ok(kv_compress(w.pool, seq, &options, &report));
}

}  // namespace tiles_test
