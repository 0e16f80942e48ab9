// Elastic pools: memory really goes back to the system when blocks do. Measured as the process's
// resident memory, from /proc/self/statm.
#include <unistd.h>

#include <cstdio>

#include "abi/allocations.hpp"
#include "abi/world.hpp"

using namespace abi;

namespace {

constexpr uint64_t slab = uint64_t{2} << 20;

uint64_t resident_bytes() {
    FILE* file = std::fopen("/proc/self/statm", "r");
    REQUIRE(file != nullptr);
    unsigned long long total = 0;
    unsigned long long resident = 0;
    REQUIRE(std::fscanf(file, "%llu %llu", &total, &resident) == 2);
    std::fclose(file);
    return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

/// What must go at least when so many slabs are given back: the round's scratch is touched for the
/// first time in between, and a sanitizer shadows it several times over.
uint64_t expected_fall(uint64_t slabs) {
    return counts_memory_calls() ? slabs * slab * 9 / 10 : slabs * slab / 2;
}

/// A pool of 64 MiB whose layer 0 holds 1024 tokens in 64 blocks of 6144 bytes.
kv_pool_config large_config(uint32_t flags) {
    kv_pool_config config = small_config(flags);
    config.arena_bytes = 32 * slab;
    config.max_tokens_per_sequence = 1u << 17;
    config.max_step_tokens = 1024;
    return config;
}

void fill(const live_pool& pool, kv_seq seq, uint32_t tokens) {
    for (uint32_t done = 0; done < tokens; done += 1024) pool.append(seq, 1024);
}

bool adds_up(const kv_pool_stats& s) {
    return s.total == s.free + s.cached + s.pinned + s.parked + s.loading &&
           s.slabs_resident <= s.slabs_total;
}

void* base_of(const live_pool& pool, kv_seq seq) {
    kv_step* step = pool.reserve(seq, 1);
    kv_tables tables = KV_INIT(kv_tables);
    REQUIRE(kv_step_export(step, 0, &tables) == KV_OK);
    REQUIRE(kv_step_cancel(step) == KV_OK);
    return tables.base;
}

TEST_CASE("an elastic pool's memory falls when a sequence is released") {
    const live_pool pool(large_config(KV_POOL_ELASTIC));
    const kv_seq keep = pool.create_sequence();
    pool.append(keep, 16);
    void* const base = base_of(pool, keep);
    const uint64_t before = resident_bytes();
    const kv_seq seq = pool.create_sequence();
    fill(pool, seq, 1u << 16);  // 4096 blocks: 12 slabs and more
    const uint64_t full = resident_bytes();
    const kv_pool_stats held = pool.stats();
    CHECK(held.slabs_resident >= 12);
    CHECK(full - before >= 11 * slab);

    REQUIRE(kv_seq_release(pool, seq) == KV_OK);
    const kv_pool_stats now = pool.stats();
    CHECK(adds_up(now));
    CHECK(now.slabs_given_back >= 10);
    // One slab still has blocks; two empty ones stay for whoever comes next.
    CHECK(now.slabs_resident <= 3);
    CHECK(held.slabs_resident - now.slabs_resident == now.slabs_given_back - held.slabs_given_back);
    CHECK(full - resident_bytes() >= expected_fall(now.slabs_given_back - held.slabs_given_back));
    CHECK(base_of(pool, keep) == base);

    // And again: what was given back can be used.
    const kv_seq again = pool.create_sequence();
    fill(pool, again, 1u << 15);
    CHECK(pool.stats().slabs_resident >= 6);
    CHECK(base_of(pool, again) == base);
    CHECK(kv_pool_check(pool) == KV_OK);
}

TEST_CASE("an elastic pool's memory falls by compaction, and the report says by how much") {
    const live_pool pool(large_config(KV_POOL_ELASTIC));
    const kv_seq seq = pool.create_sequence();
    fill(pool, seq, 1u << 16);
    const uint64_t full = resident_bytes();
    const kv_pool_stats held = pool.stats();
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = KV_SCORER_STREAMING;
    policy.budget = 1024;
    policy.sinks = 4;
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = &policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    REQUIRE(kv_compress(pool, seq, &options, &report) == KV_OK);
    CHECK(report.outcome == KV_COMPRESS_DONE);
    CHECK(report.layers == 1);
    CHECK(report.blocks_returned == 4096 - 64);
    CHECK(report.bytes_returned == (4096 - 64) * 6144);
    CHECK(report.blocks_before - report.blocks_after == 4096 - 64);
    // 4096 blocks lay in slabs of 341, among some of the window's.
    CHECK(report.slabs_given_back >= 9);
    const kv_pool_stats now = pool.stats();
    CHECK(adds_up(now));
    CHECK(now.slabs_given_back - held.slabs_given_back == report.slabs_given_back);
    CHECK(now.blocks_returned_by_compaction == 4096 - 64);
    CHECK(full - resident_bytes() >= expected_fall(report.slabs_given_back));
    CHECK(kv_pool_check(pool) == KV_OK);
}

TEST_CASE("a plain pool keeps its memory") {
    const live_pool pool(large_config(0));
    const kv_seq seq = pool.create_sequence();
    fill(pool, seq, 1u << 16);
    const uint64_t full = resident_bytes();
    const kv_pool_stats held = pool.stats();
    REQUIRE(kv_seq_release(pool, seq) == KV_OK);
    const kv_pool_stats now = pool.stats();
    CHECK(now.slabs_given_back == 0);
    CHECK(now.slabs_resident == held.slabs_resident);
    CHECK(now.slabs_free == 32);
    CHECK(now.live_blocks == 0);
    CHECK(resident_bytes() + slab >= full);
}

TEST_CASE("releasing a pool gives all of its arena back") {
    const uint64_t before = resident_bytes();
    {
        const live_pool pool(large_config(0));
        fill(pool, pool.create_sequence(), 1u << 16);
        CHECK(resident_bytes() >= before + 11 * slab);
    }
    CHECK(resident_bytes() <= before + 4 * slab);
}

}  // namespace
