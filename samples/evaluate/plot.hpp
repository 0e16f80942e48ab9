// A plot of quality against bytes, as SVG: mean divergence from the f16 cache over bytes per token,
// both axes logarithmic.
#pragma once

#include <string>

#include "evaluate/results.hpp"

namespace evaluate {

// A point for each cache that is no larger than the f16 one and diverges from it: none at all has
// no place on a logarithmic axis, nor has one that is not finite. The line joins those that no
// other beats in both bytes and divergence.
std::string plot(const evaluation& done);

}  // namespace evaluate
