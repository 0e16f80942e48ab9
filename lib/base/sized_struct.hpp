// The one place that reads and fills the ABI's sized structs (kvrt.h, "Conventions"): a smaller
// struct gets defaults for its missing tail, a larger one must have zeroes where this library knows
// nothing, and results are filled up to the caller's size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/status.hpp"

namespace kvrt {

/// More than any version will have; bounds the scan of an unknown tail.
inline constexpr uint32_t max_struct_size = 1u << 16;

status check_struct(const void* user, uint32_t known_size, uint32_t known_flags, const char* name);

/// Copies the caller's struct into `local`. `name` is for messages: "config (kv_pool_config)".
template <class struct_type>
[[nodiscard]] status adopt(const struct_type* user, uint32_t known_flags, const char* name,
                           struct_type& local) {
    static_assert(std::is_trivially_copyable_v<struct_type>);
    KVRT_TRY(check_struct(user, sizeof(struct_type), known_flags, name));
    // Byte by byte: in an array of a version's odd size, structs lie off their alignment.
    const void* source = user;
    uint32_t size = 0;
    std::memcpy(&size, source, sizeof size);
    std::memset(static_cast<void*>(&local), 0, sizeof local);
    std::memcpy(static_cast<void*>(&local), source,
                std::min<uint32_t>(size, static_cast<uint32_t>(sizeof local)));
    // A later version may give a reserved field a meaning, which this one must not ignore.
    if constexpr (requires { local.reserved0; }) {
        if (local.reserved0 != 0) {
            return fail(KV_UNSUPPORTED, "{}: reserved0 is {}: it must be 0", name, local.reserved0);
        }
    }
    if constexpr (requires { local.reserved1; }) {
        if (local.reserved1 != 0) {
            return fail(KV_UNSUPPORTED, "{}: reserved1 is {}: it must be 0", name, local.reserved1);
        }
    }
    return KV_OK;
}

/// Fills the caller's struct behind its header with `local`, and zeroes what this library does not
/// know. The caller checked it before.
template <class struct_type>
void deliver(const struct_type& local, struct_type* user) {
    constexpr std::size_t header = sizeof(kv_struct_header);
    std::byte* target = reinterpret_cast<std::byte*>(user);
    const std::size_t known = std::min<std::size_t>(user->struct_size, sizeof local);
    std::memcpy(target + header, reinterpret_cast<const std::byte*>(&local) + header,
                known - header);
    std::memset(target + known, 0, user->struct_size - known);
}

}  // namespace kvrt
