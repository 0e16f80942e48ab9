// The memory of the emulated device. Allocations are exact, on multiples of 256 bytes, between
// strips of known bytes that the address sanitizer knows as forbidden; every access that goes
// through the execution context is looked up here, in all builds.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

namespace emulator {

inline constexpr size_t strip_bytes = 256;

/// Memory filled with 0xff, registered; null is never returned.
std::byte* allocate_device(size_t bytes);
void free_device(std::byte* address);

/// Does [address, address + bytes) lie in one allocation?
bool is_device(const void* address, size_t bytes);
/// Null, or who says that of memory that was not allocated here.
extern bool (*other_device_memory)(const void* address, size_t bytes);

/// Why the strips around allocations are not as they were; empty when they are.
std::string damaged_strips();

/// The strips of one piece of memory, which begins at `memory`.
void draw_strips(std::byte* memory, size_t bytes);
bool strips_are_whole(const std::byte* memory, size_t bytes);
void clear_strips(std::byte* memory, size_t bytes);

/// An array on the device, which the host may look into between launches.
template <class value>
class device_array {
    static_assert(std::is_trivially_copyable_v<value>);

  public:
    explicit device_array(size_t count)
        : data_(reinterpret_cast<value*>(allocate_device(count * sizeof(value)))), count_(count) {}
    explicit device_array(const std::vector<value>& from) : device_array(from.size()) {
        if (count_ != 0) std::memcpy(data_, from.data(), count_ * sizeof(value));
    }
    device_array(std::initializer_list<value> from) : device_array(std::vector<value>(from)) {}
    ~device_array() { free_device(reinterpret_cast<std::byte*>(data_)); }
    device_array(const device_array&) = delete;
    device_array& operator=(const device_array&) = delete;

    value* data() { return data_; }
    const value* data() const { return data_; }
    size_t size() const { return count_; }
    value& operator[](size_t i) { return data_[i]; }
    const value& operator[](size_t i) const { return data_[i]; }
    value* begin() { return data_; }
    value* end() { return data_ + count_; }
    const value* begin() const { return data_; }
    const value* end() const { return data_ + count_; }
    std::vector<value> copy() const { return {begin(), end()}; }

  private:
    value* data_;
    size_t count_;
};

}  // namespace emulator
