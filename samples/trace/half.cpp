#include "trace/half.hpp"

#include <bit>
#include <cmath>

namespace trace {

std::uint16_t half_from_float(float value) {
    const auto bits = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    const float magnitude = std::fabs(value);
    std::uint32_t half = 0;
    if (!(magnitude <= 0x1.ffcp15f)) {  // above 65504, or not a number
        const bool rounds_down = magnitude < 65520.0f;
        half = std::isnan(value) ? 0x7e00u : rounds_down ? 0x7bffu : 0x7c00u;
    } else if (magnitude < 0x1p-14f) {  // subnormal: a multiple of 2^-24
        half = static_cast<std::uint32_t>(std::nearbyint(magnitude * 0x1p24f));
    } else {
        // 13 bits of the fraction go; half of what they are worth, less for an even rest, rounds.
        const std::uint32_t rebased = (bits & 0x7fffffffu) - (112u << 23);
        half = (rebased + 0xfffu + (rebased >> 13 & 1u)) >> 13;
    }
    return static_cast<std::uint16_t>(sign | half);
}

}  // namespace trace
