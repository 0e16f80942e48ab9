#include "step/device_seal.hpp"

#include <algorithm>
#include <limits>

#include "step/step.hpp"

namespace kvrt {

namespace {

constexpr uint64_t entry_words = 4;

/// What of a row is coded anew, and not moved.
uint32_t coded_operands(const lane_geometry& lane) {
    return (lane.layout.keys.format != lane.sealed_layout.keys.format ? 1 : 0) +
           (lane.layout.values.format != lane.sealed_layout.values.format ? 1 : 0);
}

/// Rows that were coded before are counted. How far they moved the device alone could say.
void note_recoded(cache& store, uint32_t lane, uint32_t rows) {
    if (rows == 0) return;
    recoding unmeasured;
    unmeasured.rows = uint64_t{rows} * coded_operands(store.model.lanes[lane]);
    unmeasured.squared_change = std::numeric_limits<double>::quiet_NaN();
    unmeasured.squared_rows = 1.0;
    for (uint32_t head = 0; head < store.model.lanes[lane].kv_heads; ++head) {
        count_recoding(store, lane, head, unmeasured);
    }
}

}  // namespace

status device_seals::measure(const step_context& context, uint64_t& next_word) {
    const cache& store = *context.store;
    if (!store.any_seals) return KV_OK;
    const host_array<lane_geometry>& lanes = store.model.lanes;
    const uint64_t sealing = static_cast<uint64_t>(std::count_if(
        lanes.begin(), lanes.end(), [](const lane_geometry& lane) { return lane.seals; }));
    // What the rows of a step fill, and two more of each sequence.
    const uint64_t most = sealing * (store.limits.max_step_tokens / store.model.block_tokens +
                                     2 * uint64_t{store.limits.max_step_sequences});
    first_word = round_up<uint64_t>(next_word, device_tables::line_words);
    next_word = first_word + most * entry_words;
    host_allocator& allocator = context.store->allocator;
    KVRT_TRY(entries.allocate(allocator, most, "blocks to seal"));
    return words.allocate(allocator, most * entry_words, "blocks to seal");
}

/// What is due of a lane when so many rows more are part of the sequence, and its window has slid:
/// as far as there are blocks to seal into, and room in the list.
void device_seals::list_due(cache& store, sequence& owner, uint32_t lane, uint32_t accepted,
                            seal_reach reach) {
    const block_id* const table = owner.lanes[lane].table;
    lane_state after = owner.lanes[lane];
    after.slots += accepted;
    const window_slide slide = slide_of(store, lane, after.slots, owner.next_position + accepted);
    count_slide(store, slide, after);
    const uint32_t due = blocks_to_seal(store, after, lane, after.slots, reach);
    for (uint32_t i = 0; i < due && count < entries.size(); ++i) {
        const uint32_t index = after.sealed_blocks + i;
        const block_id made = allocate_sealed(store, lane);
        if (made == no_block) return;
        const block_id source = table[index < slide.front ? index : index + slide.blocks];
        add({&owner, lane, source, made, store.model.block_tokens,
             i == 0 ? after.opened_slots : 0});
    }
}

void device_seals::write_list(const step& target) {
    for (uint32_t i = 0; i < count; ++i) {
        const entry& made = entries[i];
        uint32_t* const to = words.data() + entry_words * i;
        to[0] = made.source;
        to[1] = made.target;
        to[2] = made.slots;
        to[3] = made.coded;
    }
    target.context->store->device.write_table(first_word, words.data(), count * entry_words);
}

/// A launch for the entries of each lane: into the lane's sealed layout, or out of it.
status device_seals::launch(step& target, bool opens) {
    cache& store = *target.context->store;
    const device_verbs& verbs = target.context->verbs;
    for (uint32_t first = 0; first < count;) {
        const uint32_t lane = entries[first].lane;
        uint32_t end = first + 1;
        while (end < count && entries[end].lane == lane) ++end;
        const kvrt_lane& raw = verbs.lanes[lane];
        const kvrt_lane& sealed = verbs.sealed_lanes[lane];
        const saturation_counts counts =
            opens ? saturation_counts{} : target.context->counts.of(store, lane);
        kvrt_seal_blocks call = {};
        call.from = opens ? &sealed : &raw;
        call.to = opens ? &raw : &sealed;
        call.items = static_cast<const uint32_t*>(
            target.context->tables.at(first_word + entry_words * first));
        call.count = end - first;
        call.saturated_keys = counts.keys;
        call.saturated_values = counts.values;
        KVRT_TRY(store.device.seal_blocks(target.number, call));
        first = end;
    }
    return KV_OK;
}

void device_seals::give_up(step& target, uint64_t fence) {
    cache& store = *target.context->store;
    while (count != 0) store.blocks.take_back(entries[--count].target, fence, store.fences);
}

status device_seals::upload_and_seal(step& target) {
    if (count == 0) return KV_OK;
    write_list(target);
    const status uploaded = target.context->store->device.upload_table(target.number);
    if (uploaded < 0) {
        give_up(target, 0);
        return uploaded;
    }
    const status launched = launch(target, false);
    if (launched < 0) give_up(target, target.number);  // some may be under way
    return launched;
}

/// The step has read and written of them then, whether it is reserved or not.
status device_seals::seal_before_work(step& target) {
    KVRT_TRY(upload_and_seal(target));
    for (uint32_t i = 0; i < count; ++i) entries[i].owner->last_fence = target.number;
    settle(target);
    return KV_OK;
}

status device_seals::seal_late(step& target) {
    cache& store = *target.context->store;
    count = 0;
    if (!store.any_seals) return KV_OK;
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        if (!store.model.lanes[lane].seals) continue;
        for (uint32_t i = 0; i < target.item_count; ++i) {
            list_due(store, *target.arrays->items[i].owner, lane, 0, seal_reach::due);
        }
    }
    return seal_before_work(target);
}

