#include "sequence/seal.hpp"

#include <algorithm>
#include <atomic>

namespace kvrt {

block_run blocks_of(const cache& store, const sequence& owner, uint32_t lane) {
    const lane_geometry& geometry = store.model.lanes[lane];
    return {&geometry.layout, &geometry.sealed_layout, owner.lanes[lane].table,
            owner.lanes[lane].sealed_blocks};
}

void copy_positions(const cache& store, uint32_t lane, const position_store& from, block_id source,
                    const position_store& to, block_id target) {
    std::copy_n(from.of(source, 0), store.model.lanes[lane].kv_heads * store.model.block_tokens,
                to.of(target, 0));
}

namespace {

void fill_head(cache& store, const sequence& owner, uint32_t lane, uint32_t head,
               uint32_t first_slot, uint32_t count, const tile_layout& to, block_id target,
               uint32_t opened_end) {
    recoding recoded;
    fill_block(blocks_of(store, owner, lane), store.blocks.arena(), nullptr, first_slot, count,
               head, to, target, opened_end, recoded);
    count_recoding(store, lane, head, recoded);
}

/// A block to seal the next one of a lane into; no_block if there is none, or nothing to seal.
block_id next_sealed(cache& store, const sequence& owner, uint32_t lane, seal_reach reach) {
    const lane_state& state = owner.lanes[lane];
    if (blocks_to_seal(store, state, lane, state.slots, reach) == 0) return no_block;
    return allocate_sealed(store, lane);
}

/// A block of each of the layer's lanes at a time, so that threads share out all KV heads. False
/// when none was left to seal, or no block to seal one into.
bool seal_next_blocks(cache& store, sequence& owner, const layer_geometry& layer, seal_reach reach,
                      demotion& demoted) {
    block_id targets[max_heads];
    bool any = false;
    for (uint32_t i = 0; i < layer.lanes; ++i) {
        targets[i] = next_sealed(store, owner, layer.first_lane + i, reach);
        any = any || targets[i] != no_block;
    }
    if (!any) return false;
    const uint32_t block_tokens = store.model.block_tokens;
    store.threads.for_each(layer.kv_heads, [&](uint32_t kv_head) {
        const head_place place = layer.place_of(kv_head);
        const block_id target = targets[place.lane - layer.first_lane];
        if (target == no_block) return;
        const lane_state& state = owner.lanes[place.lane];
        const uint32_t first_slot = state.sealed_blocks * block_tokens;
        fill_head(store, owner, place.lane, place.head, first_slot, block_tokens,
                  store.model.lanes[place.lane].sealed_layout, target,
                  first_slot + state.opened_slots);
    });
    for (uint32_t i = 0; i < layer.lanes; ++i) {
        if (targets[i] == no_block) continue;
        put_sealed(store, owner, layer.first_lane + i, targets[i], demoted);
    }
    return true;
}

}  // namespace

block_id allocate_sealed(cache& store, uint32_t lane) {
    const uint32_t sealed_class = store.model.lanes[lane].sealed_class_index;
    uint64_t needed[max_block_classes] = {};
    needed[sealed_class] = 1;
    if (!store.blocks.can_allocate(needed, false)) return no_block;
    return store.blocks.allocate(sealed_class);
}

void put_sealed(cache& store, sequence& owner, uint32_t lane, block_id target, demotion& demoted) {
    const lane_geometry& geometry = store.model.lanes[lane];
    lane_state& state = owner.lanes[lane];
    const uint32_t index = state.sealed_blocks;
    const block_id source = state.table[index];
    const lane_positions positions = positions_of_lane(store, lane, index);
    copy_positions(store, lane, positions.open, source, positions.sealed, target);
    state.table[index] = target;
    ++owner.table_changes;
    ++state.sealed_blocks;
    state.opened_slots = 0;
    returned_blocks raw;
    drop_block(store, source, owner.last_fence, raw);
    if (!geometry.demotes) return;
    ++demoted.blocks;
    if (raw.blocks == 0) return;  // others still read it
    demoted.bytes += geometry.layout.block_bytes - geometry.sealed_layout.block_bytes;
}

void count_recoding(cache& store, uint32_t lane, uint32_t head, const recoding& recoded) {
    if (recoded.rows != 0) recoded_of(store, lane)[head].add_shared(recoded);
    const saturation_counts saturated = saturation_of(store, lane);
    const auto count = [head](uint64_t* counts, uint64_t more) {
        if (more == 0) return;
        std::atomic_ref(counts[head]).fetch_add(more, std::memory_order_relaxed);
    };
    count(saturated.keys, recoded.saturated_keys);
    count(saturated.values, recoded.saturated_values);
}

uint32_t blocks_to_seal(const cache& store, const lane_state& state, uint32_t lane, uint32_t slots,
                        seal_reach reach) {
    const lane_geometry& geometry = store.model.lanes[lane];
    if (!geometry.seals) return 0;
    const uint32_t block_tokens = store.model.block_tokens;
    // A partly filled sealed block is opened before anything is appended.
    const uint32_t sealed = std::min(state.sealed_blocks, state.slots / block_tokens);
    uint32_t full = slots / block_tokens;
    if (geometry.demotes && reach == seal_reach::due) {
        full = (slots - std::min(slots, geometry.demote_after)) / block_tokens;
    }
    full -= std::min(full, sealed);
    if (reach == seal_reach::due) return full;
    const auto is_shared = [&](block_id id) { return store.blocks.references(id) > 1; };
    const block_id* next = state.table + sealed;
    return static_cast<uint32_t>(std::find_if(next, next + full, is_shared) - next);
}

uint64_t bytes_to_demote(const cache& store, const sequence& owner) {
    uint64_t bytes = 0;
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        const lane_geometry& geometry = store.model.lanes[lane];
        if (!geometry.demotes) continue;
        const lane_state& state = owner.lanes[lane];
        const uint64_t saved = geometry.layout.block_bytes - geometry.sealed_layout.block_bytes;
        bytes += saved * blocks_to_seal(store, state, lane, state.slots, seal_reach::all);
    }
    return bytes;
}

demotion seal_blocks(cache& store, sequence& owner, seal_reach reach) {
    demotion demoted;
    if (!store.any_seals || store.on_device()) return demoted;
    if (!store.fences.passed(owner.last_fence)) return demoted;
    for (const layer_geometry& layer : store.model.layers) {
        if (!layer.stores || !store.model.lanes[layer.first_lane].seals) continue;
        while (seal_next_blocks(store, owner, layer, reach, demoted)) {
        }
    }
    return demoted;
}

void open_tail(cache& store, const sequence& owner, uint32_t lane, block_id target) {
    const lane_geometry& geometry = store.model.lanes[lane];
    const lane_state& state = owner.lanes[lane];
    const uint32_t index = state.blocks - 1;
    const uint32_t first_slot = index * store.model.block_tokens;
    const uint32_t heads_filled_here = store.on_device() ? 0 : geometry.kv_heads;
    store.threads.for_each(heads_filled_here, [&](uint32_t head) {
        fill_head(store, owner, lane, head, first_slot, state.slots - first_slot, geometry.layout,
                  target, 0);
    });
    const lane_positions positions = positions_of_lane(store, lane, 0);
    copy_positions(store, lane, positions.sealed, state.table[index], positions.open, target);
}

}  // namespace kvrt
