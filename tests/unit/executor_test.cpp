// The executor: every index once, whatever the number of threads, jobs and callers.
#include "base/executor.hpp"

#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

using namespace kvrt;

namespace {

/// Runs `count` indices and checks that each was run once.
void run_once_each(executor& threads, uint32_t count) {
    const auto runs = std::make_unique<std::atomic<uint32_t>[]>(count + 1);
    threads.for_each(count, [&](uint32_t index) { runs[index].fetch_add(1); });
    uint32_t wrong = runs[count].load();
    for (uint32_t i = 0; i < count; ++i) wrong += runs[i].load() != 1 ? 1 : 0;
    CHECK(wrong == 0);
}

TEST_CASE("every index runs once, with 1 to 8 threads") {
    for (uint32_t count = 1; count <= 8; ++count) {
        CAPTURE(count);
        host_allocator allocator;
        {
            executor threads;
            REQUIRE(threads.start(allocator, count, nullptr) == KV_OK);
            CHECK(threads.concurrency() == count);
            CHECK(allocator.live_bytes == executor::bytes(count));
            for (const uint32_t indices : {0u, 1u, 2u, 3u, 7u, 8u, 9u, 100u, 1000u}) {
                run_once_each(threads, indices);
            }
        }
        CHECK(allocator.live_bytes == 0);
    }
}

TEST_CASE("results of a job are seen by the caller, many jobs in a row") {
    host_allocator allocator;
    executor threads;
    REQUIRE(threads.start(allocator, 4, nullptr) == KV_OK);
    std::vector<uint64_t> plain(64, 0);  // not atomic: the job's end must order it
    for (uint64_t job = 1; job <= 2000; ++job) {
        threads.for_each(64, [&](uint32_t index) { plain[index] += job + index; });
    }
    for (uint64_t i = 0; i < 64; ++i) CHECK(plain[i] == 2000 * 2001 / 2 + 2000 * i);
}

TEST_CASE("work is spread: a job of parts that wait for each other ends") {
    host_allocator allocator;
    executor threads;
    REQUIRE(threads.start(allocator, 3, nullptr) == KV_OK);
    std::atomic<uint32_t> arrived{0};
    threads.for_each(3, [&](uint32_t) {
        arrived.fetch_add(1);
        while (arrived.load() < 3) std::this_thread::yield();
    });
    CHECK(arrived.load() == 3);
}

TEST_CASE("callers that arrive together take turns") {
    host_allocator allocator;
    executor threads;
    REQUIRE(threads.start(allocator, 3, nullptr) == KV_OK);
    std::atomic<uint64_t> sum{0};
    std::vector<std::thread> callers;
    for (int c = 0; c < 4; ++c) {
        callers.emplace_back([&] {
            for (int i = 0; i < 200; ++i) {
                threads.for_each(10, [&](uint32_t index) { sum.fetch_add(index + 1); });
            }
        });
    }
    for (std::thread& caller : callers) caller.join();
    CHECK(sum.load() == 4 * 200 * 55);
}

TEST_CASE("threads start and stop without work, also those that sleep") {
    for (int i = 0; i < 20; ++i) {
        host_allocator allocator;
        executor threads;
        REQUIRE(threads.start(allocator, 2 + i % 3, nullptr) == KV_OK);
        if (i % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
        if (i % 3 == 0) run_once_each(threads, 5);
    }
}

TEST_CASE("one thread needs no memory, the host's hook neither; it replaces the pool") {
    host_allocator allocator;
    executor alone;
    REQUIRE(alone.start(allocator, 1, nullptr) == KV_OK);
    CHECK(allocator.allocations == 0);
    run_once_each(alone, 17);

    struct record {
        uint32_t jobs = 0;
        uint32_t indices = 0;
    } seen;
    kv_hooks hooks = KV_INIT(kv_hooks);
    hooks.user = &seen;
    hooks.parallel_for = [](void* user, uint32_t count, void (*body)(void*, uint32_t),
                            void* context) {
        record& self = *static_cast<record*>(user);
        ++self.jobs;
        for (uint32_t i = count; i-- > 0; ++self.indices) body(context, i);
    };
    executor hosted;
    REQUIRE(hosted.start(allocator, 8, &hooks) == KV_OK);
    CHECK(allocator.allocations == 0);
    run_once_each(hosted, 0);
    CHECK(seen.jobs == 0);
    run_once_each(hosted, 1);
    run_once_each(hosted, 100);
    CHECK(seen.jobs == 2);
    CHECK(seen.indices == 101);
}

TEST_CASE("an allocator that refuses is reported") {
    host_allocator allocator;
    allocator.allocate = [](void*, std::size_t, std::size_t) -> void* { return nullptr; };
    executor threads;
    CHECK(threads.start(allocator, 2, nullptr) == KV_NO_MEMORY);
    run_once_each(threads, 9);
}

}  // namespace
