// Tiles among all else that a pool does: attention over them, windows, fences, full pools, and any
// order of operations.
#include "attention/kernels.hpp"
#include "tiles_attention.hpp"

using namespace tiles_test;

namespace {

TEST_CASE("attention over tiles and raw rows together is the definition over what is stored") {
    for (const uint32_t dim : {64u, 80u, 128u}) {
        std::vector<shape> shapes = mixed;
        for (shape& one : shapes) one.dim = dim;
        const world w(shapes, {});
        const kv_seq seq = w.create();
        ok(w.step(seq, 1, 150, 150));
        for (uint32_t layer = 0; layer < shapes.size(); ++layer) {
            for (const uint32_t rows : {1u, 3u, 20u}) {
                CAPTURE(layer);
                CAPTURE(rows);
                CHECK(attention_error(w, seq, layer, rows) < 2e-5);
            }
        }
        kv_compress_report report;
        compress(w, seq, KV_SCORER_KEY_NORM, 90, report);
        for (uint32_t layer = 0; layer < shapes.size(); ++layer) {
            CHECK(attention_error(w, seq, layer, 1) < 2e-5);
        }
    }
}

TEST_CASE("attention over tiles of 2 and 4 bits: every width of vectors, part of a tile") {
    for (const uint32_t dim : {64u, 72u, 80u, 96u, 128u, 160u, 256u}) {
        CAPTURE(dim);
        std::vector<shape> shapes;
        for (const uint32_t group : {1u, 3u, 4u}) {
            for (const uint32_t window : {0u, 110u}) {
                shapes.push_back({KV_FORMAT_KIVI2, KV_FORMAT_KIVI2, 1, dim, window, group});
                shapes.push_back({KV_FORMAT_KVARN2, KV_FORMAT_KVARN2, 1, dim, window, group});
                shapes.push_back({KV_FORMAT_KIVI4, KV_FORMAT_KVARN4, 1, dim, window, group});
            }
        }
        const world w(shapes, {});
        const kv_seq seq = w.create();
        ok(w.step(seq, 1, 150, 150));
        for (uint32_t layer = 0; layer < shapes.size(); ++layer) {
            CAPTURE(layer);
            CHECK(attention_error(w, seq, layer, 1) < 1e-5);
            const lane_geometry& lane = w.pool->store.model.lanes[layer];
            CHECK(decode_reads(lane.sealed_layout) == (dim % 16 == 0 || layer % 3 == 2));
        }
    }
}

TEST_CASE("a model with tiles of tokens that a block does not hold is refused, and says why") {
    kv_layer layer = KV_INIT(kv_layer);
    layer.query_heads = 1;
    layer.kv_heads = 1;
    layer.key_dim = 64;
    layer.key_format = KV_FORMAT_KIVI4;
    layer.value_format = KV_FORMAT_F16;
    kv_model model = KV_INIT(kv_model);
    model.layers = &layer;
    model.layer_count = 1;
    kv_pool_config config = KV_INIT(kv_pool_config);
    config.arena_bytes = slab_bytes;
    kv_pool* pool = nullptr;
    CHECK(kv_pool_create(&config, &model, &pool) == KV_UNSUPPORTED);
    char text[512];
    kv_last_error(text, sizeof text);
    CHECK(std::string(text).find("block_tokens is 16") != std::string::npos);
    layer.key_format = KV_FORMAT_F16;
    layer.value_format = KV_FORMAT_KVARN4;
    config.block_tokens = 32;
    CHECK(kv_pool_create(&config, &model, &pool) == KV_UNSUPPORTED);
    config.block_tokens = 128;
    ok(kv_pool_create(&config, &model, &pool));
    kv_pool_release(pool);
}

TEST_CASE("windows slide over tiles") {
    std::vector<shape> shapes = mixed;
    for (shape& one : shapes) one.window = 100;
    const world w(shapes, {});
    const kv_seq seq = w.create();
    for (uint32_t i = 0; i < 12; ++i) {
        ok(w.step(seq, 1, 50, 50));
        w.check();
    }
    // 600 tokens: the sinks' block, and blocks from position 500 on.
    CHECK(w.lane(seq, 0).blocks == 1 + 600 / 64 + 1 - 500 / 64);
    CHECK(w.lane(seq, 0).sealed_blocks + 1 == w.lane(seq, 0).blocks);
    std::vector<uint64_t> positions;
    for (uint32_t i = 0; i < 64; ++i) positions.push_back(512 + i);
    CHECK(w.stored(seq, 0, false, 0, 128) == sealed_rows(w, 1, 0, false, 0, positions)[0]);
    ok(kv_seq_release(w.pool, seq));
    CHECK(w.live_bytes() == 0);
}

TEST_CASE("while fences have not passed nothing is sealed under the host's kernels") {
    pool_options options;
    options.flags = KV_POOL_DEBUG | KV_POOL_HOST_FENCES;
    const world w({{KV_FORMAT_KIVI4, KV_FORMAT_KIVI4}}, options);
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 130, 130));
    CHECK(w.lane(seq, 0).sealed_blocks == 0);
    ok(w.step(seq, 1, 1, 1));  // fence 1 has not passed
    CHECK(w.lane(seq, 0).sealed_blocks == 0);
    ok(kv_pool_pass_fence(w.pool, 2));
    ok(w.step(seq, 1, 1, 1));
    CHECK(w.lane(seq, 0).sealed_blocks == 2);
    w.check();
    check_consecutive(w, seq, 1, 132);
}

