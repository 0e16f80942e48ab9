// How keys are turned by positions, for formats that need it, and by slots, where attention rotates
// them: made of the layers' rotations.
#pragma once

#include "model/geometry.hpp"

namespace kvrt {

/// Gives each lane whose keys need positions and each layer with cache_positions its rotation,
/// tables and all, once for each that differs. INVALID where a layer does not say how it rotates,
/// or with a factor that single precision cannot hold in both directions.
status make_turnings(host_allocator& allocator, model_geometry& model);

}  // namespace kvrt
