// Reserve: slots for everything appended, all blocks or none. First it only counts; from the moment
// it allocates, nothing can fail but the device, and then everything is undone.
#include <algorithm>
#include <string>

#include "format/move.hpp"
#include "sequence/seal.hpp"
#include "step/step.hpp"
#include "step/undo.hpp"

namespace kvrt {

namespace {

struct lane_need {
    uint32_t new_blocks = 0;
    bool copy_tail = false;    ///< others read the partly filled tail block, or it is sealed
    bool open_tail = false;    ///< it is sealed
    uint32_t seal_blocks = 0;  ///< into which full ones are sealed at the step's end
};

void find_need(const cache& store, const step_item& item, uint32_t lane, lane_need& need) {
    const lane_state& state = item.owner->lanes[lane];
    need.new_blocks = store.model.blocks_for(state.slots + item.rows) - state.blocks;
    const bool has_tail = state.slots % store.model.block_tokens != 0;
    need.open_tail = has_tail && state.sealed_blocks == state.blocks;
    need.copy_tail =
        need.open_tail || (has_tail && store.blocks.references(state.table[state.blocks - 1]) > 1);
    need.seal_blocks =
        store.any_seals ? blocks_to_seal(store, state, lane, state.slots + item.rows) : 0;
}

/// The ends of a sequence's tables are far from each other, and from all that is in the processor's
/// caches: they come all at once, before they are wanted.
void touch_tables(const step& target, uint32_t item_index) {
    const sequence& owner = *target.arrays->items[item_index].owner;
    for (uint32_t lane = 0; lane < target.context->store->model.lanes.size(); ++lane) {
        const lane_state& state = owner.lanes[lane];
        __builtin_prefetch(state.table + state.blocks, 1);
    }
    if (target.has_stream) target.context->tables.touch_rows(target.place, item_index);
}

status check_position(const step_item& item) {
    if (item.owner->next_position + item.rows <= max_position) return KV_OK;
    return fail(KV_LIMIT, "seq {:#x} would pass position {}", item.handle, max_position);
}

/// Checks one item against limits and the size of the pool; adds what it needs now.
status count_item(const cache& store, const step_item& item, uint64_t* needed) {
    KVRT_TRY(check_position(item));
    uint64_t whole[max_block_classes] = {};
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        const uint64_t slots = uint64_t{item.owner->lanes[lane].slots} + item.rows;
        if (slots > store.limits.max_tokens_per_sequence) {
            return fail(KV_LIMIT,
                        "seq {:#x} would retain {} tokens, max_tokens_per_sequence is {}: compress "
                        "it or append less",
                        item.handle, slots, store.limits.max_tokens_per_sequence);
        }
        const lane_geometry& geometry = store.model.lanes[lane];
        const lane_state& state = item.owner->lanes[lane];
        lane_need need;
        find_need(store, item, lane, need);
        needed[geometry.class_index] += need.new_blocks + (need.copy_tail ? 1 : 0);
        needed[geometry.sealed_class_index] += need.seal_blocks;
        // Others may stop to read a tail, so that it needs no copy.
        whole[geometry.class_index] +=
            need.new_blocks + (need.open_tail ? 1 : 0) + (state.blocks - state.sealed_blocks);
        whole[geometry.sealed_class_index] += state.sealed_blocks + need.seal_blocks;
    }
    if (!store.blocks.could_ever_allocate(whole)) {
        return fail(KV_TOO_LARGE,
                    "seq {:#x} with {} more tokens is larger than the pool's {} bytes, of which "
                    "blocks of each size take {} at a time: see kv_plan",
                    item.handle, item.rows, store.blocks.slab_count() * slab_bytes, slab_bytes);
    }
    return KV_OK;
}

void fill_report(const cache& store, const uint64_t* needed, kv_reserve_report& report) {
    report.need_blocks = 0;
    report.need_bytes = 0;
    for (uint32_t c = 0; c < store.blocks.class_count(); ++c) {
        report.need_blocks += needed[c];
        report.need_bytes += needed[c] * store.blocks.block_bytes(c);
    }
    report.free_bytes_now = store.blocks.free_bytes(false);
    report.free_bytes_after_fence = store.blocks.free_bytes(true);
}

/// Which items fit, in order; the status of the worst. Statuses go to the report's array.
status judge_items(const step& target, uint64_t* needed, kv_reserve_report& report) {
    const cache& store = *target.context->store;
    uint64_t fitting[max_block_classes] = {};
    status worst = KV_OK;
    uint32_t worst_item = 0;
    bool all_so_far = true;
    report.items_that_fit = 0;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        status verdict;
        if (item.rows <= item.owner->room) {  // it takes nothing, as most do
            verdict = check_position(item);
        } else {
            touch_tables(target, i);
            uint64_t mine[max_block_classes] = {};
            verdict = count_item(store, item, mine);
            for (uint32_t c = 0; c < store.blocks.class_count(); ++c) {
                needed[c] += mine[c];
                mine[c] += fitting[c];
            }
            if (verdict == KV_OK && !store.blocks.can_allocate(mine, false)) verdict = KV_AGAIN;
            if (verdict == KV_OK) std::copy(mine, mine + max_block_classes, fitting);
        }
        if (report.item_statuses != nullptr && i < report.item_status_capacity) {
            report.item_statuses[i] = verdict;
        }
        all_so_far = all_so_far && verdict == KV_OK;
        if (all_so_far) report.items_that_fit = i + 1;
        // An item that can never fit outranks one that must wait.
        if (worst == KV_OK || (worst == KV_AGAIN && verdict != KV_OK)) {
            worst = verdict;
            worst_item = i;
        }
    }
    if (worst == KV_OK || worst == KV_AGAIN) return worst;
    // Once more, so that the message is about this item and not about a later one.
    uint64_t counted[max_block_classes] = {};
    return count_item(store, target.arrays->items[worst_item], counted);
}

