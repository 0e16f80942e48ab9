#include "evaluate/retention_methods.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <iterator>

namespace evaluate {

namespace {

// As published, guards included, where a paper or its code says so: what a method keeps unasked is
// a part of it. docs/retention.md says where that comes from.
constexpr retention_method methods[] = {
    {.name = "full"},
    {.name = "random_pp",
     .scorer = KV_SCORER_RANDOM,
     .flags = KV_POLICY_PROTECT_PROMPT,
     .recent = 64},
    {.name = "streaming", .scorer = KV_SCORER_STREAMING, .sinks = 4},
    {.name = "h2o",
     .observes = observation::all_queries,
     .scorer = KV_SCORER_H2O,
     .recent = recent_half},
    {.name = "scissorhands",
     .observes = observation::counts,
     .scorer = KV_SCORER_SCISSORHANDS,
     .recent = 10},
    {.name = "tova", .observes = observation::last_query, .scorer = KV_SCORER_TOVA, .recent = 1},
    {.name = "snapkv",
     .observes = observation::last_64_queries,
     .scorer = KV_SCORER_SNAPKV,
     .recent = 64},
    {.name = "snapkv_adaptive",
     .observes = observation::last_64_queries,
     .scorer = KV_SCORER_SNAPKV,
     .allocator = KV_ALLOCATE_ADAPTIVE,
     .recent = 64},
    {.name = "pyramid",
     .observes = observation::last_8_queries,
     .scorer = KV_SCORER_SNAPKV,
     .allocator = KV_ALLOCATE_PYRAMID,
     .flags = KV_POLICY_POOL_MAX,
     .recent = 8,
     .window = 8,
     .pool_width = 7},
    {.name = "rkv", .observes = observation::last_8_queries, .scorer = KV_SCORER_RKV, .recent = 8},
    {.name = "vase_attention",
     .observes = observation::last_64_queries,
     .scorer = KV_SCORER_VASE_ATTENTION,
     .sinks = 4,
     .recent = 64},
    {.name = "vase_sketch", .scorer = KV_SCORER_VASE_SKETCH, .sinks = 4, .recent = 64},
    {.name = "key_norm", .scorer = KV_SCORER_KEY_NORM, .skip_layers = 2},
    {.name = "keydiff", .scorer = KV_SCORER_KEYDIFF},
    {.name = "lagkv", .scorer = KV_SCORER_LAGKV, .sinks = 4, .recent = 128},
    {.name = "expected_attention",
     .scorer = KV_SCORER_EXPECTED_ATTENTION,
     .flags = KV_POLICY_STATISTICS_ONLINE,
     .sinks = 4},
    {.name = "triattention",
     .scorer = KV_SCORER_TRIATTENTION,
     .flags = KV_POLICY_PROTECT_PROMPT,
     .recent = 128},
    // Our own; behind the first, older tokens are demoted, so that more of them stay for the same
    // bytes.
    {.name = "blend",
     .observes = observation::decayed_queries,
     .scorer = KV_SCORER_BLEND,
     .sinks = 4,
     .recent = 64},
    {.name = "blend_int8",
     .observes = observation::decayed_queries,
     .scorer = KV_SCORER_BLEND,
     .sinks = 4,
     .recent = 64,
     .demoted_format = KV_FORMAT_INT8_TOKEN},
    {.name = "blend_int4",
     .observes = observation::decayed_queries,
     .scorer = KV_SCORER_BLEND,
     .sinks = 4,
     .recent = 64,
     .demoted_format = KV_FORMAT_INT4_TOKEN},
};
constexpr std::size_t always = 2;  // so many of the table are always there

}  // namespace

std::span<const retention_method> retention_methods() { return methods; }

const retention_method& full_cache() { return methods[0]; }

std::string method_names() {
    std::string names;
    for (const retention_method& one : methods) {
        names += fmt::format("{}{}", names.empty() ? "" : ", ", one.name);
    }
    return names;
}

outcome<std::vector<const retention_method*>> parse_methods(std::string_view list) {
    std::vector<bool> wanted(std::size(methods), list == "all");
    std::fill_n(wanted.begin(), always, true);
    for (std::size_t start = 0; list != "all" && start <= list.size();) {
        const std::size_t end = std::min(list.find(',', start), list.size());
        const std::string_view name = list.substr(start, end - start);
        const auto* found =
            std::find_if(std::begin(methods), std::end(methods),
                         [&](const retention_method& one) { return one.name == name; });
        if (found == std::end(methods)) {
            return error{fmt::format("'{}' is no method, there are: {}", name, method_names())};
        }
        wanted[static_cast<std::size_t>(found - methods)] = true;
        start = end + 1;
    }
    std::vector<const retention_method*> chosen;
    for (std::size_t i = 0; i < std::size(methods); ++i) {
        if (wanted[i]) {
            chosen.push_back(&methods[i]);
        }
    }
    return chosen;
}

std::vector<const retention_method*> methods_stored_as(
    const configuration& stored, std::span<const retention_method* const> methods) {
    const auto is_plain = [](const operand_storage& operand) {
        return operand.format == KV_FORMAT_F32 || operand.format == KV_FORMAT_F16 ||
               operand.format == KV_FORMAT_BF16;
    };
    const bool demotes = is_plain(stored.storage.keys) && is_plain(stored.storage.values);
    std::vector<const retention_method*> left;
    std::copy_if(methods.begin(), methods.end(), std::back_inserter(left),
                 [&](const retention_method* one) { return demotes || one->demoted_format == 0; });
    return left;
}

std::vector<retention_method> with_value_reserve(std::span<const retention_method* const> methods,
                                                 std::uint32_t percent) {
    std::vector<retention_method> reserving;
    for (const retention_method* one : methods) {
        reserving.push_back(*one);
        if (percent != 0 && !one->keeps_all()) {
            reserving.back().value_reserve = percent;
        }
    }
    return reserving;
}

outcome<std::vector<double>> parse_budgets(std::string_view list) {
    std::vector<double> budgets;
    for (std::size_t start = 0; start <= list.size();) {
        const std::size_t end = std::min(list.find(',', start), list.size());
        const std::string_view word = list.substr(start, end - start);
        double percent = 0;
        const auto [behind, status] =
            std::from_chars(word.data(), word.data() + word.size(), percent);
        const bool whole = status == std::errc() && behind == word.data() + word.size();
        if (!whole || !(percent >= 0.1) || !(percent <= 100)) {
            return error{
                fmt::format("budget '{}' must be a number from 0.1 to 100: percent of a "
                            "context's length",
                            word)};
        }
        budgets.push_back(percent);
        start = end + 1;
    }
    std::sort(budgets.begin(), budgets.end(), std::greater<>());
    budgets.erase(std::unique(budgets.begin(), budgets.end()), budgets.end());
    return budgets;
}

std::uint32_t contender::budget(std::size_t length) const {
    const double tokens = std::round(percent / 100 * static_cast<double>(length));
    return static_cast<std::uint32_t>(std::max(tokens, 1.0));
}

std::uint32_t tokens_for(std::uint32_t budget, double share) {
    constexpr std::uint32_t in_a_block = 16;
    constexpr std::uint32_t written = demote_after + in_a_block;
    if (budget <= written) {
        return budget;
    }
    return written + static_cast<std::uint32_t>((budget - written) / share);
}

std::vector<contender> contenders_of(std::span<const retention_method* const> chosen,
                                     std::span<const double> budgets) {
    std::vector<contender> all;
    for (const double percent : budgets) {
        for (const retention_method* one : chosen) {
            all.push_back({one, percent});
        }
    }
    return all;
}

kv_policy policy_of(const retention_method& method, std::uint32_t budget, std::uint32_t prompt,
                    std::uint32_t every, std::uint64_t seed) {
    kv_policy policy = KV_INIT(kv_policy);
    policy.flags = method.flags;
    policy.scorer = method.scorer;
    policy.allocator = method.allocator;
    policy.budget = budget;
    policy.every = every;
    policy.seed = seed;
    policy.skip_layers = method.skip_layers;
    policy.window = method.window;
    policy.pool_width = method.pool_width;
    policy.sinks = std::min(method.sinks, budget);
    std::uint32_t guarded = policy.sinks;
    if ((method.flags & KV_POLICY_PROTECT_PROMPT) != 0) {
        policy.prompt_tokens = std::min(prompt, budget / 2);
        if (policy.prompt_tokens == 0) {
            policy.flags &= ~std::uint32_t{KV_POLICY_PROTECT_PROMPT};
        }
        guarded = std::max(guarded, policy.prompt_tokens);
    }
    // The score must have a say, too.
    policy.recent = std::min(method.recent, (budget - guarded) / 2);
    policy.value_reserve =
        static_cast<std::uint32_t>(std::uint64_t{budget} * method.value_reserve / 100);
    return policy;
}

}  // namespace evaluate
