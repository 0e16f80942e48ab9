#include "format/retile.hpp"

#include <atomic>
#include <cmath>
#include <cstring>

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

    /// The same words in both layouts. Ascending order never overwrites what is still to be read.
    void copy_words(operand_layout tile_layout::*operand, const tile_layout& to,
                    std::byte* target) const {
        const operand_layout& out = to.*operand;
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t slot = source(i);
            const operand_layout& in = from.layout_of(slot).*operand;
            const std::byte* block = block_of(slot);
            const uint32_t place = slot % from.layout->block_tokens;
            for (uint32_t w = 0; w < out.words; ++w) {
                std::memmove(target + out.at(i, head, w), block + in.at(place, head, w),
                             out.word_bytes);
            }
        }
    }

    void load_plain(const operand_layout& in, const std::byte* block, uint32_t place,
                    float* row) const {
        for (uint32_t c = 0; c < in.dim; ++c) {
            row[c] = load_element(block + in.at(place, head, c), in.type);
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
                load_plain(in, block_of(slot), slot % tokens, rows);
            }
            rows += uint64_t{together} * in.dim;
            i += together;
        }
    }

    /// rows are [count][dim]; those in slots below opened_end, or in tiles, have been coded before.
    void measure(const float* rows, const operand_layout& out, const std::byte* target,
                 uint32_t opened_end, recoding& recoded) const {
        const uint32_t tokens = from.layout->block_tokens;
        alignas(64) float coded[widest_row];
        for (uint32_t i = 0; i < count; ++i) {
            const uint32_t slot = source(i);
            if (slot >= opened_end && slot / tokens >= from.sealed_blocks) continue;
            out.open_tile(target, head, i, 1, coded);
            const float* row = rows + uint64_t{i} * out.dim;
            ++recoded.rows;
            for (uint32_t c = 0; c < out.dim; ++c) {
                if (!std::isfinite(row[c]) || !std::isfinite(coded[c])) continue;
                const double change = double{coded[c]} - double{row[c]};
                recoded.squared_change += change * change;
                recoded.squared_rows += double{row[c]} * double{row[c]};
            }
        }
    }

    void move(operand_layout tile_layout::*operand, const tile_layout& to, block_id target,
              uint32_t opened_end, recoding& recoded) const {
        const operand_layout& out = to.*operand;
        std::byte* block = block_address(arena, target);
        const bool alike = !(from.sealed_layout->*operand).tiled();
        if (alike) return copy_words(operand, to, block);
        alignas(64) float rows[most_tile_tokens * widest_row];
        decode(operand, rows);
        if (out.tiled()) {
            out.format->tile.seal(rows, out.tile_tokens, out.dim, block + out.tile_at(head));
            measure(rows, out, block, opened_end, recoded);
            return;
        }
        for (uint32_t i = 0; i < count; ++i) {
            const float* row = rows + uint64_t{i} * out.dim;
            for (uint32_t c = 0; c < out.dim; ++c) {
                store_element(block + out.at(i, head, c), out.type, row[c]);
            }
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
    return {std::atomic_ref(shared.rows).load(std::memory_order_relaxed),
            std::atomic_ref(shared.squared_change).load(std::memory_order_relaxed),
            std::atomic_ref(shared.squared_rows).load(std::memory_order_relaxed)};
}

double recoding::relative_change() const {
    return squared_rows > 0.0 ? std::sqrt(squared_change / squared_rows) : 0.0;
}

void fill_block(const block_run& from, std::byte* arena, const uint32_t* slots, uint32_t first_slot,
                uint32_t count, uint32_t kv_head, const tile_layout& to, block_id target,
                uint32_t opened_end, recoding& recoded) {
    const row_mover mover{from, arena, slots, first_slot, count, kv_head};
    mover.move(&tile_layout::keys, to, target, opened_end, recoded);
    mover.move(&tile_layout::values, to, target, opened_end, recoded);
}

}  // namespace kvrt
