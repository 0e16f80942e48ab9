// Counts what this process asks of the C library's allocator and of the system's memory calls, by
// standing in front of them (allocations.cpp). Not under sanitizers, which stand there themselves.
#pragma once

#include <cstdint>

namespace abi {

struct memory_calls {
    uint64_t heap = 0;    // malloc, calloc, realloc, aligned_alloc, memalign, posix_memalign
    uint64_t system = 0;  // mmap, munmap, mremap, madvise
};

constexpr bool counts_memory_calls() {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    return false;
#else
    return true;
#endif
}

/// Since the program started, by all threads.
memory_calls memory_calls_so_far();

}  // namespace abi
