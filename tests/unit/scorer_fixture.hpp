// Rows for scorers: sequences stored in several formats and orders, part of them sealed, with what
// every row holds in double; and candidates.
#pragma once

#include <functional>
#include <limits>
#include <utility>

#include "format/rows.hpp"
#include "paged_fixture.hpp"
#include "retention/stored_rows.hpp"

namespace scorer_test {

using namespace kvrt;
using paged_test::on_every_target;
using paged_test::paged_cache;

inline slot_ranges ranges_of(std::initializer_list<slot_range> list) {
    slot_ranges ranges;
    for (const slot_range& range : list) ranges.range[ranges.count++] = range;
    return ranges;
}

inline std::vector<uint32_t> slots_of(const slot_ranges& ranges) {
    std::vector<uint32_t> slots;
    for (const slot_range& range : ranges) {
        for (uint32_t slot = range.first; slot < range.end; ++slot) slots.push_back(slot);
    }
    return slots;
}

/// Consecutive positions that end at `next`.
inline slot_positions consecutive(uint32_t slots, uint64_t next) {
    slot_positions positions;
    positions.slots = slots;
    positions.next_position = next;
    return positions;
}

struct storage {
    tile_order order = tile_order::native;
    uint32_t block_tokens = 16;
    uint32_t key_format = KV_FORMAT_F32;
    uint32_t value_format = KV_FORMAT_F32;
};

struct row_set {
    static constexpr uint32_t heads = 2;

    uint32_t slots, sealed_slots, dims[2];
    tile_layout open, sealed;
    std::vector<uint64_t> memory;
    std::byte* arena = nullptr;
    std::vector<block_id> blocks;
    std::vector<double> numbers[2];  // keys, values: [slot][head][dim]

    /// `sealed_slots` first ones as `sealed_as`, the others as `open_as`. draw(value) makes a row.
    row_set(const storage& open_as, uint32_t slot_count, uint32_t key_dim, uint32_t value_dim,
            const std::function<std::vector<float>(bool)>& draw, const storage& sealed_as = {},
            uint32_t sealed_count = 0)
        : slots(slot_count), sealed_slots(sealed_count), dims{key_dim, value_dim} {
        paged_cache first = make(sealed_as, sealed_slots), second = make(open_as, slots);
        sealed = first.layout;
        open = second.layout;
        REQUIRE((sealed_slots == 0 || sealed.block_tokens == open.block_tokens));
        fill(first, sealed_slots, draw);
        fill(second, slots - sealed_slots, draw);
        memory.resize((first.bytes() + second.bytes()) / 8 + 16);
        const uintptr_t start = reinterpret_cast<uintptr_t>(memory.data());
        arena = reinterpret_cast<std::byte*>((start + 63) / 64 * 64);
        std::memcpy(arena, first.arena, first.bytes());
        std::memcpy(arena + first.bytes(), second.arena, second.bytes());
        blocks.assign(first.blocks.begin(),
                      first.blocks.begin() + sealed_slots / sealed.block_tokens);
        const block_id behind = static_cast<block_id>(first.bytes() / block_unit);
        for (block_id id : second.blocks) blocks.push_back(id + behind);
    }

    stored_rows view(uint32_t head) const {
        stored_rows rows;
        rows.open = &open;
        rows.sealed = sealed_slots != 0 ? &sealed : nullptr;
        rows.sealed_slots = sealed_slots;
        rows.arena = arena;
        rows.blocks = blocks.data();
        rows.kv_head = head;
        return rows;
    }
    const double* row(bool value, uint32_t slot, uint32_t head) const {
        return numbers[value].data() + (std::size_t{slot} * heads + head) * dims[value];
    }
    std::vector<double> channel_rows(bool value, uint32_t head) const {
        std::vector<double> rows;
        for (uint32_t slot = 0; slot < slots; ++slot) {
            rows.insert(rows.end(), row(value, slot, head), row(value, slot, head) + dims[value]);
        }
        return rows;
    }

  private:
    paged_cache make(const storage& how, uint32_t count) const {
        return {how.order,        how.block_tokens,   heads, dims[0], dims[1], how.key_format,
                how.value_format, std::max(count, 1u)};
    }

    void fill(paged_cache& cache, uint32_t count,
              const std::function<std::vector<float>(bool)>& draw) {
        const bool tiled = cache.layout.keys.tiled();
        if (tiled) {
            seal(cache, count, draw);
        } else {
            cache.fill(count, draw);
        }
        for (uint32_t slot = 0; slot < count; ++slot) {
            for (uint32_t head = 0; head < heads; ++head) {
                for (const bool value : {false, true}) {
                    for (uint32_t i = 0; i < dims[value]; ++i) {
                        numbers[value].push_back(tiled ? decoded(cache, value, slot, head)[i]
                                                       : cache.get(value, slot, head, i));
                    }
                }
            }
        }
    }

