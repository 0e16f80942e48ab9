// Moving slots. Rows are copied whole, the rows to come prefetched. Columns of a dim-major key tile
// are moved a group of 16 target slots at a time: every line of the source groups that have
// survivors in it is read once, the survivors in it are permuted to their new lanes, and merged
// into the target's line.
//
// In place is safe. Target group g takes slots from source groups >= g only (survivors[i] >= i),
// and each line is read before it is written; what groups after g still need lies behind group g.

#include "format/move.hpp"

#include "base/simd_targets.hpp"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "format/move.cpp"
#include <hwy/cache_control.h>
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace kvrt {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

constexpr uint32_t line_bytes = 64;
constexpr uint32_t rows_ahead = 16;

// How far ahead each of up to 16 streams is prefetched. More would push out what has not been used
// yet: tiles of one head lie a power of two apart and share sets of the cache.
constexpr uint32_t bytes_ahead = 24 * line_bytes;

// More survivors than this are written past the caches: the next step would not find them there.
constexpr uint64_t bytes_past_caches = 256 << 10;

// Up to 16 slots of one source group that go to one target group.
struct column_run {
    const std::byte* source = nullptr;  // group's tile, [word][16]
    uint8_t from[slot_group] = {};      // lane in the source, by lane of the target
    uint16_t lanes = 0;                 // of the target that this run fills
};

// What makes up one target group, in ascending source order: the keys as columns of tiles, the
// values as rows.
struct column_runs {
    column_run run[slot_group];
    uint32_t count = 0;
    uint32_t lanes = 0;  // of all runs
    const std::byte* rows[slot_group] = {};
    uint32_t row_count = 0;
};

// Into the second-level cache: the first level's few miss buffers would be the bottleneck.
HWY_INLINE void prefetch_line(const std::byte* address) { __builtin_prefetch(address, 0, 2); }

HWY_INLINE void prefetch_bytes(const std::byte* address, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes; i += line_bytes) prefetch_line(address + i);
}

#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL

// Line by line, all runs at once: their tiles are as many streams for the processor's prefetcher,
// and each line of the target is put together in a register. Two rows of 16-bit elements, or one of
// 32-bit, are one register and one line.
template <class word>
void merge_columns(const column_runs& runs, const column_runs& next, uint32_t words,
                   uint32_t row_bytes, bool stream, std::byte* target) {
    constexpr bool wide = sizeof(word) == 4;
    __m512i from[slot_group];
    __mmask32 lanes[slot_group];
    for (uint32_t r = 0; r < runs.count; ++r) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(runs.run[r].from));
        if constexpr (wide) {
            from[r] = _mm512_cvtepu8_epi32(bytes);
            lanes[r] = runs.run[r].lanes;
        } else {
            const __m256i row = _mm256_cvtepu8_epi16(bytes);
            from[r] = _mm512_inserti64x4(_mm512_castsi256_si512(row),
                                         _mm256_add_epi16(row, _mm256_set1_epi16(16)), 1);
            lanes[r] = runs.run[r].lanes * 0x10001u;
        }
    }
    const bool whole = runs.lanes == 0xffffu;
    const uint32_t bytes = words * slot_group * uint32_t{sizeof(word)};
    uint32_t row = 0, row_line = 0;  // of next, prefetched bit by bit
    const uint32_t row_lines_each = (row_bytes * slot_group + bytes - 1) / bytes;
    for (uint32_t i = 0; i < bytes; i += line_bytes) {
        for (uint32_t k = 0; k < row_lines_each && row < next.row_count; ++k) {
            prefetch_line(next.rows[row] + row_line);
            row_line += line_bytes;
            if (row_line >= row_bytes) ++row, row_line = 0;
        }
        const bool within = i + bytes_ahead < bytes;
        const column_runs& coming = within ? runs : next;
        const uint32_t place = within ? i + bytes_ahead : i + bytes_ahead - bytes;
        for (uint32_t r = 0; r < coming.count; ++r) prefetch_line(coming.run[r].source + place);
        __m512i line = whole ? _mm512_setzero_si512() : _mm512_loadu_si512(target + i);
        for (uint32_t r = 0; r < runs.count; ++r) {
            const __m512i source = _mm512_loadu_si512(runs.run[r].source + i);
            if constexpr (wide) {
                line = _mm512_mask_permutexvar_epi32(line, static_cast<__mmask16>(lanes[r]),
                                                     from[r], source);
            } else {
                line = _mm512_mask_permutexvar_epi16(line, lanes[r], from[r], source);
            }
        }
        if (stream && whole) {
            _mm512_stream_si512(reinterpret_cast<__m512i*>(target + i), line);
        } else {
            _mm512_storeu_si512(target + i, line);
        }
    }
}

