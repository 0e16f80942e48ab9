// The library's objects as C++ owns them, and its errors as exceptions.
#pragma once

#include <kvrt/kvrt.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace batching {

// Throws the library's message if a call failed.
inline void check(kv_status status) {
    if (status >= KV_OK) {
        return;
    }
    char message[512];
    kv_last_error(message, sizeof(message));
    throw std::runtime_error(std::string(kv_status_name(status)) + ": " + message);
}

struct pool_release {
    void operator()(kv_pool* pool) const { kv_pool_release(pool); }
};
using pool_handle = std::unique_ptr<kv_pool, pool_release>;

// A step that is left before its end is undone.
struct step_cancel {
    void operator()(kv_step* step) const { static_cast<void>(kv_step_cancel(step) == KV_OK); }
};
using step_handle = std::unique_ptr<kv_step, step_cancel>;

}  // namespace batching
