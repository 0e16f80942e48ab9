// Codes of 4 bits in a record (format.hpp): channels of a group, lower half in the low nibbles.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvrt {

inline void store_nibbles(const uint8_t* codes, uint32_t count, std::byte* bytes) {
    const uint32_t half = count / 2;
    for (uint32_t j = 0; j < half; ++j) {
        bytes[j] = static_cast<std::byte>(codes[j] | codes[j + half] << 4);
    }
}

inline void load_nibbles(const std::byte* bytes, uint32_t count, uint8_t* codes) {
    const uint32_t half = count / 2;
    for (uint32_t j = 0; j < half; ++j) {
        codes[j] = static_cast<uint8_t>(bytes[j]) & 15u;
        codes[j + half] = static_cast<uint8_t>(static_cast<uint8_t>(bytes[j]) >> 4);
    }
}

}  // namespace kvrt
