// Writing rows into slots. Work is cut into pieces: up to 16 rows of one item that fall into one
// group of 16 slots. A piece of 16 rows fills a native key tile through a transpose in registers;
// smaller ones write columns. Every row is converted on its own, so neither the cut nor the number
// of threads can change a bit.

#include "format/encode.hpp"

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "format/encode.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <algorithm>
#include <atomic>

#include "base/checked.hpp"
#include "format/rotation.hpp"
#include "format/vector-inl.hpp"

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

// Rows of one piece: [first_row, first_row + rows) go to slots [first_slot, ...) of one group.
struct write_piece {
    std::byte* block = nullptr;
    uint32_t first_slot = 0;  // in the block
    int64_t first_row = 0;
    uint32_t rows = 0;
    uint32_t first_position = 0;
};

// One row of one head, dense in the storage type. Returns it where it lies when it is already so.
template <element from, element to>
HWY_INLINE const std::byte* dense_row(const tensor_view& tensor, int64_t row, uint32_t head,
                                      uint32_t dim, std::byte* scratch) {
    const std::byte* source = tensor.at(row, head, 0);
    alignas(64) std::byte gathered[widest_row * element_bytes(from)];
    if (tensor.dim_stride != 1) {
        const int64_t stride = tensor.dim_stride * int64_t{element_bytes(from)};
        for (uint32_t i = 0; i < dim; ++i) {
            std::memcpy(gathered + i * element_bytes(from), source + i * stride,
                        element_bytes(from));
        }
        source = gathered;
    } else if (from == to) {
        return source;
    }
    convert_run<from, to>(source, scratch, dim);
    return scratch;
}

template <element from, element to>
void write_dim_major(const operand_layout& layout, uint32_t heads, const tensor_view& tensor,
                     const write_piece& piece) {
    using word = std::conditional_t<element_bytes(to) == 2, uint16_t, uint32_t>;
    alignas(64) std::byte scratch[slot_group][widest_row * element_bytes(to)];
    for (uint32_t head = 0; head < heads; ++head) {
        const word* rows[slot_group] = {};
        for (uint32_t r = 0; r < piece.rows; ++r) {
            rows[r] = reinterpret_cast<const word*>(
                dense_row<from, to>(tensor, piece.first_row + r, head, layout.dim, scratch[r]));
        }
        word* tile = reinterpret_cast<word*>(piece.block + layout.at(piece.first_slot, head, 0));
        if (piece.rows == slot_group) {
            transpose_rows(rows, layout.dim, tile);
            continue;
        }
        for (uint32_t r = 0; r < piece.rows; ++r) {
            for (uint32_t i = 0; i < layout.dim; ++i) tile[i * slot_group + r] = rows[r][i];
        }
    }
}

template <element from, element to>
void write_row_major(const operand_layout& layout, uint32_t heads, const tensor_view& tensor,
                     const write_piece& piece) {
    for (uint32_t r = 0; r < piece.rows; ++r) {
        for (uint32_t head = 0; head < heads; ++head) {
            std::byte* target = piece.block + layout.at(piece.first_slot + r, head, 0);
            const std::byte* row =
                dense_row<from, to>(tensor, piece.first_row + r, head, layout.dim, target);
            if (row != target) std::memcpy(target, row, layout.dim * element_bytes(to));
        }
    }
}

template <element from, element to>
HWY_INLINE void write_operand(const operand_layout& layout, uint32_t heads,
                              const tensor_view& tensor, const write_piece& piece) {
    if (layout.word_stride == 1) {
        write_row_major<from, to>(layout, heads, tensor, piece);
    } else {
        write_dim_major<from, to>(layout, heads, tensor, piece);
    }
}

