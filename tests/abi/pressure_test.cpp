// pressure_percent: policies run early when more of the arena is pinned than that.
#include "abi/world.hpp"

using namespace abi;

namespace {

constexpr uint64_t block_bytes = 16 * kv_heads * (key_dim + value_dim) * 2;  // of f16: 6 KiB
constexpr uint64_t arena_bytes = uint64_t{4} << 20;

/// A pool of one full layer, of which 10 percent, 68 blocks, may be pinned.
struct pressed {
    kv_pool* pool = nullptr;

    explicit pressed(uint32_t percent) {
        kv_layer layer = KV_INIT(kv_layer);
        layer.query_heads = query_heads;
        layer.kv_heads = kv_heads;
        layer.key_dim = key_dim;
        layer.value_dim = value_dim;
        kv_model model = KV_INIT(kv_model);
        model.layers = &layer;
        model.layer_count = 1;
        kv_pool_config config = small_config();
        config.arena_bytes = arena_bytes;
        config.max_step_tokens = 256;
        config.max_observed_sequences = 1;
        config.pressure_percent = percent;
        REQUIRE(kv_pool_create(&config, &model, &pool) == KV_OK);
    }
    pressed(const pressed&) = delete;
    pressed& operator=(const pressed&) = delete;
    ~pressed() { kv_pool_release(pool); }

    /// 0: no policy. None that is due by itself.
    kv_seq create(uint32_t budget, uint32_t scorer = KV_SCORER_STREAMING) const {
        kv_policy policy = KV_INIT(kv_policy);
        policy.scorer = scorer;
        policy.budget = budget;
        kv_seq_config config = KV_INIT(kv_seq_config);
        config.policy = budget != 0 ? &policy : nullptr;
        kv_seq seq = 0;
        REQUIRE(kv_seq_create(pool, &config, &seq) == KV_OK);
        return seq;
    }

    kv_step* open(kv_seq seq, uint32_t rows) const {
        kv_step* step = nullptr;
        REQUIRE(kv_step_begin(pool, &step) == KV_OK);
        REQUIRE(kv_seq_append(step, seq, nullptr, rows, nullptr) == KV_OK);
        REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
        const tensors t(rows);
        REQUIRE(kv_write(step, 0, &t.keys, &t.values) == KV_OK);
        return step;
    }

    static kv_step_report end(kv_step* step) {
        kv_step_report report = KV_INIT(kv_step_report);
        REQUIRE(kv_step_end(step, &report) == KV_OK);
        CHECK(report.compactions == 0);
        CHECK(report.compactions_skipped == 0);
        return report;
    }

    kv_step_report go(kv_seq seq, uint32_t rows) const { return end(open(seq, rows)); }

    uint64_t retained(kv_seq seq) const {
        kv_seq_layer_info info = KV_INIT(kv_seq_layer_info);
        REQUIRE(kv_seq_get_layer_info(pool, seq, 0, &info) == KV_OK);
        return info.retained;
    }

