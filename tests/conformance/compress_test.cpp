// Compaction seen from outside: what is left is what attention would have seen through a mask, the
// report adds up, blocks really come back, and odd budgets are legal.
#include <set>

#include "tables.hpp"

using namespace conformance;

namespace {

kv_compress_report compress(engine& host, kv_seq sequence, const kv_policy& policy) {
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    require_ok(kv_compress(host.pool(), sequence, &options, &report));
    return report;
}

pool_shape plain_pool(uint32_t layers) {
    pool_shape shape;
    shape.layers.assign(layers, layer_shape());
    return shape;
}

constexpr uint32_t all_scorers[] = {KV_SCORER_TRIATTENTION, KV_SCORER_STREAMING, KV_SCORER_KEY_NORM,
                                    KV_SCORER_RANDOM};
constexpr uint32_t all_selections[] = {KV_SELECT_PER_LAYER_PER_HEAD, KV_SELECT_PER_HEAD,
                                       KV_SELECT_UNION};

}  // namespace

TEST_CASE("a compacted cache attends as the full one does through a mask") {
    for (const uint32_t scorer : all_scorers) {
        for (const uint32_t selection : all_selections) {
            CAPTURE(scorer);
            CAPTURE(selection);
            pool_shape shape = plain_pool(2);
            shape.layers[1].alibi_slopes = {0.5f, 0.25f, 0.125f, 0.0625f};
            engine host(shape);
            const kv_seq full = host.create(nullptr, true);
            host.run({{full, 5, 190}});
            kv_seq small = 0;
            require_ok(kv_seq_fork(host.pool(), full, 1, &small));
            kv_policy policy = policy_of(scorer, 50);
            policy.selection = selection;
            policy.sinks = 3;
            policy.recent = 10;
            CHECK(compress(host, small, policy).outcome == KV_COMPRESS_DONE);
            // Both see the same new token; the full one through the mask of the small one's sets.
            std::vector<std::vector<std::set<int64_t>>> kept(2);
            for (uint32_t layer = 0; layer < 2; ++layer) {
                for (uint32_t head = 0; head < 2; ++head) {
                    const std::vector<uint32_t> positions = host.positions(small, layer, head);
                    CHECK(positions.size() == 50);
                    kept[layer].emplace_back(positions.begin(), positions.end());
                    CHECK(kept[layer][head].count(0) + kept[layer][head].count(189) == 2);
                    CHECK(kept[layer][head] ==
                          kept[selection == KV_SELECT_PER_LAYER_PER_HEAD ? layer : 0]
                              [selection == KV_SELECT_UNION ? 0 : head]);
                }
            }
            kv_step* step = host.begin({{full, 5, 2}, {small, 5, 2}});
            for (uint32_t layer = 0; layer < 2; ++layer) {
                host.write(step, layer);
                const std::vector<float> found = host.attend(step, layer);
                const exported tables(step, layer);
                const auto masked = attend_from_tables(
                    tables, shape.layers[layer], host.queries(layer), table_kind::dense,
                    [&](uint32_t item, uint32_t head, int64_t position) {
                        return item == 1 || position >= 190 ||
                               kept[layer][head].count(position) != 0;
                    });
                // Rows 2 and 3 are the small one's: compare them with rows 0 and 1 through the
                // mask.
                const std::size_t row =
                    shape.layers[layer].query_heads * shape.layers[layer].value_dim;
                const std::vector<float> rows(found.begin() + static_cast<std::ptrdiff_t>(2 * row),
                                              found.begin() + static_cast<std::ptrdiff_t>(4 * row));
                const std::vector<double> expected(
                    masked.begin(), masked.begin() + static_cast<std::ptrdiff_t>(2 * row));
                CHECK(largest_difference(rows, expected) < 1e-5);
            }
            require_ok(kv_step_end(step, nullptr));
            require_ok(kv_pool_check(host.pool()));
        }
    }
}

TEST_CASE("a compacted cache attends bit for bit as one that was only given the survivors") {
    for (const uint32_t scorer : all_scorers) {
        CAPTURE(scorer);
        engine host(plain_pool(1)), fresh(plain_pool(1));
        const kv_seq a = host.create(nullptr, true);
        host.run({{a, 3, 130}});
        kv_policy policy = policy_of(scorer, 37);
        policy.selection = KV_SELECT_UNION;
        compress(host, a, policy);
        const std::vector<uint32_t> survivors = host.positions(a, 0, 0);
        REQUIRE(survivors.size() == 37);
        const kv_seq b = fresh.create();
        part given{b, 3, 37};
        given.content.assign(survivors.begin(), survivors.end());
        fresh.run({given});
        // The next token is the 130th of the text in both; positions differ, but nothing here
        // depends on them.
        part next{b, 3, 1};
        next.content_shift = 130 - 37;
        const std::vector<float> found = host.run({{a, 3, 1}})[0];
        const std::vector<float> expected = fresh.run({next})[0];
        REQUIRE(found.size() == expected.size());
        CHECK(std::memcmp(found.data(), expected.data(), found.size() * sizeof(float)) == 0);
    }
}

