#include "device/cpu_memory.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

namespace kvrt {

cpu_memory::~cpu_memory() {
    if (mapping_ != nullptr) munmap(mapping_, mapping_bytes_);
}

status cpu_memory::reserve(uint64_t bytes, uint64_t alignment, std::byte** out_base) {
    mapping_bytes_ = bytes + alignment;  // room to start on a huge page
    void* mapping = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) {
        return fail(KV_NO_MEMORY, "arena_bytes: the system refused to map {} bytes: {}", bytes,
                    std::strerror(errno));
    }
    mapping_ = mapping;
    const uint64_t start = reinterpret_cast<uint64_t>(mapping);
    base_ = static_cast<std::byte*>(mapping) + (alignment - start % alignment) % alignment;
    // Advice only: without huge pages everything works, a little slower.
    (void)madvise(base_, bytes, MADV_HUGEPAGE);
    *out_base = base_;
    return KV_OK;
}

status cpu_memory::commit(uint64_t, uint64_t) {
    return KV_OK;  // the system backs pages at their first touch
}

void cpu_memory::give_back(uint64_t offset, uint64_t bytes) {
    (void)madvise(base_ + offset, bytes, MADV_DONTNEED);
}

}  // namespace kvrt
