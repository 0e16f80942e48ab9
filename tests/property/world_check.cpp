#include <algorithm>
#include <cstring>

#include "world.hpp"

namespace property {

kv_pool_stats world::stats() const {
    kv_pool_stats found = KV_INIT(kv_pool_stats);
    require_ok(kv_pool_get_stats(pool_, &found), "kv_pool_get_stats");
    return found;
}

void world::check_accounting() {
    const kv_pool_stats pool = stats();
    uint64_t total = 0, free = 0, pinned = 0, parked = 0, slabs = 0, live_bytes = 0;
    require(pool.classes == model_.class_bytes.size(), "{} classes instead of {}", pool.classes,
            model_.class_bytes.size());
    for (uint32_t c = 0; c < pool.classes; ++c) {
        kv_class_stats found = KV_INIT(kv_class_stats);
        require_ok(kv_pool_get_class_stats(pool_, c, &found), "kv_pool_get_class_stats");
        require(found.block_bytes == model_.class_bytes[c], "class {}: blocks of {} bytes, not {}",
                c, found.block_bytes, model_.class_bytes[c]);
        require(
            found.total == found.free + found.cached + found.pinned + found.parked + found.loading,
            "class {}: total {} is not free {} + pinned {} + parked {}", c, found.total, found.free,
            found.pinned, found.parked);
        require(found.total == found.slabs * found.blocks_per_slab,
                "class {}: {} blocks in {} slabs", c, found.total, found.slabs);
        require(found.pinned == static_cast<uint64_t>((*model_.live)[c]),
                "class {}: {} blocks are pinned, tables and steps refer to {}", c, found.pinned,
                (*model_.live)[c]);
        total += found.total;
        free += found.free;
        pinned += found.pinned;
        parked += found.parked;
        slabs += found.slabs;
        live_bytes += found.pinned * found.block_bytes;
    }
    require(pool.total == total && pool.free == free && pool.pinned == pinned &&
                pool.parked == parked && pool.cached == 0 && pool.loading == 0,
            "the pool's sums are not those of its classes");
    require(pool.live_blocks == pinned && pool.live_bytes == live_bytes,
            "live {} blocks, {} bytes; pinned {} and {}", pool.live_blocks, pool.live_bytes, pinned,
            live_bytes);
    require(pool.peak_live_blocks >= pool.live_blocks, "the peak is below the present");
    require(pool.slabs_total == model_.spec.slabs && pool.slabs_free + slabs == pool.slabs_total,
            "{} slabs: {} free, {} in classes", pool.slabs_total, pool.slabs_free, slabs);
    require(pool.blocks_allocated - pool.blocks_returned == pinned,
            "{} blocks allocated, {} returned, {} pinned", pool.blocks_allocated,
            pool.blocks_returned, pinned);
    require(pool.sequences == sequences_.size(), "{} sequences instead of {}", pool.sequences,
            sequences_.size());
    const uint32_t open = (steps_[0].open() ? 1u : 0u) + (steps_[1].open() ? 1u : 0u);
    require(pool.open_steps == open, "{} open steps instead of {}", pool.open_steps, open);
    const oracle_fences& fences = model_.fences;
    const bool all_passed =
        open == 0 && (!fences.by_host || fences.host_passed == fences.last_begun);
    require(!all_passed || parked == 0, "{} blocks are parked behind no fence", parked);
}

void world::check_sequence(const oracle_sequence& target) {
    kv_seq_info info = KV_INIT(kv_seq_info);
    require_ok(kv_seq_get_info(pool_, target.handle, &info), "kv_seq_get_info");
    uint64_t blocks = 0, bytes = 0;
    for (std::size_t lane = 0; lane < target.lanes.size(); ++lane) {
        blocks += target.lanes[lane].table.size();
        bytes += target.lanes[lane].table.size() * model_.lanes[lane].block_bytes;
    }
    require(info.accepted == target.next_position, "sequence {}: {} tokens seen instead of {}",
            target.serial, info.accepted, target.next_position);
    require(info.published == info.accepted, "sequence {}: published {}, accepted {}",
            target.serial, info.published, info.accepted);
    require(info.capacity == target.next_position + target.reserved_rows,
            "sequence {}: capacity {} instead of {} + {}", target.serial, info.capacity,
            target.next_position, target.reserved_rows);
    require(info.written == target.next_position + target.written_rows,
            "sequence {}: written {} instead of {} + {}", target.serial, info.written,
            target.next_position, target.written_rows);
    require(info.blocks == blocks && info.bytes == bytes,
            "sequence {}: {} blocks, {} bytes instead of {}, {}", target.serial, info.blocks,
            info.bytes, blocks, bytes);
    require(info.user_data == target.user_data, "sequence {}: user data {}", target.serial,
            info.user_data);
    require((info.in_step != 0) == (target.step >= 0), "sequence {}: in_step is {}", target.serial,
            info.in_step);
    require(info.compactions == target.compactions, "sequence {}: {} compactions instead of {}",
            target.serial, info.compactions, target.compactions);

    check_observed(target);
    std::vector<uint32_t> positions(model_.spec.max_tokens + 1);
    for (uint32_t layer = 0; layer < model_.spec.layers.size(); ++layer) {
        const bool stores = model_.spec.layers[layer].shared_layer < 0;
        const uint32_t heads = model_.spec.layers[layer].kv_heads;
        uint64_t retained = 0, in_tables = 0, shared = 0;
        for (uint32_t lane = lane_of(model_.spec, layer, 0);
             lane <= lane_of(model_.spec, layer, heads - 1); ++lane) {
            const oracle_lane& state = target.lanes[lane];
            retained = std::max<uint64_t>(retained, state.slots());
            in_tables += state.table.size();
            shared += static_cast<uint64_t>(
                std::count_if(state.table.begin(), state.table.end(),
                              [](const block_reference& block) { return block.use_count() > 1; }));
        }
        kv_seq_layer_info found = KV_INIT(kv_seq_layer_info);
        require_ok(kv_seq_get_layer_info(pool_, target.handle, layer, &found),
                   "kv_seq_get_layer_info");
        require(found.retained == retained, "sequence {} layer {}: {} tokens instead of {}",
                target.serial, layer, found.retained, retained);
        require(found.blocks == (stores ? in_tables : 0),
                "sequence {} layer {}: {} blocks instead of {}", target.serial, layer, found.blocks,
                in_tables);
        require(found.shared_blocks == (stores ? shared : 0),
                "sequence {} layer {}: {} shared blocks instead of {}", target.serial, layer,
                found.shared_blocks, shared);
        for (uint32_t head = 0; head < heads; ++head) {
            const uint32_t lane = lane_of(model_.spec, layer, head);
            const oracle_lane& expected = target.lanes[lane];
            const std::vector<token>& tokens = expected.heads[head - model_.lanes[lane].first_head];
            uint64_t count = 0;
            require_ok(kv_seq_get_positions(pool_, target.handle, layer, head, positions.size(),
                                            positions.data(), &count),
                       "kv_seq_get_positions");
            require(count == expected.slots(), "sequence {} layer {} head {}: {} positions, not {}",
                    target.serial, layer, head, count, expected.slots());
            for (uint64_t slot = 0; slot < count; ++slot) {
                require(positions[slot] == tokens[slot].position,
                        "sequence {} layer {} head {} slot {}: position {} instead of {}",
                        target.serial, layer, head, slot, positions[slot], tokens[slot].position);
            }
        }
    }
}

void world::check_all() {
    check_accounting();
    for (const oracle_sequence* sequence : alive()) check_sequence(*sequence);
}

void world::check_pool() { require_ok(kv_pool_check(pool_), "kv_pool_check"); }

void world::expect_error(kv_status found, kv_status expected, const char* call) {
    require_status(found, expected, call);
    ++operations_;
    check_all();
}

}  // namespace property
