// A paged cache for tests: an arena with guard bytes, a shuffled block table, and access to
// elements and records through addresses worked out here from kvrt.h's description, not from the
// library's layout code.
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
#include <string>
#include <vector>

#include "format/encode.hpp"
#include "format/tile.hpp"
#include "format_reference.hpp"
#include "memory/block_id.hpp"

namespace paged_test {

using format_test::nearest_bits;
using format_test::value_of;
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
        CAPTURE(std::string(hwy::TargetName(target)));
        body();
    }
    hwy::GetChosenTarget().Update(supported);
}

constexpr uint32_t size_of(element type) { return type == element::f32 ? 4 : 2; }

/// Stores the nearest number and returns what is stored.
inline double put_number(std::byte* address, element type, double number) {
    if (type == element::f32) {
        const float single = static_cast<float>(number);
        std::memcpy(address, &single, sizeof single);
        return single;
    }
    const uint16_t bits = nearest_bits(number, type);
    std::memcpy(address, &bits, sizeof bits);
    return value_of(bits, type);
}

inline double number_at(const std::byte* address, element type) {
    if (type == element::f32) return double{format_test::parse<float>(address)};
    return value_of(format_test::parse<uint16_t>(address), type);
}

// A tensor [rows, heads, dim] inside a larger packed buffer, as an engine's QKV buffer.
struct packed_tensor {
    std::vector<std::byte> bytes;
    kvrt::tensor_view view;

    packed_tensor(element type, uint32_t rows, uint32_t heads, uint32_t dim, bool strided) {
        view.type = type;
        view.dim_stride = strided ? 3 : 1;
        view.head_stride = view.dim_stride * dim + 8;
        view.row_stride = view.head_stride * heads + 24;
        bytes.resize(static_cast<std::size_t>(view.row_stride) * rows * size_of(type) + 64);
        view.data = bytes.data();
    }
    std::byte* at(uint32_t row, uint32_t head, uint32_t dim) const {
        return view.data +
               (row * view.row_stride + head * view.head_stride + dim * view.dim_stride) *
                   size_of(view.type);
    }
    /// Stores the nearest number and returns what is stored.
    double put(uint32_t row, uint32_t head, uint32_t dim, double value) const {
        return put_number(at(row, head, dim), view.type, value);
    }
};

/// Scales of KV heads 0, 1, 2, ...: far from 1 in both directions, and 1.
constexpr float static_scales[] = {0.5f, 3.0f, 1.0f};

struct paged_cache {
    kvrt::tile_layout layout;
    std::vector<uint64_t> memory;
    std::byte* arena = nullptr;
    std::vector<kvrt::block_id> blocks;
    uint32_t block_count = 0;        // in the arena, more than in the table
    std::vector<double> numbers[2];  // what records of keys and of values hold, once filled

