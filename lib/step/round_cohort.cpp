#include "step/round_cohort.hpp"

#include <algorithm>
#include <string>

#include "retention/expected_attention.hpp"
#include "retention/scorers.hpp"
#include "retention/scoring.hpp"
#include "step/round_sets.hpp"
#include "step/step.hpp"

namespace kvrt {

namespace {

static_assert(sizeof(position_range) == 2 * sizeof(uint64_t));  // as guards have it

/// Only the device knows how much guards hold, where they have changed since a round.
status check_counts(const round_plan& plan) {
    for (uint32_t lane = 0; lane < plan.store.model.lanes.size(); ++lane) {
        if (!takes_part(plan.store, plan.policy, plan.store.model.lanes[lane].layer)) continue;
        // A pyramid's last layers may have next to no budget.
        const uint32_t budget =
            plan.policy.allocator == KV_ALLOCATE_PYRAMID ? 0 : plan.policy.budget;
        const slot_count keep = budget_on_device(plan, lane, budget);
        if (keep.exact()) continue;
        return fail(
            KV_UNSUPPORTED,
            "policy: guards reach to where an earlier round has removed tokens, and hold {} "
            "to {} slots of layer {}, beyond the budget of {}: only the device knows how "
            "many (see docs/device.md)",
            keep.least, keep.most, plan.store.model.lanes[lane].layer, plan.policy.budget);
    }
    return KV_OK;
}

/// Does a round work with what kv_attend gathered of a layer's queries, not with what was given?
bool uses_gathered(const round_plan& plan, uint32_t layer) {
    return (plan.policy.flags & KV_POLICY_STATISTICS_ONLINE) != 0 ||
           plan.context.statistics.given_tokens[layer] == 0;
}

status is_counted() {
    return fail(KV_AGAIN,
                "kv_compress: scores say how many slots each head keeps, and the device counts "
                "them: the round moves at the end of the sequence's next step for which they have "
                "come, or when kv_compress is called again");
}

bool has_moments(const round_plan& plan) {
    if (!find_scorer(plan.policy.scorer)->query_statistics) return true;
    const uint64_t first =
        uint64_t{plan.store.sequences.index(plan.owner)} * plan.store.model.layers.size();
    for (const lane_geometry& lane : plan.store.model.lanes) {
        const uint32_t index = static_cast<uint32_t>(&lane - plan.store.model.lanes.data());
        if (plan.chosen(index) && uses_gathered(plan, lane.layer) &&
            plan.context.statistics.tokens[first + lane.layer] == 0) {
            return false;
        }
    }
    return true;
}

}  // namespace

round_cohort::round_cohort(step_context& context, uint64_t number, const round_listener& listener)
    : context_(context), rounds_(context.rounds), number_(number), listener_(listener) {}

void round_cohort::add(sequence& owner, const kv_policy& policy) {
    if (count_ == rounds_.most_rounds) flush();
    bool alone = false;
    if (!plan(owner, policy, alone)) return;
    if (alone && count_ != 0) {
        flush();
        if (!plan(owner, policy, alone)) return;
    }
    ++count_;
    if (alone) flush();
}

/// False where there is nothing to enqueue, and the listener knows. A round that goes alone, since
/// others may let go of what it shares, have no room for another's tables, or are not to be counted
/// as it is, is not planned yet behind them.
bool round_cohort::plan(sequence& owner, const kv_policy& policy, bool& alone) {
    cache& store = *context_.store;
    device_rounds::pending_round& round = rounds_.pending[count_];
    round = {};
    round.owner = &owner;
    round.policy = policy;
    round_plan plan = plan_of(store, *context_.retention, owner, round.policy);
    begin_round(plan, round.report);
    status verdict = check_counts(plan);
    bool runs = false;
    alone = false;
    const bool any = verdict == KV_OK && choose_lanes(plan);
    if (any) verdict = check_sets_on_device(plan);
    if (verdict == KV_OK && !any) {
        find_nothing(plan, round.report);
    } else if (verdict == KV_OK && !has_observations(plan)) {
        round.report.outcome = KV_COMPRESS_NO_OBSERVATIONS;
    } else if (verdict == KV_OK && !has_moments(plan)) {
        round.report.outcome = KV_COMPRESS_NO_STATISTICS;
    } else if (verdict == KV_OK && allocates_by_scores(plan) &&
               find_count(plan, rounds_.counted) != count_state::here) {
        runs = plan_count_first(plan, verdict, alone);
    } else if (verdict == KV_OK) {
        runs = plan_move(plan, verdict, alone);
    }
    if (alone && count_ != 0) return true;
    if (runs) {
        plan_lanes(plan);
    } else {
        note_outcome(plan, verdict, round.report);
        listener_.told(listener_.user, owner, verdict, round.report);
    }
    return runs;
}

/// Whether lanes are to be counted; else that is under way.
bool round_cohort::plan_count_first(round_plan& plan, status& verdict, bool& alone) {
    device_rounds::pending_round& round = rounds_.pending[count_];
    if (find_count(plan, rounds_.counted) == count_state::on_its_way) {
        verdict = is_counted();
        return false;
    }
    round.counts = plan.policy.allocator;
    alone = count_ != 0 && rounds_.pending[0].counts != round.counts;
    return true;
}

/// Whether survivors are to move: where scores say how many, what was counted is known.
bool round_cohort::plan_move(round_plan& plan, status& verdict, bool& alone) {
    device_rounds::pending_round& round = rounds_.pending[count_];
    if (allocates_by_scores(plan) && !apply_count(plan, rounds_.counted)) {
        rounds_.counted.forget(plan.store, plan.owner);
        find_nothing(plan, round.report);
        return false;
    }
    const fresh_blocks fresh = choose_fresh(plan);
    const bool behind_counts = count_ != 0 && rounds_.pending[0].counts != 0;
    alone = fresh.shared || behind_counts || used_targets_ + fresh.entries > rounds_.targets.size();
    if (alone && count_ != 0) return true;
    if (fresh.count != 0) verdict = take_fresh(plan, fresh);
    return verdict == KV_OK;
}

block_id* round_cohort::targets_of(uint32_t index, uint32_t lane) const {
    return rounds_.targets.data() +
           rounds_.target_at[uint64_t{index} * context_.store->model.lanes.size() + lane];
}

/// Those of more demoted blocks than need be where blocks for the others are missing.
fresh_blocks round_cohort::choose_fresh(round_plan& plan) const {
    fresh_blocks fresh = count_fresh(plan);
    if (context_.store->blocks.can_allocate(fresh.needed, false)) return fresh;
    plan.stays_demoted = true;
    rounds_.pending[count_].stays_demoted = true;
    return count_fresh(plan);
}

/// Fresh blocks in the places of those that must stay as they are, or have another layout.
status round_cohort::take_fresh(const round_plan& plan, const fresh_blocks& fresh) {
    cache& store = *context_.store;
    if (!store.blocks.can_allocate(fresh.needed, false)) {
        return fail(KV_AGAIN,
                    "kv_compress: blocks that others read stay as they are, and tiles of other "
                    "tokens end in a raw block, so {} fresh ones are needed for the survivors; {} "
                    "bytes are free",
                    fresh.count, store.blocks.free_bytes(false));
    }
    const uint64_t lanes = store.model.lanes.size();
    uint64_t used = used_targets_;
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        if (!plan.chosen(lane)) continue;
        rounds_.target_at[count_ * lanes + lane] = used;
        const uint32_t kept = store.model.blocks_for(plan.keep(lane));
        std::copy_n(plan.owner.lanes[lane].table, kept, targets_of(count_, lane));
        used += kept;
    }
    bool all = true;
    for_each_fresh(plan, [&](uint32_t lane, uint32_t index, uint32_t block_class, bool) {
        if (!all) return;
        const block_id made = store.blocks.allocate(block_class);
        all = made != no_block;
        if (all) targets_of(count_, lane)[index] = made;
    });
    if (all) {
        used_targets_ = used;
        rounds_.pending[count_].fresh = true;
        rounds_.pending[count_].report.blocks_copied = fresh.count;
        return KV_OK;
    }
    const std::string reason = message_buffer();
    for_each_fresh(plan, [&](uint32_t lane, uint32_t index, uint32_t, bool) {
        const block_id made = targets_of(count_, lane)[index];
        if (made != plan.owner.lanes[lane].table[index]) {
            store.blocks.take_back(made, 0, store.fences);
        }
    });
    return fail(KV_DEVICE, "the device has no memory behind a free slab of the arena: {}", reason);
}