    uint64_t live_bytes() const {
        kv_pool_stats stats = KV_INIT(kv_pool_stats);
        REQUIRE(kv_pool_get_stats(pool, &stats) == KV_OK);
        REQUIRE(kv_pool_check(pool) == KV_OK);
        return stats.live_bytes;
    }
};

TEST_CASE("under pressure the sequence that retains most above its budget goes first") {
    const pressed world(10);
    std::vector<kv_seq> seqs;
    for (const uint32_t budget : {100u, 64u, 80u, 0u}) seqs.push_back(world.create(budget));
    for (const kv_seq seq : seqs) {
        CHECK(world.go(seq, 256).pressure_rounds == 0);  // 16 blocks each
    }
    CHECK(world.live_bytes() == 64 * block_bytes);
    // The fifth makes 74 blocks: one round of the second, which retains 192 too many.
    const kv_seq last = world.create(150);
    kv_step_report report = world.go(last, 160);
    CHECK(report.pressure_rounds == 1);
    CHECK(report.blocks_returned == 12);
    CHECK(report.bytes_returned == 12 * block_bytes);
    CHECK(world.live_bytes() == 62 * block_bytes);
    CHECK(world.live_bytes() <= arena_bytes / 10);
    CHECK(world.retained(seqs[0]) == 256);
    CHECK(world.retained(seqs[1]) == 64);
    CHECK(world.retained(seqs[2]) == 256);
    CHECK(world.retained(last) == 160);
    kv_seq_info info = KV_INIT(kv_seq_info);
    REQUIRE(kv_seq_get_info(world.pool, seqs[1], &info) == KV_OK);
    CHECK(info.compactions == 1);
    CHECK(info.last_outcome == KV_COMPRESS_DONE);

    // 7 blocks more are 69: the third, with 176 too many, gives 11.
    CHECK(world.go(seqs[1], 112).pressure_rounds == 1);
    CHECK(world.retained(seqs[2]) == 80);
    CHECK(world.live_bytes() == 58 * block_bytes);
    // 16 more are 74: the first, with 156 too many, gives 9.
    CHECK(world.go(world.create(0), 256).pressure_rounds == 1);
    CHECK(world.retained(seqs[0]) == 100);
    CHECK(world.live_bytes() == 65 * block_bytes);
    // 81: the second has 112 too many and gives 7, the fifth 10 and gives no whole block.
    report = world.go(world.create(0), 256);
    CHECK(report.pressure_rounds == 2);
    CHECK(report.blocks_returned == 7);
    CHECK(world.retained(seqs[1]) == 64);
    CHECK(world.retained(last) == 150);
    // What is not above a budget stays, however much there is.
    CHECK(world.live_bytes() == 74 * block_bytes);
    const kv_seq small = world.create(0);
    CHECK(world.go(small, 1).pressure_rounds == 0);
}

TEST_CASE("under pressure sequences in open steps are left alone, until their step has ended") {
    const pressed world(10);
    const kv_seq busy = world.create(16), idle = world.create(64), other = world.create(0);
    world.go(busy, 240);
    world.go(idle, 240);
    kv_step* open = world.open(busy, 8);  // 16 blocks
    const kv_seq grows = world.create(0);
    CHECK(world.go(grows, 256).pressure_rounds == 0);
    kv_step_report report = world.go(other, 256);  // 63 blocks, and 16 more
    CHECK(report.pressure_rounds == 0);
    CHECK(world.live_bytes() == 63 * block_bytes);
    report = world.go(world.create(0), 96);  // 69 blocks
    CHECK(report.pressure_rounds == 1);
    CHECK(world.retained(idle) == 64);
    CHECK(world.retained(busy) == 240);
    CHECK(world.live_bytes() == (69 - 11) * block_bytes);
    report = world.go(world.create(0), 192);  // 70 blocks, and nobody to ask
    CHECK(report.pressure_rounds == 0);
    CHECK(world.retained(busy) == 240);
    report = pressed::end(open);
    CHECK(report.pressure_rounds == 1);
    CHECK(world.retained(busy) == 16);
}

TEST_CASE("a sequence whose round removes nothing does not keep others from theirs") {
    const pressed world(10);
    const kv_seq silent = world.create(16, KV_SCORER_HOST);
    const kv_seq gives = world.create(200);
    world.go(silent, 256);
    world.go(gives, 256);
    for (uint32_t i = 0; i < 2; ++i) world.go(world.create(0), 256);
    const kv_step_report report = world.go(world.create(0), 96);  // 70 blocks
    CHECK(report.pressure_rounds == 1);
    CHECK(world.retained(silent) == 256);
    CHECK(world.retained(gives) == 200);
    kv_seq_info info = KV_INIT(kv_seq_info);
    REQUIRE(kv_seq_get_info(world.pool, silent, &info) == KV_OK);
    CHECK(info.rounds_skipped == 1);
    CHECK(info.last_outcome == KV_COMPRESS_NO_OBSERVATIONS);
}

TEST_CASE("without policies, or without pressure_percent, nothing runs early") {
    for (const uint32_t percent : {0u, 10u}) {
        CAPTURE(percent);
        const pressed world(percent);
        for (uint32_t i = 0; i < 8; ++i) {
            const kv_seq seq = world.create(percent == 0 ? 16 : 0);
            CHECK(world.go(seq, 256).pressure_rounds == 0);
            CHECK(world.retained(seq) == 256);
        }
        CHECK(world.live_bytes() == 8 * 16 * block_bytes);
    }
}

}  // namespace
