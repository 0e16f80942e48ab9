#include "retention/compact.hpp"

#include <algorithm>
#include <limits>
#include <numeric>

#include "retention/round.hpp"
#include "retention/scores.hpp"

namespace kvrt {

status create_retention(cache& store, retention_context& context) {
    const model_geometry& model = store.model;
    uint32_t kv_heads = 0;
    uint32_t score_rows = 0;
    uint64_t weights = 0;
    uint64_t phases = 0;
    for (const lane_geometry& lane : model.lanes) {
        const layer_geometry& layer = model.layers[lane.layer];
        triattention_shape widest;
        widest.key_dim = lane.layout.keys.dim;
        widest.group = layer.query_heads / layer.kv_heads;
        widest.offset_max = 1u << 31;
        widest.maximum = true;
        kv_heads = std::max(kv_heads, lane.kv_heads);
        score_rows = std::max(score_rows, layer.query_heads);
        weights = std::max(weights, triattention_weight_count(widest, layer.rope));
        phases = std::max(phases, triattention_phase_count(widest, layer.rope));
    }
    context.slot_stride = round_up<uint64_t>(store.limits.max_tokens_per_sequence, 64);
    context.weight_stride = weights;
    host_allocator& allocator = store.allocator;
    KVRT_TRY(create_statistics(store, context.statistics));
    KVRT_TRY(context.chosen_lanes.allocate(allocator, model.lanes.size(), "round scratch"));
    KVRT_TRY(context.scores.allocate(allocator, score_rows * context.slot_stride, "round scratch",
                                     memory_contents::undefined));
    KVRT_TRY(context.totals.allocate(allocator, kv_heads * context.slot_stride, "round scratch",
                                     memory_contents::undefined));
    KVRT_TRY(context.survivors.allocate(allocator, kv_heads * context.slot_stride, "round scratch",
                                        memory_contents::undefined));
    KVRT_TRY(
        context.target_table.allocate(allocator, store.sequences.max_blocks(), "round scratch"));
    KVRT_TRY(context.recoded.allocate(allocator, kv_heads, "round scratch"));
    KVRT_TRY(context.phases.allocate(allocator, phases, "round scratch"));
    return context.weights.allocate(allocator, kv_heads * weights, "round scratch");
}

status check_policy(const cache& store, const kv_policy& policy) {
    if (policy.scorer == KV_SCORER_NONE || policy.scorer > KV_SCORER_RANDOM) {
        return fail(KV_UNSUPPORTED, "policy: scorer {} is not one of KV_SCORER_*", policy.scorer);
    }
    if (policy.selection > KV_SELECT_UNION) {
        return fail(KV_UNSUPPORTED, "policy: selection {} is not one of KV_SELECT_*",
                    policy.selection);
    }
    if (policy.budget == 0) {
        return fail(KV_INVALID, "policy: budget is 0: say how many tokens stay per layer and head");
    }
    if (policy.offset_max != 0 && !std::has_single_bit(policy.offset_max)) {
        return fail(KV_INVALID, "policy: offset_max {} is not a power of two", policy.offset_max);
    }
    if ((policy.flags & KV_POLICY_PROTECT_PROMPT) != 0 && policy.prompt_tokens == 0) {
        return fail(KV_INVALID, "policy: PROTECT_PROMPT needs prompt_tokens");
    }
    if (policy.scorer != KV_SCORER_TRIATTENTION) return KV_OK;
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        if (store.model.lanes[lane].evictable && !has_statistics(store, lane)) {
            return fail(
                KV_UNSUPPORTED,
                "layer {} has no kv_rope: TriAttention must know how keys are rotated (style "
                "KV_ROPE_NONE if they are not)",
                store.model.lanes[lane].layer);
        }
    }
    return KV_OK;
}

bool round_is_due(const cache& store, const sequence& owner) {
    const kv_policy& policy = owner.policy;
    if (policy.every == 0 || owner.tokens_since_round < policy.every) return false;
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        if (store.model.lanes[lane].evictable && owner.lanes[lane].slots > policy.budget) {
            return true;
        }
    }
    return false;
}