void round_cohort::plan_phases(const round_plan& plan, double* phases) const {
    const cache& store = *context_.store;
    uint64_t next = 0;
    for (uint32_t layer = 0; layer < store.model.layers.size(); ++layer) {
        if (!has_statistics(store, layer) || rounds_.first_phase[layer] != next) continue;
        const rope_description& rope = store.model.layers[layer].rope;
        if (plan.policy.scorer == KV_SCORER_EXPECTED_ATTENTION) {
            expected_phases(expected_shape{}, rope, plan.owner.next_position, phases + next);
        } else {
            triattention_phases(shape_of(store, layer, plan.policy), rope, plan.owner.next_position,
                                phases + next);
        }
        next += most_phases(store, layer);
    }
}

void round_cohort::plan_lanes(const round_plan& plan) {
    device_rounds::pending_round& round = rounds_.pending[count_];
    const guard_rules rules = guard_rules_of(plan);
    round.guards = {plan.owner.next_position,
                    rules.prompt_tokens,
                    rules.sinks,
                    rules.recent,
                    reinterpret_cast<const uint64_t*>(rules.pinned),
                    rules.pinned_count,
                    value_reserve_of(plan.policy),
                    plan.policy.segment_quota != 0 ? plan.policy.segments : 0,
                    plan.policy.segment_quota,
                    plan.policy.prompt_tokens};
    double* const phases = rounds_.phases.data() + count_ * rounds_.phase_stride;
    if (find_scorer(plan.policy.scorer)->query_statistics) plan_phases(plan, phases);
    for (uint32_t lane = 0; lane < context_.store->model.lanes.size(); ++lane) {
        if (plan.chosen(lane)) plan_lane(plan, lane, phases);
    }
}

