#include "sequence/cache.hpp"

#include <algorithm>

#include "sequence/seal.hpp"

namespace kvrt {

namespace {

/// Tokens that can be appended before a block is sealed, which takes another; none where one is
/// due, or must be opened first.
uint32_t room_until_sealed(const cache& store, const lane_state& state, uint32_t lane) {
    const lane_geometry& geometry = store.model.lanes[lane];
    const uint32_t block_tokens = store.model.block_tokens;
    const bool opens = state.slots % block_tokens != 0 && state.sealed_blocks == state.blocks;
    if (opens || blocks_to_seal(store, state, lane, state.slots) != 0) return 0;
    const uint64_t sealed = std::min(state.sealed_blocks, state.slots / block_tokens);
    const uint64_t next =
        (sealed + 1) * block_tokens + (geometry.demotes ? geometry.demote_after : 0);
    return static_cast<uint32_t>(std::min<uint64_t>(next - 1 - state.slots, max_demote_after));
}

}  // namespace

void measure_room(const cache& store, sequence& owner) {
    const uint32_t block_tokens = store.model.block_tokens;
    uint32_t room = store.limits.max_tokens_per_sequence;
    for (uint32_t lane = 0; lane < store.sequences.lane_count() && room != 0; ++lane) {
        const lane_state& state = owner.lanes[lane];
        room = std::min({room, state.blocks * block_tokens - state.slots,
                         store.limits.max_tokens_per_sequence - state.slots});
        if (state.slots % block_tokens != 0 &&
            store.blocks.references(state.table[state.blocks - 1]) > 1) {
            room = 0;
        }
        if (store.model.lanes[lane].seals && room != 0) {
            room = std::min(room, room_until_sealed(store, state, lane));
        }
    }
    owner.room = room;
}

void drop_block(cache& store, block_id id, uint64_t fence, returned_blocks& returned) {
    const uint32_t class_index = store.blocks.class_of(id);
    if (!store.blocks.drop(id, fence, store.fences)) return;
    ++returned.blocks;
    returned.bytes += store.blocks.block_bytes(class_index);
}

void shrink_table(cache& store, sequence& owner, uint32_t lane, uint32_t keep,
                  returned_blocks& returned) {
    lane_state& state = owner.lanes[lane];
    if (state.blocks > keep) ++owner.table_changes;
    while (state.blocks > keep) {
        drop_block(store, state.table[--state.blocks], owner.last_fence, returned);
    }
    state.sealed_blocks = std::min(state.sealed_blocks, state.blocks);
}

void release_sequence(cache& store, sequence& target) {
    returned_blocks returned;
    for (uint32_t lane = 0; lane < store.sequences.lane_count(); ++lane) {
        shrink_table(store, target, lane, 0, returned);
    }
    store.sequences.close(target);
}

sequence* fork_sequence(cache& store, sequence& parent) {
    sequence* child = store.sequences.open();
    if (child == nullptr) return nullptr;
    lane_state* lanes = child->lanes;
    const uint32_t generation = child->generation;
    *child = parent;
    child->lanes = lanes;
    child->generation = generation;
    child->in_step = false;
    child->reserved_rows = 0;
    child->statistics_pending = false;
    child->room = 0;
    parent.room = 0;
    child->written_rows = 0;
    child->release_at_step_end = false;
    forget_deferred_round(*child);
    for (uint32_t lane = 0; lane < store.sequences.lane_count(); ++lane) {
        const lane_state& source = parent.lanes[lane];
        lane_state& target = lanes[lane];
        target.slots = source.slots;
        target.explicit_slots = source.explicit_slots;
        target.blocks = store.model.blocks_for(source.slots);
        target.sealed_blocks = source.sealed_blocks;
        target.opened_slots = source.opened_slots;
        std::copy_n(source.table, target.blocks, target.table);
        for (uint32_t i = 0; i < target.blocks; ++i) store.blocks.retain(target.table[i]);
        if (device_has_positions(store, parent, lane)) {
            spans_of(store, *child, lane) = spans_of(store, parent, lane);
        }
    }
    return child;
}

lane_positions positions_of_lane(const cache& store, uint32_t lane, uint32_t sealed_blocks) {
    const lane_geometry& geometry = store.model.lanes[lane];
    return {store.blocks.positions(geometry.class_index, store.model.block_tokens),
            store.blocks.positions(geometry.sealed_class_index, store.model.block_tokens),
            sealed_blocks};
}

slot_positions positions_of(const cache& store, const sequence& owner, uint32_t lane,
                            uint32_t kv_head) {
    const lane_state& state = owner.lanes[lane];
    slot_positions positions;
    positions.store = positions_of_lane(store, lane, state.sealed_blocks);
    positions.blocks = state.table;
    positions.kv_head = kv_head;
    positions.slots = state.slots;
    positions.explicit_slots = state.explicit_slots;
    positions.next_position = owner.next_position;
    return positions;
}

position_spans& spans_of(cache& store, const sequence& owner, uint32_t lane) {
    const uint64_t index = store.sequences.index(owner);
    return store.spans[index * store.sequences.lane_count() + lane];
}

retained_spans retained_of(const cache& store, const sequence& owner, uint32_t lane) {
    static constexpr position_spans none;
    const lane_state& state = owner.lanes[lane];
    const bool placed = device_has_positions(store, owner, lane);
    const uint64_t index = store.sequences.index(owner);
    return {placed ? store.spans[index * store.sequences.lane_count() + lane] : none, state.slots,
            state.explicit_slots, owner.next_position};
}

namespace {

/// Can a window lane serve queries from `position` on?
bool window_reaches_back(const cache& store, const sequence& target, uint32_t lane,
                         uint64_t position) {
    const lane_geometry& geometry = store.model.lanes[lane];
    const lane_state& state = target.lanes[lane];
    if (geometry.window == 0 || state.slots == target.next_position) return true;  // nothing slid
    if (position <= state.explicit_slots) return true;  // all it sees are sinks' blocks
    const uint64_t oldest_seen =
        position + 1 > geometry.window ? position + 1 - geometry.window : 0;
    const uint64_t oldest_kept = target.next_position - (state.slots - state.explicit_slots);
    return std::max<uint64_t>(oldest_seen, geometry.window_sinks) >= oldest_kept;
}

}  // namespace

namespace {

/// Can a lane that policies evict from go back to `position`? Not into the survivors of a
/// compaction, unless nothing before `position` was evicted.
bool survivors_reach_back(const cache& store, const sequence& target, uint32_t lane,
                          uint64_t position) {
    if (device_has_positions(store, target, lane)) {
        const retained_spans retained = retained_of(store, target, lane);
        return position >= retained.tail_first() ||
               count_between(retained, 0, position).least == position;
    }
    for (uint32_t head = 0; head < store.model.lanes[lane].kv_heads; ++head) {
        const uint32_t keep = positions_of(store, target, lane, head).find(position);
        if (keep != position && keep < target.lanes[lane].explicit_slots) return false;
    }
    return true;
}

/// How many slots are left of a lane that reaches back to `position`.
uint32_t slots_before(cache& store, const sequence& target, uint32_t lane, uint64_t position) {
    if (!device_has_positions(store, target, lane)) {
        return positions_of(store, target, lane, 0).find(position);
    }
    const retained_spans retained = retained_of(store, target, lane);
    if (position >= retained.tail_first()) {
        return retained.explicit_slots + static_cast<uint32_t>(position - retained.tail_first());
    }
    // Nothing before it was removed.
    position_spans& left = spans_of(store, target, lane);
    const uint32_t slots = static_cast<uint32_t>(position);
    left.count = 1;
    left.span[0] = {0, slots, {slots, slots}};
    return slots;
}

}  // namespace

status truncate_sequence(cache& store, sequence& target, uint64_t tokens_seen) {
    if (tokens_seen > target.next_position) {
        return fail(KV_INVALID, "tokens_seen is {}, the sequence has seen {}", tokens_seen,
                    target.next_position);
    }
    if (tokens_seen == target.next_position) return KV_OK;
    const uint32_t lane_count = store.sequences.lane_count();
    for (uint32_t lane = 0; lane < lane_count; ++lane) {
        if (!window_reaches_back(store, target, lane, tokens_seen)) {
            return fail(KV_NO_SNAPSHOT,
                        "layer {}: its window has slid past what a query at position {} sees",
                        store.model.lanes[lane].layer, tokens_seen);
        }
        if (store.model.lanes[lane].evictable &&
            !survivors_reach_back(store, target, lane, tokens_seen)) {
            return fail(
                KV_NO_SNAPSHOT,
                "layer {}: a compaction has removed tokens before position {} for the sake of "
                "later ones{}",
                store.model.lanes[lane].layer, tokens_seen,
                device_has_positions(store, target, lane) ? ", or only the device knows which"
                                                          : "");
        }
    }
    returned_blocks returned;
    for (uint32_t lane = 0; lane < lane_count; ++lane) {
        lane_state& state = target.lanes[lane];
        const uint32_t keep = slots_before(store, target, lane, tokens_seen);
        state.slots = keep;
        state.explicit_slots = std::min(state.explicit_slots, keep);
        const uint32_t open_from = state.sealed_blocks * store.model.block_tokens;
        state.opened_slots = std::min(state.opened_slots, keep - std::min(keep, open_from));
        shrink_table(store, target, lane, store.model.blocks_for(keep), returned);
    }
    ++target.table_changes;  // lanes may have lost different numbers of slots, and no block
    target.next_position = tokens_seen;
    target.room = 0;
    return KV_OK;
}

window_slide slide_of(const cache& store, uint32_t lane, uint32_t slots, uint64_t next_position) {
    const lane_geometry& geometry = store.model.lanes[lane];
    const uint32_t block_tokens = store.model.block_tokens;
    if (geometry.window == 0 || next_position < geometry.window) return {};
    // The next query sees positions from here on, and the sinks.
    const uint64_t first_seen = next_position - geometry.window + 1;
    const uint32_t front_blocks = store.model.blocks_for(geometry.window_sinks);
    const uint32_t front_slots = front_blocks * block_tokens;
    if (slots <= front_slots) return {};
    const uint64_t tail_first = next_position - (slots - front_slots);
    if (first_seen < tail_first + block_tokens) return {};
    return {front_blocks,
            static_cast<uint32_t>(std::min<uint64_t>((first_seen - tail_first) / block_tokens,
                                                     (slots - front_slots) / block_tokens))};
}

void count_slide(const cache& store, const window_slide& slide, lane_state& state) {
    const uint32_t sealed_behind = state.sealed_blocks - std::min(state.sealed_blocks, slide.front);
    if (slide.blocks > sealed_behind) state.opened_slots = 0;
    state.sealed_blocks -= std::min(sealed_behind, slide.blocks);
    state.blocks -= slide.blocks;
    state.slots -= slide.blocks * store.model.block_tokens;
}

void slide_windows(cache& store, sequence& target, returned_blocks& returned) {
    if (!store.any_window) return;
    for (uint32_t lane = 0; lane < store.sequences.lane_count(); ++lane) {
        const lane_geometry& geometry = store.model.lanes[lane];
        lane_state& state = target.lanes[lane];
        const window_slide slide = slide_of(store, lane, state.slots, target.next_position);
        if (slide.blocks == 0) continue;
        const uint32_t front_slots = slide.front * store.model.block_tokens;
        if (state.explicit_slots < front_slots) {
            // Until now slot = position in the front; from now on it must say so.
            const lane_positions positions = positions_of_lane(store, lane, state.sealed_blocks);
            for (uint32_t slot = 0; slot < front_slots; ++slot) {
                for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
                    positions.of(state.table, slot, head) = slot;
                }
            }
            state.explicit_slots = front_slots;
        }
        for (uint32_t i = 0; i < slide.blocks; ++i) {
            drop_block(store, state.table[slide.front + i], target.last_fence, returned);
        }
        std::copy(state.table + slide.front + slide.blocks, state.table + state.blocks,
                  state.table + slide.front);
        ++target.table_changes;
        count_slide(store, slide, state);
    }
}

