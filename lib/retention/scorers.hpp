// What each method of eviction needs and assumes, as data. How its scores are made is in
// score_*.cpp; a new method is an entry here and a function there.
#pragma once

#include <cstdint>

#include "kvrt/kvrt.h"

namespace kvrt {

/// What is kept per slot beside keys and values.
enum class observed_kind : uint8_t {
    nothing,
    mass,    ///< attention weights, decayed
    last,    ///< those of the last query
    recent,  ///< of the last `window` queries
    counts,  ///< of those: how many weights were at least the mean
    given    ///< the host's scores
};

struct scorer_description {
    uint32_t id;
    const char* name;
    observed_kind observes = observed_kind::nothing;
    uint32_t window = 0;
    float decay = 1.0f;
    uint32_t observe_every = 1;
    uint32_t pool_width = 1;
    bool pools_maximum = false;
    bool query_statistics = false;   ///< scores come from the means of queries
    bool samples_always = false;     ///< its survivors are drawn
    bool can_sample = false;         ///< its scores are not negative
    bool one_set_per_layer = false;  ///< selection, where the policy leaves it open
    float prior_share = 0.0f;        ///< of what queries are expected to ask, beside what was seen
    float redundancy = 0.0f;         ///< what directions of keys weigh
};

/// nullptr where there is none.
const scorer_description* find_scorer(uint32_t id);

/// What a sequence keeps for its policy. Sequences whose rules are equal observe the same.
struct observation_rules {
    observed_kind kind = observed_kind::nothing;
    uint32_t window = 0;
    uint32_t every = 1;  ///< of steps of one token
    float decay = 1.0f;

    bool operator==(const observation_rules&) const = default;
};
observation_rules rules_of(const kv_policy& policy);

/// The shares that a policy's scores are made of: its own, or its scorer's.
float prior_share_of(const kv_policy& policy);
float redundancy_of(const kv_policy& policy);
/// Of R-KV's exact redundancy: keys are similar above this cosine.
float similarity_of(const kv_policy& policy);
bool draws_survivors(const kv_policy& policy);

/// Bits of all scorers, for kv_capabilities.
uint64_t scorer_bits();

}  // namespace kvrt