template <element from>
HWY_INLINE void write_from(const operand_layout& layout, uint32_t heads, const tensor_view& tensor,
                           const write_piece& piece) {
    switch (layout.type) {
        case element::f32:
            return write_operand<from, element::f32>(layout, heads, tensor, piece);
        case element::f16:
            return write_operand<from, element::f16>(layout, heads, tensor, piece);
        case element::bf16:
            return write_operand<from, element::bf16>(layout, heads, tensor, piece);
    }
}

// A row of one head as f32 in `row`, rotated if it is stored so.
template <element from>
HWY_INLINE void load_row(const operand_layout& layout, const tensor_view& tensor, int64_t at,
                         uint32_t head, float* row) {
    std::byte* bytes = reinterpret_cast<std::byte*>(row);
    const std::byte* dense = dense_row<from, element::f32>(tensor, at, head, layout.dim, bytes);
    if (dense != bytes) std::memcpy(bytes, dense, layout.dim * sizeof(float));
    if (layout.rotated) rotate_row(row, layout.dim);
}

// Plain rows of tile-local formats that want them rotated, kept until their block is sealed.
template <element from>
void write_rotated(const operand_layout& layout, uint32_t heads, const tensor_view& tensor,
                   const write_piece& piece) {
    alignas(64) float rows[slot_group][widest_row];
    tensor_view rotated;
    rotated.data = reinterpret_cast<std::byte*>(rows);
    rotated.row_stride = widest_row;
    write_piece here = piece;
    here.first_row = 0;
    for (uint32_t head = 0; head < heads; ++head) {
        for (uint32_t r = 0; r < piece.rows; ++r) {
            load_row<from>(layout, tensor, piece.first_row + r, head, rows[r]);
        }
        operand_layout of_head = layout;
        of_head.offset = layout.tile_at(head);
        write_from<element::f32>(of_head, 1, rotated, here);
    }
}

// Records of a piece: whole, or as columns of a native key tile.
template <element from>
void write_records(const operand_layout& layout, uint32_t heads, const tensor_view& tensor,
                   const write_piece& piece, uint64_t* saturated) {
    alignas(64) float row[widest_row];
    alignas(64) uint32_t records[slot_group][most_record_bytes / record_word];
    const uint32_t record_words = record_bytes(*layout.format, layout.dim) / record_word;
    const uint32_t* words[slot_group];
    for (uint32_t r = 0; r < slot_group; ++r) words[r] = records[r];
    for (uint32_t head = 0; head < heads; ++head) {
        row_constants constants = layout.constants(head);
        uint32_t beyond = 0;
        for (uint32_t r = 0; r < piece.rows; ++r) {
            constants.position = piece.first_position + r;
            load_row<from>(layout, tensor, piece.first_row + r, head, row);
            records[r][record_words - 1] = 0;  // padding
            beyond += layout.format->encode(row, layout.dim, constants,
                                            reinterpret_cast<std::byte*>(records[r]));
        }
        if (beyond != 0 && saturated != nullptr) {
            std::atomic_ref<uint64_t>(saturated[head]).fetch_add(beyond, std::memory_order_relaxed);
        }
        if (layout.word_stride == 1) {
            for (uint32_t r = 0; r < piece.rows; ++r) {
                std::byte* target = piece.block + layout.at(piece.first_slot + r, head, 0);
                const std::byte* record = reinterpret_cast<const std::byte*>(records[r]);
                if (layout.inline_form) {
                    to_inline(*layout.format, layout.dim, record, target);
                } else {
                    std::memcpy(target, record, layout.row_bytes());
                }
            }
            continue;
        }
        uint32_t* tile =
            reinterpret_cast<uint32_t*>(piece.block + layout.at(piece.first_slot, head, 0));
        uint32_t w = 0;
        if (piece.rows == slot_group) {
            w = layout.words / 4 * 4;
            transpose_rows(words, w, tile);
        }
        for (; w < layout.words; ++w) {
            for (uint32_t r = 0; r < piece.rows; ++r) tile[w * slot_group + r] = records[r][w];
        }
    }
}