TEST_CASE("a pool too small for raw blocks and tiles says so, and loses nothing") {
    pool_options options;
    options.slabs = 2;  // one of each class
    options.max_tokens = 8192;
    const world w({{KV_FORMAT_KIVI4, KV_FORMAT_KIVI4, 8, 128}}, options);
    const kv_seq seq = w.create();
    uint32_t tokens = 0;
    kv_status status = KV_OK;
    while ((status = w.step(seq, 1, 64, 64)) == KV_OK) tokens += 64;
    CHECK((status == KV_TOO_LARGE || status == KV_AGAIN));
    const lane_geometry& lane = w.pool->store.model.lanes[0];
    CHECK(tokens / 64 == slab_bytes / (lane.sealed_layout.block_bytes + guard_bytes));
    check_consecutive(w, seq, 1, tokens);
    w.check();
    ok(kv_seq_release(w.pool, seq));
    CHECK(w.live_bytes() == 0);
}

TEST_CASE(
    "any order of operations keeps every row near what was written, and every block counted") {
    pool_options options;
    options.slabs = 64;
    options.max_tokens = 2048;
    const world w(mixed, options);
    struct followed {
        kv_seq handle;
        uint64_t seen;
    };
    std::vector<followed> alive;
    std::mt19937 draw(11);
    const auto below = [&](uint32_t n) { return static_cast<uint32_t>(draw() % n); };
    for (int turn = 0; turn < 400; ++turn) {
        const uint32_t what = below(10);
        if (alive.empty() || (what == 0 && alive.size() < 6)) {
            alive.push_back({w.create(), 0});
            continue;
        }
        followed& one = alive[below(static_cast<uint32_t>(alive.size()))];
        if (what <= 4) {
            const uint32_t count = 1 + below(90), accepted = below(4) == 0 ? below(count) : count;
            const bool cancel = below(8) == 0;
            if (w.lane(one.handle, 0).slots + count > 2048) continue;
            ok(w.step(one.handle, 1, count, accepted, cancel));
            if (!cancel) one.seen += accepted;
        } else if (what == 5 && alive.size() < 6) {
            kv_seq child = 0;
            ok(kv_seq_fork(w.pool, one.handle, 1, &child));
            alive.push_back({child, one.seen});
        } else if (what == 6) {
            const uint64_t to = one.seen - std::min<uint64_t>(one.seen, below(100));
            const kv_status status = kv_seq_truncate(w.pool, one.handle, to);
            REQUIRE((status == KV_OK || status == KV_NO_SNAPSHOT));
            if (status == KV_OK) one.seen = to;
        } else if (what == 7 && w.lane(one.handle, 0).slots > 20) {
            kv_compress_report report;
            compress(w, one.handle, below(2) == 0 ? KV_SCORER_RANDOM : KV_SCORER_STREAMING,
                     16 + below(200), report);
        } else if (what == 8 && below(3) == 0) {
            ok(kv_seq_release(w.pool, one.handle));
            one = alive.back();
            alive.pop_back();
            continue;
        }
        w.check();
        const followed& looked = alive[below(static_cast<uint32_t>(alive.size()))];
        const uint32_t slots = w.lane(looked.handle, 0).slots;
        if (slots == 0) continue;
        for (int probe = 0; probe < 20; ++probe) {
            const uint32_t layer = below(static_cast<uint32_t>(mixed.size()));
            const uint32_t head = below(2), slot = below(slots);
            const bool value = below(2) == 1;
            const slot_positions positions =
                positions_of(w.pool->store, w.inside(looked.handle), layer, head);
            const auto row = w.stored(looked.handle, layer, value, head, slot);
            const auto distance = [&](uint64_t position) {
                const auto all = written(1, layer, value, 2, 64, position);
                double sum = 0.0;
                for (uint32_t i = 0; i < 64; ++i) {
                    sum += std::pow(double{row[i]} - double{all[head * 64 + i]}, 2.0);
                }
                return sum;
            };
            // However often it was coded again, it is this token's row and no neighbour's.
            const uint64_t position = positions.at(slot);
            const double error = distance(position);
            for (uint64_t other = position + 1; other < position + 5; ++other) {
                REQUIRE(error < distance(other));
            }
            // 4 bits stay near, too; 2 bits grow with each time.
            const bool two_bits = layer == 4 || (layer == 1 && value);
            double square = 0.0;
            for (const float x : row) square += double{x} * double{x};
            if (!two_bits) REQUIRE(error < 0.1 * square);
        }
    }
    for (const followed& one : alive) ok(kv_seq_release(w.pool, one.handle));
    CHECK(w.live_bytes() == 0);
    w.check();
}

}  // namespace
