// From kv_pool_config and kv_model to a cache, shared by kv_pool_create and kv_plan.
#pragma once

#include "api/handles.hpp"

namespace kvrt {

inline constexpr uint64_t max_arena_bytes = uint64_t{128} << 30;

/// The config with its defaults filled in, and its hooks (all null when it has none), checked: all
/// but arena_bytes.
status resolve_config(const kv_pool_config* config, kv_pool_config& resolved, kv_hooks& hooks);

status check_arena(uint64_t arena_bytes);

/// Allocates everything of a pool but its threads. `resolved` comes from resolve_config.
status create_stores(const kv_pool_config& resolved, const kv_model* model, kv_pool& pool);

/// kv_pool_create; a pool on the device has its memory from `memory`.
status create_pool(const kv_pool_config* config, const kv_model* model,
                   const device_allocator& memory, kv_pool** out_pool);

}  // namespace kvrt
