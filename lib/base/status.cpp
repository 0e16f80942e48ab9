// The one place that compiles fmt's formatting; elsewhere fmt/core.h only checks format strings.
#define FMT_HEADER_ONLY 1
#include "base/status.hpp"

#include <fmt/format.h>

namespace kvrt {

status fail_with(status code, fmt::string_view text, fmt::format_args values) noexcept {
    char* buffer = message_buffer();
    try {
        const auto end = fmt::vformat_to_n(buffer, message_capacity - 1, text, values);
        *end.out = '\0';
    } catch (...) {
        buffer[0] = '\0';
    }
    return code;
}

char* message_buffer() noexcept {
    thread_local char buffer[message_capacity] = "";
    return buffer;
}

const char* status_name(status code) noexcept {
    switch (code) {
        case KV_OK:
            return "KV_OK";
        case KV_INVALID:
            return "KV_INVALID";
        case KV_UNSUPPORTED:
            return "KV_UNSUPPORTED";
        case KV_STALE:
            return "KV_STALE";
        case KV_NO_SNAPSHOT:
            return "KV_NO_SNAPSHOT";
        case KV_AGAIN:
            return "KV_AGAIN";
        case KV_TOO_LARGE:
            return "KV_TOO_LARGE";
        case KV_LIMIT:
            return "KV_LIMIT";
        case KV_NO_MEMORY:
            return "KV_NO_MEMORY";
        case KV_DEVICE:
            return "KV_DEVICE";
        case KV_IO:
            return "KV_IO";
        case KV_CORRUPT:
            return "KV_CORRUPT";
        case KV_INTERNAL:
            return "KV_INTERNAL";
        default:
            return "KV_UNKNOWN";
    }
}

int32_t status_category(status code) noexcept {
    if (code >= 0) return KV_CATEGORY_OK;
    const int32_t block = -(code / 100);
    return block >= KV_CATEGORY_ARGUMENT && block <= KV_CATEGORY_INTERNAL ? block
                                                                          : KV_CATEGORY_INTERNAL;
}

}  // namespace kvrt
