// The same bits for every thread count, for a host's executor that runs everything backwards, and
// whatever else is in the batch.
#include "engine.hpp"

using namespace conformance;

namespace {

pool_shape mixed_pool(uint32_t layout) {
    layer_shape plain;
    layer_shape wide;
    wide.query_heads = 8;
    wide.kv_heads = 2;
    wide.key_dim = 128;
    wide.value_dim = 64;
    wide.value_format = KV_FORMAT_F16;
    layer_shape windowed;
    windowed.window = 100;
    windowed.window_sinks = 4;
    windowed.key_format = windowed.value_format = KV_FORMAT_F32;
    pool_shape shape;
    shape.layers = {plain, wide, windowed};
    shape.layout = layout;
    return shape;
}

void same_bits(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
    REQUIRE(a.size() == b.size());
    for (std::size_t layer = 0; layer < a.size(); ++layer) {
        CAPTURE(layer);
        REQUIRE(a[layer].size() == b[layer].size());
        CHECK(std::memcmp(a[layer].data(), b[layer].data(), a[layer].size() * sizeof(float)) == 0);
    }
}

using outputs = std::vector<std::vector<float>>;

/// A life with long and short contexts, prefill, decode, drafts and a compaction.
outputs live(const pool_shape& shape) {
    engine host(shape);
    const kv_seq a = host.create(nullptr, true), b = host.create(nullptr, true);
    outputs all;
    const auto run = [&](const std::vector<part>& parts) {
        for (std::vector<float>& layer : host.run(parts)) all.push_back(std::move(layer));
    };
    run({{a, 1, 1500}});
    run({{a, 1, 1}, {b, 2, 70}});
    run({{a, 1, 4}, {b, 2, 1}});
    kv_policy policy = policy_of(KV_SCORER_TRIATTENTION, 300);
    policy.recent = 20;
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    require_ok(kv_compress(host.pool(), a, &options, nullptr));
    for (uint32_t layer = 0; layer < 2; ++layer) {
        for (uint32_t head = 0; head < 2; ++head) {
            const std::vector<uint32_t> kept = host.positions(a, layer, head);
            all.emplace_back(kept.begin(), kept.end());
        }
    }
    run({{a, 1, 1}, {b, 2, 1}});
    run({{b, 2, 3}, {a, 1, 40}});
    return all;
}

void backwards(void*, uint32_t count, void (*body)(void*, uint32_t), void* context) {
    while (count-- > 0) body(context, count);
}

}  // namespace

TEST_CASE("results do not depend on threads or on the order of their work") {
    for (const uint32_t layout :
         {uint32_t{KV_LAYOUT_NATIVE}, uint32_t{KV_LAYOUT_HND}, uint32_t{KV_LAYOUT_NHD}}) {
        CAPTURE(layout);
        pool_shape shape = mixed_pool(layout);
        const outputs one = live(shape);
        for (const uint32_t threads : {2u, 3u}) {
            CAPTURE(threads);
            shape.threads = threads;
            same_bits(one, live(shape));
        }
        kv_hooks hooks = KV_INIT(kv_hooks);
        hooks.parallel_for = backwards;
        shape.hooks = &hooks;
        same_bits(one, live(shape));
    }
}

TEST_CASE("results do not depend on what else is in the batch") {
    for (const uint32_t threads : {1u, 2u}) {
        pool_shape shape = mixed_pool(KV_LAYOUT_NATIVE);
        shape.threads = threads;
        engine alone(shape), crowded(shape);
        const kv_seq a = alone.create(), b = crowded.create();
        std::vector<kv_seq> others;
        for (uint32_t i = 0; i < 6; ++i) others.push_back(crowded.create());
        for (const uint32_t rows : {300u, 1u, 5u, 60u, 1u}) {
            CAPTURE(rows);
            const outputs expected = alone.run({{a, 77, rows}});
            std::vector<part> parts;
            for (uint32_t i = 0; i < others.size(); ++i) {
                if (i == 3) parts.push_back({b, 77, rows});
                parts.push_back({others[i], i, 1 + i * 50 % 90});
            }
            uint32_t first_row = 0;
            for (uint32_t i = 0; i < 3; ++i) first_row += parts[i].rows;
            const outputs found = crowded.run(parts);
            for (std::size_t layer = 0; layer < found.size(); ++layer) {
                CAPTURE(layer);
                const layer_shape& s = shape.layers[layer];
                const std::size_t row = s.query_heads * s.value_dim;
                CHECK(std::memcmp(found[layer].data() + first_row * row, expected[layer].data(),
                                  rows * row * sizeof(float)) == 0);
                const std::size_t logs = crowded.rows() * row + first_row * s.query_heads;
                CHECK(std::memcmp(found[layer].data() + logs, expected[layer].data() + rows * row,
                                  rows * s.query_heads * sizeof(float)) == 0);
            }
        }
    }
}
