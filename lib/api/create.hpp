// From kv_pool_config and kv_model to a cache, shared by kv_pool_create and kv_plan.
#pragma once

#include "api/handles.hpp"

namespace kvrt {

/// The config with its defaults filled in, and its hooks (all null when it has none), checked.
status resolve_config(const kv_pool_config* config, kv_pool_config& resolved, kv_hooks& hooks);

/// Allocates everything of a pool but its threads. `resolved` comes from resolve_config.
status create_stores(const kv_pool_config& resolved, const kv_model* model, kv_pool& pool);

}  // namespace kvrt
