// The life of blocks with tile-local formats: written raw, sealed when full, opened when a sequence
// goes back into one, coded anew when survivors move.
#include "tiles_fixture.hpp"

using namespace tiles_test;

namespace {

TEST_CASE("blocks are sealed when they are full, whatever the chunks they came in") {
    for (const uint32_t layout : {KV_LAYOUT_NATIVE, KV_LAYOUT_HND, KV_LAYOUT_NHD}) {
        pool_options options;
        options.layout = layout;
        const world w(mixed, options);
        const kv_seq seq = w.create();
        uint32_t tokens = 0;
        for (const uint32_t chunk : {1u, 62u, 1u, 1u, 130u, 61u, 64u, 3u}) {
            ok(w.step(seq, 1, chunk, chunk));
            tokens += chunk;
            check_consecutive(w, seq, 1, tokens);
            w.check();
        }
        ok(kv_seq_release(w.pool, seq));
        CHECK(w.live_bytes() == 0);
        w.check();
    }
}

TEST_CASE("sealing gives the raw block back: what is held is tiles and one raw block") {
    const world w({{KV_FORMAT_KIVI4, KV_FORMAT_KIVI4}}, {});
    const lane_geometry& lane = w.pool->store.model.lanes[0];
    const uint64_t sealed = lane.sealed_layout.block_bytes, raw = lane.layout.block_bytes;
    // 64 tokens, 2 heads of 64: f16 keys and q4_1-like values of 40 bytes a row against tiles of
    // 4 bits, with two groups of 32 tokens that have 2 numbers of 2 bytes for each channel.
    CHECK(raw == 2 * 64 * (128 + 40));
    CHECK(sealed == 2 * (64 * 32 + 2 * 64 * 4 + 64 * 40));
    const kv_seq seq = w.create();
    for (uint32_t tokens = 1; tokens <= 200; ++tokens) {
        ok(w.step(seq, 1, 1, 1));
        CHECK(w.live_bytes() == tokens / 64 * sealed + (tokens % 64 != 0 ? raw : 0));
    }
    ok(kv_seq_release(w.pool, seq));
}

TEST_CASE("rejected and cancelled tokens are never in a tile") {
    const world w(mixed, {});
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 60, 60));
    ok(w.step(seq, 2, 8, 8, true));  // cancelled; other numbers
    check_consecutive(w, seq, 1, 60);
    kv_step* open = nullptr;
    ok(kv_step_begin(w.pool, &open));
    ok(kv_seq_append(open, seq, nullptr, 8, nullptr));
    ok(kv_step_reserve(open, nullptr));
    w.write(open, 2, 60, 8);  // drafts
    ok(kv_step_accept(open, seq, 0));
    ok(kv_step_end(open, nullptr));
    check_consecutive(w, seq, 1, 60);
    ok(w.step(seq, 1, 8, 4));
    check_consecutive(w, seq, 1, 64);
    ok(w.step(seq, 1, 140, 63));
    check_consecutive(w, seq, 1, 127);
    w.check();
}

TEST_CASE("a fork reads the same tiles, and writes its own tail") {
    const world w(mixed, {});
    const kv_seq parent = w.create();
    ok(w.step(parent, 1, 150, 150));
    kv_seq child = 0;
    ok(kv_seq_fork(w.pool, parent, 1, &child));
    const uint64_t before = w.live_bytes();
    ok(w.step(child, 1, 50, 50));
    ok(w.step(parent, 1, 10, 10));
    check_consecutive(w, child, 1, 200);
    check_consecutive(w, parent, 1, 160);
    for (uint32_t layer = 0; layer < mixed.size(); ++layer) {
        CHECK(w.lane(child, layer).table[0] == w.lane(parent, layer).table[0]);
    }
    ok(kv_seq_release(w.pool, child));
    CHECK(w.live_bytes() == before);
    check_consecutive(w, parent, 1, 160);
    w.check();
}

