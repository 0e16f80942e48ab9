// Errors are values: a kv_status, and a message per thread that says what was wrong and what would
// be right. `fail` is the only place that writes the message.
#pragma once

#include <fmt/core.h>

#include <cstddef>

#include "kvrt/kvrt.h"

namespace kvrt {

using status = kv_status;

inline constexpr std::size_t message_capacity = 512;

/// This thread's last message, always terminated.
char* message_buffer() noexcept;

/// Writes the message; compiled once, so that callers need no more of fmt than its checks.
[[nodiscard]] status fail_with(status code, fmt::string_view text,
                               fmt::format_args values) noexcept;

template <class... arguments>
[[nodiscard]] status fail(status code, fmt::format_string<arguments...> text,
                          const arguments&... values) noexcept {
    return fail_with(code, text, fmt::make_format_args(values...));
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
