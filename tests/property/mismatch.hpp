// How a check of the property tests fails: by throwing what was found, so that millions of checks
// cost a comparison each and the test case adds the seed and the place in the stream.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

#include "kvrt/kvrt.h"

namespace property {

struct mismatch : std::runtime_error {
    using std::runtime_error::runtime_error;
};

template <class... arguments>
void require(bool holds, fmt::format_string<const arguments&...> text, const arguments&... values) {
    if (!holds)
        throw mismatch(
            fmt::vformat(static_cast<fmt::string_view>(text), fmt::make_format_args(values...)));
}

inline std::string last_error() {
    std::string text(512, '\0');
    text.resize(kv_last_error(text.data(), text.size()));
    return text;
}

inline void require_status(kv_status found, kv_status expected, const char* call) {
    if (found == expected) return;
    throw mismatch(fmt::format("{}: {} instead of {} ({})", call, kv_status_name(found),
                               kv_status_name(expected), found < 0 ? last_error() : "no error"));
}

inline void require_ok(kv_status found, const char* call) { require_status(found, KV_OK, call); }

}  // namespace property
