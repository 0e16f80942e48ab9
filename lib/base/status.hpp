// Errors are values: a kv_status, and a message per thread that says what was wrong and what would
// be right. `fail` is the only place that writes the message.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <utility>

#include "kvrt/kvrt.h"

namespace kvrt {

using status = kv_status;

inline constexpr std::size_t message_capacity = 512;

/// This thread's last message, always terminated.
char* message_buffer() noexcept;

template <class... arguments>
[[nodiscard]] status fail(status code, fmt::format_string<arguments...> text,
                          arguments&&... values) noexcept {
    char* buffer = message_buffer();
    try {
        auto end = fmt::format_to_n(buffer, message_capacity - 1, text,
                                    std::forward<arguments>(values)...);
        *end.out = '\0';
    } catch (...) {
        buffer[0] = '\0';
    }
    return code;
}

const char* status_name(status code) noexcept;
int32_t status_category(status code) noexcept;

}  // namespace kvrt

/// Returns from the enclosing function when `expression` is an error.
#define KVRT_TRY(expression)                                  \
    do {                                                      \
        const ::kvrt::status kvrt_try_status_ = (expression); \
        if (kvrt_try_status_ < 0) return kvrt_try_status_;    \
    } while (false)
