// The oracle's own view of what a policy has observed: attention per token in double, or the host's
// scores. Kinds that count a window of queries are followed only as far as whether they saw any.
#pragma once

#include "oracle.hpp"

namespace property {

enum class observed_kind { nothing, mass, last, windowed, given };

struct observed_rules {
    observed_kind kind = observed_kind::nothing;
    uint32_t scorer_class = 0;  // windowed: counts or sums
    uint32_t window = 0;
    uint32_t every = 1;
    float decay = 1.0f;

    bool operator==(const observed_rules&) const = default;
};
observed_rules rules_of(const kv_policy& policy);
/// Of the policy that a sequence has.
observed_rules rules_of(const oracle_sequence& owner);

/// A token that the host gave no score.
double no_score();

/// After a sequence has got another policy: what it saw by other rules is gone.
void change_rules(oracle_sequence& owner, const observed_rules& before);

/// Is the open step's attention observed, of an item of so many rows?
bool observes(const oracle_sequence& owner, uint32_t rows);
/// Is the open step, of one row, left out in a lane: do the policy's own rounds not count its
/// query, and has it seen others?
bool leaves_out(const oracle& model, const oracle_sequence& owner, std::size_t lane, uint32_t rows);
/// Begins what the step leaves in a lane, before its rows are added; `numbers`: with sums.
void begin_pending(oracle_sequence& owner, uint32_t lane, uint32_t rows, bool numbers);
/// The step's end, after accepted tokens have joined, and its cancellation.
void commit_pending(oracle_sequence& owner);
void discard_pending(oracle_sequence& owner);
void truncate_observed(oracle_sequence& owner);

/// What the library should say of a slot.
double observed_at(const oracle_sequence& owner, std::size_t lane, std::size_t head,
                   std::size_t slot);

/// Has the sequence seen what a round by this policy needs, in all of these lanes?
bool has_observed(const oracle_sequence& owner, const kv_policy& policy,
                  const std::vector<char>& lanes);

/// The newest so many positions, which nobody has observed, stay in rounds that go by it.
uint64_t unseen_tokens(const oracle_sequence& owner, const kv_policy& policy);

/// The newest so many positions that the host has given no scores stay, in its rounds.
uint64_t newest_without_scores(const oracle& model, const oracle_sequence& owner,
                               const kv_policy& policy);

}  // namespace property