namespace {

uint32_t resolved_selection(const kv_policy& policy) {
    // The most recent tokens are the same in every lane that has the same tokens.
    if (policy.scorer == KV_SCORER_STREAMING) return KV_SELECT_PER_LAYER_PER_HEAD;
    return policy.selection == KV_SELECT_DEFAULT ? uint32_t{KV_SELECT_PER_LAYER_PER_HEAD}
                                                 : policy.selection;
}

/// Do two heads retain the same tokens? Only explicit positions need a look.
bool same_tokens(const slot_positions& a, const slot_positions& b) {
    if (a.slots != b.slots) return false;
    const uint32_t looked_at = std::max(a.explicit_slots, b.explicit_slots);
    for (uint32_t slot = 0; slot < looked_at; ++slot) {
        if (a.at(slot) != b.at(slot)) return false;
    }
    return true;
}

/// A set common to lanes, or to lanes and heads, needs the same tokens in all of them: earlier
/// rounds with another selection, or that left layers out, may have let them come apart.
status check_sets(const round_plan& plan) {
    if (plan.selection == KV_SELECT_PER_LAYER_PER_HEAD) return KV_OK;
    const model_geometry& model = plan.store.model;
    const bool by_head = plan.selection == KV_SELECT_PER_HEAD;
    const uint32_t lanes = static_cast<uint32_t>(model.lanes.size());
    const uint8_t* chosen = plan.context.chosen_lanes.data();
    const uint32_t first = static_cast<uint32_t>(std::find(chosen, chosen + lanes, 1) - chosen);
    for (uint32_t lane = first; lane < lanes; ++lane) {
        if (chosen[lane] == 0) continue;
        const uint32_t heads = model.lanes[lane].kv_heads;
        if (by_head && heads != model.lanes[first].kv_heads) {
            return fail(
                KV_INVALID,
                "policy: layers {} and {} have {} and {} KV heads: selection PER_HEAD needs "
                "the same number in all",
                model.lanes[first].layer, model.lanes[lane].layer, model.lanes[first].kv_heads,
                heads);
        }
        for (uint32_t head = 0; head < heads; ++head) {
            const uint32_t other = by_head ? head : 0;
            if (same_tokens(positions_of(plan.store, plan.owner, lane, head),
                            positions_of(plan.store, plan.owner, first, other))) {
                continue;
            }
            return fail(KV_INVALID,
                        "policy: layer {} head {} retains other tokens than layer {} head {}: a "
                        "selection common to them needs the same in all, so keep to one selection "
                        "per sequence",
                        model.lanes[lane].layer, head, model.lanes[first].layer, other);
        }
    }
    return KV_OK;
}

/// Chooses lanes and how many slots they keep. False when there is nothing to remove.
bool choose_lanes(round_plan& plan) {
    const uint32_t lanes = static_cast<uint32_t>(plan.store.model.lanes.size());
    const bool on_top = (plan.policy.flags & KV_POLICY_PROMPT_ON_TOP) != 0;
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        const lane_geometry& geometry = plan.store.model.lanes[lane];
        const bool skipped =
            plan.policy.scorer == KV_SCORER_KEY_NORM && geometry.layer < plan.policy.skip_layers;
        const bool chosen = geometry.evictable && !skipped && plan.owner.lanes[lane].slots != 0;
        plan.context.chosen_lanes[lane] = chosen ? 1 : 0;
        for (uint32_t head = 0; chosen && head < geometry.kv_heads; ++head) {
            plan.keep = std::max(
                plan.keep, retained_after_round(plan.owner.lanes[lane].slots, plan.policy.budget,
                                                on_top, guards_of(plan, lane, head)));
        }
    }
    bool any = false;
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        if (plan.context.chosen_lanes[lane] == 0) continue;
        if (plan.owner.lanes[lane].slots <= plan.keep) plan.context.chosen_lanes[lane] = 0;
        any = any || plan.context.chosen_lanes[lane] != 0;
    }
    return any;
}

status check_room(const round_plan& plan) {
    uint64_t needed[max_block_classes] = {};
    for (uint32_t lane = 0; lane < plan.store.model.lanes.size(); ++lane) {
        if (plan.context.chosen_lanes[lane] == 0) continue;
        if (plan.store.model.lanes[lane].seals) {
            bound_fresh_tiles(plan, lane, needed);
        } else {
            bound_fresh_blocks(plan, lane, needed);
        }
    }
    if (plan.store.blocks.can_allocate(needed, false)) return KV_OK;
    return fail(KV_AGAIN,
                "kv_compress: blocks that others read stay as they are, and tiles of other tokens "
                "end in a raw block, so {} fresh ones are needed for the survivors; {} bytes are "
                "free",
                std::accumulate(needed, needed + max_block_classes, uint64_t{0}),
                plan.store.blocks.free_bytes(false));
}

uint32_t* survivors_of(const round_plan& plan, uint32_t kv_head) {
    return plan.context.survivors.data() + kv_head * plan.context.slot_stride;
}

float* totals_of(const round_plan& plan, uint32_t kv_head) {
    return plan.context.totals.data() + kv_head * plan.context.slot_stride;
}

void move_survivors(const round_plan& plan, uint32_t lane, bool common, compaction_report& report) {
    if (plan.store.model.lanes[lane].seals) {
        compact_tiles(plan, lane, common, report);
    } else {
        compact_lane(plan, lane, common, report);
    }
}