#else

template <class word>
void merge_columns(const column_runs& runs, const column_runs& next, uint32_t words,
                   uint32_t row_bytes, bool /*stream*/, std::byte* target) {
    const uint32_t bytes = words * slot_group * uint32_t{sizeof(word)};
    for (uint32_t r = 0; r < next.row_count; ++r) prefetch_bytes(next.rows[r], row_bytes);
    for (uint32_t r = 0; r < next.count; ++r) prefetch_bytes(next.run[r].source, bytes);
    word* out = reinterpret_cast<word*>(target);
    for (uint32_t r = 0; r < runs.count; ++r) {
        const word* source = reinterpret_cast<const word*>(runs.run[r].source);
        for (uint32_t lane = 0; lane < slot_group; ++lane) {
            if ((runs.run[r].lanes >> lane & 1u) == 0) continue;
            const uint32_t from = runs.run[r].from[lane];
            for (uint32_t i = 0; i < words; ++i) {
                out[i * slot_group + lane] = source[i * slot_group + from];
            }
        }
    }
}

#endif

// `bytes` is a multiple of 4; source and target are the same or apart.
HWY_INLINE void copy_row(const std::byte* source, std::byte* target, uint32_t bytes, bool stream) {
    const hn::CappedTag<uint8_t, 64> wide;
    const hn::CappedTag<uint8_t, 16> narrow;
    const uint8_t* from = reinterpret_cast<const uint8_t*>(source);
    uint8_t* to = reinterpret_cast<uint8_t*>(target);
    const uint32_t step = static_cast<uint32_t>(hn::Lanes(wide));
    const uint32_t small_step = static_cast<uint32_t>(hn::Lanes(narrow));
    uint32_t i = 0;
    if (stream && reinterpret_cast<uintptr_t>(target) % line_bytes == 0) {
        for (; i + step <= bytes; i += step) hn::Stream(hn::LoadU(wide, from + i), wide, to + i);
    }
    for (; i + step <= bytes; i += step) hn::StoreU(hn::LoadU(wide, from + i), wide, to + i);
    for (; i + small_step <= bytes; i += small_step) {
        hn::StoreU(hn::LoadU(narrow, from + i), narrow, to + i);
    }
    std::memcpy(to + i, from + i, bytes - i);
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
    uint32_t row_bytes() const { return operand.row_bytes(); }
};

// Rows survivors[first .. end) of an operand whose words are contiguous.
void move_rows(const slot_addresses& place, const move_list& moves, uint32_t first, uint32_t end,
               bool stream) {
    const uint32_t bytes = place.row_bytes();
    for (uint32_t i = first; i < end; ++i) {
        const std::byte* source = place.of(moves.source, moves.survivors[i]);
        std::byte* target = place.of(moves.target, i);
        if (source != target) copy_row(source, target, bytes, stream);
    }
}

void prefetch_rows(const slot_addresses& place, const move_list& moves, uint32_t first,
                   uint32_t end) {
    for (uint32_t i = first; i < end; ++i) {
        prefetch_bytes(place.of(moves.source, moves.survivors[i]), place.row_bytes());
    }
}

