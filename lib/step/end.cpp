// Ending a step: the one ordered point where lengths and tables of its sequences change.
#include <algorithm>

#include "sequence/seal.hpp"
#include "step/device_pressure.hpp"
#include "step/round_cohort.hpp"
#include "step/step.hpp"
#include "step/undo.hpp"

namespace kvrt {

namespace {

/// On the CPU only the host's kernels can still be at work on a step that is undone, and only on
/// exported tables: without an export nobody waits for a fence, whose number the host never learns.
/// On a device the step's own work can, of which there is none before it is reserved.
uint64_t fence_of_undone(const step& target) {
    if (target.has_stream) return target.state == step_state::building ? 0 : target.number;
    const host_array<uint8_t>& exported = target.arrays->lane_exported;
    const bool any = std::find(exported.begin(), exported.end(), 1) != exported.end();
    return any ? target.number : 0;
}

}  // namespace

void undo_lanes(step& target, uint32_t item_index, uint32_t lane_count) {
    cache& store = *target.context->store;
    const uint64_t fence = fence_of_undone(target);
    const uint64_t copy_fence = target.has_stream ? target.number : fence;  // it may be under way
    const step_item& item = target.arrays->items[item_index];
    sequence& owner = *item.owner;
    if (item.grew) ++owner.table_changes;
    for (uint32_t lane = 0; item.grew && lane < lane_count; ++lane) {
        const lane_undo& undo = target.arrays->undo[item_index * store.model.lanes.size() + lane];
        lane_state& state = owner.lanes[lane];
        store.blocks.redeem(store.model.lanes[lane].sealed_class_index, undo.promised);
        while (state.blocks > undo.blocks_before) {
            store.blocks.take_back(state.table[--state.blocks], fence, store.fences);
        }
        if (undo.replaced != no_block) {
            store.blocks.take_back(state.table[state.blocks - 1], copy_fence, store.fences);
            state.table[state.blocks - 1] = undo.replaced;
            state.sealed_blocks = undo.sealed_before;
            state.opened_slots = undo.opened_before;
        }
    }
    if (fence == 0) owner.last_fence = item.fence_before;
    owner.reserved_rows = 0;
    owner.written_rows = 0;
}

namespace {

void close(step& target) {
    cache& store = *target.context->store;
    store.fences.open[target.place] = 0;
    target.state = step_state::closed;
}

/// Accepted tokens become part of the sequence; blocks behind them go back.
void settle_item(step& target, uint32_t item_index, kv_step_report& report) {
    cache& store = *target.context->store;
    const step_item& item = target.arrays->items[item_index];
    sequence& owner = *item.owner;
    returned_blocks rolled_back;
    const uint32_t lanes = static_cast<uint32_t>(store.model.lanes.size());
    for (uint32_t lane = 0; lane < lanes; ++lane) owner.lanes[lane].slots += item.accepted;
    for (uint32_t lane = 0; item.grew && lane < lanes; ++lane) {
        const lane_undo& undo = target.arrays->undo[item_index * lanes + lane];
        store.blocks.redeem(store.model.lanes[lane].sealed_class_index, undo.promised);
        if (undo.replaced != no_block) {
            drop_block(store, undo.replaced, target.number, rolled_back);
        }
        shrink_table(store, owner, lane, store.model.blocks_for(owner.lanes[lane].slots),
                     rolled_back);
    }
    owner.next_position += item.accepted;
    owner.tokens_since_round += item.accepted;
    owner.reserved_rows = 0;
    owner.written_rows = 0;
    owner.in_step = false;
    if (owner.statistics_pending) {
        commit_statistics(store, target.context->retention->statistics,
                          store.sequences.index(owner), mark_of_step(target.number));
        owner.statistics_pending = false;
    }
    commit_observations(store, target.context->retention->observations, owner);
    report.accepted_tokens += item.accepted;

    returned_blocks slid;
    slide_windows(store, owner, slid);
    if (item.grew) {
        target.demoted.add(seal_blocks(store, owner));
        measure_room(store, owner);
    } else {
        owner.room -= std::min(owner.room, item.accepted);  // a fork meanwhile took it all
    }
    report.window_blocks_returned += slid.blocks;
    report.blocks_returned += slid.blocks + rolled_back.blocks;
    report.bytes_returned += slid.bytes + rolled_back.bytes;
}

void note_round(step& target, sequence& owner, status verdict, const compaction_report& round,
                kv_step_report& report) {
    target.demoted.add(round.demoted);
    report.blocks_returned += round.returned.blocks;
    report.bytes_returned += round.returned.bytes;
    if (verdict < 0 || round.outcome != KV_COMPRESS_DONE) {
        ++owner.rounds_skipped;
        ++report.compactions_skipped;
        report.last_skip_outcome = verdict < 0 ? 0 : round.outcome;
        report.last_skip_status = verdict;
        return;
    }
    ++report.compactions;
}

/// Whether a round is to run now, and by what policy.
bool find_round(step& target, const step_item& item, kv_policy& policy) {
    sequence& owner = *item.owner;
    policy = owner.policy;
    const bool due =
        owner.has_policy &&
        round_is_due(*target.context->store, *target.context->retention, owner, item.accepted);
    owner.prompt_was_in = false;
    if (!owner.compress_at_step_end) return due;
    const bool given = owner.has_deferred_policy;
    forget_deferred_round(owner);
    if (given) policy = owner.deferred_policy;
    // The sequence's own policy may have been taken away since.
    return given || owner.has_policy;
}

/// Rounds that are due, and releases that had to wait, in the order of the items.
void run_policies(step& target, kv_step_report& report) {
    cache& store = *target.context->store;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        sequence& owner = *target.arrays->items[i].owner;
        kv_policy policy;
        if (owner.release_at_step_end) {
            release_sequence(store, owner);
        } else if (find_round(target, target.arrays->items[i], policy)) {
            compaction_report round;
            const status verdict =
                compact_sequence(store, *target.context->retention, owner, policy, round);
            note_round(target, owner, verdict, round, report);
        }
    }
}

/// The same on a device, as part of the step: its event is recorded again behind them.
status run_policies_on_device(step& target, kv_step_report& report) {
    struct listening {
        step& target;
        kv_step_report& report;
    } both{target, report};
    const round_listener listener = {
        &both, [](void* user, sequence& owner, status verdict, const compaction_report& round) {
            const listening& to = *static_cast<listening*>(user);
            note_round(to.target, owner, verdict, round, to.report);
        }};
    round_cohort cohort(*target.context, target.number, listener);
    for (uint32_t i = 0; i < target.item_count; ++i) {
        sequence& owner = *target.arrays->items[i].owner;
        kv_policy policy;
        if (owner.release_at_step_end) {
            cohort.flush();
            release_sequence(*target.context->store, owner);
            continue;
        }
        const counted_rounds& counted = target.context->rounds.counted;
        const kv_policy* const to_move = policy_to_move(*target.context->store, counted, owner);
        const bool due = find_round(target, target.arrays->items[i], policy);
        if (!due && to_move != nullptr) policy = *to_move;
        if (due || to_move != nullptr) cohort.add(owner, policy);
    }
    return cohort.finish();
}

/// What the device does at a step's end, up to its event.
status end_on_device(step& target) {
    device_seals& seals = target.context->seals;
    plugin_device& device = target.context->store->device;
    KVRT_TRY(seals.seal_at_end(target));
    status verdict = device.fetch_counters(target.number);
    if (verdict == KV_OK) verdict = device.end_step(target.number);
    if (verdict < 0) seals.give_up(target, target.number);
    return verdict;
}

status check_written(const step& target) {
    const cache& store = *target.context->store;
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        if (target.arrays->lane_written[lane] != 0 || target.arrays->lane_exported[lane] != 0) {
            continue;
        }
        const lane_geometry& geometry = store.model.lanes[lane];
        if (store.model.layers[geometry.layer].lanes == 1) {
            return fail(KV_INVALID,
                        "kv_step_end: layer {} was neither written nor exported in this step; the "
                        "step is cancelled",
                        geometry.layer);
        }
        return fail(KV_INVALID,
                    "kv_step_end: KV head {} of layer {} was neither written nor exported in this "
                    "step; the step is cancelled",
                    geometry.first_head, geometry.layer);
    }
    return KV_OK;
}

}  // namespace

