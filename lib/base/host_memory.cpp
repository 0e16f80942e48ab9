#include "base/host_memory.hpp"

#include <cstdlib>

#if defined(KVRT_HAS_MIMALLOC)
#include <mimalloc.h>
#endif

namespace kvrt {

namespace {

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
