// Compaction of the lanes of rounds, by survivors that have been selected: of lanes that are stored
// alike in all blocks, and of those that seal.
#include <algorithm>

#include "driver/rounds.hpp"
#include "driver/verbs.hpp"
#include "kernels/compact_tiles.hpp"

namespace kvrt::cuda {

using namespace kernels;

status round_runner::describe_share(round_share& mine) const {
    KVRT_TRY(describe_lane(*mine.lanes->lane, "kv_compress", mine.place));
    mine.read = mine.place;
    if (mine.lanes->sealed == nullptr) return KV_OK;
    KVRT_TRY(describe_lane(*mine.lanes->sealed, "kv_compress", mine.sealed));
    if (mine.opens) mine.read = opening_of(mine).opened;
    return KV_OK;
}

status round_runner::launch_compaction(stream_handle stream, const kvrt_round& round,
                                       const round_share& mine, const set_lists& sets,
                                       uint32_t first, uint64_t survivor_stride) {
    const kvrt_lane& lane = *mine.lanes->lane;
    compact_sealed_parameters call;
    compact_parameters& compact = call.all;
    compact.arena = static_cast<std::byte*>(const_cast<void*>(lane.arena));
    compact.place = mine.place;
    compact.positions = positions_of(lane.positions);
    compact.lanes = on_device<compact_lane>(sets.moves) + first;
    compact.tables = on_device<uint32_t>(0);
    compact.survivors = reinterpret_cast<const uint32_t*>(scores());
    compact.survivor_stride = mine.shares_sets ? 0 : survivor_stride;
    compact.sums = round.sums;
    compact.sums_stride = round.sums_stride;
    compact.count = mine.count;
    const uint32_t blocks = compact_blocks(mine.count, mine.kv_heads);
    if (mine.lanes->sealed == nullptr) {
        return functions_->launch(compact_, blocks, compact_threads, compact_shared_bytes, stream,
                                  &compact);
    }
    call.sealed = mine.sealed;
    call.sealed_positions = sealed_positions_of(*mine.lanes);
    call.lanes = on_device<sealed_lane>(sets.sealed) + first;
    KVRT_TRY(launch_tiles(stream, mine, call));
    return functions_->launch(compact_sealed_, blocks, compact_threads, compact_sealed_shared_bytes,
                              stream, &call);
}

/// Some blocks of every lane at once, from the front: as many as are opened beside each other.
status round_runner::launch_tiles(stream_handle stream, const round_share& mine,
                                  const compact_sealed_parameters& compact) {
    const bool keys = is_tile(mine.sealed.keys.codes), values = is_tile(mine.sealed.values.codes);
    if (!keys && !values) return KV_OK;
    compact_tiles_parameters call;
    open_survivors_parameters& from = call.from;
    from.what = opening_of(mine);
    from.what.operands =
        (keys ? uint32_t{opened_keys} : 0u) | (values ? uint32_t{opened_values} : 0u);
    from.lanes = compact.all.lanes;
    from.more = compact.lanes;
    from.survivors = compact.all.survivors;
    from.survivor_stride = compact.all.survivor_stride;
    call.arena = compact.all.arena;
    const uint32_t tokens = mine.place.block_tokens;
    uint32_t blocks = 0;
    for (uint32_t i = 0; i < mine.count; ++i) {
        blocks = std::max(blocks, ceil_divide(mine.lanes[i].keep, tokens));
    }
    const uint64_t room = opened_size_ / from.what.opened.block_bytes / mine.count;
    for (uint32_t first = 0; first < blocks; first += from.blocks_each) {
        from.blocks_each = static_cast<uint32_t>(std::min<uint64_t>(room, blocks - first));
        from.first_slot = first * tokens;
        from.what.most_slots = from.blocks_each * tokens;
        KVRT_TRY(functions_->launch(open_survivors_, open_lanes_blocks(from.what),
                                    open_lanes_threads, 0, stream, &from));
        KVRT_TRY(functions_->launch(compact_tiles_, compact_tiles_blocks(call), seal_threads,
                                    seal_shared_bytes, stream, &call));
    }
    return KV_OK;
}

}  // namespace kvrt::cuda