void round_cohort::plan_lane(const round_plan& plan, uint32_t lane, const double* phases) {
    const cache& store = *context_.store;
    const lane_geometry& geometry = store.model.lanes[lane];
    const layer_geometry& layer = store.model.layers[geometry.layer];
    const lane_state& state = plan.owner.lanes[lane];
    rounds_.planned_origins[lane_count_] = {count_, lane};
    kvrt_round_lane& made = rounds_.planned[lane_count_++];
    made = {};
    made.lane = &context_.verbs.lanes[lane];
    made.guards = &rounds_.pending[count_].guards;
    made.source_table = state.table;
    made.target_table = rounds_.pending[count_].fresh ? targets_of(count_, lane) : state.table;
    made.slots = state.slots;
    made.explicit_slots = state.explicit_slots;
    made.keep = plan.keep(lane);
    made.places = allocates_by_scores(plan) ? kept_of(plan, lane, plan.policy.budget) : made.keep;
    if (geometry.seals) plan_sealed(plan, lane, made);
    made.kind = rounds_.kind_of[lane];
    made.selection = plan.selection;
    made.bundle = bundle_of(rounds_, plan, geometry.layer);
    made.set = uint64_t{count_} * store.model.layers.size() + geometry.layer;
    if (rounds_.pending[count_].counts != 0) {
        bundle_counted(plan, geometry.layer, made);
        plan_count(plan, lane, rounds_.counted, made);
    }
    made.sums = sums_of(plan.context.observations, plan.owner, lane);
    kvrt_round_scores& scores = made.scores;
    scores.scorer = plan.policy.scorer;
    scores.variants = 1;
    const random_key key = draw_key(plan, lane, 0);
    scores.layer = key.layer;
    scores.first_head = key.head;
    scores.seed = key.seed;
    scores.round = key.round;
    if (plan.policy.scorer == KV_SCORER_LAGKV) scores.sinks = lag_shape_of(plan.policy).sinks;
    scores.samples = draws_survivors(plan.policy) ? 1 : 0;
    scores.prior_share = prior_share_of(plan.policy);
    scores.redundancy = redundancy_of(plan.policy);
    const bool exact = (plan.policy.flags & KV_POLICY_EXACT_REDUNDANCY) != 0;
    if (exact) scores.similarity = similarity_of(plan.policy);
    if (goes_by_observation(plan.policy.scorer)) {
        const score_pooling pooling = pooling_of(plan.policy);
        scores.pool_width = pooling.width;
        scores.pool_maximum = pooling.maximum ? 1 : 0;
    }
    if (!find_scorer(plan.policy.scorer)->query_statistics) return;
    const statistics_store& statistics = plan.context.statistics;
    const uint32_t key_dim = geometry.layout.keys.dim;
    scores.group = layer.group();
    scores.rotated = layer.rope.rotated_bands();
    scores.interleaved = layer.rope.style == KV_ROPE_INTERLEAVED ? 1 : 0;
    scores.attention_factor = layer.rope.attention_factor;
    scores.phase_count = expected_phase_count(layer.rope);
    if (plan.policy.scorer == KV_SCORER_EXPECTED_ATTENTION) {
        scores.spread = statistics.given_spread[geometry.layer];
    } else {
        const triattention_shape shape = shape_of(store, geometry.layer, plan.policy);
        scores.variants = shape.variants();
        scores.phase_count = triattention_phase_count(shape, layer.rope);
    }
    scores.first_band = statistics.offset[geometry.layer] +
                        uint64_t{geometry.first_head} * scores.group * layer.rope.bands(key_dim);
    scores.moments =
        static_cast<const float*>(context_.tables.at(rounds_.moments_word)) + scores.first_band;
    if (uses_gathered(plan, geometry.layer)) plan_gathered(plan, geometry, scores);
    if (scores.phase_count != 0) scores.phases = phases + rounds_.first_phase[geometry.layer];
}