TEST_CASE("the report of a round adds up, and the pool agrees") {
    engine host(plain_pool(3));
    const kv_seq a = host.create();
    host.run({{a, 1, 500}});
    kv_policy policy = policy_of(KV_SCORER_RANDOM, 100);
    const kv_pool_stats before = host.stats();
    kv_compress_report report = compress(host, a, policy);
    kv_pool_stats after = host.stats();
    CHECK(report.outcome == KV_COMPRESS_DONE);
    CHECK(report.layers == 3);
    CHECK(report.tokens_before == 500 * 2 * 3);
    CHECK(report.tokens_after == 100 * 2 * 3);
    CHECK(report.blocks_before == 32 * 3);
    CHECK(report.blocks_after == 7 * 3);
    CHECK(report.blocks_copied == 0);
    CHECK(report.blocks_before - report.blocks_after == report.blocks_returned);
    CHECK(report.bytes_before - report.bytes_after == report.bytes_returned);
    CHECK(before.live_blocks - after.live_blocks == report.blocks_returned);
    CHECK(before.live_bytes - after.live_bytes == report.bytes_returned);
    CHECK(after.blocks_returned_by_compaction == report.blocks_returned);
    CHECK(after.bytes_returned_by_compaction == report.bytes_returned);
    CHECK(after.compactions == 1);
    CHECK(host.info(a).compactions == 1);
    CHECK(host.info(a).blocks == report.blocks_after);

    SUBCASE("a second round has nothing to remove") {
        report = compress(host, a, policy);
        CHECK(report.outcome == KV_COMPRESS_NOTHING);
        CHECK(report.tokens_before == report.tokens_after);
        CHECK(report.blocks_returned == 0);
        CHECK(host.stats().compactions == 1);
        CHECK(host.stats().compactions_skipped == 1);
        CHECK(host.info(a).compactions == 1);
    }
    SUBCASE("blocks that a child still reads are not returned, and survivors are copied") {
        kv_seq child = 0;
        require_ok(kv_seq_fork(host.pool(), a, 1, &child));
        policy.budget = 40;
        report = compress(host, a, policy);
        CHECK(report.outcome == KV_COMPRESS_DONE);
        CHECK(report.blocks_copied != 0);
        CHECK(report.blocks_returned == 0);
        after = host.stats();
        require_ok(kv_seq_release(host.pool(), child));
        // Only the parent's blocks are left.
        CHECK(host.stats().live_blocks == host.info(a).blocks);
    }
}

TEST_CASE("after evicting nine tokens in ten, scattered, nine blocks in ten are back") {
    for (const uint32_t scorer : {uint32_t{KV_SCORER_RANDOM}, uint32_t{KV_SCORER_KEY_NORM}}) {
        engine host(plain_pool(2));
        const kv_seq a = host.create();
        host.run({{a, 7, 2048}});
        const uint64_t before = host.stats().live_blocks;
        compress(host, a, policy_of(scorer, 205));
        const uint64_t after = host.stats().live_blocks;
        CHECK(static_cast<double>(before - after) >= 0.89 * static_cast<double>(before));
        require_ok(kv_pool_check(host.pool()));
    }
}

TEST_CASE("budgets below what is protected grow to hold it") {
    engine host(plain_pool(2));
    const kv_seq a = host.create();
    host.run({{a, 1, 200}});
    kv_policy policy = policy_of(KV_SCORER_KEY_NORM, 10);
    policy.flags = KV_POLICY_PROTECT_PROMPT;
    policy.prompt_tokens = 60;
    policy.sinks = 4;    // inside the prompt
    policy.recent = 20;  // 80 in all, one more pinned
    require_ok(kv_seq_pin(host.pool(), a, 100, 1));
    CHECK(compress(host, a, policy).outcome == KV_COMPRESS_DONE);
    for (uint32_t layer = 0; layer < 2; ++layer) {
        const std::vector<uint32_t> kept = host.positions(a, layer, 1);
        REQUIRE(kept.size() == 81);
        CHECK(kept[0] == 0);
        CHECK(kept[59] == 59);
        CHECK(kept[60] == 100);
        CHECK(kept[61] == 180);
        CHECK(kept[80] == 199);
    }
    CHECK(compress(host, a, policy).outcome == KV_COMPRESS_NOTHING);
}

TEST_CASE("a prompt larger than the budget stays whole; on top of the budget it leaves room") {
    engine host(plain_pool(1));
    const kv_seq a = host.create(), b = host.create();
    host.run({{a, 1, 150}, {b, 2, 150}});
    kv_policy policy = policy_of(KV_SCORER_STREAMING, 30);
    policy.flags = KV_POLICY_PROTECT_PROMPT;
    policy.prompt_tokens = 90;
    compress(host, a, policy);
    CHECK(host.positions(a, 0, 0).size() == 90);
    CHECK(host.positions(a, 0, 0).back() == 89);
    policy.flags |= KV_POLICY_PROMPT_ON_TOP;
    compress(host, b, policy);
    const std::vector<uint32_t> kept = host.positions(b, 0, 0);
    REQUIRE(kept.size() == 120);
    CHECK(kept[89] == 89);
    CHECK(kept[90] == 120);
    CHECK(kept[119] == 149);
}

