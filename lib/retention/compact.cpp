#include "retention/compact.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "retention/expected_attention.hpp"
#include "retention/lagkv.hpp"
#include "retention/scoring.hpp"
#include "retention/sketch.hpp"
#include "retention/unit_keys.hpp"

namespace kvrt {

namespace {

status create_scratch(cache& store, uint32_t kv_heads, retention_context& context) {
    uint32_t key_dim = 0, widest = 0;
    for (const lane_geometry& lane : store.model.lanes) {
        key_dim = std::max(key_dim, lane.layout.keys.dim);
        widest = std::max({widest, lane.layout.keys.dim, lane.layout.values.dim});
    }
    constexpr const char* what = "round scratch";
    constexpr memory_contents undefined = memory_contents::undefined;
    host_allocator& allocator = store.allocator;
    scoring_scratch& scratch = context.scratch;
    const uint32_t slots = store.limits.max_tokens_per_sequence;
    scratch.unit_sums_stride = uint64_t{ceil_divide(slots, slots_per_part)} * key_dim;
    scratch.lag_stride = round_up<uint64_t>(lag_scratch_bytes({}), 64);
    KVRT_TRY(scratch.measures.allocate(allocator, kv_heads * context.slot_stride, what, undefined));
    KVRT_TRY(scratch.ranges.allocate(allocator, kv_heads * context.slot_stride, what, undefined));
    KVRT_TRY(scratch.unit_sums.allocate(allocator, kv_heads * scratch.unit_sums_stride, what,
                                        undefined));
    KVRT_TRY(scratch.sketch.allocate(allocator, sketch_count(widest), what, undefined));
    KVRT_TRY(scratch.lag.allocate(allocator, kv_heads * scratch.lag_stride, what, undefined));
    KVRT_TRY(scratch.shares.allocate(allocator, kv_heads, what));
    KVRT_TRY(scratch.budgets.allocate(allocator, store.model.layers.size(), what));
    if (store.limits.max_observed_sequences == 0) return KV_OK;
    KVRT_TRY(scratch.unlike.allocate(allocator, kv_heads * context.slot_stride, what, undefined));
    KVRT_TRY(scratch.units.allocate(allocator, unit_copy_count(slots, key_dim), what, undefined));
    KVRT_TRY(scratch.latest.allocate(allocator, context.slot_stride, what, undefined));
    return scratch.latest_cosine.allocate(allocator, context.slot_stride, what, undefined);
}

}  // namespace

status create_retention(cache& store, retention_context& context) {
    const model_geometry& model = store.model;
    uint32_t kv_heads = 0;
    uint32_t score_rows = 0;
    uint64_t weights = 0;
    uint64_t phases = 0;
    uint32_t lanes = 0;
    for (const lane_geometry& lane : model.lanes) {
        const layer_geometry& layer = model.layers[lane.layer];
        triattention_shape widest;
        widest.key_dim = lane.layout.keys.dim;
        widest.group = layer.group();
        widest.offset_max = 1u << 31;
        widest.maximum = true;
        kv_heads = std::max(kv_heads, layer.kv_heads);
        lanes = std::max(lanes, layer.lanes);
        score_rows = std::max(score_rows, layer.query_heads);
        const expected_shape expected{.key_dim = widest.key_dim, .group = widest.group};
        weights = std::max({weights, triattention_weight_count(widest, layer.rope),
                            expected_weight_count(expected, layer.rope, true)});
        phases = std::max({phases, triattention_phase_count(widest, layer.rope),
                           expected_phase_count(layer.rope)});
    }
    context.slot_stride = round_up<uint64_t>(store.limits.max_tokens_per_sequence, 64);
    context.weight_stride = weights;
    host_allocator& allocator = store.allocator;
    KVRT_TRY(create_statistics(store, context.statistics));
    KVRT_TRY(create_observations(store, store.limits.max_observed_sequences, context.observations));
    KVRT_TRY(context.chosen_lanes.allocate(allocator, model.lanes.size(), "round scratch"));
    KVRT_TRY(context.keep.allocate(allocator, model.lanes.size(), "round scratch"));
    KVRT_TRY(context.scores.allocate(allocator, score_rows * context.slot_stride, "round scratch",
                                     memory_contents::undefined));
    KVRT_TRY(context.totals.allocate(allocator, kv_heads * context.slot_stride, "round scratch",
                                     memory_contents::undefined));
    KVRT_TRY(context.survivors.allocate(allocator, kv_heads * context.slot_stride, "round scratch",
                                        memory_contents::undefined));
    KVRT_TRY(context.moves.allocate(allocator, lanes, "round scratch"));
    KVRT_TRY(context.target_tables.allocate(allocator,
                                            uint64_t{lanes} * store.sequences.max_blocks(),
                                            "round scratch", memory_contents::undefined));
    KVRT_TRY(context.recoded.allocate(allocator, kv_heads, "round scratch"));
    KVRT_TRY(context.phases.allocate(allocator, phases, "round scratch"));
    KVRT_TRY(context.weights.allocate(allocator, kv_heads * weights, "round scratch"));
    KVRT_TRY(create_history(store, context.history));
    return create_scratch(store, kv_heads, context);
}

namespace {

/// Do two heads retain the same tokens? Only explicit positions need a look.
bool same_tokens(const slot_positions& a, const slot_positions& b) {
    if (a.slots != b.slots) return false;
    const uint32_t looked_at = std::max(a.explicit_slots, b.explicit_slots);
    for (uint32_t slot = 0; slot < looked_at; ++slot) {
        if (a.at(slot) != b.at(slot)) return false;
    }
    return true;
}

/// The first KV head of a chosen lane whose survivors are those of `set`; a place behind all lanes
/// where there is none.
head_place first_of_set(const round_plan& plan, uint32_t set) {
    const host_array<lane_geometry>& lanes = plan.store.model.lanes;
    for (uint32_t lane = 0; lane < lanes.size(); ++lane) {
        const lane_geometry& geometry = lanes[lane];
        if (!plan.chosen(lane)) continue;
        if (plan.selection == KV_SELECT_UNION) return {lane, 0};
        if (set >= geometry.first_head && set - geometry.first_head < geometry.kv_heads) {
            return {lane, set - geometry.first_head};
        }
    }
    return {static_cast<uint32_t>(lanes.size()), 0};
}

/// A set common to lanes, or to lanes and heads, needs the same tokens in all of them: earlier
/// rounds with another selection, or that left layers out, may have let them come apart.
status check_sets(const round_plan& plan) {
    if (plan.selection == KV_SELECT_PER_LAYER_PER_HEAD) return KV_OK;
    const model_geometry& model = plan.store.model;
    const uint32_t lanes = static_cast<uint32_t>(model.lanes.size());
    const uint8_t* chosen = plan.context.chosen_lanes.data();
    const uint32_t first = static_cast<uint32_t>(std::find(chosen, chosen + lanes, 1) - chosen);
    const uint32_t first_layer = model.lanes[first].layer;
    const bool by_layer = plan.selection == KV_SELECT_PER_LAYER;
    for (uint32_t lane = by_layer ? 0 : first; lane < lanes; ++lane) {
        const lane_geometry& geometry = model.lanes[lane];
        // Of a layer all heads' scores join, also of those that have little enough.
        const bool joins =
            chosen[lane] != 0 || (by_layer && plan.any_chosen(model.layers[geometry.layer]));
        if (!joins) continue;
        const uint32_t heads = model.layers[geometry.layer].kv_heads;
        if (plan.selection == KV_SELECT_PER_HEAD && heads != model.layers[first_layer].kv_heads) {
            return fail(
                KV_INVALID,
                "policy: layers {} and {} have {} and {} KV heads: selection PER_HEAD needs "
                "the same number in all",
                first_layer, geometry.layer, model.layers[first_layer].kv_heads, heads);
        }
        for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
            const head_place other = by_layer
                                         ? head_place{model.layers[geometry.layer].first_lane, 0}
                                         : first_of_set(plan, set_of(plan, lane, head));
            if (same_tokens(positions_of(plan.store, plan.owner, lane, head),
                            positions_of(plan.store, plan.owner, other.lane, other.head))) {
                continue;
            }
            const lane_geometry& others = model.lanes[other.lane];
            return fail(KV_INVALID,
                        "policy: layer {} head {} retains other tokens than layer {} head {}: a "
                        "selection common to them needs the same in all, so keep to one selection "
                        "per sequence",
                        geometry.layer, geometry.first_head + head, others.layer,
                        others.first_head + other.head);
        }
    }
    return KV_OK;
}

void bound_fresh(const round_plan& plan, uint64_t* needed) {
    for (uint32_t lane = 0; lane < plan.store.model.lanes.size(); ++lane) {
        if (!plan.chosen(lane)) continue;
        if (plan.store.model.lanes[lane].seals) {
            bound_fresh_tiles(plan, lane, needed);
        } else {
            bound_fresh_blocks(plan, lane, needed);
        }
    }
}

status check_room(round_plan& plan) {
    for (const bool stays_demoted : {false, true}) {
        uint64_t needed[max_block_classes] = {};
        plan.stays_demoted = stays_demoted;
        bound_fresh(plan, needed);
        if (plan.store.blocks.can_allocate(needed, false)) return KV_OK;
    }
    uint64_t needed[max_block_classes] = {};
    bound_fresh(plan, needed);
    return fail(KV_AGAIN,
                "kv_compress: blocks that others read stay as they are, and tiles of other tokens "
                "end in a raw block, so {} fresh ones are needed for the survivors; {} bytes are "
                "free",
                std::accumulate(needed, needed + max_block_classes, uint64_t{0}),
                plan.store.blocks.free_bytes(false));
}

/// What a KV head is about to lose of the attention that was observed.
double lost_attention(const round_plan& plan, uint32_t lane, uint32_t head) {
    const observation_place* place = place_of(plan.context.observations, plan.owner);
    if (place == nullptr || place->rules.kind == observed_kind::given) return 0.0;
    if (plan.store.on_device()) return std::numeric_limits<double>::quiet_NaN();  // it has the sums
    const uint32_t slots = plan.owner.lanes[lane].slots;
    float* sums = measures_of(plan, lane, head);
    read_observations(plan.context.observations, plan.owner, lane, head, slots, sums);
    double all = 0.0, kept = 0.0;
    for (uint32_t slot = 0; slot < slots; ++slot) all += double{sums[slot]};
    const uint32_t* survivors = survivors_of(plan, lane, head);
    for (uint32_t i = 0; i < plan.keep(lane); ++i) kept += double{sums[survivors[i]]};
    return all > 0.0 ? std::max(0.0, 1.0 - kept / all) : 0.0;
}

}  // namespace