// Splits the survivors that become slots [first, end), all of one target group, by source group.
HWY_INLINE void find_runs(const slot_addresses& place, const slot_addresses& values,
                          const move_list& moves, uint32_t first, uint32_t end, column_runs& runs) {
    runs.count = 0;
    runs.lanes = 0;
    runs.row_count = 0;
    uint32_t current = ~uint32_t{0};
    for (uint32_t i = first; i < end; ++i) {
        const uint32_t slot = moves.survivors[i];
        const uint32_t group = slot / slot_group;
        if (group != current) {
            const std::byte* tile = place.of(moves.source, group * slot_group);
            // Slots that lie where they should are a prefix of the survivors.
            if (slot == i && tile == place.of(moves.target, group * slot_group)) continue;
            current = group;
            runs.run[runs.count] = column_run();
            runs.run[runs.count++].source = tile;
        }
        runs.rows[runs.row_count++] = values.of(moves.source, slot);
        column_run& run = runs.run[runs.count - 1];
        run.from[i % slot_group] = static_cast<uint8_t>(slot % slot_group);
        run.lanes = static_cast<uint16_t>(run.lanes | 1u << i % slot_group);
        runs.lanes |= run.lanes;
    }
}

template <class word>
void move_native(const slot_addresses& keys, const slot_addresses& values, const move_list& moves,
                 uint32_t first, bool stream) {
    column_runs runs[2];
    const auto group_end = [&](uint32_t slot) {
        return HWY_MIN(slot / slot_group * slot_group + slot_group, moves.count);
    };
    uint32_t end = group_end(first);
    find_runs(keys, values, moves, first, end, runs[0]);
    for (uint32_t i = first, turn = 0; i < moves.count; turn ^= 1) {
        const uint32_t next_end = end < moves.count ? group_end(end) : end;
        find_runs(keys, values, moves, end, next_end, runs[turn ^ 1]);
        merge_columns<word>(runs[turn], runs[turn ^ 1], keys.operand.words, values.row_bytes(),
                            stream, keys.of(moves.target, i / slot_group * slot_group));
        move_rows(values, moves, i, end, stream);
        i = end;
        end = next_end;
    }
}

void move_row_major(const slot_addresses& keys, const slot_addresses& values,
                    const move_list& moves, uint32_t first, bool stream) {
    for (uint32_t i = first; i < moves.count; i += rows_ahead) {
        const uint32_t end = HWY_MIN(i + rows_ahead, moves.count);
        const uint32_t next_end = HWY_MIN(end + rows_ahead, moves.count);
        for (const slot_addresses* place : {&keys, &values}) {
            prefetch_rows(*place, moves, end, next_end);
            move_rows(*place, moves, i, end, stream);
        }
    }
}

void move_lane(const tile_layout& layout, std::byte* arena, const move_list& moves) {
    const slot_addresses keys{arena, layout, layout.keys, moves.kv_head};
    const slot_addresses values{arena, layout, layout.values, moves.kv_head};
    uint32_t first = 0;  // what lies where it should is skipped; usually the protected prompt
    while (first < moves.count && moves.survivors[first] == first &&
           moves.source[first / layout.block_tokens] == moves.target[first / layout.block_tokens]) {
        ++first;
    }
    if (first == moves.count) return;
    const bool stream =
        uint64_t{moves.count - first} * (keys.row_bytes() + values.row_bytes()) > bytes_past_caches;
    if (layout.keys.word_stride == 1) {
        move_row_major(keys, values, moves, first, stream);
    } else if (layout.keys.word_bytes == 2) {
        move_native<uint16_t>(keys, values, moves, first, stream);
    } else {
        move_native<uint32_t>(keys, values, moves, first, stream);
    }
    if (stream) hwy::FlushStream();
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
        const uint32_t size = operand->word_bytes;
        for (uint32_t head = 0; head < layout.kv_heads; ++head) {
            if (operand->word_stride == 1) {
                for (uint32_t slot = 0; slot < slots; ++slot) {
                    const int64_t row = operand->at(slot, head, 0);
                    std::memcpy(to + row, from + row, std::size_t{operand->words} * size);
                }
                continue;
            }
            const uint32_t whole = slots / slot_group * slot_group;
            for (uint32_t slot = 0; slot < whole; slot += slot_group) {
                const int64_t tile = operand->at(slot, head, 0);
                std::memcpy(to + tile, from + tile,
                            std::size_t{operand->words} * slot_group * size);
            }
            for (uint32_t i = 0; slots != whole && i < operand->words; ++i) {
                const int64_t line = operand->at(whole, head, i);
                std::memcpy(to + line, from + line, std::size_t{slots - whole} * size);
            }
        }
    }
}

}  // namespace kvrt
#endif
