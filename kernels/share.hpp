// What lanes of a step's table have in common. Most keep the same slots, so what is planned of one
// lane is uploaded once, and copied to the others here; the slots that new rows go to are made of
// that and of each lane's own block table.
//
// Both happen in one launch, so neither reads what the other writes: mappings go by the plan of the
// lane that was uploaded.
#pragma once

#include "kernels/copy.hpp"

namespace kvrt::kernels {

inline constexpr uint32_t share_threads = 256;
/// Of a block of threads: 16 bytes a thread.
inline constexpr uint32_t share_lines = share_threads * 16 / line_bytes;

/// Lines [source, source + lines) of the table become lines [target, ...) too.
struct line_share {
    uint32_t source;
    uint32_t target;
    uint32_t lines;
    uint32_t unused;
};

/// A lane's rows: where they go to, from [rows][3] targets: row of the block table, slot, position
/// (-1, where there is no row) to [rows] places of 64 bits, id * block_tokens + slot in the block,
/// or -1. All are lines of the table; block tables begin on one.
struct lane_mapping {
    uint32_t targets;
    uint32_t mapping;
    uint32_t block_table;
    uint32_t unused;
};

/// Launch with share_blocks(call) blocks of share_threads threads. Targets of shares, mappings, and
/// what is read are apart.
struct share_parameters {
    uint32_t* table = nullptr;
    const line_share* shares = nullptr;      ///< [share_count]
    const lane_mapping* mappings = nullptr;  ///< [lanes]
    uint32_t share_count = 0;
    uint32_t most_lines = 0;  ///< of a share
    uint32_t lanes = 0;
    uint32_t rows = 0;    ///< of the step, or of the one before in its place, whichever has more
    uint32_t stride = 0;  ///< words of a row of a block table
    uint32_t block_shift = 0;  ///< log2(block_tokens)
};

KVRT_BOTH constexpr uint32_t stretches_of_share(uint32_t most_lines) {
    return (most_lines + share_lines - 1) / share_lines;
}
KVRT_BOTH constexpr uint32_t stretches_of_rows(uint32_t rows) {
    return (rows + share_threads - 1) / share_threads;
}
inline uint32_t share_blocks(const share_parameters& call) {
    return call.share_count * stretches_of_share(call.most_lines) +
           call.lanes * stretches_of_rows(call.rows);
}

/// The kernel.
template <class Cx>
KVRT_DEVICE void share_plans(const share_parameters& call) {
    const uint32_t stretches = stretches_of_share(call.most_lines);
    const uint32_t sharing = call.share_count * stretches;
    if (Cx::block() < sharing) {
        const word4 share =
            Cx::template load_constant<word4>(call.shares + Cx::block() / stretches);
        const uint32_t piece =
            Cx::block() % stretches * share_threads + Cx::thread();  // of 16 bytes
        constexpr uint32_t pieces_of_line = line_bytes / 16;
        if (piece >= share.z * pieces_of_line) return;
        const uint64_t at = uint64_t{piece} * 4;
        Cx::store(call.table + uint64_t{share.y} * line_words + at,
                  Cx::template load<word4>(call.table + uint64_t{share.x} * line_words + at));
        return;
    }
    const uint32_t parts = stretches_of_rows(call.rows);
    const uint32_t lane = (Cx::block() - sharing) / parts;
    const uint32_t row = (Cx::block() - sharing) % parts * share_threads + Cx::thread();
    if (row >= call.rows) return;
    const word4 mapping = Cx::template load_constant<word4>(call.mappings + lane);
    const uint32_t* const target =
        call.table + uint64_t{mapping.x} * line_words + uint64_t{row} * 3;
    const uint32_t item = Cx::template load<uint32_t>(target);
    uint64_t place = ~uint64_t{0};
    if (item != 0xffffffffu) {
        const uint32_t slot = Cx::template load<uint32_t>(target + 1);
        const uint32_t* const blocks =
            call.table + uint64_t{mapping.z} * line_words + uint64_t{item} * call.stride;
        const uint64_t id = Cx::template load<uint32_t>(blocks + (slot >> call.block_shift));
        place = (id << call.block_shift) + (slot & ((1u << call.block_shift) - 1));
    }
    Cx::store(call.table + uint64_t{mapping.y} * line_words + uint64_t{row} * 2,
              word2{static_cast<uint32_t>(place), static_cast<uint32_t>(place >> 32)});
}

}  // namespace kvrt::kernels