void note_history(const round_plan& plan, const layer_geometry& layer, compaction_report& report) {
    for_each_head(plan, layer, [&](uint32_t lane, uint32_t head) {
        head_history& history = history_of(plan.store, plan.context, plan.owner, lane, head);
        ++history.rounds;
        history.tokens_removed += plan.owner.lanes[lane].slots - plan.keep(lane);
        history.lost = lost_attention(plan, lane, head);
        history.lost_sum += history.lost;
    });
    for (uint32_t kv_head = 0; kv_head < layer.kv_heads; ++kv_head) {
        const head_place place = layer.place_of(kv_head);
        if (!plan.chosen(place.lane)) continue;
        report.lost +=
            history_of(plan.store, plan.context, plan.owner, place.lane, place.head).lost;
        ++report.heads_lost;
    }
}

namespace {

void move_survivors(const round_plan& plan, const layer_geometry& layer,
                    compaction_report& report) {
    note_history(plan, layer, report);
    if (plan.store.model.lanes[layer.first_lane].seals) {
        compact_tiles(plan, layer, report);
    } else {
        compact_lanes(plan, layer, report);
    }
    ++report.layers;
}

/// Each layer by itself: its heads have sets of their own, or one for all of them.
void select_by_layer(const round_plan& plan, compaction_report& report) {
    for (const layer_geometry& layer : plan.store.model.layers) {
        if (!plan.any_chosen(layer)) continue;
        score_layer(plan, layer);
        adjust_scores(plan, layer);
        if (allocates_by_scores(plan)) allocate_layer(plan, layer);
        const auto select = [&](uint32_t lane, uint32_t head) {
            select_top(lane_scores(plan, lane, head), guards_of(plan, lane, head).candidates,
                       plan.owner.lanes[lane].slots, plan.keep(lane),
                       survivors_of(plan, lane, head));
        };
        if (plan.selection == KV_SELECT_PER_LAYER) {
            select(layer.first_lane, 0);
        } else {
            for_each_head(plan, layer, select);
        }
        if (plan.any_chosen(layer)) move_survivors(plan, layer, report);
    }
}

/// Adds the scores of a layer's heads to those of their sets.
void join_scores(const round_plan& plan, const layer_geometry& layer) {
    for (uint32_t kv_head = 0; kv_head < layer.kv_heads; ++kv_head) {
        const head_place place = layer.place_of(kv_head);
        if (!plan.chosen(place.lane)) continue;
        const slot_ranges candidates = guards_of(plan, place.lane, place.head).candidates;
        const float* scores = lane_scores(plan, place.lane, place.head);
        float* totals = totals_of(plan, set_of(plan, place.lane, place.head));
        if (plan.selection == KV_SELECT_PER_HEAD) {
            add_scores(candidates, scores, totals);
        } else {
            raise_scores(candidates, scores, totals);
        }
    }
}

/// Scores of all lanes join per KV head (mean over layers) or altogether (max of all), then one
/// selection serves every lane.
void select_in_common(const round_plan& plan, compaction_report& report) {
    const model_geometry& model = plan.store.model;
    const bool by_head = plan.selection == KV_SELECT_PER_HEAD;
    const uint8_t* chosen = plan.context.chosen_lanes.data();
    const uint32_t first =
        static_cast<uint32_t>(std::find(chosen, chosen + model.lanes.size(), 1) - chosen);
    const uint32_t sets = by_head ? model.layers[model.lanes[first].layer].kv_heads : 1;
    const auto for_each_set = [&](const auto& body) {
        for (uint32_t set = 0; set < sets; ++set) {
            const head_place place = first_of_set(plan, set);
            if (place.lane != model.lanes.size()) body(set, place);
        }
    };
    for_each_set([&](uint32_t set, const head_place& place) {
        fill_scores(guards_of(plan, place.lane, place.head).candidates,
                    by_head ? 0.0f : -std::numeric_limits<float>::infinity(), totals_of(plan, set));
        begin_ranges(plan, place);
    });
    for (const layer_geometry& layer : model.layers) {
        if (!plan.any_chosen(layer)) continue;
        score_layer(plan, layer);
        join_scores(plan, layer);
        note_ranges(plan, layer);
    }
    for_each_set([&](uint32_t set, const head_place& place) {
        adjust_totals(plan, place);
        select_top(totals_of(plan, set), guards_of(plan, place.lane, place.head).candidates,
                   plan.owner.lanes[place.lane].slots, plan.keep(place.lane),
                   survivors_of(plan, place.lane, place.head));
    });
    for (const layer_geometry& layer : model.layers) {
        if (plan.any_chosen(layer)) move_survivors(plan, layer, report);
    }
}

}  // namespace