    paged_cache(tile_order order, uint32_t block_tokens, uint32_t kv_heads, uint32_t key_dim,
                uint32_t value_dim, uint32_t key_format, uint32_t value_format, uint32_t slots,
                uint32_t seed = 1)
        : layout(kvrt::make_tile_layout(
              order, block_tokens, kv_heads, key_dim, value_dim,
              *kvrt::find_format(key_format, kvrt::operand_role::keys),
              *kvrt::find_format(value_format, kvrt::operand_role::values))) {
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
    paged_cache(tile_order order, uint32_t block_tokens, uint32_t kv_heads, uint32_t key_dim,
                uint32_t value_dim, element key_type, element value_type, uint32_t slots,
                uint32_t seed = 1)
        : paged_cache(order, block_tokens, kv_heads, key_dim, value_dim,
                      static_cast<uint32_t>(key_type), static_cast<uint32_t>(value_type), slots,
                      seed) {}

    kvrt::block_id id_of(uint32_t index) const {
        return index * (layout.block_bytes / kvrt::block_unit);
    }
    std::size_t bytes() const { return std::size_t{block_count} * layout.block_bytes; }
    std::vector<std::byte> copy() const { return {arena, arena + bytes()}; }

    const kvrt::operand_layout& operand(bool value) const {
        return value ? layout.values : layout.keys;
    }
    kvrt::operand_layout& operand(bool value) { return value ? layout.values : layout.keys; }
    const format_test::facts& facts(bool value) const {
        return format_test::facts_of(operand(value).format->id,
                                     value ? kvrt::operand_role::values : kvrt::operand_role::keys);
    }
    double scale(bool value, uint32_t head) const {
        const float* scales = operand(value).scales;
        return scales != nullptr && facts(value).static_scale ? double{scales[head]} : 1.0;
    }
    /// Records in HND and NHD lie in the form of their origin, where they have one.
    bool foreign(bool value) const {
        return facts(value).foreign_form && layout.order != tile_order::native;
    }

    /// A row is so many words of so many bytes: elements, words of 4 bytes of a record, or words of
    /// 2 bytes of one in foreign form.
    uint32_t word_bytes(bool value) const {
        if (facts(value).plain()) return facts(value).code_bits() / 8;
        return foreign(value) ? 2 : 4;
    }
    uint32_t row_bytes(bool value) const {
        const uint32_t dim = operand(value).dim;
        return foreign(value) ? facts(value).bytes(dim) : facts(value).padded_bytes(dim);
    }
    uint32_t words(bool value) const { return row_bytes(value) / word_bytes(value); }

    /// Byte offset in the arena of [slot, head, word] of keys or values.
    std::size_t offset(const std::vector<kvrt::block_id>& table, bool value, uint32_t slot,
                       uint32_t head, uint32_t word) const {
        const uint32_t tokens = layout.block_tokens, in_block = slot % tokens;
        const std::size_t block = std::size_t{table[slot / tokens]} * 64;
        const std::size_t key_row = row_bytes(false), value_row = row_bytes(true);
        const std::size_t size = word_bytes(value);
        if (layout.order == tile_order::native) {
            const std::size_t key_tile = pad(tokens * key_row);
            const std::size_t value_tile = pad(tokens * value_row);
            const std::size_t tile = block + head * (key_tile + value_tile);
            if (value) return tile + key_tile + in_block * value_row + word * size;
            return tile + ((in_block / 16 * words(false) + word) * 16 + in_block % 16) * size;
        }
        const std::size_t start = block + (value ? pad(layout.kv_heads * tokens * key_row) : 0);
        const std::size_t row = layout.order == tile_order::hnd
                                    ? std::size_t{head} * tokens + in_block
                                    : std::size_t{in_block} * layout.kv_heads + head;
        return start + row * (value ? value_row : key_row) + word * size;
    }

    /// The padded record of [slot, head].
    std::vector<std::byte> record(bool value, uint32_t slot, uint32_t head) const {
        std::vector<std::byte> row(row_bytes(value));
        for (uint32_t word = 0; word < words(value); ++word) {
            std::memcpy(row.data() + word * word_bytes(value),
                        arena + offset(blocks, value, slot, head, word), word_bytes(value));
        }
        if (!foreign(value)) return row;
        return format_test::from_foreign_form(facts(value), row.data(), operand(value).dim);
    }

    /// Writes rows of normal numbers to slots [0, slots).
    void fill(uint32_t slots, std::mt19937& random) {
        fill(slots, [&](bool value) { return format_test::gauss_row(operand(value).dim, random); });
    }

    /// The same with rows that `draw` makes, of keys or of values.
    template <class row_source>
    void fill(uint32_t slots, const row_source& draw) {
        const uint32_t heads = layout.kv_heads;
        packed_tensor keys(element::f32, slots, heads, layout.keys.dim, false);
        packed_tensor values(element::f32, slots, heads, layout.values.dim, false);
        for (uint32_t slot = 0; slot < slots; ++slot) {
            for (uint32_t head = 0; head < heads; ++head) {
                for (const bool value : {false, true}) {
                    const std::vector<float> row = draw(value);
                    for (uint32_t i = 0; i < operand(value).dim; ++i) {
                        const double number = double{row[i]};
                        (value ? values : keys).put(slot, head, i, number);
                        if (facts(value).plain()) set(value, slot, head, i, number);
                    }
                }
            }
        }
        if (facts(false).plain() && facts(true).plain()) return;
        kvrt::executor alone;
        kvrt::write_item item;
        item.blocks = blocks.data();
        item.rows = slots;
        kvrt::write_rows(layout, arena, &item, 1, keys.view, values.view, {}, alone);
        for (const bool value : {false, true}) {
            if (!facts(value).plain()) decode(value, slots);
        }
    }

    /// Reads back what records of slots [0, slots) hold, in the basis of the rows.
    void decode(bool value, uint32_t slots) {
        const uint32_t dim = operand(value).dim;
        numbers[value].clear();
        for (uint32_t slot = 0; slot < slots; ++slot) {
            for (uint32_t head = 0; head < layout.kv_heads; ++head) {
                std::vector<double> row = format_test::decode(
                    facts(value), record(value, slot, head).data(), dim, scale(value, head));
                if (operand(value).rotated) row = format_test::hadamard(row);
                numbers[value].insert(numbers[value].end(), row.begin(), row.end());
            }
        }
    }

    double get(bool value, uint32_t slot, uint32_t head, uint32_t dim) const {
        if (!facts(value).plain()) {
            return numbers[value]
                          [(std::size_t{slot} * layout.kv_heads + head) * operand(value).dim + dim];
        }
        return number_at(arena + offset(blocks, value, slot, head, dim), operand(value).type);
    }

    /// Of plain formats: stores the nearest number and returns what is stored.
    double set(bool value, uint32_t slot, uint32_t head, uint32_t dim, double number) {
        return put_number(arena + offset(blocks, value, slot, head, dim), operand(value).type,
                          number);
    }

    static std::size_t pad(std::size_t count) { return (count + 63) / 64 * 64; }
};

}  // namespace paged_test
