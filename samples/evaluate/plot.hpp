// A plot of quality against bytes, as SVG: mean divergence from the f16 cache over bytes per token,
// both axes logarithmic.
#pragma once

#include <string>

#include "evaluate/results.hpp"

namespace evaluate {

// Results without divergence (f16 itself), or whose divergence is not finite, have no place on a
// logarithmic axis and no point. The line joins those that none beats in both bytes and divergence.
std::string plot(const evaluation& done);

}  // namespace evaluate