kv_layer_stats layer_stats(const world& w, uint32_t layer) {
    kv_layer_stats stats = KV_INIT(kv_layer_stats);
    stats.layer = layer;
    ok(kv_pool_get_layer_stats(w.pool, &stats));
    return stats;
}

TEST_CASE("going back into a tile opens it; coding it again costs little, and is reported") {
    const world w(mixed, {});
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 200, 200));
    CHECK(layer_stats(w, 0).recoded_rows == 0);
    ok(kv_seq_truncate(w.pool, seq, 100));
    w.check();
    for (uint32_t slot = 64; slot < 100; ++slot) {  // as before
        std::vector<uint64_t> positions;
        for (uint32_t i = 0; i < 64; ++i) positions.push_back(64 + i);
        if (slot == 64) {
            CHECK(w.stored(seq, 0, false, 1, slot) == sealed_rows(w, 1, 0, false, 1, positions)[0]);
        }
    }
    const auto old = w.stored(seq, 0, false, 0, 99);
    ok(w.step(seq, 1, 5, 5, true));  // opened, and closed again by the cancel
    CHECK(w.lane(seq, 0).sealed_blocks == 2);
    ok(w.step(seq, 1, 5, 5));
    CHECK(w.lane(seq, 0).sealed_blocks == 1);
    const auto raw = w.stored(seq, 0, false, 0, 99);
    for (uint32_t i = 0; i < raw.size(); ++i) CHECK(raw[i] == rounded(old[i]));
    ok(w.step(seq, 1, 23, 23));
    CHECK(w.lane(seq, 0).sealed_blocks == 2);
    // Slots 64 to 99 were coded twice: 36 rows of 2 heads, keys alone in layers 0 and 4.
    CHECK(layer_stats(w, 0).recoded_rows == 72);
    CHECK(layer_stats(w, 1).recoded_rows == 144);
    CHECK(layer_stats(w, 2).recoded_rows == 0);
    CHECK(layer_stats(w, 3).recoded_rows == 72);
    CHECK(layer_stats(w, 4).recoded_rows == 72);
    // 4 bits over a spread of some 5 deviations: a step of 0.33, an error of 0.1 of it squared.
    CHECK(layer_stats(w, 0).recoding_error < 0.05);
    CHECK(layer_stats(w, 0).recoding_error > 0.0);
    const auto twice = w.stored(seq, 0, false, 0, 99);
    for (uint32_t i = 0; i < twice.size(); ++i) {
        CHECK(std::abs(twice[i] - old[i]) < 0.3);  // half a step of the new tile, and of f16
    }
    w.check();
}

TEST_CASE(
    "survivors are coded anew once: tiles of what they were, with full blocks and a raw rest") {
    const world w(mixed, {});
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 250, 250));
    std::map<std::pair<uint32_t, uint64_t>, std::vector<float>> before;  // layer 0, keys
    for (uint32_t head = 0; head < 2; ++head) {
        for (uint32_t slot = 0; slot < 250; ++slot) {
            before[{head, slot}] = w.stored(seq, 0, false, head, slot);
        }
    }
    kv_compress_report report;
    compress(w, seq, KV_SCORER_RANDOM, 100, report);
    CHECK(report.outcome == KV_COMPRESS_DONE);
    CHECK(report.recoded_rows > 0);
    CHECK(report.recoding_error > 0.0);
    CHECK(report.recoding_error < 0.3);  // 2 bits are among them
    w.check();
    const lane_state& state = w.lane(seq, 0);
    CHECK(state.slots == 100);
    CHECK(state.blocks == 2);
    CHECK(state.sealed_blocks == 1);
    double worst = 0.0;
    for (uint32_t head = 0; head < 2; ++head) {
        const slot_positions positions = positions_of(w.pool->store, w.inside(seq), 0, head);
        for (uint32_t slot = 0; slot < 100; ++slot) {
            const auto row = w.stored(seq, 0, false, head, slot);
            const auto& old = before[{head, positions.at(slot)}];
            for (uint32_t i = 0; i < row.size(); ++i) {
                worst = std::max(worst, double{std::abs(row[i] - old[i])});
            }
            if (slot >= 64) {
                for (uint32_t i = 0; i < row.size(); ++i) REQUIRE(row[i] == rounded(old[i]));
            }
        }
    }
    CHECK(worst < 0.3);
    // Values of KIVI are token-local: byte by byte.
    const uint64_t held = w.live_bytes();
    ok(w.step(seq, 1, 60, 60));
    CHECK(w.live_bytes() > held);
    w.check();
}