TEST_CASE("rounds asked for with drafts in flight run at step end, after accept") {
    engine host(plain_pool(2));
    const kv_seq a = host.create();
    host.run({{a, 1, 100}});
    kv_step* step = host.begin({{a, 1, 8}});
    host.write(step, 0);
    host.write(step, 1);
    CHECK(compress(host, a, policy_of(KV_SCORER_STREAMING, 40)).outcome == KV_COMPRESS_DEFERRED);
    CHECK(host.positions(a, 0, 0).size() == 100);
    require_ok(kv_step_accept(step, a, 3));
    kv_step_report report = KV_INIT(kv_step_report);
    require_ok(kv_step_end(step, &report));
    CHECK(report.compactions == 1);
    CHECK(report.accepted_tokens == 3);
    const std::vector<uint32_t> kept = host.positions(a, 1, 0);
    REQUIRE(kept.size() == 40);
    CHECK(kept.front() == 63);
    CHECK(kept.back() == 102);

    // A cancelled step takes its deferred round along.
    step = host.begin({{a, 1, 2}});
    CHECK(compress(host, a, policy_of(KV_SCORER_STREAMING, 10)).outcome == KV_COMPRESS_DEFERRED);
    require_ok(kv_step_cancel(step));
    host.run({{a, 1, 1}});
    CHECK(host.positions(a, 0, 0).size() == 41);

    // And so does an item that is taken out of its step, whatever becomes of that.
    const kv_seq other = host.create();
    for (const bool cancels : {true, false}) {
        CAPTURE(cancels);
        require_ok(kv_step_begin(host.pool(), &step));
        require_ok(kv_seq_append(step, a, nullptr, 1, nullptr));
        require_ok(kv_seq_append(step, other, nullptr, 1, nullptr));
        CHECK(compress(host, a, policy_of(KV_SCORER_STREAMING, 10)).outcome ==
              KV_COMPRESS_DEFERRED);
        require_ok(kv_step_remove(step, a));
        if (cancels) {
            require_ok(kv_step_cancel(step));
        } else {
            require_ok(kv_step_reserve(step, nullptr));
            host.write(step, 0);
            host.write(step, 1);
            require_ok(kv_step_end(step, nullptr));
        }
        host.run({{a, 1, 1}});
        CHECK(host.positions(a, 0, 0).size() == (cancels ? 42 : 43));
    }
}

TEST_CASE("a policy runs every so many accepted tokens, and drafts do not count") {
    engine host(plain_pool(1));
    kv_policy policy = policy_of(KV_SCORER_STREAMING, 32);
    policy.every = 16;
    const kv_seq a = host.create(&policy);
    host.run({{a, 1, 33}});
    CHECK(host.positions(a, 0, 0).size() == 32);
    uint32_t accepted = 0;
    while (accepted < 15) {
        kv_step* step = host.begin({{a, 1, 4}});
        host.write(step, 0);
        require_ok(kv_step_accept(step, a, 1));
        require_ok(kv_step_end(step, nullptr));
        CHECK(host.positions(a, 0, 0).size() == 32 + ++accepted);
    }
    host.run({{a, 1, 1}});
    CHECK(host.positions(a, 0, 0).size() == 32);
    CHECK(host.info(a).compactions == 2);
}

TEST_CASE("TriAttention without queries says so and removes nothing") {
    engine host(plain_pool(1));
    const kv_seq a = host.create();  // gathers nothing
    host.run({{a, 1, 100}});
    const kv_compress_report report = compress(host, a, policy_of(KV_SCORER_TRIATTENTION, 20));
    CHECK(report.outcome == KV_COMPRESS_NO_STATISTICS);
    CHECK(host.positions(a, 0, 0).size() == 100);
}

TEST_CASE("random survivors depend on seed and round alone") {
    const auto survivors = [](uint64_t seed, uint32_t bystanders, uint32_t threads) {
        pool_shape shape = plain_pool(2);
        shape.threads = threads;
        engine host(shape);
        for (uint32_t i = 0; i < bystanders; ++i) host.run({{host.create(), i, 20}});
        const kv_seq a = host.create();
        host.run({{a, 1, 300}});
        kv_policy policy = policy_of(KV_SCORER_RANDOM, 200);
        policy.seed = seed;
        compress(host, a, policy);
        std::vector<std::vector<uint32_t>> sets = {host.positions(a, 0, 0), host.positions(a, 0, 1),
                                                   host.positions(a, 1, 0)};
        policy.budget = 100;
        compress(host, a, policy);
        sets.push_back(host.positions(a, 0, 0));
        return sets;
    };
    const auto first = survivors(1, 0, 1);
    CHECK(first == survivors(1, 3, 2));
    CHECK(first != survivors(2, 0, 1));
    CHECK(first[0] != first[1]);
    CHECK(first[0] != first[2]);
}
