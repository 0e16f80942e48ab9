// Tile layouts against the index formulas that kvrt.h documents for each.
#include "format/tile.hpp"

#include <doctest/doctest.h>

#include <cstddef>
#include <vector>

#include "paged_fixture.hpp"

using namespace kvrt;

namespace {

constexpr tile_order orders[] = {tile_order::native, tile_order::hnd, tile_order::nhd};

std::size_t padded(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

struct shape {
    uint32_t tokens, heads, key_dim, value_dim;
    element key_type, value_type;
};

/// Bytes from the block's start, as the header's words say.
std::size_t documented(tile_order order, const shape& s, bool value, std::size_t slot,
                       std::size_t head, std::size_t dim) {
    const std::size_t key_size = element_bytes(s.key_type);
    const std::size_t value_size = element_bytes(s.value_type);
    const std::size_t own_size = value ? value_size : key_size;
    const std::size_t own_dim = value ? s.value_dim : s.key_dim;
    switch (order) {
        case tile_order::native: {
            // Per KV head its key tile, then its value tile; keys [slot / 16][dim][slot % 16].
            const std::size_t key_tile = padded(s.tokens * s.key_dim * key_size);
            const std::size_t value_tile = padded(s.tokens * s.value_dim * value_size);
            const std::size_t tile = head * (key_tile + value_tile);
            return value ? tile + key_tile + (slot * s.value_dim + dim) * value_size
                         : tile + (slot / 16 * s.key_dim * 16 + dim * 16 + slot % 16) * key_size;
        }
        case tile_order::hnd: {
            const std::size_t start = value ? padded(s.heads * s.tokens * s.key_dim * key_size) : 0;
            return start + ((head * s.tokens + slot) * own_dim + dim) * own_size;
        }
        default: {
            const std::size_t start = value ? padded(s.heads * s.tokens * s.key_dim * key_size) : 0;
            return start + ((slot * s.heads + head) * own_dim + dim) * own_size;
        }
    }
}

TEST_CASE("every element lies where the header says, once, inside the block") {
    const shape shapes[] = {
        {16, 1, 32, 32, element::f16, element::f16},
        {16, 2, 64, 64, element::bf16, element::bf16},
        {32, 3, 64, 32, element::f32, element::f16},
        {16, 3, 72, 40, element::f16, element::f32},
        {64, 2, 40, 136, element::bf16, element::f32},
        {128, 1, 32, 256, element::f16, element::f16},
        {16, 5, 256, 128, element::f32, element::f32},
    };
    for (const shape& s : shapes) {
        for (const tile_order order : orders) {
            CAPTURE(static_cast<uint32_t>(order));
            CAPTURE(s.key_dim);
            const tile_layout layout = make_tile_layout(order, s.tokens, s.heads, s.key_dim,
                                                        s.value_dim, s.key_type, s.value_type);
            CHECK(layout.block_bytes % 64 == 0);
            std::vector<unsigned char> taken(layout.block_bytes, 0);
            uint32_t wrong = 0;
            for (const bool value : {false, true}) {
                const operand_layout& operand = value ? layout.values : layout.keys;
                CHECK(operand.type == (value ? s.value_type : s.key_type));
                CHECK(operand.dim == (value ? s.value_dim : s.key_dim));
                for (uint32_t slot = 0; slot < s.tokens; ++slot) {
                    for (uint32_t head = 0; head < s.heads; ++head) {
                        for (uint32_t dim = 0; dim < operand.dim; ++dim) {
                            const std::size_t at =
                                static_cast<std::size_t>(operand.at(slot, head, dim));
                            const uint32_t size = element_bytes(operand.type);
                            wrong += at == documented(order, s, value, slot, head, dim) ? 0 : 1;
                            if (at % size != 0 || at + size > layout.block_bytes) {
                                ++wrong;
                                continue;
                            }
                            for (uint32_t i = 0; i < size; ++i) wrong += taken[at + i]++;
                        }
                    }
                }
            }
            CHECK(wrong == 0);
        }
    }
}

TEST_CASE("tiles that kernels load whole start on 64 bytes") {
    const tile_layout layout =
        make_tile_layout(tile_order::native, 16, 4, 72, 40, element::f16, element::bf16);
    for (uint32_t head = 0; head < 4; ++head) {
        CHECK(layout.keys.at(0, head, 0) % 64 == 0);
        CHECK(layout.values.at(0, head, 0) % 64 == 0);
    }
}

}  // namespace