returned_blocks table_size(const cache& store, const sequence& owner) {
    returned_blocks size;
    for (uint32_t lane = 0; lane < store.sequences.lane_count(); ++lane) {
        const lane_geometry& geometry = store.model.lanes[lane];
        const lane_state& state = owner.lanes[lane];
        size.blocks += state.blocks;
        size.bytes +=
            uint64_t{state.sealed_blocks} * store.blocks.block_bytes(geometry.sealed_class_index) +
            uint64_t{state.blocks - state.sealed_blocks} *
                store.blocks.block_bytes(geometry.class_index);
    }
    return size;
}

namespace {

status check_lane(const cache& store, const sequence& owner, uint32_t lane) {
    const lane_state& state = owner.lanes[lane];
    const lane_geometry& geometry = store.model.lanes[lane];
    if (state.slots > state.blocks * store.model.block_tokens ||
        state.sealed_blocks > (geometry.seals ? state.blocks : 0) ||
        state.explicit_slots > state.slots || state.slots > owner.next_position) {
        return fail(KV_INTERNAL, "layer {}: {} slots ({} explicit) in {} blocks at position {}",
                    geometry.layer, state.slots, state.explicit_slots, state.blocks,
                    owner.next_position);
    }
    if (device_has_positions(store, owner, lane)) {
        const slot_count known = count_between(retained_of(store, owner, lane), 0, max_position);
        if (known.least <= state.slots && state.slots <= known.most) return KV_OK;
        return fail(KV_INTERNAL, "layer {}: {} slots, the host knows of {} to {}", geometry.layer,
                    state.slots, known.least, known.most);
    }
    for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
        const slot_positions positions = positions_of(store, owner, lane, head);
        for (uint32_t slot = 1; slot < state.slots; ++slot) {
            if (positions.at(slot - 1) >= positions.at(slot)) {
                return fail(KV_INTERNAL, "layer {} head {}: positions do not ascend at slot {}",
                            geometry.layer, head, slot);
            }
        }
    }
    return KV_OK;
}

}  // namespace

