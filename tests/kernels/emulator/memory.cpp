// Compiled without sanitizers: the thread sanitizer must not see the strips checked, and the
// address sanitizer forbids them.
#include "memory.hpp"

#include <cstdlib>
#include <new>

#if defined(KVRT_EMULATE_ADDRESS)
#include <sanitizer/asan_interface.h>
#endif

namespace emulator {

namespace {

constexpr std::byte strip_byte{0xa5};

struct allocation {
    std::byte* memory;
    size_t bytes;
};
std::vector<allocation> allocations;  // by address

std::vector<allocation>::iterator first_behind(const void* address) {
    auto low = allocations.begin();
    size_t count = allocations.size();
    while (count != 0) {
        const size_t half = count / 2;
        if (low[static_cast<std::ptrdiff_t>(half)].memory <= address) {
            low += static_cast<std::ptrdiff_t>(half + 1);
            count -= half + 1;
        } else {
            count = half;
        }
    }
    return low;
}

}  // namespace

void draw_strips(std::byte* memory, size_t bytes) {
    for (size_t i = 0; i < strip_bytes; ++i) {
        memory[-1 - static_cast<std::ptrdiff_t>(i)] = strip_byte;
        memory[bytes + i] = strip_byte;
    }
#if defined(KVRT_EMULATE_ADDRESS)
    __asan_poison_memory_region(memory - strip_bytes, strip_bytes);
    __asan_poison_memory_region(memory + bytes, strip_bytes);
#endif
}

bool strips_are_whole(const std::byte* memory, size_t bytes) {
    for (size_t i = 0; i < strip_bytes; ++i) {
        if (memory[-1 - static_cast<std::ptrdiff_t>(i)] != strip_byte) return false;
        if (memory[bytes + i] != strip_byte) return false;
    }
    return true;
}

void clear_strips(std::byte* memory, size_t bytes) {
#if defined(KVRT_EMULATE_ADDRESS)
    __asan_unpoison_memory_region(memory - strip_bytes, bytes + 2 * strip_bytes);
#endif
    (void)memory;
    (void)bytes;
}

std::byte* allocate_device(size_t bytes) {
    const size_t all = (bytes + 2 * strip_bytes + 255) / 256 * 256;
    void* raw = std::aligned_alloc(256, all);
    if (raw == nullptr) throw std::bad_alloc();
    std::byte* const memory = static_cast<std::byte*>(raw) + strip_bytes;
    std::memset(memory, 0xff, bytes);
    draw_strips(memory, bytes);
    allocations.insert(first_behind(memory), {memory, bytes});
    return memory;
}

void free_device(std::byte* address) {
    const auto found = first_behind(address) - 1;
    clear_strips(address, found->bytes);
    allocations.erase(found);
    std::free(address - strip_bytes);
}

bool (*other_device_memory)(const void* address, size_t bytes) = nullptr;

bool is_device(const void* address, size_t bytes) {
    const std::byte* const first = static_cast<const std::byte*>(address);
    const auto behind = first_behind(address);
    if (behind != allocations.begin() && first + bytes <= behind[-1].memory + behind[-1].bytes) {
        return true;
    }
    return other_device_memory != nullptr && other_device_memory(address, bytes);
}

std::string damaged_strips() {
    for (const allocation& each : allocations) {
        if (!strips_are_whole(each.memory, each.bytes)) {
            return "a write beyond a device allocation of " + std::to_string(each.bytes) + " bytes";
        }
    }
    return {};
}

}  // namespace emulator
