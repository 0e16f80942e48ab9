// Engines with their own kernels: what kv_step_export hands out is enough to compute what kv_attend
// computes, in every layout, after compaction, with windows and positions in the logits; and keys
// written through the slot map are those that kv_attend reads.
#include "tables.hpp"

using namespace conformance;

namespace {

std::vector<layer_shape> all_kinds_of_layers() {
    layer_shape plain;
    layer_shape windowed;
    windowed.window = 37;
    windowed.window_sinks = 5;
    windowed.key_format = KV_FORMAT_F32;
    layer_shape biased;
    biased.alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
    biased.sink_logits = {0.0f, 1.0f, -2.0f, 3.0f};
    biased.value_format = KV_FORMAT_F32;
    layer_shape capped;
    capped.query_heads = 6;
    capped.kv_heads = 1;
    capped.key_dim = 64;
    capped.softcap = 5.0f;
    return {plain, windowed, biased, capped};
}

void compare_layers(engine& host, kv_step* step) {
    for (uint32_t layer = 0; layer < host.shape().layers.size(); ++layer) {
        CAPTURE(layer);
        host.write(step, layer);
        const std::vector<float> found = host.attend(step, layer);
        const exported tables(step, layer);
        for (const table_kind kind : {table_kind::dense, table_kind::compressed}) {
            CHECK(largest_difference(
                      found, attend_from_tables(tables, host.shape().layers[layer],
                                                host.queries(layer), kind, keep_all)) < 1e-5);
        }
    }
}

/// The tables say the same thing in three ways.
void check_consistency(const engine& host, kv_step* step) {
    for (uint32_t layer = 0; layer < host.shape().layers.size(); ++layer) {
        const exported e(step, layer);
        CHECK(e.tables.layout == host.shape().layout);
        CHECK(e.tables.block_tokens == host.shape().block_tokens);
        CHECK(e.tables.token_count == host.rows());
        CHECK(e.query_start[0] == 0);
        CHECK(e.query_start[e.tables.item_count] == static_cast<int32_t>(host.rows()));
        for (uint32_t item = 0; item < e.tables.item_count; ++item) {
            const int32_t* row = e.block_table.data() + item * e.tables.block_table_stride;
            const int32_t blocks = e.indptr[item + 1] - e.indptr[item];
            CHECK(e.kv_len[item] == (blocks - 1) * static_cast<int32_t>(e.tables.block_tokens) +
                                        e.last_page_len[item]);
            CHECK(e.last_page_len[item] >= 1);
            CHECK(e.last_page_len[item] <= static_cast<int32_t>(e.tables.block_tokens));
            CHECK(e.slot_indptr[item + 1] - e.slot_indptr[item] == e.kv_len[item]);
            for (uint32_t i = 0; i < e.tables.block_table_stride; ++i) {
                const bool used = static_cast<int32_t>(i) < blocks;
                CHECK(row[i] == (used ? e.indices[static_cast<uint32_t>(e.indptr[item]) + i] : -1));
            }
            const int32_t first = e.query_start[item], end = e.query_start[item + 1];
            for (int32_t r = first; r < end; ++r) {
                const int32_t slot = e.kv_len[item] - (end - r);
                const int32_t tokens = static_cast<int32_t>(e.tables.block_tokens);
                CHECK(e.slot_mapping[static_cast<uint32_t>(r)] ==
                      int64_t{row[slot / tokens]} * tokens + slot % tokens);
                CHECK(e.positions[static_cast<uint32_t>(r)] ==
                      static_cast<int32_t>(host.first_positions()[item]) + (r - first));
            }
        }
    }
}

}  // namespace