    // Keys sealed in whole tiles; values stay as rows of plain elements.
    void seal(paged_cache& cache, uint32_t count,
              const std::function<std::vector<float>(bool)>& draw) {
        const operand_layout& keys = cache.layout.keys;
        for (uint32_t slot = 0; slot < count; slot += keys.tile_tokens) {
            std::byte* block = block_address(cache.arena, cache.blocks[slot / keys.tile_tokens]);
            for (uint32_t head = 0; head < heads; ++head) {
                std::vector<float> rows;
                for (uint32_t s = 0; s < keys.tile_tokens; ++s) {
                    const std::vector<float> row = draw(false);
                    rows.insert(rows.end(), row.begin(), row.end());
                    const std::vector<float> value = draw(true);
                    for (uint32_t i = 0; i < dims[1]; ++i) {
                        paged_test::put_number(block + cache.layout.values.at(s, head, i),
                                               cache.layout.values.type, double{value[i]});
                    }
                }
                keys.format->tile.seal(rows.data(), keys.tile_tokens, keys.dim,
                                       block + keys.tile_at(head));
            }
        }
    }

    static std::vector<float> decoded(const paged_cache& cache, bool value, uint32_t slot,
                                      uint32_t head) {
        const operand_layout& operand = cache.operand(value);
        const uint32_t tokens = cache.layout.block_tokens;
        std::vector<float> row(operand.dim);
        read_row(operand, block_address(cache.arena, cache.blocks[slot / tokens]), slot % tokens,
                 head, 0, row.data());
        return row;
    }
};

/// Rows of normal numbers about a mean of their own per channel, of a few sizes.
inline std::function<std::vector<float>(bool)> drawn_rows(uint32_t key_dim, uint32_t value_dim,
                                                          std::mt19937& random) {
    return [=, &random](bool value) {
        std::normal_distribution<float> normal;
        std::vector<float> row(value ? value_dim : key_dim);
        const float size = std::exp(0.5f * normal(random));
        for (uint32_t i = 0; i < row.size(); ++i) {
            row[i] = size * (normal(random) + static_cast<float>(i % 5) * 0.4f - 0.8f);
        }
        return row;
    };
}

/// Runs body(set) for sequences of `slots` slots, at least 64, in every kind of storage, on every
/// target. The last two kinds have a sealed part.
inline void for_each_row_set(uint32_t slots, uint32_t key_dim, uint32_t value_dim,
                             const std::function<void(const row_set&)>& body) {
    const storage f32{tile_order::native, 16, KV_FORMAT_F32, KV_FORMAT_F32};
    const storage f16{tile_order::native, 32, KV_FORMAT_F16, KV_FORMAT_F16};
    const storage f16_rows{tile_order::hnd, 32, KV_FORMAT_F16, KV_FORMAT_F32};
    const storage bf16_rows{tile_order::nhd, 32, KV_FORMAT_BF16, KV_FORMAT_F16};
    const storage codes{tile_order::native, 64, KV_FORMAT_Q8_0, KV_FORMAT_Q4_0};
    const storage foreign_codes{tile_order::hnd, 16, KV_FORMAT_Q4_1, KV_FORMAT_INT8_TOKEN};
    const storage tiles{tile_order::native, 32, KV_FORMAT_KIVI4, KV_FORMAT_F16};
    const std::pair<storage, storage> kinds[] = {
        {f32, {}},   {f16, {}},           {f16_rows, {}},  {bf16_rows, {}},
        {codes, {}}, {foreign_codes, {}}, {f16, f16_rows}, {bf16_rows, tiles}};
    std::mt19937 random(slots + key_dim);
    for (std::size_t kind = 0; kind < std::size(kinds); ++kind) {
        const auto& [open, sealed] = kinds[kind];
        const bool cut = kind >= std::size(kinds) - 2;
        const uint32_t sealed_slots = cut ? slots / 2 / 32 * 32 : 0;
        const row_set set(open, slots, key_dim, value_dim, drawn_rows(key_dim, value_dim, random),
                          sealed, sealed_slots);
        REQUIRE((!cut || sealed_slots > 0));
        CAPTURE(kind);
        on_every_target([&] { body(set); });
    }
}

/// Relative to the larger of |expected| and `scale`.
inline bool close(double value, double expected, double tolerance, double scale = 0.0) {
    return std::abs(value - expected) <= tolerance * std::max(std::abs(expected), scale);
}

inline double dot(const double* a, const double* b, uint32_t dim) {
    double sum = 0;
    for (uint32_t i = 0; i < dim; ++i) sum += a[i] * b[i];
    return sum;
}

}  // namespace scorer_test
