// Whole blocks, in accesses of 16 bytes: copied within the arena, gathered into one piece and
// scattered from it, filled with zeros. And lines of tables, from one piece to their places.
//
// A block of threads takes a stretch of one block; how many stretches a block has says
// copy_stretches.
#pragma once

#include "kernels/layout.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t copy_threads = 128;
inline constexpr uint32_t copy_pieces = 4;  ///< of 16 bytes, in flight per thread
inline constexpr uint32_t stretch_bytes = copy_threads * copy_pieces * 16;

KVRT_BOTH constexpr uint32_t copy_stretches(uint32_t block_bytes) {
    return (block_bytes + stretch_bytes - 1) / stretch_bytes;
}

struct block_copy {
    uint32_t source;
    uint32_t target;
};

/// Launch each with count * copy_stretches(block_bytes) blocks of copy_threads threads. Sources and
/// targets of a launch are apart.
struct copy_parameters {
    std::byte* arena = nullptr;
    const block_copy* copies = nullptr;  ///< [count]
    uint32_t count = 0;
    uint32_t block_bytes = 0;
};

/// Block i of `ids` is bytes [i * block_bytes, ...) of `piece`, which lies on a multiple of 16.
struct gather_parameters {
    std::byte* arena = nullptr;
    std::byte* piece = nullptr;
    const uint32_t* ids = nullptr;  ///< [count]
    uint32_t count = 0;
    uint32_t block_bytes = 0;
};

inline constexpr uint32_t line_words = 16;
inline constexpr uint32_t line_bytes = 4 * line_words;
inline constexpr uint32_t spread_threads = 256;

/// Line lines[i] of `table` becomes line i of the batch, which is uint32_t lines[count], padded to
/// a multiple of line_bytes, and behind that the lines' words. Launch with spread_blocks(count)
/// blocks of spread_threads; lines differ from each other.
struct spread_parameters {
    uint32_t* table = nullptr;
    const std::byte* batch = nullptr;
    uint32_t count = 0;
};

constexpr uint32_t spread_blocks(uint32_t count) {
    constexpr uint32_t lines = spread_threads / line_words;
    return (count + lines - 1) / lines;
}
/// Where the batch's words begin.
KVRT_BOTH constexpr uint64_t spread_words_at(uint64_t count) {
    return (count * sizeof(uint32_t) + line_bytes - 1) / line_bytes * line_bytes;
}

/// What of which block this block of threads does.
struct copy_share {
    uint32_t index;
    uint32_t first;  ///< byte
};
template <class Cx>
KVRT_DEVICE copy_share share_of_block(uint32_t block_bytes) {
    const uint32_t stretches = copy_stretches(block_bytes);
    return {Cx::block() / stretches, Cx::block() % stretches * stretch_bytes + Cx::thread() * 16};
}

/// All loads before the first store.
template <class Cx>
KVRT_DEVICE void copy_stretch(const std::byte* source, std::byte* target, uint32_t first,
                              uint32_t bytes) {
    word4 pieces[copy_pieces];
    KVRT_UNROLL
    for (uint32_t i = 0; i < copy_pieces; ++i) {
        const uint32_t at = first + i * copy_threads * 16;
        if (at < bytes) pieces[i] = Cx::template load_once<word4>(source + at);
    }
    KVRT_UNROLL
    for (uint32_t i = 0; i < copy_pieces; ++i) {
        const uint32_t at = first + i * copy_threads * 16;
        if (at < bytes) Cx::store_once(target + at, pieces[i]);
    }
}

template <class Cx>
KVRT_DEVICE void copy_blocks(const copy_parameters& call) {
    const copy_share mine = share_of_block<Cx>(call.block_bytes);
    if (mine.index >= call.count) return;
    const block_copy& copy = call.copies[mine.index];
    const uint32_t source = Cx::template load_constant<uint32_t>(&copy.source);
    const uint32_t target = Cx::template load_constant<uint32_t>(&copy.target);
    copy_stretch<Cx>(block_at(call.arena, source), block_at(call.arena, target), mine.first,
                     call.block_bytes);
}

template <class Cx>
KVRT_DEVICE void gather_blocks(const gather_parameters& call) {
    const copy_share mine = share_of_block<Cx>(call.block_bytes);
    if (mine.index >= call.count) return;
    const uint32_t id = Cx::template load_constant<uint32_t>(call.ids + mine.index);
    copy_stretch<Cx>(block_at(call.arena, id), call.piece + uint64_t{mine.index} * call.block_bytes,
                     mine.first, call.block_bytes);
}

template <class Cx>
KVRT_DEVICE void scatter_blocks(const gather_parameters& call) {
    const copy_share mine = share_of_block<Cx>(call.block_bytes);
    if (mine.index >= call.count) return;
    const uint32_t id = Cx::template load_constant<uint32_t>(call.ids + mine.index);
    copy_stretch<Cx>(call.piece + uint64_t{mine.index} * call.block_bytes, block_at(call.arena, id),
                     mine.first, call.block_bytes);
}

/// Of gather_parameters, all but `piece`.
template <class Cx>
KVRT_DEVICE void zero_blocks(const gather_parameters& call) {
    const copy_share mine = share_of_block<Cx>(call.block_bytes);
    if (mine.index >= call.count) return;
    const uint32_t id = Cx::template load_constant<uint32_t>(call.ids + mine.index);
    std::byte* const target = block_at(call.arena, id);
    KVRT_UNROLL
    for (uint32_t i = 0; i < copy_pieces; ++i) {
        const uint32_t at = mine.first + i * copy_threads * 16;
        if (at < call.block_bytes) Cx::store_once(target + at, word4{0, 0, 0, 0});
    }
}

template <class Cx>
KVRT_DEVICE void spread_lines(const spread_parameters& call) {
    const uint64_t word = uint64_t{Cx::block()} * spread_threads + Cx::thread();
    const uint64_t index = word / line_words;
    if (index >= call.count) return;
    const uint32_t line =
        Cx::template load_constant<uint32_t>(call.batch + index * sizeof(uint32_t));
    const std::byte* const words = call.batch + spread_words_at(call.count);
    Cx::store(call.table + uint64_t{line} * line_words + word % line_words,
              Cx::template load_once<uint32_t>(words + word * sizeof(uint32_t)));
}

}  // namespace kvrt::kernels