/// False, with a message, when the device has failed.
bool copy_tail_slots(const step& target, const tile_layout& layout, block_id source, block_id copy,
                     uint32_t slots) {
    cache& store = *target.context->store;
    if (store.on_device()) {
        return store.device.copy(target.number, uint64_t{copy} * block_unit,
                                 uint64_t{source} * block_unit, layout.block_bytes) >= 0;
    }
    copy_block_slots(layout, store.blocks.arena(), source, copy, slots);
    return true;
}

/// Positions that rounds have placed go with a copied tail block. False as above.
bool copy_tail_positions(const step& target, const sequence& owner, uint32_t lane, block_id source,
                         block_id copy) {
    cache& store = *target.context->store;
    const lane_geometry& geometry = store.model.lanes[lane];
    if (!device_has_positions(store, owner, lane)) {
        const position_store positions =
            store.blocks.positions(geometry.class_index, store.model.block_tokens);
        copy_positions(store, lane, positions, source, positions, copy);
        return true;
    }
    const position_store positions =
        target.context->rounds.positions_of(*target.context, lane, false);
    return store.device.copy_words(target.number, positions.of(copy, 0), positions.of(source, 0),
                                   geometry.kv_heads * store.model.block_tokens) >= 0;
}

/// False when the device has failed, or has no memory behind a free slab.
bool grow_lane(step& target, uint32_t item_index, uint32_t lane) {
    cache& store = *target.context->store;
    const step_item& item = target.arrays->items[item_index];
    const lane_geometry& geometry = store.model.lanes[lane];
    lane_state& state = item.owner->lanes[lane];
    lane_undo& undo = target.arrays->undo[item_index * store.model.lanes.size() + lane];
    lane_need need;
    find_need(store, item, lane, need);
    undo = {state.blocks, state.sealed_blocks, state.opened_slots, need.seal_blocks, no_block};
    store.blocks.promise(geometry.sealed_class_index, need.seal_blocks);
    if (need.copy_tail) {
        const block_id copy = store.blocks.allocate(geometry.class_index);
        if (copy == no_block) return false;
        undo.replaced = state.table[state.blocks - 1];
        if (need.open_tail) {
            open_tail(store, *item.owner, lane, copy);
            --state.sealed_blocks;
            state.opened_slots = state.slots % store.model.block_tokens;
        } else {
            if (!copy_tail_slots(target, geometry.layout, undo.replaced, copy,
                                 state.slots % store.model.block_tokens) ||
                !copy_tail_positions(target, *item.owner, lane, undo.replaced, copy)) {
                store.blocks.take_back(copy, target.number, store.fences);
                undo.replaced = no_block;
                return false;
            }
        }
        state.table[state.blocks - 1] = copy;
        ++item.owner->table_changes;
    }
    for (uint32_t i = 0; i < need.new_blocks; ++i) {
        const block_id id = store.blocks.allocate(geometry.class_index);
        if (id == no_block) return false;
        state.table[state.blocks++] = id;
    }
    return true;
}

}  // namespace

