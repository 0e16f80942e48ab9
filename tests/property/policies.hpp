// Policies drawn at random.
#pragma once

#include <cstdint>
#include <random>

#include "kvrt/kvrt.h"

namespace property {

/// Of all scorers, selections and allocators. `heads_apart`: no lane that a policy may choose from
/// has several KV heads, as one by scores needs.
kv_policy random_policy(std::mt19937_64& random, bool heads_apart);

/// What KV_SELECT_DEFAULT stands for.
uint32_t resolved_selection(const kv_policy& policy);

}  // namespace property
