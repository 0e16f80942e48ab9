// The caller's layers: an array whose stride is the struct_size that its first element states.
#pragma once

#include "base/status.hpp"

namespace kvrt {

inline constexpr uint32_t max_layers = 1024;

/// Where a layer begins, on no alignment: in a version of an odd size, they lie as they come.
const std::byte* layer_at(const kv_layer* layers, uint32_t index);

/// INVALID for an array that is not there, or a count out of range.
status check_layer_array(const kv_layer* layers, uint32_t count, const char* name);

/// Copies a layer of a checked array. A struct_size that differs from the first one's is INVALID.
status read_layer(const kv_layer* layers, uint32_t index, kv_layer& layer);

}  // namespace kvrt