TEST_CASE("token-local values beside tile-local keys move bit by bit") {
    const world w({{KV_FORMAT_KIVI4, KV_FORMAT_KIVI4}}, {});
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 250, 250));
    std::map<std::pair<uint32_t, uint64_t>, std::vector<float>> before;
    for (uint32_t head = 0; head < 2; ++head) {
        for (uint32_t slot = 0; slot < 250; ++slot) {
            before[{head, slot}] = w.stored(seq, 0, true, head, slot);
        }
    }
    for (const uint32_t budget : {190u, 130u, 70u, 40u}) {
        kv_compress_report report;
        compress(w, seq, KV_SCORER_RANDOM, budget, report);
        for (uint32_t head = 0; head < 2; ++head) {
            const slot_positions positions = positions_of(w.pool->store, w.inside(seq), 0, head);
            for (uint32_t slot = 0; slot < budget; ++slot) {
                REQUIRE(w.stored(seq, 0, true, head, slot) == before[{head, positions.at(slot)}]);
            }
        }
        w.check();
    }
}

TEST_CASE("survivors that do not move keep their tiles bit by bit") {
    const world w(mixed, {});
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 250, 250));
    const auto old = w.stored(seq, 1, true, 1, 70);
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = KV_SCORER_STREAMING;
    policy.budget = 200;  // three blocks and a rest
    policy.sinks = 130;
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    ok(kv_compress(w.pool, seq, &options, &report));
    CHECK(w.stored(seq, 1, true, 1, 70) == old);
    CHECK(report.recoded_rows > 0);  // of the third block
    w.check();
}

TEST_CASE("scores are those of the keys as they are stored, sealed, raw, rotated or not") {
    const world w({{KV_FORMAT_KIVI4, KV_FORMAT_KIVI4}, {KV_FORMAT_KVARN4, KV_FORMAT_KVARN2}}, {});
    const kv_seq seq = w.create();
    ok(w.step(seq, 1, 250, 250));
    // Small norms stay, of all but the first 4 and the last 8 tokens.
    std::vector<std::vector<uint64_t>> expected;
    for (uint32_t layer = 0; layer < 2; ++layer) {
        for (uint32_t head = 0; head < 2; ++head) {
            std::vector<std::pair<double, uint64_t>> norms;
            for (uint32_t slot = 4; slot < 242; ++slot) {
                double square = 0.0;
                for (const float x : w.stored(seq, layer, false, head, slot)) {
                    square += double{x} * double{x};
                }
                norms.emplace_back(square, slot);
            }
            std::sort(norms.begin(), norms.end());
            std::vector<uint64_t> kept = {0, 1, 2, 3};
            for (uint32_t i = 0; i < 100 - 12; ++i) kept.push_back(norms[i].second);
            for (uint64_t slot = 242; slot < 250; ++slot) kept.push_back(slot);
            std::sort(kept.begin(), kept.end());
            expected.push_back(kept);
        }
    }
    kv_compress_report report;
    compress(w, seq, KV_SCORER_KEY_NORM, 100, report);
    for (uint32_t layer = 0; layer < 2; ++layer) {
        for (uint32_t head = 0; head < 2; ++head) {
            const slot_positions positions =
                positions_of(w.pool->store, w.inside(seq), layer, head);
            std::vector<uint64_t> kept;
            for (uint32_t slot = 0; slot < 100; ++slot) kept.push_back(positions.at(slot));
            CHECK(kept == expected[layer * 2 + head]);
        }
    }
}

}  // namespace
