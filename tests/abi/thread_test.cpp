// Many threads: a thread-safe pool takes them all, a plain one refuses the second caller without
// damage, and counters can be read by anyone at any time.
#include <atomic>
#include <thread>

#include "abi/world.hpp"

using namespace abi;

namespace {

template <class callable>
void run_threads(uint32_t count, const callable& body) {
    std::vector<std::thread> threads;
    for (uint32_t i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
    for (std::thread& thread : threads) thread.join();
}

bool adds_up(const kv_pool_stats& s) {
    return s.total == s.free + s.cached + s.pinned + s.parked + s.loading &&
           s.live_blocks == s.pinned && s.live_blocks <= s.peak_live_blocks &&
           s.blocks_allocated == s.blocks_returned + s.pinned && s.slabs_free <= s.slabs_total &&
           s.arena_bytes == s.slabs_total * s.slab_bytes;
}

TEST_CASE("a thread-safe pool: every thread with its own sequences, steps taken in turn") {
    kv_pool_config config = small_config(KV_POOL_THREAD_SAFE);
    config.threads = 3;
    config.max_sequences = 32;
    config.arena_bytes = uint64_t{16} << 20;
    const live_pool pool(config);
    constexpr uint32_t workers = 4;
    constexpr uint32_t rounds = 60;
    std::atomic<uint64_t> wrong{0};
    std::atomic<uint64_t> ended{0};
    std::atomic<bool> done{false};
    std::thread reader([&] {
        kv_pool_stats stats = KV_INIT(kv_pool_stats);
        while (!done.load()) {
            if (kv_pool_get_stats(pool, &stats) != KV_OK || !adds_up(stats)) ++wrong;
            std::this_thread::yield();
        }
    });
    run_threads(workers, [&](uint32_t id) {
        const tensors t(5);
        kv_seq seq = 0;
        if (kv_seq_create(pool, nullptr, &seq) != KV_OK) ++wrong;
        uint64_t seen = 0;
        for (uint32_t round = 0; round < rounds; ++round) {
            kv_step* step = nullptr;
            kv_status verdict = kv_step_begin(pool, &step);
            while (verdict == KV_LIMIT) {  // two steps of others are open
                std::this_thread::yield();
                verdict = kv_step_begin(pool, &step);
            }
            bool good = verdict == KV_OK;
            good = good && kv_seq_append(step, seq, nullptr, 5, nullptr) == KV_OK;
            good = good && kv_step_reserve(step, nullptr) == KV_OK;
            good = good && kv_write(step, 0, &t.keys, &t.values) == KV_OK;
            good = good && kv_write(step, 1, &t.keys, &t.values) == KV_OK;
            if (round % 3 == 2) {
                good = good && kv_step_cancel(step) == KV_OK;
            } else {
                good = good && kv_step_end(step, nullptr) == KV_OK;
                seen += 5;
                ++ended;
            }
            kv_seq child = 0;
            good = good && kv_seq_fork(pool, seq, 1, &child) == KV_OK;
            kv_seq_info info = KV_INIT(kv_seq_info);
            good = good && kv_seq_get_info(pool, child, &info) == KV_OK && info.accepted == seen;
            if (round % 2 == id % 2) std::swap(seq, child);
            good = good && kv_seq_release(pool, child) == KV_OK;
            // Its own message, whatever others do.
            good = good && kv_seq_truncate(pool, seq, 1000 + id) == KV_INVALID;
            good = good && last_error().find(std::to_string(1000 + id)) != std::string::npos;
            if (!good) ++wrong;
        }
        if (kv_seq_release(pool, seq) != KV_OK) ++wrong;
    });
    done = true;
    reader.join();
    CHECK(wrong.load() == 0);
    CHECK(pool.stats().steps_ended == ended.load());
    CHECK(pool.stats().steps_cancelled == workers * rounds / 3);
    CHECK(pool.stats().live_blocks == 0);
    CHECK(pool.stats().sequences == 0);
    CHECK(kv_pool_check(pool) == KV_OK);
}

TEST_CASE("counters read by others while the owner works are of one moment") {
    const live_pool pool;
    std::atomic<uint64_t> wrong{0};
    std::atomic<uint64_t> reads{0};
    std::atomic<bool> done{false};
    std::thread owner([&] {
        const tensors t(30);
        for (int i = 0; i < 300; ++i) {
            kv_seq seq = 0;
            bool good = kv_seq_create(pool, nullptr, &seq) == KV_OK;
            kv_step* step = nullptr;
            good = good && kv_step_begin(pool, &step) == KV_OK;
            good = good && kv_seq_append(step, seq, nullptr, 30, nullptr) == KV_OK;
            good = good && kv_step_reserve(step, nullptr) == KV_OK;
            good = good && kv_write(step, 0, &t.keys, &t.values) == KV_OK;
            good = good && kv_write(step, 1, &t.keys, &t.values) == KV_OK;
            good = good && kv_step_end(step, nullptr) == KV_OK;
            good = good && kv_seq_release(pool, seq) == KV_OK;
            if (!good) ++wrong;
            // Readers may be slow to start: they have seen some of the work at least.
            while (i == 299 && reads.load() < 200) std::this_thread::yield();
        }
        done = true;
    });
    run_threads(2, [&](uint32_t) {
        uint64_t steps = 0;
        while (!done.load()) {
            kv_pool_stats stats = KV_INIT(kv_pool_stats);
            kv_class_stats one = KV_INIT(kv_class_stats);
            bool good = kv_pool_get_stats(pool, &stats) == KV_OK && adds_up(stats);
            good = good && stats.steps_ended >= steps && stats.open_steps <= 1;
            good = good && stats.tokens_accepted == 30 * stats.steps_ended;
            steps = stats.steps_ended;
            good = good && kv_pool_get_class_stats(pool, 0, &one) == KV_OK;
            good = good && one.total == one.free + one.pinned + one.parked;
            good = good && one.total == one.slabs * one.blocks_per_slab;
            if (!good) ++wrong;
            ++reads;
        }
    });
    owner.join();
    CHECK(wrong.load() == 0);
    CHECK(reads.load() >= 200);
}

TEST_CASE("a plain pool: the second caller gets KV_INVALID and does no damage") {
    // The host's executor keeps the first call inside for as long as the test likes.
    struct gate {
        std::atomic<bool> inside{false};
        std::atomic<bool> leave{false};
    } held;
    kv_hooks hooks = KV_INIT(kv_hooks);
    hooks.user = &held;
    hooks.parallel_for = [](void* user, uint32_t count, void (*body)(void*, uint32_t),
                            void* context) {
        gate& self = *static_cast<gate*>(user);
        self.inside = true;
        while (!self.leave.load()) std::this_thread::yield();
        for (uint32_t i = 0; i < count; ++i) body(context, i);
    };
    kv_pool_config config = small_config();
    config.hooks = &hooks;
    const live_pool pool(config);
    const kv_seq seq = pool.create_sequence();
    kv_step* step = pool.reserve(seq, 20);
    const tensors t(20);
    std::atomic<int32_t> verdict{1};
    std::thread owner([&] { verdict = kv_write(step, 0, &t.keys, &t.values); });
    while (!held.inside.load()) std::this_thread::yield();

    kv_seq other = 0;
    CHECK(kv_seq_create(pool, nullptr, &other) == KV_INVALID);
    CHECK(last_error().find("thread") != std::string::npos);
    CHECK(other == 0);
    CHECK(kv_seq_release(pool, seq) == KV_INVALID);
    CHECK(kv_step_cancel(step) == KV_INVALID);
    CHECK(kv_pool_check(pool) == KV_INVALID);
    kv_pool_stats stats = KV_INIT(kv_pool_stats);
    CHECK(kv_pool_get_stats(pool, &stats) == KV_OK);
    CHECK(stats.sequences == 1);
    CHECK(stats.open_steps == 1);

    held.leave = true;
    owner.join();
    CHECK(verdict.load() == KV_OK);
    CHECK(kv_write(step, 1, &t.keys, &t.values) == KV_OK);
    CHECK(kv_step_end(step, nullptr) == KV_OK);
    CHECK(pool.info(seq).accepted == 20);
    CHECK(kv_pool_check(pool) == KV_OK);
}

TEST_CASE("messages belong to their thread") {
    CHECK(kv_pool_check(nullptr) == KV_INVALID);
    const std::string mine = last_error();
    std::string others = "unset";
    std::string fresh = "unset";
    std::thread([&] {
        fresh = last_error();
        CHECK(kv_capabilities(nullptr) == KV_INVALID);
        others = last_error();
    }).join();
    CHECK(fresh.empty());
    CHECK(others != mine);
    CHECK(last_error() == mine);
}

}  // namespace