template <element from>
HWY_INLINE void write_any(const operand_layout& layout, uint32_t heads, const tensor_view& tensor,
                          const write_piece& piece, uint64_t* saturated) {
    if (layout.plain() && layout.rotated) {
        write_rotated<from>(layout, heads, tensor, piece);
    } else if (layout.plain()) {
        write_from<from>(layout, heads, tensor, piece);
    } else {
        write_records<from>(layout, heads, tensor, piece, saturated);
    }
}

void write_tensor(const operand_layout& layout, uint32_t heads, const tensor_view& tensor,
                  const write_piece& piece, uint64_t* saturated) {
    switch (tensor.type) {
        case element::f32:
            return write_any<element::f32>(layout, heads, tensor, piece, saturated);
        case element::f16:
            return write_any<element::f16>(layout, heads, tensor, piece, saturated);
        case element::bf16:
            return write_any<element::bf16>(layout, heads, tensor, piece, saturated);
    }
}

// Writes the pieces of all items whose first row, counted over all items, is in [first, end).
void write_stripe(const tile_layout& layout, std::byte* arena, const write_item* items,
                  uint32_t item_count, const tensor_view& keys, const tensor_view& values,
                  const saturation_counts& saturated, uint64_t first, uint64_t end) {
    uint64_t base = 0;  // rows of the items before
    for (uint32_t i = 0; i < item_count && base < end; base += items[i++].rows) {
        const write_item& item = items[i];
        if (base + item.rows <= first) continue;
        for (uint32_t row = 0; row < item.rows;) {
            const uint32_t slot = item.first_slot + row;
            const uint32_t rows = HWY_MIN(slot_group - slot % slot_group, item.rows - row);
            if (base + row >= end) break;
            if (base + row >= first) {
                write_piece piece;
                piece.block = block_address(arena, item.blocks[slot / layout.block_tokens]);
                piece.first_slot = slot % layout.block_tokens;
                piece.first_row = int64_t{item.first_row} + row;
                piece.rows = rows;
                piece.first_position = item.first_position + row;
                write_tensor(layout.keys, layout.kv_heads, keys, piece, saturated.keys);
                write_tensor(layout.values, layout.kv_heads, values, piece, saturated.values);
            }
            row += rows;
        }
    }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(write_stripe);

namespace {

/// Below this many bytes a call is done before another thread has woken up.
constexpr uint64_t bytes_worth_a_thread = 128 << 10;

}  // namespace

void write_rows(const write_call* calls, uint32_t call_count, std::byte* arena, executor& threads) {
    uint64_t rows = 0;
    for (uint32_t i = 0; i < calls[0].item_count; ++i) rows += calls[0].items[i].rows;
    const tile_layout& layout = *calls[0].layout;
    const uint64_t row_bytes =
        uint64_t{layout.kv_heads} * (layout.keys.row_bytes() + layout.values.row_bytes());
    const uint64_t stripe_rows =
        round_up(ceil_divide(bytes_worth_a_thread, row_bytes), uint64_t{slot_group});
    const auto write = &HWY_DYNAMIC_DISPATCH(write_stripe);
    const uint64_t all_rows = rows * call_count;
    const uint32_t stripes = static_cast<uint32_t>(ceil_divide(all_rows, stripe_rows));
    threads.for_each(stripes, [&](uint32_t stripe) {
        const uint64_t end = std::min(all_rows, (stripe + 1) * stripe_rows);
        for (uint64_t first = stripe * stripe_rows; first < end;) {
            const write_call& call = calls[first / rows];
            const uint64_t of_call = first / rows * rows;
            const uint64_t end_here = std::min(end, of_call + rows);
            write(*call.layout, arena, call.items, call.item_count, call.keys, call.values,
                  call.saturated, first - of_call, end_here - of_call);
            first = end_here;
        }
    });
}

}  // namespace kvrt
#endif