void select_per_layer_per_head(const round_plan& plan, compaction_report& report) {
    for (uint32_t lane = 0; lane < plan.store.model.lanes.size(); ++lane) {
        if (plan.context.chosen_lanes[lane] == 0) continue;
        score_lane(plan, lane);
        plan.store.threads.for_each(plan.store.model.lanes[lane].kv_heads, [&](uint32_t head) {
            select_top(lane_scores(plan, lane, head), guards_of(plan, lane, head).candidates,
                       plan.owner.lanes[lane].slots, plan.keep, survivors_of(plan, head));
        });
        move_survivors(plan, lane, false, report);
    }
}

/// Scores of all lanes join per KV head (mean over layers) or altogether (max of all), then one
/// selection serves every lane.
void select_in_common(const round_plan& plan, compaction_report& report) {
    const bool by_head = plan.selection == KV_SELECT_PER_HEAD;
    const uint32_t lanes = static_cast<uint32_t>(plan.store.model.lanes.size());
    const uint8_t* chosen = plan.context.chosen_lanes.data();
    const uint32_t first = static_cast<uint32_t>(std::find(chosen, chosen + lanes, 1) - chosen);
    const uint32_t sets = by_head ? plan.store.model.lanes[first].kv_heads : 1;
    for (uint32_t set = 0; set < sets; ++set) {
        fill_scores(guards_of(plan, first, set).candidates,
                    by_head ? 0.0f : -std::numeric_limits<float>::infinity(), totals_of(plan, set));
    }
    for (uint32_t lane = first; lane < lanes; ++lane) {
        if (chosen[lane] == 0) continue;
        score_lane(plan, lane);
        for (uint32_t head = 0; head < plan.store.model.lanes[lane].kv_heads; ++head) {
            const slot_ranges candidates = guards_of(plan, first, by_head ? head : 0).candidates;
            const float* scores = lane_scores(plan, lane, head);
            if (by_head) {
                add_scores(candidates, scores, totals_of(plan, head));
            } else {
                raise_scores(candidates, scores, totals_of(plan, 0));
            }
        }
    }
    for (uint32_t set = 0; set < sets; ++set) {
        select_top(totals_of(plan, set), guards_of(plan, first, set).candidates,
                   plan.owner.lanes[first].slots, plan.keep, survivors_of(plan, set));
    }
    for (uint32_t lane = first; lane < lanes; ++lane) {
        if (chosen[lane] != 0) move_survivors(plan, lane, !by_head, report);
    }
}

void count_tokens(const round_plan& plan, uint64_t& tokens, returned_blocks& tables) {
    tokens = 0;
    for (uint32_t lane = 0; lane < plan.store.model.lanes.size(); ++lane) {
        tokens += uint64_t{plan.owner.lanes[lane].slots} * plan.store.model.lanes[lane].kv_heads;
    }
    tables = table_size(plan.store, plan.owner);
}

status run(round_plan& plan, compaction_report& report) {
    count_tokens(plan, report.tokens_before, report.tables_before);
    count_tokens(plan, report.tokens_after, report.tables_after);
    if (!choose_lanes(plan)) {
        report.outcome = KV_COMPRESS_NOTHING;
        plan.owner.tokens_since_round = 0;
        return KV_OK;
    }
    KVRT_TRY(check_sets(plan));
    const bool online_only = (plan.policy.flags & KV_POLICY_STATISTICS_ONLINE) != 0;
    if (plan.policy.scorer == KV_SCORER_TRIATTENTION &&
        !load_means(plan.store, plan.context.statistics, plan.store.sequences.index(plan.owner),
                    online_only, plan.context.chosen_lanes.data())) {
        report.outcome = KV_COMPRESS_NO_STATISTICS;
        return KV_OK;
    }
    KVRT_TRY(check_room(plan));

    if (plan.selection == KV_SELECT_PER_LAYER_PER_HEAD) {
        select_per_layer_per_head(plan, report);
    } else {
        select_in_common(plan, report);
    }
    plan.owner.tokens_since_round = 0;
    plan.owner.room = 0;
    ++plan.owner.rounds_run;
    ++plan.owner.compactions;
    report.outcome = KV_COMPRESS_DONE;
    count_tokens(plan, report.tokens_after, report.tables_after);
    return KV_OK;
}

}  // namespace

status compact_sequence(cache& store, retention_context& context, sequence& owner,
                        const kv_policy& policy, compaction_report& report) {
    round_plan plan{store, context, owner, policy};
    plan.selection = resolved_selection(policy);
    const status verdict = run(plan, report);
    if (verdict == KV_OK && report.outcome == KV_COMPRESS_DONE) {
        ++context.compactions;
        context.returned.blocks += report.returned.blocks;
        context.returned.bytes += report.returned.bytes;
    } else {
        ++context.compactions_skipped;
    }
    return verdict;
}

}  // namespace kvrt
