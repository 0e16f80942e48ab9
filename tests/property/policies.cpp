#include "policies.hpp"

#include <algorithm>
#include <initializer_list>

namespace property {

uint32_t resolved_selection(const kv_policy& policy) {
    if (policy.scorer == KV_SCORER_STREAMING) return KV_SELECT_PER_LAYER_PER_HEAD;
    if (policy.selection == KV_SELECT_DEFAULT) {
        return policy.scorer == KV_SCORER_TOVA ? uint32_t{KV_SELECT_PER_LAYER}
                                               : uint32_t{KV_SELECT_PER_LAYER_PER_HEAD};
    }
    return policy.selection;
}

namespace {

struct dice {
    std::mt19937_64& random;
    uint64_t below(uint64_t bound) { return random() % bound; }
};

bool samples(const kv_policy& policy) {
    return (policy.flags & KV_POLICY_SAMPLE) != 0 || policy.scorer == KV_SCORER_VASE_ATTENTION;
}

/// What the policy's scorer reads, and of that now and then.
void observe_at_random(dice& dice, kv_policy& policy) {
    const auto is_one_of = [&](std::initializer_list<uint32_t> scorers) {
        return std::find(scorers.begin(), scorers.end(), policy.scorer) != scorers.end();
    };
    const auto in = [&](bool reads, uint64_t times) { return reads && dice.below(times) == 0; };
    const bool windowed = is_one_of(
        {KV_SCORER_SCISSORHANDS, KV_SCORER_SNAPKV, KV_SCORER_RKV, KV_SCORER_VASE_ATTENTION});
    const bool summed = is_one_of({KV_SCORER_H2O, KV_SCORER_BLEND});
    const bool observed = windowed || summed || policy.scorer == KV_SCORER_TOVA;
    const bool pooled = observed || policy.scorer == KV_SCORER_HOST;
    if (in(is_one_of({KV_SCORER_EXPECTED_ATTENTION, KV_SCORER_BLEND}), 2)) {
        policy.flags |= KV_POLICY_STATISTICS_ONLINE;
    }
    if (in(windowed, 2)) policy.window = 1 + static_cast<uint32_t>(dice.below(12));
    if (in(observed, 4)) policy.observe_every = static_cast<uint32_t>(dice.below(4));
    if (in(summed, 3)) policy.decay = 1.0f - static_cast<float>(dice.below(8)) / 16.0f;
    if (in(pooled, 4)) policy.pool_width = 1 + 2 * static_cast<uint32_t>(dice.below(5));
    if (in(pooled, 4)) policy.flags |= KV_POLICY_POOL_MAX;
    if (in(policy.scorer == KV_SCORER_RKV, 2)) policy.flags |= KV_POLICY_EXACT_REDUNDANCY;
}

void adjust_at_random(dice& dice, kv_policy& policy) {
    const bool may_sample = policy.scorer == KV_SCORER_H2O || policy.scorer == KV_SCORER_SNAPKV ||
                            policy.scorer == KV_SCORER_VASE_SKETCH ||
                            policy.scorer == KV_SCORER_HOST;
    if (may_sample && dice.below(4) == 0) policy.flags |= KV_POLICY_SAMPLE;
    if (dice.below(6) == 0) policy.value_reserve = static_cast<uint32_t>(dice.below(60));
    if (dice.below(8) == 0) {
        policy.prompt_tokens = std::max(policy.prompt_tokens, 60u);
        policy.segments = 1 + static_cast<uint32_t>(dice.below(20));
        policy.segment_quota = 1 + static_cast<uint32_t>(dice.below(5));
    }
    if (policy.prompt_tokens != 0 && dice.below(4) == 0) policy.flags |= KV_POLICY_AT_PROMPT_END;
    if (dice.below(5) == 0) policy.slack = 1 + static_cast<uint32_t>(dice.below(20));
}

void allocate_at_random(dice& dice, kv_policy& policy, bool heads_apart) {
    if (policy.selection == KV_SELECT_PER_HEAD || policy.selection == KV_SELECT_UNION) return;
    switch (dice.below(6)) {
        case 0:
            policy.allocator = KV_ALLOCATE_PYRAMID;
            policy.steepness = static_cast<uint32_t>(dice.below(30));
            break;
        case 1:
            if (samples(policy)) break;
            policy.allocator = KV_ALLOCATE_THRESHOLD;
            policy.threshold = static_cast<float>(dice.below(40)) / 20.0f - 0.5f;
            break;
        case 2:
            if (!heads_apart || policy.selection == KV_SELECT_PER_LAYER ||
                resolved_selection(policy) == KV_SELECT_PER_LAYER) {
                break;
            }
            policy.allocator = KV_ALLOCATE_ADAPTIVE;
            policy.floor_share = static_cast<float>(dice.below(5)) / 4.0f;
            break;
        default:
            break;
    }
}

}  // namespace

kv_policy random_policy(std::mt19937_64& random, bool heads_apart) {
    dice dice{random};
    kv_policy policy = KV_INIT(kv_policy);
    policy.scorer = 1 + static_cast<uint32_t>(dice.below(dice.below(3) == 0 ? 4 : 16));
    policy.selection = static_cast<uint32_t>(dice.below(5));
    policy.budget = 1 + static_cast<uint32_t>(dice.below(70));
    policy.every = static_cast<uint32_t>(dice.below(3) == 0 ? 0 : 1 + dice.below(24));
    if (dice.below(2) == 0) policy.sinks = static_cast<uint32_t>(dice.below(20));
    if (dice.below(2) == 0) policy.recent = static_cast<uint32_t>(dice.below(30));
    if (dice.below(3) == 0) {
        policy.flags |= KV_POLICY_PROTECT_PROMPT;
        policy.prompt_tokens = 1 + static_cast<uint32_t>(dice.below(40));
        if (dice.below(2) == 0) policy.flags |= KV_POLICY_PROMPT_ON_TOP;
    }
    if (policy.scorer == KV_SCORER_TRIATTENTION) {
        if (dice.below(3) == 0) policy.flags |= KV_POLICY_OFFSETS_MAX;
        if (dice.below(2) == 0) policy.offset_max = 1u << dice.below(12);
    }
    if (dice.below(9) == 0) policy.skip_layers = 1;
    policy.seed = dice.random();
    observe_at_random(dice, policy);
    adjust_at_random(dice, policy);
    allocate_at_random(dice, policy, heads_apart);
    return policy;
}

}  // namespace property
