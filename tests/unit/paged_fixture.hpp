// A paged cache for tests: an arena with guard bytes, a shuffled block table, and element access
// through addresses worked out here from kvrt.h's description, not from the library's layout code.
#pragma once

// clang-format off
#include "base/simd_targets.hpp"  // before anything of Highway
// clang-format on

#include <doctest/doctest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "format/tile.hpp"
#include "memory/block_id.hpp"

namespace paged_test {

using kvrt::element;
using kvrt::tile_order;

constexpr element all_elements[] = {element::f32, element::f16, element::bf16};
constexpr tile_order all_orders[] = {tile_order::native, tile_order::hnd, tile_order::nhd};

/// Runs `body` on each instruction set that this processor and the kernels have.
template <class callable>
void on_every_target(const callable& body) {
    const int64_t supported = hwy::SupportedTargets();
    for (int64_t rest = supported & HWY_TARGETS; rest != 0; rest &= rest - 1) {
        const int64_t target = rest & -rest;
        hwy::GetChosenTarget().Update(target);
        CAPTURE(hwy::TargetName(target));
        body();
    }
    hwy::GetChosenTarget().Update(supported);
}

/// Value of 16 stored bits, from the definition of the formats.
inline double value_of(uint16_t bits, element type) {
    const int exponent_bits = type == element::f16 ? 5 : 8;
    const int mantissa_bits = 15 - exponent_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent == (1 << exponent_bits) - 1) return mantissa != 0 ? NAN : sign * INFINITY;
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

/// The nearest 16-bit number, ties to even, found by bisection over all of them.
inline uint16_t nearest_bits(double value, element type) {
    const uint16_t infinity = type == element::f16 ? 0x7c00 : 0x7f80;
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::abs(value);
    if (std::isinf(value)) return static_cast<uint16_t>(sign | infinity);
    uint16_t low = 0, high = infinity;  // value_of(low) <= magnitude; bits order as values do
    while (high - low > 1) {
        const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
        (value_of(middle, type) <= magnitude ? low : high) = middle;
    }
    // Beyond the largest number the next one counts as if the exponent went on.
    const double below = value_of(low, type);
    const double above = high == infinity
                             ? 2 * below - value_of(static_cast<uint16_t>(low - 1), type)
                             : value_of(high, type);
    const double middle = (below + above) / 2;
    const bool up = magnitude > middle || (magnitude == middle && (low & 1) != 0);
    return static_cast<uint16_t>(sign | (up ? high : low));
}

struct paged_cache {
    kvrt::tile_layout layout;
    std::vector<uint64_t> memory;
    std::byte* arena = nullptr;
    std::vector<kvrt::block_id> blocks;
    uint32_t block_count = 0;  // in the arena, more than in the table

    paged_cache(tile_order order, uint32_t block_tokens, uint32_t kv_heads, uint32_t key_dim,
                uint32_t value_dim, element key_type, element value_type, uint32_t slots,
                uint32_t seed = 1)
        : layout(kvrt::make_tile_layout(order, block_tokens, kv_heads, key_dim, value_dim, key_type,
                                        value_type)) {
        const uint32_t needed = (slots + block_tokens - 1) / block_tokens;
        block_count = needed + 3;
        memory.resize((std::size_t{block_count} * layout.block_bytes) / 8 + 16);
        arena = reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(memory.data()) + 63) /
                                             64 * 64);
        std::vector<uint32_t> order_of_blocks(block_count);
        for (uint32_t i = 0; i < block_count; ++i) order_of_blocks[i] = i;
        std::mt19937 random(seed);
        std::shuffle(order_of_blocks.begin(), order_of_blocks.end(), random);
        for (uint32_t i = 0; i < needed; ++i) blocks.push_back(id_of(order_of_blocks[i]));
        for (std::size_t i = 0; i < bytes(); ++i) arena[i] = static_cast<std::byte>(random());
    }

    kvrt::block_id id_of(uint32_t index) const {
        return index * (layout.block_bytes / kvrt::block_unit);
    }
    std::size_t bytes() const { return std::size_t{block_count} * layout.block_bytes; }
    std::vector<std::byte> copy() const { return {arena, arena + bytes()}; }

    /// Byte offset in the arena of [slot, head, dim] of keys or values.
    std::size_t offset(const std::vector<kvrt::block_id>& table, bool value, uint32_t slot,
                       uint32_t head, uint32_t dim) const {
        const uint32_t tokens = layout.block_tokens, in_block = slot % tokens;
        const uint32_t key_size = size_of(layout.keys.type),
                       value_size = size_of(layout.values.type);
        const std::size_t block = std::size_t{table[slot / tokens]} * 64;
        const std::size_t key_dim = layout.keys.dim, value_dim = layout.values.dim;
        const std::size_t own_dim = value ? value_dim : key_dim;
        const std::size_t own_size = value ? value_size : key_size;
        if (layout.order == tile_order::native) {
            const std::size_t key_tile = pad(tokens * key_dim * key_size);
            const std::size_t value_tile = pad(tokens * value_dim * value_size);
            const std::size_t tile = block + head * (key_tile + value_tile);
            if (value) return tile + key_tile + (in_block * value_dim + dim) * value_size;
            return tile + ((in_block / 16 * key_dim + dim) * 16 + in_block % 16) * key_size;
        }
        const std::size_t start =
            block + (value ? pad(layout.kv_heads * tokens * key_dim * key_size) : 0);
        const std::size_t row = layout.order == tile_order::hnd
                                    ? std::size_t{head} * tokens + in_block
                                    : std::size_t{in_block} * layout.kv_heads + head;
        return start + (row * own_dim + dim) * own_size;
    }

    double get(bool value, uint32_t slot, uint32_t head, uint32_t dim) const {
        const element type = value ? layout.values.type : layout.keys.type;
        const std::byte* address = arena + offset(blocks, value, slot, head, dim);
        if (type == element::f32) {
            float number;
            std::memcpy(&number, address, sizeof number);
            return number;
        }
        uint16_t bits;
        std::memcpy(&bits, address, sizeof bits);
        return value_of(bits, type);
    }

    /// Stores the nearest number and returns what is stored.
    double set(bool value, uint32_t slot, uint32_t head, uint32_t dim, double number) {
        const element type = value ? layout.values.type : layout.keys.type;
        std::byte* address = arena + offset(blocks, value, slot, head, dim);
        if (type == element::f32) {
            const float single = static_cast<float>(number);
            std::memcpy(address, &single, sizeof single);
            return single;
        }
        const uint16_t bits = nearest_bits(number, type);
        std::memcpy(address, &bits, sizeof bits);
        return value_of(bits, type);
    }

    static uint32_t size_of(element type) { return type == element::f32 ? 4 : 2; }
    static std::size_t pad(std::size_t count) { return (count + 63) / 64 * 64; }
};

}  // namespace paged_test
