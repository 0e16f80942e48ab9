#include "base/host_memory.hpp"

#include <sys/mman.h>

#include <cstdlib>

#if defined(KVRT_HAS_MIMALLOC)
#include <mimalloc.h>
#endif

namespace kvrt {

namespace {

/// Below this, large pages are not worth asking for.
constexpr std::size_t least_advised = std::size_t{4} << 20;

/// Tables of pages for memory that is streamed through cost as much as the memory's own lines.
void advise_large_pages(void* memory, std::size_t bytes) {
#if defined(MADV_HUGEPAGE)
    constexpr std::size_t page = 4096;
    const uintptr_t begin = round_up<uintptr_t>(reinterpret_cast<uintptr_t>(memory), page);
    const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / page * page;
    if (begin < end) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)memory;
    (void)bytes;
#endif
}

void* own_allocate(std::size_t bytes, std::size_t alignment, memory_contents contents) {
#if defined(KVRT_HAS_MIMALLOC)
    return contents == memory_contents::zeroed ? mi_zalloc_aligned(bytes, alignment)
                                               : mi_malloc_aligned(bytes, alignment);
#else
    void* memory = std::aligned_alloc(alignment, round_up(bytes, alignment));
    if (memory != nullptr && contents == memory_contents::zeroed) std::memset(memory, 0, bytes);
    return memory;
#endif
}

void own_release(void* memory) {
#if defined(KVRT_HAS_MIMALLOC)
    mi_free(memory);
#else
    std::free(memory);
#endif
}

}  // namespace

void* allocate(host_allocator& allocator, std::size_t bytes, std::size_t alignment,
               memory_contents contents) {
    void* memory = nullptr;
    if (allocator.allocate != nullptr) {
        memory = allocator.allocate(allocator.user, bytes, alignment);
        if (memory != nullptr && contents == memory_contents::zeroed) {
            std::memset(memory, 0, bytes);
        }
    } else {
        memory = own_allocate(bytes, alignment, contents);
        const bool large = contents == memory_contents::scratch && bytes >= least_advised;
        if (memory != nullptr && large) advise_large_pages(memory, bytes);
    }
    if (memory != nullptr) {
        ++allocator.allocations;
        allocator.live_bytes += bytes;
    }
    return memory;
}

void release(host_allocator& allocator, void* memory, std::size_t bytes, std::size_t alignment) {
    if (memory == nullptr) return;
    allocator.live_bytes -= bytes;
    if (allocator.allocate != nullptr) {
        if (allocator.release != nullptr) {
            allocator.release(allocator.user, memory, bytes, alignment);
        }
    } else {
        own_release(memory);
    }
}

}  // namespace kvrt