TEST_CASE("attention from exported tables alone equals kv_attend") {
    for (const uint32_t layout :
         {uint32_t{KV_LAYOUT_NATIVE}, uint32_t{KV_LAYOUT_HND}, uint32_t{KV_LAYOUT_NHD}}) {
        for (const uint32_t block_tokens : {16u, 32u, 128u}) {
            for (const uint32_t flags : {0u, uint32_t{KV_POOL_DEBUG}}) {
                CAPTURE(layout);
                CAPTURE(block_tokens);
                CAPTURE(flags);
                pool_shape shape;
                shape.layers = all_kinds_of_layers();
                shape.layout = layout;
                shape.block_tokens = block_tokens;
                shape.flags = flags;
                engine host(shape);
                const kv_seq a = host.create(), b = host.create(), c = host.create();
                host.run({{a, 1, 150}, {b, 2, 40}});
                // A round that leaves different holes in every layer and head.
                const kv_policy policy = policy_of(KV_SCORER_KEY_NORM, 61);
                kv_compress_options options = KV_INIT(kv_compress_options);
                options.policy = &policy;
                require_ok(kv_compress(host.pool(), a, &options, nullptr));
                // A prefill, a decode and a token with drafts in one step.
                kv_step* step = host.begin({{c, 3, 29}, {a, 1, 1}, {b, 2, 5}});
                compare_layers(host, step);
                check_consistency(host, step);
                require_ok(kv_step_accept(step, b, 2));
                require_ok(kv_step_end(step, nullptr));
                step = host.begin({{b, 2, 1}, {a, 1, 3}});
                compare_layers(host, step);
                check_consistency(host, step);
                require_ok(kv_step_end(step, nullptr));
            }
        }
    }
}

TEST_CASE("keys written by the host through the slot map are what kv_attend reads") {
    for (const uint32_t layout :
         {uint32_t{KV_LAYOUT_NATIVE}, uint32_t{KV_LAYOUT_HND}, uint32_t{KV_LAYOUT_NHD}}) {
        CAPTURE(layout);
        layer_shape single;
        single.key_format = single.value_format = KV_FORMAT_F32;
        pool_shape shape;
        shape.layers = {single};
        shape.layout = layout;
        engine host(shape), other(shape);
        const kv_seq a = host.create(), b = other.create();
        for (const uint32_t rows : {20u, 1u, 13u}) {
            kv_step* step = host.begin({{a, 9, rows}});
            const exported e(step, 0);
            const std::vector<float> keys = host.tensor(0, false), values = host.tensor(0, true);
            for (uint32_t row = 0; row < rows; ++row) {
                const int64_t tokens = e.tables.block_tokens;
                const int64_t block = e.slot_mapping[row] / tokens;
                const auto slot = static_cast<uint32_t>(e.slot_mapping[row] % tokens);
                for (uint32_t head = 0; head < single.kv_heads; ++head) {
                    for (uint32_t d = 0; d < single.key_dim; ++d) {
                        std::memcpy(e.address(block, slot, head, d, false),
                                    &keys[(row * single.kv_heads + head) * single.key_dim + d], 4);
                    }
                    for (uint32_t d = 0; d < single.value_dim; ++d) {
                        std::memcpy(e.address(block, slot, head, d, true),
                                    &values[(row * single.kv_heads + head) * single.value_dim + d],
                                    4);
                    }
                }
            }
            const std::vector<float> found = host.attend(step, 0);
            require_ok(kv_step_end(step, nullptr));  // exported, so it may end without kv_write
            const std::vector<float> expected = other.run({{b, 9, rows}})[0];
            CHECK(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0);
        }
    }
}

TEST_CASE("the four lengths of a sequence") {
    pool_shape shape;
    shape.layers = {layer_shape()};
    engine host(shape);
    const kv_seq a = host.create();
    const auto check = [&](uint64_t capacity, uint64_t written, uint64_t accepted) {
        const kv_seq_info info = host.info(a);
        CHECK(info.capacity == capacity);
        CHECK(info.written == written);
        CHECK(info.accepted == accepted);
        CHECK(info.published == accepted);
    };
    check(0, 0, 0);
    host.run({{a, 1, 10}});
    check(10, 10, 10);
    kv_step* step = host.begin({{a, 1, 6}});
    check(16, 10, 10);
    host.write(step, 0);
    check(16, 16, 10);
    require_ok(kv_step_accept(step, a, 4));
    check(16, 16, 10);
    require_ok(kv_step_end(step, nullptr));
    check(14, 14, 14);
    step = host.begin({{a, 1, 20}});
    check(34, 14, 14);
    require_ok(kv_step_cancel(step));
    check(14, 14, 14);
    step = host.begin({{a, 1, 3}});
    { const exported tables(step, 0); }
    check(17, 17, 14);
    require_ok(kv_step_accept(step, a, 0));
    require_ok(kv_step_end(step, nullptr));
    check(14, 14, 14);
    require_ok(kv_seq_truncate(host.pool(), a, 5));
    check(5, 5, 5);
}
