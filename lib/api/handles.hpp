// What the opaque handles of kvrt.h are, and how every call enters and leaves the core.
#pragma once

#include <array>
#include <atomic>
#include <mutex>

#include "base/sized_struct.hpp"
#include "step/step.hpp"

namespace kvrt {

/// Step handles go round in a ring longer than the number of open steps, so that a handle kept too
/// long meets a closed step rather than somebody else's.
inline constexpr uint32_t step_handles = 16;

/// A snapshot of counters that any thread reads without a lock (a sequence lock: odd while the
/// owner writes).
class published_stats {
  public:
    void publish(const kv_pool_stats& pool, const kv_class_stats* classes, uint32_t class_count);
    void read(kv_pool_stats* pool, uint32_t class_index, kv_class_stats* one_class) const;

  private:
    static constexpr std::size_t pool_words = sizeof(kv_pool_stats) / 8;
    static constexpr std::size_t class_words = sizeof(kv_class_stats) / 8;
    static_assert(sizeof(kv_pool_stats) % 8 == 0 && sizeof(kv_class_stats) % 8 == 0);

    std::atomic<uint64_t> version_{0};
    std::array<std::atomic<uint64_t>, pool_words> pool_{};
    std::array<std::array<std::atomic<uint64_t>, class_words>, max_block_classes> classes_{};
};

/// What one pool adds to kv_live_count: what it last published of itself.
struct live_share {
    uint32_t sequences = 0;
    uint32_t steps = 0;
};

}  // namespace kvrt

struct kv_step {
    kv_pool* pool = nullptr;
    kvrt::step core;
};

struct kv_pool {
    kvrt::cache store;  // first: it owns the allocator that everything else returns memory to
    kvrt::retention_context retention;
    kvrt::step_context steps;
    std::array<kv_step, kvrt::step_handles> handles;
    uint32_t next_handle = 0;
    uint32_t flags = 0;
    kv_hooks hooks = {};
    uint64_t steps_ended = 0;
    uint64_t steps_cancelled = 0;
    uint64_t tokens_accepted = 0;
    std::mutex lock;
    std::atomic<bool> inside{false};
    kvrt::published_stats stats;
    kvrt::live_share live;
};

namespace kvrt {

inline constexpr uint32_t policy_flags = KV_POLICY_PROTECT_PROMPT | KV_POLICY_PROMPT_ON_TOP |
                                         KV_POLICY_OFFSETS_MAX | KV_POLICY_STATISTICS_ONLINE |
                                         KV_POLICY_SAMPLE | KV_POLICY_POOL_MAX |
                                         KV_POLICY_EXACT_REDUNDANCY | KV_POLICY_AT_PROMPT_END;

void publish_stats(kv_pool& pool);

/// A pool begins, or ends with all that lives in it, for kv_live_count.
void count_pool_created();
void count_pool_released(kv_pool& pool);

uint64_t now(const kv_pool& pool);

/// Writes a line to the host's log hook, if there is one.
void log_line(const kv_pool& pool, int32_t level, const char* text);

/// Runs a call: one thread at a time, and whatever is thrown becomes a status.
template <class callable>
status call_pool(kv_pool* pool, const callable& body) noexcept {
    if (pool == nullptr) return fail(KV_INVALID, "pool is NULL");
    try {
        std::unique_lock<std::mutex> guard;
        if ((pool->flags & KV_POOL_THREAD_SAFE) != 0) {
            guard = std::unique_lock<std::mutex>(pool->lock);
        } else if (pool->inside.exchange(true, std::memory_order_acquire)) {
            return fail(KV_INVALID,
                        "another thread is inside a call on this pool: take turns, or create it "
                        "with KV_POOL_THREAD_SAFE");
        }
        const status verdict = body();
        pool->inside.store(false, std::memory_order_release);
        return verdict;
    } catch (const std::exception& error) {
        pool->inside.store(false, std::memory_order_release);
        return fail(KV_INTERNAL, "{}", error.what());
    } catch (...) {
        pool->inside.store(false, std::memory_order_release);
        return fail(KV_INTERNAL, "an unknown exception reached the interface");
    }
}

template <class callable>
status call_step(kv_step* step, const callable& body) noexcept {
    if (step == nullptr) return fail(KV_INVALID, "step is NULL");
    return call_pool(step->pool, body);
}

/// Runs body(sequence&) for a live handle.
template <class callable>
status with_sequence(kv_pool& pool, kv_seq handle, const callable& body) {
    sequence* target = pool.store.sequences.find(handle);
    if (target == nullptr) return pool.store.sequences.fail_stale(handle);
    return body(*target);
}

}  // namespace kvrt