status device_seals::relieve_pressure(step& target) {
    cache& store = *target.context->store;
    count = 0;
    if (!store.any_seals || store.limits.pressure_bytes == 0) return KV_OK;
    for (sequence& owner : store.sequences) owner.asked_under_pressure = false;
    const auto is_free = [&](const sequence& owner) {
        return !owner.in_step || find_item(target, owner) != nullptr;
    };
    const auto saves = [&](const sequence& owner) { return bytes_to_demote(store, owner); };
    uint64_t saved = 0;
    while (store.blocks.totals().pinned_bytes > store.limits.pressure_bytes + saved) {
        sequence* const chosen = ask_next(store, is_free, saves);
        if (chosen == nullptr) break;
        const uint32_t before = count;
        for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
            if (!store.model.lanes[lane].demotes) continue;
            list_due(store, *chosen, lane, 0, seal_reach::all);
        }
        for (uint32_t i = before; i < count; ++i) {
            // Both are pinned as yet.
            saved += store.model.lanes[entries[i].lane].layout.block_bytes;
        }
    }
    return seal_before_work(target);
}

void device_seals::list_openings(const step& target) {
    cache& store = *target.context->store;
    count = 0;
    if (!store.any_seals) return;
    const uint32_t lanes = static_cast<uint32_t>(store.model.lanes.size());
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        for (uint32_t i = 0; i < target.item_count; ++i) {
            const step_item& item = target.arrays->items[i];
            const lane_undo& undo = target.arrays->undo[uint64_t{i} * lanes + lane];
            const lane_state& state = item.owner->lanes[lane];
            if (!item.grew || undo.sealed_before == state.sealed_blocks) continue;
            add({item.owner, lane, undo.replaced, state.table[undo.blocks_before - 1],
                 state.slots % store.model.block_tokens, 0});
        }
    }
    write_list(target);
}

status device_seals::open_tails(step& target) {
    const status verdict = launch(target, true);
    count = 0;
    return verdict;
}

status device_seals::seal_at_end(step& target) {
    cache& store = *target.context->store;
    count = 0;
    if (!store.any_seals) return KV_OK;
    const uint32_t lanes = static_cast<uint32_t>(store.model.lanes.size());
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        const lane_geometry& geometry = store.model.lanes[lane];
        for (uint32_t i = 0; geometry.seals && i < target.item_count; ++i) {
            const step_item& item = target.arrays->items[i];
            if (!item.grew) continue;
            lane_undo& undo = target.arrays->undo[uint64_t{i} * lanes + lane];
            store.blocks.redeem(geometry.sealed_class_index, undo.promised);
            undo.promised = 0;
            list_due(store, *item.owner, lane, item.accepted, seal_reach::due);
        }
    }
    const status verdict = upload_and_seal(target);
    return verdict == KV_AGAIN ? KV_OK : verdict;
}

void device_seals::settle(step& target) {
    cache& store = *target.context->store;
    for (uint32_t i = 0; i < count; ++i) {
        const entry& made = entries[i];
        put_sealed(store, *made.owner, made.lane, made.target, target.demoted);
        note_recoded(store, made.lane, made.coded);
    }
    for (uint32_t i = 0; i < count; ++i) measure_room(store, *entries[i].owner);
    count = 0;
}

}  // namespace kvrt