void round_cohort::plan_sealed(const round_plan& plan, uint32_t lane, kvrt_round_lane& made) const {
    const uint32_t block_tokens = plan.store.model.block_tokens;
    const lane_state& state = plan.owner.lanes[lane];
    const saturation_counts counts = context_.counts.of(plan.store, lane);
    made.sealed = &context_.verbs.sealed_lanes[lane];
    made.sealed_slots = state.sealed_blocks * block_tokens;
    made.sealed_after = round_target_of(plan, lane).sealed_blocks * block_tokens;
    made.coded_slots = made.sealed_slots + state.opened_slots;
    made.saturated_keys = counts.keys;
    made.saturated_values = counts.values;
}

void round_cohort::plan_gathered(const round_plan& plan, const lane_geometry& lane,
                                 kvrt_round_scores& scores) const {
    const device_queries& queries = context_.queries;
    scores.gathered = 1;
    scores.spread = plan.policy.scorer == KV_SCORER_EXPECTED_ATTENTION ? 1 : 0;
    scores.place = plan.store.sequences.index(plan.owner);
    scores.counted =
        plan.context.statistics
            .device_pending[scores.place * plan.store.model.layers.size() + lane.layer];
    scores.first_query_head = queries.first_head[lane.layer] + lane.first_head * scores.group;
    scores.moments = queries.moments_at(scores.place, scores.first_band);
}

/// What the rounds read, and they themselves.
status round_cohort::enqueue(kvrt_round& call) {
    cache& store = *context_.store;
    KVRT_TRY(open());
    rounds_.write_moments(context_);
    call.moment_stride = context_.retention->statistics.length;
    const observation_store& observations = context_.retention->observations;
    call.sums = observations.base;
    call.sums_stride = observations.slot_stride;
    call.queries = context_.queries.memory;
    KVRT_TRY(store.device.upload_table(number_));
    return store.device.run_round(number_, call);
}

/// False where so many at once are too many, and nothing was done.
bool round_cohort::launch(uint32_t first_round, uint32_t rounds) {
    kvrt_round call = {};
    call.count = order_planned(context_, first_round, rounds, lane_count_);
    call.lanes = rounds_.lanes.data();
    call.counts = rounds_.pending[first_round].counts;
    const status verdict = enqueue(call);
    const bool crowded = verdict == KV_AGAIN || verdict == KV_TOO_LARGE;
    if (crowded && rounds > 1) return false;
    for (uint32_t i = 0; i < rounds; ++i) {
        if (call.counts != 0) {
            settle_count(first_round + i, call, verdict);
        } else {
            settle(first_round + i, call, verdict);
        }
    }
    return true;
}

void round_cohort::flush() {
    if (count_ == 0) return;
    if (!launch(0, count_)) {
        for (uint32_t i = 0; i < count_; ++i) (void)launch(i, 1);
    }
    count_ = 0;
    lane_count_ = 0;
    used_targets_ = 0;
}

/// The round is still due: it moves when what was counted has come.
void round_cohort::settle_count(uint32_t index, const kvrt_round& call, status verdict) {
    cache& store = *context_.store;
    const device_rounds::pending_round& round = rounds_.pending[index];
    const round_plan plan = plan_of(store, *context_.retention, *round.owner, round.policy);
    bool all = true, any = false;
    for (uint32_t i = 0; i < call.count; ++i) {
        if (rounds_.origins[i].round != index) continue;
        all = all && i < call.done;
        any = any || i < call.done;
    }
    if (any) {
        round.owner->last_fence = number_;
        rounds_.counted.begin(store, *round.owner, round.policy, number_);
    }
    if (all) {
        verdict = is_counted();
    } else {
        rounds_.counted.forget(store, *round.owner);
    }
    note_outcome(plan, verdict, round.report);
    listener_.told(listener_.user, *round.owner, verdict, round.report);
}

