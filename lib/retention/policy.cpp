// What a policy may say, and when it wants a round.
#include <bit>
#include <cmath>

#include "retention/round.hpp"
#include "retention/scorers.hpp"
#include "retention/transform.hpp"

namespace kvrt {

namespace {

constexpr uint32_t most_segments = 4096;

status check_share(const char* name, float value) {
    if (value >= 0.0f && value <= 1.0f) return KV_OK;  // not NaN, either
    return fail(KV_INVALID, "policy: {} is {}: 0 to 1", name, value);
}

const char* allocator_name(uint32_t allocator) {
    constexpr const char* names[] = {"UNIFORM", "UNIFORM", "PYRAMID", "ADAPTIVE", "THRESHOLD"};
    return names[allocator];
}

status check_allocator(const cache& store, const kv_policy& policy) {
    if (policy.allocator > KV_ALLOCATE_THRESHOLD) {
        return fail(KV_UNSUPPORTED, "policy: allocator {} is not one of KV_ALLOCATE_*",
                    policy.allocator);
    }
    if (policy.allocator == KV_ALLOCATE_DEFAULT || policy.allocator == KV_ALLOCATE_UNIFORM) {
        return KV_OK;
    }
    if (policy.selection == KV_SELECT_PER_HEAD || policy.selection == KV_SELECT_UNION) {
        return fail(KV_INVALID,
                    "policy: one set of tokens for all layers has one size: another allocator than "
                    "UNIFORM wants selection PER_LAYER_PER_HEAD or PER_LAYER");
    }
    if (policy.allocator == KV_ALLOCATE_THRESHOLD) {
        const bool draws = (policy.flags & KV_POLICY_SAMPLE) != 0;
        if (draws || find_scorer(policy.scorer)->samples_always) {
            return fail(KV_INVALID,
                        "policy: allocator THRESHOLD compares scores, which draws are "
                        "not: no SAMPLE or VASE_ATTENTION");
        }
        if (!std::isnan(policy.threshold)) return KV_OK;
        return fail(KV_INVALID, "policy: threshold is not a number");
    }
    if (policy.allocator != KV_ALLOCATE_ADAPTIVE) {
        if (policy.steepness <= 4096) return KV_OK;
        return fail(KV_INVALID, "policy: steepness {}: at most 4096", policy.steepness);
    }
    if (policy.selection == KV_SELECT_PER_LAYER ||
        resolved_selection(policy) == KV_SELECT_PER_LAYER) {
        return fail(KV_INVALID,
                    "policy: heads with one set per layer, {}, have nothing to compete for: choose "
                    "selection PER_LAYER_PER_HEAD",
                    policy.selection == KV_SELECT_DEFAULT ? "as this scorer has them by default"
                                                          : "as selection PER_LAYER says");
    }
    for (const layer_geometry& layer : store.model.layers) {
        const lane_geometry& lane = store.model.lanes[layer.first_lane];
        if (!layer.stores || !lane.evictable || layer.lanes == layer.kv_heads) continue;
        return fail(KV_UNSUPPORTED,
                    "policy: allocator ADAPTIVE lets heads keep different numbers: layer {} wants "
                    "KV_LAYER_LANE_PER_HEAD",
                    lane.layer);
    }
    return KV_OK;
}

status check_scoring(const kv_policy& policy, const scorer_description& scorer) {
    if (policy.pool_width > widest_pool || (policy.pool_width != 0 && policy.pool_width % 2 == 0)) {
        return fail(KV_INVALID, "policy: pool_width {}: odd, at most {}", policy.pool_width,
                    widest_pool);
    }
    KVRT_TRY(check_share("decay", policy.decay));
    KVRT_TRY(check_share("redundancy", policy.redundancy));
    KVRT_TRY(check_share("similarity", policy.similarity));
    KVRT_TRY(check_share("floor_share", policy.floor_share));
    KVRT_TRY(check_share("prior_share", policy.prior_share));
    if ((policy.flags & KV_POLICY_SAMPLE) != 0 && !scorer.can_sample) {
        return fail(KV_INVALID,
                    "policy: SAMPLE draws with probabilities, which scores of {} are not",
                    scorer.name);
    }
    if (policy.segments != 0 && policy.prompt_tokens == 0) {
        return fail(KV_INVALID, "policy: segments are parts of the prompt: say prompt_tokens");
    }
    if ((policy.segments != 0) != (policy.segment_quota != 0)) {
        return fail(KV_INVALID,
                    "policy: {} segments with a segment_quota of {}: set both, or neither",
                    policy.segments, policy.segment_quota);
    }
    if (policy.segments > most_segments) {
        return fail(KV_INVALID, "policy: {} segments: at most {}", policy.segments, most_segments);
    }
    return KV_OK;
}

/// A field or flag that only some scorers and allocators read.
struct special_field {
    const char* name;
    bool set, read;
    const char* readers;
};

/// What nothing reads was meant to do something: not what its author would get.
status check_special_fields(const kv_policy& policy, const scorer_description& scorer) {
    const auto flag = [&](uint32_t which) { return (policy.flags & which) != 0; };
    const bool has_scores = scorer.observes != observed_kind::nothing;
    const bool observes = has_scores && scorer.observes != observed_kind::given;
    const bool looks_ahead =
        policy.scorer == KV_SCORER_TRIATTENTION || policy.scorer == KV_SCORER_BLEND;
    const bool removes_similar = policy.scorer == KV_SCORER_RKV;
    const special_field fields[] = {
        {"window", policy.window != 0, scorer.window != 0,
         "SCISSORHANDS, SNAPKV, RKV and VASE_ATTENTION"},
        {"observe_every", policy.observe_every != 0, observes, "scorers by attention"},
        {"decay", policy.decay != 0.0f, scorer.observes == observed_kind::mass, "H2O and BLEND"},
        {"pool_width", policy.pool_width != 0, has_scores, "scorers by attention, and HOST"},
        {"POOL_MAX", flag(KV_POLICY_POOL_MAX), has_scores, "scorers by attention, and HOST"},
        {"prior_share", policy.prior_share != 0.0f, scorer.prior_share != 0.0f, "BLEND"},
        {"redundancy", policy.redundancy != 0.0f, scorer.redundancy != 0.0f, "RKV and BLEND"},
        {"EXACT_REDUNDANCY", flag(KV_POLICY_EXACT_REDUNDANCY), removes_similar, "RKV"},
        {"similarity", policy.similarity != 0.0f,
         removes_similar && flag(KV_POLICY_EXACT_REDUNDANCY), "RKV with EXACT_REDUNDANCY"},
        {"offset_max", policy.offset_max != 0, looks_ahead, "TRIATTENTION and BLEND"},
        {"OFFSETS_MAX", flag(KV_POLICY_OFFSETS_MAX), looks_ahead, "TRIATTENTION and BLEND"},
        {"STATISTICS_ONLINE", flag(KV_POLICY_STATISTICS_ONLINE), scorer.query_statistics,
         "TRIATTENTION, EXPECTED_ATTENTION and BLEND"},
        {"floor_share", policy.floor_share != 0.0f, policy.allocator == KV_ALLOCATE_ADAPTIVE,
         "allocator ADAPTIVE"},
        {"threshold", policy.threshold != 0.0f, policy.allocator == KV_ALLOCATE_THRESHOLD,
         "allocator THRESHOLD"},
        {"steepness", policy.steepness != 0, policy.allocator == KV_ALLOCATE_PYRAMID,
         "allocator PYRAMID"},
    };
    for (const special_field& field : fields) {
        if (!field.set || field.read) continue;
        return fail(KV_INVALID,
                    "policy: {} is of {} alone: "
                    "with scorer {} and allocator {} leave it out",
                    field.name, field.readers, scorer.name, allocator_name(policy.allocator));
    }
    return KV_OK;
}

/// A policy that could never remove a token is a mistake that nobody would notice.
status check_layers(const cache& store, const kv_policy& policy) {
    for (uint32_t layer = 0; layer < store.model.layers.size(); ++layer) {
        if (takes_part(store, policy, layer)) return KV_OK;
    }
    return fail(KV_INVALID,
                "policy: there is no layer for it: of {} layers the first {} are left whole "
                "(skip_layers), and the others have a window, or share another layer's cache",
                store.model.layers.size(),
                std::min<std::size_t>(policy.skip_layers, store.model.layers.size()));
}

/// Where heads of several layers share a set, those layers have the same number of heads.
status check_heads(const cache& store, const kv_policy& policy) {
    if (resolved_selection(policy) != KV_SELECT_PER_HEAD) return KV_OK;
    const layer_geometry* first = nullptr;
    for (uint32_t i = 0; i < store.model.layers.size(); ++i) {
        const layer_geometry& layer = store.model.layers[i];
        if (!takes_part(store, policy, i)) continue;
        if (first == nullptr) first = &layer;
        if (layer.kv_heads == first->kv_heads) continue;
        return fail(KV_INVALID,
                    "policy: layers {} and {} have {} and {} KV heads: selection PER_HEAD needs "
                    "the same number in all",
                    store.model.lanes[first->first_lane].layer, i, first->kv_heads, layer.kv_heads);
    }
    return KV_OK;
}

}  // namespace

uint32_t resolved_selection(const kv_policy& policy) {
    // The most recent tokens are the same in every lane that has the same tokens.
    if (policy.scorer == KV_SCORER_STREAMING) return KV_SELECT_PER_LAYER_PER_HEAD;
    if (policy.selection != KV_SELECT_DEFAULT) return policy.selection;
    return find_scorer(policy.scorer)->one_set_per_layer ? uint32_t{KV_SELECT_PER_LAYER}
                                                         : uint32_t{KV_SELECT_PER_LAYER_PER_HEAD};
}

status check_policy(const cache& store, const kv_policy& policy) {
    const scorer_description* scorer = find_scorer(policy.scorer);
    if (scorer == nullptr) {
        return fail(KV_UNSUPPORTED, "policy: scorer {} is not one of KV_SCORER_*", policy.scorer);
    }
    if (policy.selection > KV_SELECT_PER_LAYER) {
        return fail(KV_UNSUPPORTED, "policy: selection {} is not one of KV_SELECT_*",
                    policy.selection);
    }
    if (policy.budget == 0) {
        return fail(KV_INVALID, "policy: budget is 0: say how many tokens stay per layer and head");
    }
    if (policy.offset_max != 0 && !std::has_single_bit(policy.offset_max)) {
        return fail(KV_INVALID, "policy: offset_max {} is not a power of two", policy.offset_max);
    }
    constexpr uint32_t prompt_flags = KV_POLICY_PROTECT_PROMPT | KV_POLICY_AT_PROMPT_END;
    if ((policy.flags & prompt_flags) != 0 && policy.prompt_tokens == 0) {
        return fail(KV_INVALID, "policy: PROTECT_PROMPT and AT_PROMPT_END need prompt_tokens");
    }
    if ((policy.flags & KV_POLICY_PROMPT_ON_TOP) != 0 &&
        (policy.flags & KV_POLICY_PROTECT_PROMPT) == 0) {
        return fail(KV_INVALID,
                    "policy: PROMPT_ON_TOP is of a prompt that is protected: set PROTECT_PROMPT");
    }
    KVRT_TRY(check_layers(store, policy));
    KVRT_TRY(check_allocator(store, policy));
    KVRT_TRY(check_heads(store, policy));
    KVRT_TRY(check_scoring(policy, *scorer));
    KVRT_TRY(check_special_fields(policy, *scorer));
    if (!scorer->query_statistics) return KV_OK;
    for (const lane_geometry& lane : store.model.lanes) {
        if (lane.evictable && store.model.layers[lane.layer].cache_positions) {
            return fail(KV_UNSUPPORTED,
                        "layer {} has KV_LAYER_CACHE_POSITIONS: {} scores keys where they stand in "
                        "the text: choose a scorer by attention, by keys and values, STREAMING or "
                        "HOST",
                        lane.layer, scorer->name);
        }
        if (lane.evictable && !has_statistics(store, lane.layer)) {
            return fail(KV_UNSUPPORTED,
                        "layer {} has no kv_rope: {} must know how keys are rotated (style "
                        "KV_ROPE_NONE if they are not)",
                        lane.layer, scorer->name);
        }
    }
    return KV_OK;
}

uint64_t tokens_after_round(const kv_policy& policy) {
    const bool protects = (policy.flags & KV_POLICY_PROTECT_PROMPT) != 0;
    const uint64_t prompt = protects ? policy.prompt_tokens : 0;
    const bool on_top = (policy.flags & KV_POLICY_PROMPT_ON_TOP) != 0;
    const uint64_t guarded = std::max<uint64_t>(prompt, policy.sinks) + policy.recent;
    return std::max(policy.budget + (on_top ? prompt : 0), guarded);
}

bool takes_part(const cache& store, const kv_policy& policy, uint32_t layer) {
    const layer_geometry& geometry = store.model.layers[layer];
    return geometry.stores && layer >= policy.skip_layers &&
           store.model.lanes[geometry.first_lane].evictable;
}

/// Is more retained than rounds leave, and `slack`? By the mean of the layers, and in each by the
/// mean of its lanes: allocators give them different numbers of one sum. What keeps as much as
/// reaches a threshold has no sum to share: the lane with the most counts.
static bool exceeds_slack(const round_plan& plan) {
    const model_geometry& model = plan.store.model;
    double retained = 0.0, layers = 0.0;
    uint64_t largest = 0;
    for (uint32_t i = 0; i < model.layers.size(); ++i) {
        if (!takes_part(plan.store, plan.policy, i)) continue;
        const layer_geometry& layer = model.layers[i];
        uint64_t slots = 0;
        for (uint32_t lane = layer.first_lane; lane < layer.end_lane(); ++lane) {
            slots += plan.owner.lanes[lane].slots;
            largest = std::max<uint64_t>(largest, plan.owner.lanes[lane].slots);
        }
        retained += static_cast<double>(slots) / layer.lanes;
        layers += 1.0;
    }
    if (plan.policy.allocator == KV_ALLOCATE_THRESHOLD) {
        retained = layers * static_cast<double>(largest);
    }
    const double slack = static_cast<double>(plan.policy.slack);
    if (retained <= layers * (plan.policy.budget + slack)) return false;
    uint32_t left = 0;
    for (uint32_t lane = 0; lane < model.lanes.size(); ++lane) {
        if (!takes_part(plan.store, plan.policy, model.lanes[lane].layer)) continue;
        left = std::max(left, budget_of(plan, lane, plan.policy.budget));
    }
    return retained > layers * (left + slack);
}

bool round_is_due(cache& store, retention_context& context, sequence& owner, uint64_t accepted) {
    const kv_policy& policy = owner.policy;
    const bool by_count = policy.every != 0 && owner.tokens_since_round >= policy.every;
    const bool at_prompt_end =
        (policy.flags & KV_POLICY_AT_PROMPT_END) != 0 &&
        owner.next_position >= policy.prompt_tokens &&
        (owner.prompt_was_in || owner.next_position - accepted < policy.prompt_tokens);
    const bool any_number = policy.allocator == KV_ALLOCATE_THRESHOLD;
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        if (!store.model.lanes[lane].evictable) continue;
        const uint64_t slots = owner.lanes[lane].slots;
        const bool above = slots > policy.budget || any_number;
        if (above && (by_count || at_prompt_end)) return true;
    }
    return policy.slack != 0 && exceeds_slack(plan_of(store, context, owner, policy));
}

}  // namespace kvrt
