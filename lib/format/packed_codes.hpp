// Codes of 4, 2 and 3 bits in a record (format.hpp), of a group of `count` channels.
//
//   4 bits  byte j holds channel j in its low nibble and channel j + count/2 in its high one.
//   2 bits  byte j holds channels j, j + count/4, j + count/2 and j + 3 count/4, from its lowest
//           bits up; count is a multiple of 4.
//   3 bits  the low 2 bits of all codes as above, in count/4 bytes; then the third bits, where bit
//           k of byte j is of channel j + k count/8. count is a multiple of 8.
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

/// Of each code the lowest 2 bits.
inline void store_quarters(const uint8_t* codes, uint32_t count, std::byte* bytes) {
    const uint32_t quarter = count / 4;
    for (uint32_t j = 0; j < quarter; ++j) {
        bytes[j] = static_cast<std::byte>((codes[j] & 3u) | (codes[j + quarter] & 3u) << 2 |
                                          (codes[j + 2 * quarter] & 3u) << 4 |
                                          (codes[j + 3 * quarter] & 3u) << 6);
    }
}

inline void load_quarters(const std::byte* bytes, uint32_t count, uint8_t* codes) {
    const uint32_t quarter = count / 4;
    for (uint32_t part = 0; part < 4; ++part) {
        for (uint32_t j = 0; j < quarter; ++j) {
            codes[part * quarter + j] =
                static_cast<uint8_t>(static_cast<uint8_t>(bytes[j]) >> (2 * part) & 3u);
        }
    }
}

template <uint32_t bits>
void store_codes(const uint8_t* codes, uint32_t count, std::byte* bytes) {
    static_assert(bits >= 2 && bits <= 4);
    if constexpr (bits == 4) {
        store_nibbles(codes, count, bytes);
        return;
    }
    store_quarters(codes, count, bytes);
    if constexpr (bits == 3) {
        std::byte* third = bytes + count / 4;
        const uint32_t eighth = count / 8;
        for (uint32_t j = 0; j < eighth; ++j) {
            uint32_t byte = 0;
            for (uint32_t k = 0; k < 8; ++k) byte |= (codes[j + k * eighth] >> 2 & 1u) << k;
            third[j] = static_cast<std::byte>(byte);
        }
    }
}

template <uint32_t bits>
void load_codes(const std::byte* bytes, uint32_t count, uint8_t* codes) {
    static_assert(bits >= 2 && bits <= 4);
    if constexpr (bits == 4) {
        load_nibbles(bytes, count, codes);
        return;
    }
    load_quarters(bytes, count, codes);
    if constexpr (bits == 3) {
        const std::byte* third = bytes + count / 4;
        const uint32_t eighth = count / 8;
        for (uint32_t k = 0; k < 8; ++k) {
            for (uint32_t j = 0; j < eighth; ++j) {
                const uint32_t bit = static_cast<uint32_t>(third[j]) >> k & 1u;
                codes[k * eighth + j] = static_cast<uint8_t>(codes[k * eighth + j] | bit << 2);
            }
        }
    }
}

}  // namespace kvrt
