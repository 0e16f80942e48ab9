// From the format ids and storage structs of kvrt.h to what an operand of a lane is stored with.
#pragma once

#include "base/status.hpp"
#include "format/tile.hpp"

namespace kvrt {

/// UNSUPPORTED, naming layer and field, for an id that this library does not store.
status resolve_format(uint32_t id, operand_role role, const char* field, uint32_t layer,
                      const format_description*& out);

/// Checks a storage struct (may be null) against its operand's format, and copies to next_value
/// what the format takes: static scales, [kv_heads], or means and scales of channels,
/// [kv_heads][dim] each.
status take_storage(const kv_storage* storage, uint32_t kv_heads, const char* field, uint32_t layer,
                    float*& next_value, operand_layout& operand);

}  // namespace kvrt
