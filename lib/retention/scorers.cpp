#include "retention/scorers.hpp"

#include <algorithm>
#include <iterator>

namespace kvrt {

namespace {

constexpr scorer_description plain(uint32_t id, const char* name) {
    return {.id = id, .name = name};
}

constexpr scorer_description observing(uint32_t id, const char* name, observed_kind kind,
                                       uint32_t window = 0) {
    return {.id = id, .name = name, .observes = kind, .window = window, .can_sample = true};
}

constexpr scorer_description pooled(scorer_description base, uint32_t width, bool maximum) {
    base.pool_width = width;
    base.pools_maximum = maximum;
    return base;
}

constexpr scorer_description all_scorers[] = {
    {.id = KV_SCORER_TRIATTENTION, .name = "TRIATTENTION", .query_statistics = true},
    plain(KV_SCORER_STREAMING, "STREAMING"),
    plain(KV_SCORER_KEY_NORM, "KEY_NORM"),
    plain(KV_SCORER_RANDOM, "RANDOM"),
    {.id = KV_SCORER_H2O,
     .name = "H2O",
     .observes = observed_kind::mass,
     .observe_every = 4,
     .can_sample = true},
    observing(KV_SCORER_SCISSORHANDS, "SCISSORHANDS", observed_kind::counts, 400),
    {.id = KV_SCORER_TOVA,
     .name = "TOVA",
     .observes = observed_kind::last,
     .can_sample = true,
     .one_set_per_layer = true},
    pooled(observing(KV_SCORER_SNAPKV, "SNAPKV", observed_kind::recent, 64), 5, false),
    {.id = KV_SCORER_RKV,
     .name = "RKV",
     .observes = observed_kind::recent,
     .window = 8,
     .pool_width = 7,
     .pools_maximum = true,
     .redundancy = 0.9f},
    {.id = KV_SCORER_VASE_ATTENTION,
     .name = "VASE_ATTENTION",
     .observes = observed_kind::recent,
     .window = 64,
     .pool_width = 5,
     .samples_always = true,
     .can_sample = true},
    {.id = KV_SCORER_VASE_SKETCH, .name = "VASE_SKETCH", .can_sample = true},
    plain(KV_SCORER_KEYDIFF, "KEYDIFF"),
    plain(KV_SCORER_LAGKV, "LAGKV"),
    {.id = KV_SCORER_EXPECTED_ATTENTION,
     .name = "EXPECTED_ATTENTION",
     .query_statistics = true,
     .can_sample = true},
    observing(KV_SCORER_HOST, "HOST", observed_kind::given),
    // Shares were tuned on needles and lists to copy in text (docs/retention.md).
    {.id = KV_SCORER_BLEND,
     .name = "BLEND",
     .observes = observed_kind::mass,
     .decay = 0.97f,
     .observe_every = 4,
     .pool_width = 5,
     .query_statistics = true,
     .prior_share = 0.1f,
     .redundancy = 0.3f},
};

}  // namespace

const scorer_description* find_scorer(uint32_t id) {
    const scorer_description* found =
        std::find_if(std::begin(all_scorers), std::end(all_scorers),
                     [id](const scorer_description& scorer) { return scorer.id == id; });
    return found == std::end(all_scorers) ? nullptr : found;
}

observation_rules rules_of(const kv_policy& policy) {
    const scorer_description& scorer = *find_scorer(policy.scorer);
    observation_rules rules;
    rules.kind = scorer.observes;
    if (rules.kind == observed_kind::nothing || rules.kind == observed_kind::given) return rules;
    if (scorer.window != 0) rules.window = policy.window != 0 ? policy.window : scorer.window;
    rules.every = policy.observe_every != 0 ? policy.observe_every : scorer.observe_every;
    if (rules.kind == observed_kind::mass) {
        rules.decay = policy.decay != 0.0f ? policy.decay : scorer.decay;
    }
    return rules;
}

float prior_share_of(const kv_policy& policy) {
    return policy.prior_share != 0.0f ? policy.prior_share
                                      : find_scorer(policy.scorer)->prior_share;
}

float redundancy_of(const kv_policy& policy) {
    return policy.redundancy != 0.0f ? policy.redundancy : find_scorer(policy.scorer)->redundancy;
}

float similarity_of(const kv_policy& policy) {
    return policy.similarity != 0.0f ? policy.similarity : 0.5f;
}

bool draws_survivors(const kv_policy& policy) {
    return find_scorer(policy.scorer)->samples_always || (policy.flags & KV_POLICY_SAMPLE) != 0;
}

uint64_t scorer_bits() {
    uint64_t bits = 0;
    for (const scorer_description& scorer : all_scorers) bits |= uint64_t{1} << scorer.id;
    return bits;
}

}  // namespace kvrt
