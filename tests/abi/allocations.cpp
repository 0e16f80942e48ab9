#include "abi/allocations.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstddef>

namespace {

std::atomic<uint64_t> heap_calls{0};
std::atomic<uint64_t> system_calls{0};

}  // namespace

abi::memory_calls abi::memory_calls_so_far() { return {heap_calls.load(), system_calls.load()}; }

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

#pragma GCC visibility push(default)
extern "C" {

void* __libc_malloc(std::size_t);
void* __libc_calloc(std::size_t, std::size_t);
void* __libc_realloc(void*, std::size_t);
void* __libc_memalign(std::size_t, std::size_t);

void* malloc(std::size_t bytes) {
    heap_calls.fetch_add(1, std::memory_order_relaxed);
    return __libc_malloc(bytes);
}

void* calloc(std::size_t count, std::size_t bytes) {
    heap_calls.fetch_add(1, std::memory_order_relaxed);
    return __libc_calloc(count, bytes);
}

void* realloc(void* memory, std::size_t bytes) {
    heap_calls.fetch_add(1, std::memory_order_relaxed);
    return __libc_realloc(memory, bytes);
}

void* memalign(std::size_t alignment, std::size_t bytes) {
    heap_calls.fetch_add(1, std::memory_order_relaxed);
    return __libc_memalign(alignment, bytes);
}

void* aligned_alloc(std::size_t alignment, std::size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void** out, std::size_t alignment, std::size_t bytes) {
    void* memory = memalign(alignment, bytes);
    if (memory == nullptr) return ENOMEM;
    *out = memory;
    return 0;
}

void* mmap(void* address, std::size_t bytes, int protection, int flags, int file, off_t offset) {
    system_calls.fetch_add(1, std::memory_order_relaxed);
    return reinterpret_cast<void*>(
        syscall(SYS_mmap, address, bytes, protection, flags, file, offset));
}

int munmap(void* address, std::size_t bytes) {
    system_calls.fetch_add(1, std::memory_order_relaxed);
    return static_cast<int>(syscall(SYS_munmap, address, bytes));
}

int madvise(void* address, std::size_t bytes, int advice) {
    system_calls.fetch_add(1, std::memory_order_relaxed);
    return static_cast<int>(syscall(SYS_madvise, address, bytes, advice));
}

void* mremap(void* address, std::size_t old_bytes, std::size_t bytes, int flags, ...) {
    system_calls.fetch_add(1, std::memory_order_relaxed);
    std::va_list rest;
    va_start(rest, flags);
    void* target = (flags & MREMAP_FIXED) != 0 ? va_arg(rest, void*) : nullptr;
    va_end(rest);
    return reinterpret_cast<void*>(syscall(SYS_mremap, address, old_bytes, bytes, flags, target));
}

}  // extern "C"
#pragma GCC visibility pop

#endif
