// Which tokens stay: methods of eviction as named configurations of the library's policies.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "evaluate/configuration.hpp"

namespace evaluate {

// What a sequence keeps of its attention for a method. Sequences of the same kind observe the same,
// so that one of them can be read through a text and forked for every method of its kind.
enum class observation {
    nothing,
    all_queries,
    decayed_queries,
    counts,
    last_query,
    last_8_queries,
    last_64_queries
};

// Stays at the end, whatever its scores: half of what nothing else protects.
inline constexpr std::uint32_t recent_half = ~0u;

struct retention_method {
    std::string_view name;
    observation observes = observation::nothing;
    std::uint32_t scorer = KV_SCORER_NONE;  // NONE: all tokens stay
    std::uint32_t allocator = KV_ALLOCATE_UNIFORM;
    std::uint32_t flags = 0;  // KV_POLICY_*
    std::uint32_t sinks = 0;
    std::uint32_t recent = 0;
    std::uint32_t skip_layers = 0;
    std::uint32_t window = 0;          // as in kv_policy, and
    std::uint32_t pool_width = 0;      // this: 0 is the scorer's
    std::uint32_t demoted_format = 0;  // of all but the newest tokens; 0: as they are written
    std::uint32_t value_reserve = 0;   // percent of a budget that widely ranging values take

    bool keeps_all() const { return scorer == KV_SCORER_NONE; }
    bool lane_per_head() const { return allocator == KV_ALLOCATE_ADAPTIVE; }
};

// Of methods that demote, the newest so many tokens stay as they are written, and those that share
// a block with them.
inline constexpr std::uint32_t demote_after = 32;

// The full cache first.
std::span<const retention_method> retention_methods();
const retention_method& full_cache();

// Names between commas; all methods for "all". The full cache and the random one come first,
// asked for or not: nothing is judged without them.
outcome<std::vector<const retention_method*>> parse_methods(std::string_view list);

// Those that can be judged where all contenders are stored so: demotion is of rows that are not
// coded before.
std::vector<const retention_method*> methods_stored_as(
    const configuration& stored, std::span<const retention_method* const> methods);

// The same, of which those that evict hold so many percent of a budget in reserve; 0: as they are.
std::vector<retention_method> with_value_reserve(std::span<const retention_method* const> methods,
                                                 std::uint32_t percent);

// Percents of a context's length between commas, from the largest to the smallest.
outcome<std::vector<double>> parse_budgets(std::string_view list);

// A method with a budget.
struct contender {
    const retention_method* method = nullptr;
    double percent = 0;  // of a context's length

    // In tokens as the others hold them.
    std::uint32_t budget(std::size_t length) const;
};

// How many tokens take the bytes of `budget` tokens, when those that are demoted take `share` of
// the others' bytes.
std::uint32_t tokens_for(std::uint32_t budget, double share);

// Every method with every budget, budget by budget.
std::vector<contender> contenders_of(std::span<const retention_method* const> methods,
                                     std::span<const double> budgets);

// Of a text that is no prompt, so much is taken for one: the beginning, as an instruction would be.
inline constexpr std::uint32_t protected_beginning = 64;

// The policy of a method that is not the full cache. `prompt` tokens are worth protecting, of which
// at most half a budget is; `every` as in kv_policy.
kv_policy policy_of(const retention_method& method, std::uint32_t budget, std::uint32_t prompt,
                    std::uint32_t every, std::uint64_t seed);

std::string method_names();

}  // namespace evaluate