status step_reserve(step& target, kv_reserve_report& report) {
    KVRT_TRY(expect_state(target, step_state::building, "kv_step_reserve"));
    if (target.item_count == 0) {
        return fail(KV_INVALID, "kv_step_reserve: nothing was appended to the step");
    }
    cache& store = *target.context->store;
    if (store.on_device()) {
        if (!target.has_stream) {
            return fail(KV_INVALID, "kv_step_reserve: call kv_cuda_step_use_stream first");
        }
        KVRT_TRY(poll_device(store));
    }
    store.blocks.collect(store.fences);
    // What could not be sealed yet: with host fences, the blocks of the step before.
    if (store.on_device()) {
        KVRT_TRY(target.context->seals.seal_late(target));
        KVRT_TRY(target.context->seals.relieve_pressure(target));
    }
    for (uint32_t i = 0; store.any_seals && i < target.item_count; ++i) {
        target.demoted.add(seal_blocks(store, *target.arrays->items[i].owner));
    }
    uint64_t needed[max_block_classes] = {};
    const status verdict = judge_items(target, needed, report);
    fill_report(store, needed, report);
    if (verdict == KV_AGAIN) {
        return fail(KV_AGAIN,
                    "the step needs {} blocks ({} bytes), {} bytes are free now and {} after the "
                    "fences, in blocks of all sizes: release, compress or remove sequences",
                    report.need_blocks, report.need_bytes, report.free_bytes_now,
                    report.free_bytes_after_fence);
    }
    if (verdict < 0) return verdict;

    const uint32_t lanes = static_cast<uint32_t>(store.model.lanes.size());
    for (uint32_t i = 0; i < target.item_count; ++i) {
        step_item& item = target.arrays->items[i];
        item.fence_before = item.owner->last_fence;
        item.owner->last_fence = target.number;
        item.grew = item.rows > item.owner->room;
        if (item.grew) ++item.owner->table_growths;
        for (uint32_t lane = 0; item.grew && lane < lanes; ++lane) {
            if (grow_lane(target, i, lane)) continue;
            const std::string reason = message_buffer();
            undo_lanes(target, i, lane + 1);
            for (uint32_t done = i; done-- > 0;) undo_lanes(target, done, lanes);
            return fail(KV_DEVICE, "the device has no memory behind a free slab of the arena: {}",
                        reason);
        }
        item.owner->reserved_rows = item.rows;
    }
    if (store.on_device()) {
        target.context->seals.list_openings(target);
        status planned = target.context->tables.plan(target);
        if (planned == KV_OK) planned = target.context->seals.open_tails(target);
        if (planned < 0) {
            for (uint32_t done = target.item_count; done-- > 0;) undo_lanes(target, done, lanes);
            return planned;
        }
    }
    target.state = step_state::reserved;
    return KV_OK;
}

}  // namespace kvrt
