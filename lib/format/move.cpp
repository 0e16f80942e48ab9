// Moving slots. Rows are copied whole, the rows to come prefetched. Columns of a dim-major key tile
// are moved a group of 16 target slots at a time: for each source group that has survivors in it,
// every line of its tile is read once, its survivors are permuted to their new lanes, and merged
// into the target's line.
//
// In place is safe. Target group g takes slots from source groups >= g only (survivors[i] >= i),
// and each line is read before it is written; what groups after g still need lies behind group g.

#include "format/move.hpp"

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "format/move.cpp"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr uint32_t line_bytes = 64;

// Up to 16 slots of one source group that go to one target group.
struct column_run {
    const std::byte* source = nullptr;  // group's tile, [dim][16]
    uint8_t from[slot_group] = {};      // lane in the source, by lane of the target
    uint16_t lanes = 0;                 // of the target that this run fills
};

HWY_INLINE void prefetch_bytes(const std::byte* address, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += line_bytes) __builtin_prefetch(address + i);
}

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL

// Two rows of 16-bit elements, or one of 32-bit, are one register and one line.
template <class word>
HWY_INLINE void move_columns(const column_run& run, const std::byte* next, uint32_t dim, bool first,
                             std::byte* target) {
    const uint32_t lines = dim * slot_group * uint32_t{sizeof(word)} / line_bytes;
    if constexpr (sizeof(word) == 2) {
        const __m256i lanes =
            _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(run.from)));
        const __m512i from = _mm512_inserti64x4(_mm512_castsi256_si512(lanes),
                                                _mm256_add_epi16(lanes, _mm256_set1_epi16(16)), 1);
        const __mmask32 mask = static_cast<__mmask32>(run.lanes) * 0x10001u;
        for (uint32_t i = 0; i < lines; ++i) {
            if (next != nullptr) __builtin_prefetch(next + i * line_bytes);
            const __m512i line = _mm512_loadu_si512(run.source + i * line_bytes);
            std::byte* out = target + i * line_bytes;
            _mm512_storeu_si512(out, first ? _mm512_maskz_permutexvar_epi16(mask, from, line)
                                           : _mm512_mask_permutexvar_epi16(_mm512_loadu_si512(out),
                                                                           mask, from, line));
        }
    } else {
        const __m512i from =
            _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(run.from)));
        for (uint32_t i = 0; i < lines; ++i) {
            if (next != nullptr) __builtin_prefetch(next + i * line_bytes);
            const __m512i line = _mm512_loadu_si512(run.source + i * line_bytes);
            std::byte* out = target + i * line_bytes;
            _mm512_storeu_si512(out, first ? _mm512_maskz_permutexvar_epi32(run.lanes, from, line)
                                           : _mm512_mask_permutexvar_epi32(_mm512_loadu_si512(out),
                                                                           run.lanes, from, line));
        }
    }
}

#else

template <class word>
HWY_INLINE void move_columns(const column_run& run, const std::byte* next, uint32_t dim,
                             bool /*first*/, std::byte* target) {
    const word* source = reinterpret_cast<const word*>(run.source);
    word* out = reinterpret_cast<word*>(target);
    if (next != nullptr) prefetch_bytes(next, dim * slot_group * uint32_t{sizeof(word)});
    for (uint32_t rest = run.lanes; rest != 0; rest &= rest - 1) {
        const uint32_t lane = static_cast<uint32_t>(hwy::Num0BitsBelowLS1Bit_Nonzero32(rest));
        const uint32_t from = run.from[lane];
        for (uint32_t i = 0; i < dim; ++i)
            out[i * slot_group + lane] = source[i * slot_group + from];
    }
}

#endif

// `bytes` is a multiple of 16; source and target are the same or apart.
HWY_INLINE void copy_row(const std::byte* source, std::byte* target, uint32_t bytes) {
    const hn::CappedTag<uint8_t, 64> wide;
    const hn::CappedTag<uint8_t, 16> narrow;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(source);
    uint8_t* to = reinterpret_cast<uint8_t*>(target);
    uint32_t i = 0;
    for (const uint32_t step = static_cast<uint32_t>(hn::Lanes(wide)); i + step <= bytes;
         i += step) {
        hn::StoreU(hn::LoadU(wide, from + i), wide, to + i);
    }
    for (const uint32_t step = static_cast<uint32_t>(hn::Lanes(narrow)); i < bytes; i += step) {
        hn::StoreU(hn::LoadU(narrow, from + i), narrow, to + i);
    }
}

// Where slots of one operand and head lie.
struct slot_addresses {
    std::byte* arena;
    const tile_layout& layout;
    const operand_layout& operand;
    uint32_t head;

    std::byte* of(const block_id* table, uint32_t slot) const {
        return block_address(arena, table[slot / layout.block_tokens]) +
               operand.at(slot % layout.block_tokens, head, 0);
    }
    uint32_t row_bytes() const { return operand.dim * element_bytes(operand.type); }
};

constexpr uint32_t rows_ahead = 16;

// Rows survivors[first .. end) of an operand whose dims are contiguous.
void move_rows(const slot_addresses& place, const move_list& moves, uint32_t first, uint32_t end,
               uint32_t prefetch_end) {
    const uint32_t bytes = place.row_bytes();
    for (uint32_t i = first; i < end; ++i) {
        if (i + rows_ahead < prefetch_end) {
            prefetch_bytes(place.of(moves.source, moves.survivors[i + rows_ahead]), bytes);
        }
        const std::byte* source = place.of(moves.source, moves.survivors[i]);
        std::byte* target = place.of(moves.target, i);
        if (source != target) copy_row(source, target, bytes);
    }
}

