// How keys are turned by positions, for the formats that need it: made of the layers' rotations.
#pragma once

#include "model/geometry.hpp"

namespace kvrt {

/// Gives each lane whose keys need positions its rotation, tables and all, once for each that
/// differs. INVALID where a layer does not say how it rotates, or with a factor that single
/// precision cannot hold in both directions.
status make_turnings(host_allocator& allocator, model_geometry& model);

}  // namespace kvrt
