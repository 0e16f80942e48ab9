// Half precision (IEEE 754 binary16), in which traces hold what a model computed.
#pragma once

#include <cstdint>

namespace trace {

// The nearest half, the even one of two; what is too large becomes infinite.
std::uint16_t half_from_float(float value);

}  // namespace trace