// Splits the survivors that become slots [first, end), all of one target group, by source group.
uint32_t find_runs(const slot_addresses& place, const move_list& moves, uint32_t first,
                   uint32_t end, column_run* runs) {
    uint32_t count = 0, current = ~uint32_t{0};
    for (uint32_t i = first; i < end; ++i) {
        const uint32_t slot = moves.survivors[i];
        const uint32_t group = slot / slot_group;
        const std::byte* tile = place.of(moves.source, group * slot_group);
        if (slot == i && tile == place.of(moves.target, group * slot_group)) continue;
        if (group != current) {
            current = group;
            runs[count] = column_run();
            runs[count++].source = tile;
        }
        column_run& run = runs[count - 1];
        run.from[i % slot_group] = static_cast<uint8_t>(slot % slot_group);
        run.lanes = static_cast<uint16_t>(run.lanes | 1u << i % slot_group);
    }
    return count;
}

template <class word>
void move_native(const slot_addresses& keys, const slot_addresses& values, const move_list& moves,
                 uint32_t first) {
    // Values follow one group behind, so that their rows have arrived when they are copied.
    const uint32_t value_bytes = values.row_bytes();
    uint32_t values_done = first;
    for (uint32_t i = first; i < moves.count;) {
        const uint32_t group_start = i / slot_group * slot_group;
        const uint32_t end = HWY_MIN(group_start + slot_group, moves.count);
        column_run runs[slot_group];
        const uint32_t count = find_runs(keys, moves, i, end, runs);
        uint32_t lanes = 0;
        for (uint32_t r = 0; r < count; ++r) lanes |= runs[r].lanes;
        const std::byte* after =
            end < moves.count
                ? keys.of(moves.source, moves.survivors[end] / slot_group * slot_group)
                : nullptr;
        std::byte* target = keys.of(moves.target, group_start);
        for (uint32_t r = 0; r < count; ++r) {
            for (uint32_t rest = runs[r].lanes; rest != 0; rest &= rest - 1) {
                const uint32_t lane =
                    static_cast<uint32_t>(hwy::Num0BitsBelowLS1Bit_Nonzero32(rest));
                prefetch_bytes(values.of(moves.source, moves.survivors[group_start + lane]),
                               value_bytes);
            }
            const bool whole = r == 0 && lanes == 0xffffu;
            move_columns<word>(runs[r], r + 1 < count ? runs[r + 1].source : after,
                               keys.operand.dim, whole, target);
        }
        move_rows(values, moves, values_done, i, 0);
        values_done = i;
        i = end;
    }
    move_rows(values, moves, values_done, moves.count, 0);
}

void move_lane(const tile_layout& layout, std::byte* arena, const move_list& moves) {
    const slot_addresses keys{arena, layout, layout.keys, moves.kv_head};
    const slot_addresses values{arena, layout, layout.values, moves.kv_head};
    uint32_t first = 0;  // what lies where it should is skipped; usually the protected prompt
    while (first < moves.count && moves.survivors[first] == first &&
           moves.source[first / layout.block_tokens] == moves.target[first / layout.block_tokens]) {
        ++first;
    }
    if (layout.keys.dim_stride == 1) {
        move_rows(keys, moves, first, moves.count, moves.count);
        move_rows(values, moves, first, moves.count, moves.count);
    } else if (element_bytes(layout.keys.type) == 2) {
        move_native<uint16_t>(keys, values, moves, first);
    } else {
        move_native<uint32_t>(keys, values, moves, first);
    }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace kvrt
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace kvrt {

HWY_EXPORT(move_lane);

void move_slots(const tile_layout& layout, std::byte* arena, const move_list& moves) {
    HWY_DYNAMIC_DISPATCH(move_lane)(layout, arena, moves);
}

void copy_block_slots(const tile_layout& layout, std::byte* arena, block_id source, block_id target,
                      uint32_t slots) {
    const std::byte* from = block_address(arena, source);
    std::byte* to = block_address(arena, target);
    if (slots == layout.block_tokens) {
        std::memcpy(to, from, layout.block_bytes);
        return;
    }
    for (const operand_layout* operand : {&layout.keys, &layout.values}) {
        const uint32_t size = element_bytes(operand->type);
        for (uint32_t head = 0; head < layout.kv_heads; ++head) {
            if (operand->dim_stride == 1) {
                for (uint32_t slot = 0; slot < slots; ++slot) {
                    const int64_t row = operand->at(slot, head, 0);
                    std::memcpy(to + row, from + row, std::size_t{operand->dim} * size);
                }
                continue;
            }
            const uint32_t whole = slots / slot_group * slot_group;
            for (uint32_t slot = 0; slot < whole; slot += slot_group) {
                const int64_t tile = operand->at(slot, head, 0);
                std::memcpy(to + tile, from + tile, std::size_t{operand->dim} * slot_group * size);
            }
            for (uint32_t i = 0; slots != whole && i < operand->dim; ++i) {
                const int64_t line = operand->at(whole, head, i);
                std::memcpy(to + line, from + line, std::size_t{slots - whole} * size);
            }
        }
    }
}

}  // namespace kvrt
#endif