void count_tokens(const round_plan& plan, uint64_t& tokens, returned_blocks& tables) {
    tokens = 0;
    for (uint32_t lane = 0; lane < plan.store.model.lanes.size(); ++lane) {
        tokens += uint64_t{plan.owner.lanes[lane].slots} * plan.store.model.lanes[lane].kv_heads;
    }
    tables = table_size(plan.store, plan.owner);
}

void end_round(const round_plan& plan, compaction_report& report) {
    plan.owner.tokens_since_round = 0;
    plan.owner.room = 0;
    ++plan.owner.rounds_run;
    ++plan.owner.compactions;
    report.outcome = KV_COMPRESS_DONE;
    report.demoted = seal_blocks(plan.store, plan.owner);
    count_tokens(plan, report.tokens_after, report.tables_after);
}

/// What selection builds on, whoever chose the lanes.
static status check_keeps(const round_plan& plan) {
    for (uint32_t lane = 0; lane < plan.store.model.lanes.size(); ++lane) {
        if (!plan.chosen(lane)) continue;
        const lane_geometry& geometry = plan.store.model.lanes[lane];
        const uint32_t slots = plan.owner.lanes[lane].slots, keep = plan.keep(lane);
        uint32_t held = 0;
        for (uint32_t head = 0; head < geometry.kv_heads; ++head) {
            held = std::max(held, guards_of(plan, lane, head).protected_slots);
        }
        const bool removes = keep < slots || allocates_by_scores(plan);
        if (removes && keep >= held && geometry.evictable) continue;
        return fail(KV_INTERNAL, "layer {} head {}: {} of {} slots are to stay, guards hold {}",
                    geometry.layer, geometry.first_head, keep, slots, held);
    }
    return KV_OK;
}

