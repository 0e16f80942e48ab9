#include "format/retile.hpp"

#include <atomic>
#include <cmath>
#include <cstring>

#include "format/rows.hpp"

namespace kvrt {

namespace {

struct row_mover {
    const block_run& from;
    std::byte* arena;
    const uint32_t* slots;
    uint32_t first_slot;
    uint32_t count;
    uint32_t head;

    uint32_t source(uint32_t i) const { return slots != nullptr ? slots[i] : first_slot + i; }
    const std::byte* block_of(uint32_t slot) const {
        return block_address(arena, from.blocks[slot / from.layout->block_tokens]);
    }

    uint32_t place_of(uint32_t slot) const { return slot % from.layout->block_tokens; }
    bool was_coded(uint32_t slot, uint32_t opened_end) const {
        return slot < opened_end || slot / from.layout->block_tokens < from.sealed_blocks;
    }

    /// Row by row, of formats without tiles: the same words where the row is stored alike.
    /// Ascending order never overwrites what is still to be read.
    void move_rows(operand_layout tile_layout::*operand, const tile_layout& to, std::byte* target,
                   uint32_t opened_end, uint64_t& saturated, recoding& recoded) const {
        const operand_layout& out = to.*operand;
        alignas(64) float row[widest_row];
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t slot = source(i);
            const operand_layout& in = from.layout_of(slot).*operand;
            const std::byte* block = block_of(slot);
            if (in.format == out.format) {
                for (uint32_t w = 0; w < out.words; ++w) {
                    std::memmove(target + out.at(i, head, w),
                                 block + in.at(place_of(slot), head, w), out.word_bytes);
                }
                continue;
            }
            read_stored_row(in, block, place_of(slot), head, 0, row);
            const uint32_t beyond = store_row(out, target, i, head, row);
            if (!was_coded(slot, opened_end)) {
                saturated += beyond;
            } else if (&to == from.sealed_layout) {
                measure(row, out, target, i, recoded);
            }
        }
    }

    void decode(operand_layout tile_layout::*operand, float* rows) const {
        const uint32_t tokens = from.layout->block_tokens;
        for (uint32_t i = 0; i < count;) {
            const uint32_t slot = source(i);
            const operand_layout& in = from.layout_of(slot).*operand;
            // Neighbours of a tile are decoded together.
            uint32_t together = 1;
            while (in.tiled() && i + together < count && source(i + together) == slot + together &&
                   (slot + together) % tokens != 0) {
                ++together;
            }
            if (in.tiled()) {
                in.open_tile(block_of(slot), head, slot % tokens, together, rows);
            } else {
                read_stored_row(in, block_of(slot), slot % tokens, head, 0, rows);
            }
            rows += uint64_t{together} * in.dim;
            i += together;
        }
    }

    /// How far coding moved a row that was coded before.
    void measure(const float* row, const operand_layout& out, const std::byte* target, uint32_t i,
                 recoding& recoded) const {
        alignas(64) float coded[widest_row];
        read_stored_row(out, target, i, head, 0, coded);
        ++recoded.rows;
        for (uint32_t c = 0; c < out.dim; ++c) {
            if (!std::isfinite(row[c]) || !std::isfinite(coded[c])) continue;
            const double change = double{coded[c]} - double{row[c]};
            recoded.squared_change += change * change;
            recoded.squared_rows += double{row[c]} * double{row[c]};
        }
    }

    void move(operand_layout tile_layout::*operand, const tile_layout& to, block_id target,
              uint32_t opened_end, uint64_t& saturated, recoding& recoded) const {
        const operand_layout& out = to.*operand;
        std::byte* block = block_address(arena, target);
        if (!(from.sealed_layout->*operand).tiled()) {
            return move_rows(operand, to, block, opened_end, saturated, recoded);
        }
        alignas(64) float rows[most_tile_tokens * widest_row];
        decode(operand, rows);
        if (out.tiled()) {
            out.format->tile.seal(rows, out.tile_tokens, out.dim, block + out.tile_at(head));
            for (uint32_t i = 0; i < count; ++i) {
                if (!was_coded(source(i), opened_end)) continue;
                measure(rows + uint64_t{i} * out.dim, out, block, i, recoded);
            }
            return;
        }
        for (uint32_t i = 0; i < count; ++i) {
            store_row(out, block, i, head, rows + uint64_t{i} * out.dim);
        }
    }
};

}  // namespace

void recoding::add_shared(const recoding& other) {
    std::atomic_ref(rows).fetch_add(other.rows, std::memory_order_relaxed);
    std::atomic_ref(squared_change).fetch_add(other.squared_change, std::memory_order_relaxed);
    std::atomic_ref(squared_rows).fetch_add(other.squared_rows, std::memory_order_relaxed);
}

recoding recoding::load_shared() const {
    recoding& shared = const_cast<recoding&>(*this);  // atomic_ref takes no const in C++20
    return {
        .rows = std::atomic_ref(shared.rows).load(std::memory_order_relaxed),
        .squared_change = std::atomic_ref(shared.squared_change).load(std::memory_order_relaxed),
        .squared_rows = std::atomic_ref(shared.squared_rows).load(std::memory_order_relaxed)};
}

double recoding::relative_change() const {
    return squared_rows > 0.0 ? std::sqrt(squared_change / squared_rows) : 0.0;
}

void fill_block(const block_run& from, std::byte* arena, const uint32_t* slots, uint32_t first_slot,
                uint32_t count, uint32_t kv_head, const tile_layout& to, block_id target,
                uint32_t opened_end, recoding& recoded) {
    const row_mover mover{from, arena, slots, first_slot, count, kv_head};
    mover.move(&tile_layout::keys, to, target, opened_end, recoded.saturated_keys, recoded);
    mover.move(&tile_layout::values, to, target, opened_end, recoded.saturated_values, recoded);
}

}  // namespace kvrt