/// Tables follow what was compacted; of lanes that were not, fresh blocks go back.
void round_cohort::settle(uint32_t index, const kvrt_round& call, status verdict) {
    cache& store = *context_.store;
    device_rounds::pending_round& round = rounds_.pending[index];
    round_plan plan = plan_of(store, *context_.retention, *round.owner, round.policy);
    plan.stays_demoted = round.stays_demoted;
    std::fill(plan.context.chosen_lanes.begin(), plan.context.chosen_lanes.end(), uint8_t{0});
    bool all = true, any = false;
    for (uint32_t i = 0; i < call.count; ++i) {
        if (rounds_.origins[i].round != index) continue;
        const uint32_t lane = rounds_.origins[i].lane;
        plan.context.keep[lane] = call.lanes[i].keep;
        plan.context.chosen_lanes[lane] = i < call.done ? 1 : 0;
        all = all && i < call.done;
        any = any || i < call.done;
        if (i < call.done) continue;
        for (uint32_t b = 0; b < store.model.blocks_for(call.lanes[i].keep); ++b) {
            const block_id fresh = call.lanes[i].target_table[b];
            if (fresh == call.lanes[i].source_table[b]) continue;
            store.blocks.take_back(fresh, number_, store.fences);
        }
    }
    if (any) move_lanes(plan, index);
    if (all) {
        verdict = KV_OK;
        rounds_.counted.forget(store, *round.owner);
        end_round(plan, round.report);
    }
    note_outcome(plan, verdict, round.report);
    listener_.told(listener_.user, *round.owner, verdict, round.report);
}

void round_cohort::move_lanes(const round_plan& plan, uint32_t index) {
    cache& store = *context_.store;
    compaction_report& report = rounds_.pending[index].report;
    const held_positions held = held_by_guards(plan);
    const bool newest = keeps_newest(plan.policy);
    const bool fresh = rounds_.pending[index].fresh;
    plan.owner.last_fence = number_;
    plan.owner.room = 0;
    const bool in_common = is_common_to_layers(plan.selection);
    if (in_common) ++rounds_.sets;
    for (const layer_geometry& layer : store.model.layers) {
        if (!plan.any_chosen(layer)) continue;
        note_history(plan, layer, report);
        ++report.layers;
        if (plan.selection == KV_SELECT_PER_LAYER) ++rounds_.sets;
        for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
            if (!plan.chosen(lane)) continue;
            const lane_move& move = begin_move(plan, lane);
            if (fresh) std::copy_n(targets_of(index, lane), move.kept_blocks, move.target);
            position_spans after =
                spans_after_round(retained_of(store, plan.owner, lane), held.begin(), held.count,
                                  plan.keep(lane), newest);
            if (store.model.lanes[lane].seals) {
                settle_sealed(plan, lane, report);
            } else {
                replace_table(plan, lane, report);
            }
            after.set = in_common || plan.selection == KV_SELECT_PER_LAYER ? rounds_.sets : 0;
            after.by_head = plan.selection == KV_SELECT_PER_HEAD;
            spans_of(store, plan.owner, lane) = after;
        }
    }
}

status round_cohort::open() {
    if (!open_) KVRT_TRY(context_.store->device.open_round(number_));
    open_ = true;
    return KV_OK;
}

status round_cohort::finish() {
    flush();
    if (!open_) return KV_OK;
    open_ = false;
    return context_.store->device.end_step(number_);
}

status compress_on_device(step_context& context, sequence& owner, const kv_policy& policy,
                          compaction_report& report) {
    struct answer {
        status verdict = KV_OK;
        compaction_report report;
    } heard;
    cache& store = *context.store;
    KVRT_TRY(store.device.poll());
    store.blocks.collect(store.fences);
    const round_listener listener = {
        &heard, [](void* user, sequence&, status verdict, const compaction_report& told) {
            *static_cast<answer*>(user) = {verdict, told};
        }};
    round_cohort cohort(context, ++store.fences.last_begun, listener);
    cohort.add(owner, policy);
    const status ended = cohort.finish();
    report = heard.report;
    return heard.verdict < 0 ? heard.verdict : ended;
}

}  // namespace kvrt
