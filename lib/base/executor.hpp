// Runs the parts of one call on several threads. The result of a call never depends on how many:
// work is cut by the shape of the data alone, and joined in a fixed order.
#pragma once

#include <cstdint>

#include "base/host_memory.hpp"

namespace kvrt {

/// Parallel-for over an index range: the host's hook, or the library's own small pool of threads.
class executor {
  public:
    executor();
    ~executor();
    executor(const executor&) = delete;
    executor& operator=(const executor&) = delete;

    /// `threads` counts the caller's; 0 is one per processor. With a host hook no thread is made.
    status start(host_allocator& allocator, uint32_t threads, const kv_hooks* hooks);

    /// Host memory that start takes for this many threads, the threads' own stacks apart.
    static uint64_t bytes(uint32_t threads);

    uint32_t concurrency() const { return concurrency_; }

    /// Runs body(context, index) for every index in [0, count); returns when all are done.
    void run(uint32_t count, void (*body)(void* context, uint32_t index), void* context);

    /// The same for a callable `void(uint32_t index)`; nothing is allocated.
    template <class callable>
    void for_each(uint32_t count, const callable& body) {
        run(
            count,
            [](void* context, uint32_t index) { (*static_cast<const callable*>(context))(index); },
            const_cast<callable*>(&body));
    }

  private:
    struct workers;
    void stop();

    host_allocator* allocator_ = nullptr;
    workers* workers_ = nullptr;
    void* user_ = nullptr;
    void (*parallel_for_)(void*, uint32_t, void (*)(void*, uint32_t), void*) = nullptr;
    uint32_t concurrency_ = 1;
};

}  // namespace kvrt