status step_end(step& target, kv_step_report& report) {
    status verdict =
        target.state == step_state::building
            ? fail(KV_INVALID, "kv_step_end: the step was not reserved, and is cancelled")
            : expect_state(target, step_state::reserved, "kv_step_end");
    if (verdict == KV_OK) verdict = check_written(target);
    if (verdict == KV_OK && target.has_stream) verdict = end_on_device(target);
    if (verdict < 0) {
        step_cancel(target);
        return verdict;
    }
    cache& store = *target.context->store;
    report.fence = target.number;
    close(target);  // this device's readers are done; host fences are passed by the host
    for (uint32_t i = 0; i < target.item_count; ++i) settle_item(target, i, report);
    if (store.on_device()) {
        target.context->seals.settle(target);
        verdict = run_policies_on_device(target, report);
        if (verdict == KV_OK) verdict = relieve_pressure_on_device(target, report);
    } else {
        run_policies(target, report);
    }
    store.blocks.collect(store.fences);
    if (store.limits.pressure_bytes != 0 && !store.on_device()) {
        pressure_report relief;
        relieve_pressure(store, *target.context->retention, store.limits.pressure_bytes, relief);
        report.pressure_rounds = relief.rounds;
        target.demoted.add(relief.demoted);
        report.blocks_returned += relief.returned.blocks;
        report.bytes_returned += relief.returned.bytes;
    }
    report.demoted_blocks = target.demoted.blocks;
    report.demoted_bytes = target.demoted.bytes;
    return verdict;
}

void step_cancel(step& target) {
    if (target.state == step_state::closed) return;
    cache& store = *target.context->store;
    const bool reserved = target.state == step_state::reserved;
    // Where that fails, its work counts as unfinished for ever, and its blocks stay parked.
    if (target.has_stream) {
        (void)store.device.fetch_counters(target.number);
        (void)store.device.end_step(target.number);
    }
    close(target);
    for (uint32_t i = target.item_count; i-- > 0;) {
        sequence& owner = *target.arrays->items[i].owner;
        if (reserved) undo_lanes(target, i, static_cast<uint32_t>(store.model.lanes.size()));
        discard_statistics(store, target.context->retention->statistics,
                           store.sequences.index(owner));
        discard_observations(store, target.context->retention->observations, owner);
        owner.in_step = false;
        owner.statistics_pending = false;
        forget_deferred_round(owner);
        if (owner.release_at_step_end) release_sequence(store, owner);
    }
    store.blocks.collect(store.fences);
}

}  // namespace kvrt