bool has_observations(const round_plan& plan) {
    const observation_rules rules = rules_of(plan.policy);
    if (rules.kind == observed_kind::nothing) return true;
    const observation_store& observations = plan.context.observations;
    const observation_place* place = place_of(observations, plan.owner);
    if (place == nullptr || !(place->rules == rules)) return false;
    for (uint32_t lane = 0; lane < plan.store.model.lanes.size(); ++lane) {
        if (!plan.chosen(lane)) continue;
        if (observed_queries(observations, plan.owner, lane) == 0) return false;
    }
    return true;
}

namespace {

status run(round_plan& plan, compaction_report& report) {
    KVRT_TRY(check_keeps(plan));
    KVRT_TRY(check_sets(plan));
    if (!has_observations(plan)) {
        report.outcome = KV_COMPRESS_NO_OBSERVATIONS;
        return KV_OK;
    }
    const bool online_only = (plan.policy.flags & KV_POLICY_STATISTICS_ONLINE) != 0;
    if (find_scorer(plan.policy.scorer)->query_statistics &&
        !load_moments(plan.store, plan.context.statistics, plan.store.sequences.index(plan.owner),
                      online_only, plan.context.chosen_lanes.data())) {
        report.outcome = KV_COMPRESS_NO_STATISTICS;
        return KV_OK;
    }
    KVRT_TRY(check_room(plan));

    if (plan.selection == KV_SELECT_PER_HEAD || plan.selection == KV_SELECT_UNION) {
        select_in_common(plan, report);
    } else {
        select_by_layer(plan, report);
    }
    if (report.layers == 0) {  // all that there is reaches the threshold
        plan.owner.tokens_since_round = 0;
        return KV_OK;
    }
    end_round(plan, report);
    return KV_OK;
}

/// Tokens that came after the host's scores have none, and stay.
uint64_t newest_without_scores(const round_plan& plan) {
    const observation_place* place = place_of(plan.context.observations, plan.owner);
    if (plan.policy.scorer != KV_SCORER_HOST || place == nullptr ||
        place->rules.kind != observed_kind::given) {
        return 0;
    }
    uint64_t newest = 0;
    for (uint32_t lane = 0; lane < plan.store.model.lanes.size(); ++lane) {
        const lane_geometry& geometry = plan.store.model.lanes[lane];
        if (!geometry.evictable || geometry.layer < plan.policy.skip_layers ||
            observed_queries(plan.context.observations, plan.owner, lane) == 0) {
            continue;
        }
        newest = std::max(newest, positions_behind(plan.context.observations, plan.owner, lane));
    }
    return newest;
}

}  // namespace

