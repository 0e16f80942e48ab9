#include "base/executor.hpp"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvrt {

namespace {

/// How long a worker looks for new work before it sleeps: about the gap between two layers of a
/// small model, so that a decode loop seldom pays for a wake-up.
constexpr int spins_before_sleep = 4000;

constexpr uint32_t max_threads = 256;

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

// One job at a time. A job is announced by `generation`; each worker takes indices until none is
// left, and the caller returns when `busy` workers have let go of the job.
struct executor::workers {
    std::mutex one_job;  // callers of a thread-safe pool may arrive together
    std::mutex mutex;
    std::condition_variable wake;
    std::atomic<uint64_t> generation{0};
    std::atomic<bool> stopping{false};

    void (*body)(void*, uint32_t) = nullptr;
    void* context = nullptr;
    uint32_t count = 0;
    std::atomic<uint32_t> next{0};
    std::atomic<uint32_t> busy{0};

    std::thread threads[max_threads];
    uint32_t thread_count = 0;

    void take_indices() {
        for (uint32_t index = next.fetch_add(1, std::memory_order_relaxed); index < count;
             index = next.fetch_add(1, std::memory_order_relaxed)) {
            body(context, index);
        }
    }

    void serve() {
        uint64_t seen = 0;
        while (true) {
            for (int spin = 0; spin < spins_before_sleep; ++spin) {
                if (generation.load(std::memory_order_acquire) != seen) break;
                relax();
            }
            if (generation.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex);
                wake.wait(lock, [&] {
                    return generation.load(std::memory_order_acquire) != seen ||
                           stopping.load(std::memory_order_relaxed);
                });
            }
            if (stopping.load(std::memory_order_relaxed)) return;
            // Every worker answers every job, so none can be more than one generation behind.
            ++seen;
            take_indices();
            busy.fetch_sub(1, std::memory_order_release);
        }
    }

    ~workers() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            stopping.store(true, std::memory_order_relaxed);
            generation.fetch_add(1, std::memory_order_release);
        }
        wake.notify_all();
        for (uint32_t i = 0; i < thread_count; ++i) threads[i].join();
    }
};

executor::executor() = default;
executor::~executor() { stop(); }

void executor::stop() {
    if (workers_ == nullptr) return;
    workers_->~workers();
    release(*allocator_, workers_, sizeof(workers), alignof(workers));
    workers_ = nullptr;
}

status executor::start(host_allocator& allocator, uint32_t threads, const kv_hooks* hooks) {
    const uint32_t processors = std::max(1u, std::thread::hardware_concurrency());
    if (hooks != nullptr && hooks->parallel_for != nullptr) {
        user_ = hooks->user;
        parallel_for_ = hooks->parallel_for;
        concurrency_ = processors;
        return KV_OK;
    }
    concurrency_ = std::min(threads == 0 ? processors : threads, max_threads);
    if (concurrency_ == 1) return KV_OK;

    void* memory = allocate(allocator, sizeof(workers), alignof(workers), memory_contents::zeroed);
    if (memory == nullptr) {
        return fail(KV_NO_MEMORY, "threads: the allocator refused {} bytes", sizeof(workers));
    }
    allocator_ = &allocator;
    workers_ = new (memory) workers;
    try {
        for (uint32_t i = 0; i + 1 < concurrency_; ++i) {
            workers_->threads[i] = std::thread([pool = workers_] { pool->serve(); });
            workers_->thread_count = i + 1;
        }
    } catch (const std::exception& error) {
        stop();
        return fail(KV_NO_MEMORY, "threads: the system refused to start {} threads: {}",
                    concurrency_ - 1, error.what());
    }
    return KV_OK;
}

uint64_t executor::bytes(uint32_t threads) {
    const bool alone = threads == 1 || (threads == 0 && std::thread::hardware_concurrency() <= 1);
    return alone ? 0 : sizeof(workers);
}

void executor::run(uint32_t count, void (*body)(void*, uint32_t), void* context) {
    if (count == 0) return;
    if (parallel_for_ != nullptr) {
        parallel_for_(user_, count, body, context);
        return;
    }
    if (workers_ == nullptr || count == 1) {
        for (uint32_t index = 0; index < count; ++index) body(context, index);
        return;
    }
    workers& pool = *workers_;
    const std::lock_guard<std::mutex> only_job(pool.one_job);
    pool.body = body;
    pool.context = context;
    pool.count = count;
    pool.next.store(0, std::memory_order_relaxed);
    pool.busy.store(pool.thread_count, std::memory_order_relaxed);
    {
        const std::lock_guard<std::mutex> lock(pool.mutex);
        pool.generation.fetch_add(1, std::memory_order_release);
    }
    pool.wake.notify_all();
    pool.take_indices();
    // A worker may have been descheduled in the middle of its part: let it run.
    for (int spin = 0; pool.busy.load(std::memory_order_acquire) != 0; ++spin) {
        if (spin < spins_before_sleep) {
            relax();
        } else {
            std::this_thread::yield();
        }
    }
}

}  // namespace kvrt
