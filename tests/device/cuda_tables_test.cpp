// A step's tables in device memory: each step's own, at addresses that stay.
#include "cuda_pool.hpp"

using namespace kvrt;
using namespace kvrt::cuda;

TEST_CASE("a device that is far behind with uploads: again, and nothing is lost or held") {
    cuda_host host;
    const cuda_pool pool(small_config());
    std::vector<kv_seq> seqs;
    for (uint32_t i = 0; i < 3; ++i) {
        seqs.push_back(pool.create_sequence());
        REQUIRE(append(pool, host.stream, seqs[i], 20) == KV_OK);
    }
    kv_seq child = 0;
    REQUIRE(kv_seq_fork(pool, seqs[0], 1, &child) == KV_OK);
    host.fake.run_all();
    host.fake.block(host.stream);
    kv_status verdict = KV_OK;
    uint32_t steps = 0;
    for (; verdict == KV_OK && steps < 40; ++steps) {
        verdict = append(pool, host.stream, seqs[1 + steps % 2], 1);
    }
    CHECK(verdict == KV_AGAIN);
    CHECK(message_has("uploads in flight"));
    CHECK(steps > 10);

    kv_step* step = pool.begin(host.stream);
    REQUIRE(kv_seq_append(step, seqs[0], nullptr, 30, nullptr) == KV_OK);
    REQUIRE(kv_seq_append(step, child, nullptr, 30, nullptr) == KV_OK);
    const kv_pool_stats before = pool.stats();
    for (uint32_t tries = 0; tries < 10; ++tries) {
        CHECK(kv_step_reserve(step, nullptr) == KV_AGAIN);
        CHECK(pool.stats().pinned == before.pinned);
        // Of new blocks none is held, of copies each: they may be under way.
        CHECK(pool.stats().parked == before.parked + 4 * (tries + 1));
        CHECK(kv_pool_check(pool) == KV_OK);
    }
    host.fake.unblock(host.stream);
    host.fake.run_all();
    CHECK(kv_step_reserve(step, nullptr) == KV_OK);
    CHECK(kv_step_cancel(step) == KV_OK);
    CHECK(host.fake.synchronisations() == 0);
}

TEST_CASE("two steps open: each has tables of its own") {
    cuda_host host;
    const cuda_pool pool(small_config());
    kv_step* steps[2];
    kv_cuda_tables tables[2];
    for (uint32_t i = 0; i < 2; ++i) {
        steps[i] = pool.begin(host.stream);
        const kv_seq seq = pool.create_sequence();
        REQUIRE(kv_seq_append(steps[i], seq, nullptr, 20 + 30 * i, nullptr) == KV_OK);
        REQUIRE(kv_step_reserve(steps[i], nullptr) == KV_OK);
        tables[i] = KV_INIT(kv_cuda_tables);
        REQUIRE(kv_cuda_step_tables(steps[i], 0, &tables[i]) == KV_OK);
    }
    CHECK(tables[0].place != tables[1].place);
    host.fake.run_all();  // both uploads, in front of either's kernels
    for (uint32_t i = 0; i < 2; ++i) {
        const auto word = [&](const void* address) {
            return *host.fake.memory_of<int32_t>(reinterpret_cast<device_pointer>(address));
        };
        CHECK(word(tables[i].kv_len) == static_cast<int32_t>(20 + 30 * i));
        CHECK(word(tables[i].query_start + 1) == static_cast<int32_t>(20 + 30 * i));
        CHECK(word(tables[i].positions + 19) == 19);
        CHECK((word(tables[i].block_table + 3) == -1) == (i == 0));
        CHECK((word(tables[i].slot_mapping + 20) == -1) == (i == 0));
        REQUIRE(kv_step_cancel(steps[i]) == KV_OK);
    }
    CHECK(tables[0].query_start != tables[1].query_start);
}

TEST_CASE("tables at fixed addresses: a graph that was captured once reads each step's own") {
    cuda_host host;
    const cuda_pool pool(small_config());
    const kv_seq seq = pool.create_sequence();
    const kv_seq other = pool.create_sequence();
    kv_cuda_tables first = KV_INIT(kv_cuda_tables);
    std::vector<int32_t> seen;
    std::vector<operation> graph;
    for (uint32_t round = 0; round < 20; ++round) {
        CAPTURE(round);
        kv_step* step = pool.begin(host.stream);
        REQUIRE(kv_seq_append(step, seq, nullptr, 7, nullptr) == KV_OK);
        if (round % 3 == 0) REQUIRE(kv_seq_append(step, other, nullptr, 2, nullptr) == KV_OK);
        kv_cuda_tables tables = KV_INIT(kv_cuda_tables);
        CHECK(kv_cuda_step_tables(step, 0, &tables) == KV_INVALID);  // not reserved
        REQUIRE(kv_step_reserve(step, nullptr) == KV_OK);
        REQUIRE(kv_cuda_step_tables(step, 0, &tables) == KV_OK);
        CHECK(kv_cuda_step_tables(step, 2, &tables) == KV_INVALID);
        kv_cuda_tables window = KV_INIT(kv_cuda_tables);
        REQUIRE(kv_cuda_step_tables(step, 1, &window) == KV_OK);
        CHECK(window.query_start == tables.query_start);
        CHECK(window.kv_len != tables.kv_len);
        if (round == 0) {
            first = tables;
            host.fake.begin_capture(host.stream);
            host.stream->captured.push_back({"look", [&host, &seen, first] {
                                                 const auto word = [&](const void* address) {
                                                     return *host.fake.memory_of<int32_t>(
                                                         reinterpret_cast<device_pointer>(address));
                                                 };
                                                 seen = {word(first.kv_len), word(first.kv_len + 1),
                                                         word(first.query_start + 2),
                                                         word(first.positions)};
                                             }});
            graph = host.fake.end_capture(host.stream);
        }
        CHECK(std::memcmp(&first, &tables, sizeof first) == 0);
        host.fake.replay(graph, host.stream);
        REQUIRE(kv_step_end(step, nullptr) == KV_OK);
        host.fake.run_all();
        const int32_t count = static_cast<int32_t>(round);
        const int32_t others = 2 * (count / 3 + 1);
        const bool both = round % 3 == 0;
        const std::vector<int32_t> expected = {7 * (count + 1), both ? others : 0, both ? 9 : 7,
                                               7 * count};
        CHECK(seen == expected);
    }
}