float* totals_of(const round_plan& plan, uint32_t set) {
    return plan.context.totals.data() + set * plan.context.slot_stride;
}

round_plan plan_of(cache& store, retention_context& context, sequence& owner,
                   const kv_policy& policy) {
    round_plan plan{store, context, owner, policy};
    plan.selection = resolved_selection(policy);
    plan.recent = std::max({uint64_t{policy.recent}, newest_without_scores(plan),
                            unseen_tokens(context.observations, owner, policy)});
    return plan;
}

void begin_round(const round_plan& plan, compaction_report& report) {
    count_tokens(plan, report.tokens_before, report.tables_before);
    count_tokens(plan, report.tokens_after, report.tables_after);
}

void note_outcome(const round_plan& plan, status verdict, const compaction_report& report) {
    plan.context.returned.blocks += report.returned.blocks;
    plan.context.returned.bytes += report.returned.bytes;
    if (verdict == KV_OK && report.outcome == KV_COMPRESS_DONE) {
        ++plan.context.compactions;
    } else {
        ++plan.context.compactions_skipped;
    }
    plan.owner.last_round = verdict;
    plan.owner.last_outcome = verdict < 0 ? 0 : report.outcome;
}

void find_nothing(const round_plan& plan, compaction_report& report) {
    report.outcome = KV_COMPRESS_NOTHING;
    plan.owner.tokens_since_round = 0;
}

status run_round(round_plan& plan, compaction_report& report) {
    begin_round(plan, report);
    const status verdict = run(plan, report);
    note_outcome(plan, verdict, report);
    return verdict;
}

status compact_sequence(cache& store, retention_context& context, sequence& owner,
                        const kv_policy& policy, compaction_report& report) {
    KVRT_TRY(refuse_on_device(store, "a round that the host runs"));
    round_plan plan = plan_of(store, context, owner, policy);
    if (choose_lanes(plan)) return run_round(plan, report);
    begin_round(plan, report);
    find_nothing(plan, report);
    note_outcome(plan, KV_OK, report);
    return KV_OK;
}

}  // namespace kvrt