status check_cache(cache& store, const held_block* extra, uint64_t extra_count) {
    host_allocator own;
    host_array<uint32_t> expected[max_block_classes];
    for (uint32_t c = 0; c < store.blocks.class_count(); ++c) {
        KVRT_TRY(expected[c].allocate(own, store.blocks.blocks_in_class(c), "reference check"));
    }
    for (const sequence& owner : store.sequences) {
        if (!owner.alive) continue;
        for (uint32_t lane = 0; lane < store.sequences.lane_count(); ++lane) {
            const lane_state& state = owner.lanes[lane];
            for (uint32_t i = 0; i < state.blocks; ++i) {
                const uint32_t c = class_at(store.model.lanes[lane], state, i);
                if (store.blocks.class_of(state.table[i]) != c) {
                    return fail(KV_INTERNAL, "layer {}: block {} of {} ({} sealed) is of class {}",
                                store.model.lanes[lane].layer, i, state.blocks, state.sealed_blocks,
                                store.blocks.class_of(state.table[i]));
                }
                ++expected[c][store.blocks.block_index(c, state.table[i])];
            }
            KVRT_TRY(check_lane(store, owner, lane));
        }
    }
    for (uint64_t i = 0; i < extra_count; ++i) {
        ++expected[extra[i].class_index]
                  [store.blocks.block_index(extra[i].class_index, extra[i].id)];
    }
    return store.blocks.check(expected);
}

}  // namespace kvrt
