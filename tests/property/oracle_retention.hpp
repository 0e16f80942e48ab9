// The oracle's own view of one retention round: which lanes, how many tokens, what may go, and
// whether the survivors that the library chose are the best ones by the method's formula.
#pragma once

#include <functional>

#include "oracle.hpp"
#include "policies.hpp"

namespace property {

/// Means of a lane's queries before rotation, [query_heads][bands] each.
struct query_means {
    uint64_t tokens = 0;
    std::vector<float> real, imaginary, magnitude;
};
using means_reader = std::function<query_means(uint32_t layer)>;

struct round_plan {
    bool nothing = true;         // no lane retains more than the policy keeps
    bool sets_differ = false;    // a common selection over lanes that hold different tokens
    std::vector<uint32_t> keep;  // tokens per head, by lane
    std::vector<char> chosen;    // by lane
    std::array<uint64_t, 16> fresh = {};  // most blocks that copies may take, by class
    uint64_t fresh_blocks = 0;
};

/// Tokens that guards hold, in the KV head of a lane that holds most.
uint32_t held_in_lane(const oracle& model, const oracle_sequence& owner, const kv_policy& policy,
                      std::size_t lane);

/// Tokens that a lane keeps of a budget, if it has as many.
uint32_t budget_of_lane(const oracle& model, const oracle_sequence& owner, const kv_policy& policy,
                        std::size_t lane);

/// Does the sequence's own policy want a round at the end of a step that accepted so many tokens?
bool round_is_due(const oracle& model, const oracle_sequence& owner, uint32_t accepted);

/// Fills in the most blocks that copies of the chosen lanes may take.
void bound_fresh(const oracle& model, const oracle_sequence& owner, const kv_policy& policy,
                 round_plan& plan);

round_plan plan_round(const oracle& model, const oracle_sequence& owner, const kv_policy& policy);

/// May a block be changed in place?
bool is_private(const oracle& model, const oracle_sequence& owner, const block_reference& block);

/// Positions per lane and head after a round.
using survivor_sets = std::vector<std::vector<std::vector<uint32_t>>>;

struct round_effect {
    uint64_t copied = 0;
    uint32_t layers = 0;
    drop_count returned;
};

/// Throws mismatch unless `survivors` is what the policy asks for; then makes them so. `numbers`:
/// the oracle has followed what was observed.
round_effect apply_round(oracle& model, oracle_sequence& owner, const kv_policy& policy,
                         const round_plan& plan, const survivor_sets& survivors,
                         const means_reader& means, bool numbers = true);

}  // namespace property
