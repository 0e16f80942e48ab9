// Host memory of a pool: everything but the arena. It all comes through one host_allocator, at pool
// creation, so that the host can supply it, count it, and refuse it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>

#include "base/checked.hpp"
#include "base/status.hpp"

namespace kvrt {

/// The host's hooks, or the library's own allocator when they are null.
struct host_allocator {
    void* user = nullptr;
    void* (*allocate)(void* user, std::size_t bytes, std::size_t alignment) = nullptr;
    void (*release)(void* user, void* memory, std::size_t bytes, std::size_t alignment) = nullptr;
    uint64_t allocations = 0;  ///< calls so far
    uint64_t live_bytes = 0;
};

/// Large arrays that are written before they are read need not be touched at creation. `scratch` is
/// undefined too, and used from end to end: the system is asked for large pages.
enum class memory_contents { zeroed, undefined, scratch };

/// Memory, or nullptr. The library's own allocator does not touch fresh pages to zero them.
void* allocate(host_allocator& allocator, std::size_t bytes, std::size_t alignment,
               memory_contents contents);
void release(host_allocator& allocator, void* memory, std::size_t bytes, std::size_t alignment);

/// A fixed array of plain elements, allocated once, with their defaults where they have any. Not
/// resizable on purpose.
template <class element>
class host_array {
    static_assert(std::is_trivially_destructible_v<element>);

  public:
    host_array() = default;
    host_array(const host_array&) = delete;
    host_array& operator=(const host_array&) = delete;
    host_array(host_array&& other) noexcept { swap(other); }
    host_array& operator=(host_array&& other) noexcept {
        swap(other);
        return *this;
    }
    ~host_array() {
        if (data_ != nullptr) release(*allocator_, data_, size_ * sizeof(element), alignment);
    }

    /// NO_MEMORY names `what`. A count of zero is an empty array.
    status allocate(host_allocator& allocator, uint64_t count, const char* what,
                    memory_contents contents = memory_contents::zeroed) {
        uint64_t bytes = 0;
        if (!checked_multiply(count, sizeof(element), bytes) || bytes > (uint64_t{1} << 46)) {
            return fail(KV_TOO_LARGE, "{}: {} elements of {} bytes are more than can be addressed",
                        what, count, sizeof(element));
        }
        if (count == 0) return KV_OK;
        void* memory =
            kvrt::allocate(allocator, static_cast<std::size_t>(bytes), alignment, contents);
        if (memory == nullptr) {
            return fail(KV_NO_MEMORY, "{}: the allocator refused {} bytes", what, bytes);
        }
        allocator_ = &allocator;
        data_ = static_cast<element*>(memory);
        size_ = static_cast<std::size_t>(count);
        if constexpr (!std::is_trivially_default_constructible_v<element>) {
            std::uninitialized_default_construct_n(data_, size_);
        }
        return KV_OK;
    }

    element* data() { return data_; }
    const element* data() const { return data_; }
    std::size_t size() const { return size_; }
    element& operator[](std::size_t index) { return data_[index]; }
    const element& operator[](std::size_t index) const { return data_[index]; }
    element* begin() { return data_; }
    element* end() { return data_ + size_; }
    const element* begin() const { return data_; }
    const element* end() const { return data_ + size_; }

  private:
    static constexpr std::size_t alignment = alignof(element) > 64 ? alignof(element) : 64;

    void swap(host_array& other) noexcept {
        std::swap(allocator_, other.allocator_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
    }

    host_allocator* allocator_ = nullptr;
    element* data_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace kvrt
