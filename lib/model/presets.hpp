// Formats that go well together, as data: kv_model_apply_preset writes one of them into a caller's
// layers.
#pragma once

#include "base/status.hpp"

namespace kvrt {

struct preset_operand {
    uint32_t format = KV_FORMAT_F16;
    bool rotated = false;
};

struct preset_description {
    uint32_t id = 0;  ///< KV_PRESET_*
    preset_operand keys;
    preset_operand values;
    uint32_t short_window = 0;  ///< layers with a window up to this many tokens are spared
    uint32_t edge_layers = 0;   ///< so many at each end, of those that store, are spared
};

/// NULL for an id that this library does not know.
const preset_description* find_preset(uint32_t id);

/// Writes into all layers, or on an error into none.
status apply_preset(const preset_description& preset, kv_layer* layers, uint32_t count);

}  // namespace kvrt
