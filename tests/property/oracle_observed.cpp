#include "oracle_observed.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace property {

observed_rules rules_of(const kv_policy& policy) {
    observed_rules rules;
    const auto window = [&](uint32_t usual, uint32_t scorer_class) {
        rules.kind = observed_kind::windowed;
        rules.window = policy.window != 0 ? policy.window : usual;
        rules.scorer_class = scorer_class;
    };
    switch (policy.scorer) {
        case KV_SCORER_H2O:
            rules.kind = observed_kind::mass;
            rules.every = 4;
            if (policy.decay != 0.0f) rules.decay = policy.decay;
            break;
        case KV_SCORER_BLEND:
            rules.kind = observed_kind::mass;
            rules.every = 4;
            rules.decay = policy.decay != 0.0f ? policy.decay : 0.97f;
            break;
        case KV_SCORER_TOVA:
            rules.kind = observed_kind::last;
            break;
        case KV_SCORER_SCISSORHANDS:
            window(400, 1);
            break;
        case KV_SCORER_SNAPKV:
        case KV_SCORER_VASE_ATTENTION:
            window(64, 0);
            break;
        case KV_SCORER_RKV:
            window(8, 0);
            break;
        case KV_SCORER_HOST:
            rules.kind = observed_kind::given;
            return rules;
        default:
            return rules;
    }
    if (policy.observe_every != 0) rules.every = policy.observe_every;
    return rules;
}

observed_rules rules_of(const oracle_sequence& owner) {
    return owner.has_policy && !owner.released ? rules_of(owner.policy) : observed_rules{};
}

double no_score() { return std::numeric_limits<double>::infinity(); }

void change_rules(oracle_sequence& owner, const observed_rules& before) {
    if (rules_of(owner) == before) return;
    for (oracle_lane& lane : owner.lanes) {
        lane.observed_any = lane.pending = false;
        lane.sums.clear();
        lane.given_end = 0;
    }
    owner.unobserved_steps = 0;
    owner.gap = owner.pending_gap = false;
    owner.seen_end = 0;
}

bool observes(const oracle_sequence& owner, uint32_t rows) {
    const observed_rules rules = rules_of(owner);
    if (rules.kind == observed_kind::nothing || rules.kind == observed_kind::given) return false;
    return rows > 1 || owner.unobserved_steps + 1 >= rules.every;
}

bool leaves_out(const oracle& model, const oracle_sequence& owner, std::size_t lane,
                uint32_t rows) {
    const observed_rules rules = rules_of(owner);
    const kv_policy& policy = owner.policy;
    const bool forgets = rules.kind == observed_kind::windowed || rules.kind == observed_kind::last;
    if (rows != 1 || !forgets || rules.every != 1 || !owner.lanes[lane].observed_any) return false;
    if (policy.every == 0 && policy.slack == 0) return false;
    // Steps of one token until a round may come, this one included.
    const uint64_t counted = rules.kind == observed_kind::last ? 1 : rules.window;
    int64_t steps = std::numeric_limits<int64_t>::max();
    const auto ends_at = [&](uint64_t bound, uint64_t now) {
        steps = std::min(steps, static_cast<int64_t>(bound) - static_cast<int64_t>(now));
    };
    if (policy.every != 0) ends_at(policy.every, owner.tokens_since_round);
    if (owner.prompt_was_in) return false;
    if ((policy.flags & KV_POLICY_AT_PROMPT_END) != 0 &&
        owner.next_position < policy.prompt_tokens) {
        ends_at(policy.prompt_tokens, owner.next_position);
    }
    for (std::size_t i = 0; policy.slack != 0 && i < model.lanes.size(); ++i) {
        if (!model.lanes[i].evictable) continue;
        ends_at(uint64_t{policy.budget} + policy.slack + 1, owner.lanes[i].slots());
    }
    return steps > static_cast<int64_t>(counted);
}

void begin_pending(oracle_sequence& owner, uint32_t lane, uint32_t rows, bool numbers) {
    oracle_lane& state = owner.lanes[lane];
    if (state.pending) return;
    state.pending = true;
    state.pending_sums.clear();
    if (!numbers) return;
    const observed_rules rules = rules_of(owner);
    for (std::size_t head = 0; head < state.heads.size(); ++head) {
        std::vector<double> sums(state.slots() + rows, 0.0);
        for (std::size_t slot = 0; rules.kind == observed_kind::mass && slot < state.slots();
             ++slot) {
            sums[slot] = observed_at(owner, lane, head, slot) *
                         std::pow(double{rules.decay}, static_cast<double>(rows));
        }
        state.pending_sums.push_back(std::move(sums));
    }
}

void commit_pending(oracle_sequence& owner) {
    bool any = false;
    for (oracle_lane& lane : owner.lanes) {
        if (!lane.pending) continue;
        any = lane.observed_any = true;
        lane.pending = false;
        lane.sums = std::move(lane.pending_sums);
        lane.pending_sums.clear();
    }
    owner.unobserved_steps = any ? 0 : owner.unobserved_steps + 1;
    owner.gap = !any && (owner.gap || owner.pending_gap);
    owner.pending_gap = false;
    if (any) owner.seen_end = owner.next_position;
    truncate_observed(owner);
}

void discard_pending(oracle_sequence& owner) {
    for (oracle_lane& lane : owner.lanes) lane.pending = false;
    owner.pending_gap = false;
}

void truncate_observed(oracle_sequence& owner) {
    for (oracle_lane& lane : owner.lanes) {
        for (std::vector<double>& head : lane.sums) {
            if (head.size() > lane.slots()) head.resize(lane.slots());
        }
        lane.given_end = std::min(lane.given_end, owner.next_position);
    }
    owner.seen_end = std::min(owner.seen_end, owner.next_position);
}

double observed_at(const oracle_sequence& owner, std::size_t lane, std::size_t head,
                   std::size_t slot) {
    const std::vector<std::vector<double>>& sums = owner.lanes[lane].sums;
    if (head < sums.size() && slot < sums[head].size()) return sums[head][slot];
    return rules_of(owner).kind == observed_kind::given ? no_score() : 0.0;
}

bool has_observed(const oracle_sequence& owner, const kv_policy& policy,
                  const std::vector<char>& lanes) {
    const observed_rules wanted = rules_of(policy);
    if (wanted.kind == observed_kind::nothing) return true;
    if (!(rules_of(owner) == wanted)) return false;
    for (std::size_t lane = 0; lane < lanes.size(); ++lane) {
        if (lanes[lane] != 0 && !owner.lanes[lane].observed_any) return false;
    }
    return true;
}

uint64_t unseen_tokens(const oracle_sequence& owner, const kv_policy& policy) {
    if (!owner.gap || !(rules_of(policy) == rules_of(owner))) return 0;
    return owner.next_position - owner.seen_end;
}

uint64_t newest_without_scores(const oracle& model, const oracle_sequence& owner,
                               const kv_policy& policy) {
    if (policy.scorer != KV_SCORER_HOST || rules_of(owner).kind != observed_kind::given) return 0;
    uint64_t newest = 0;
    for (std::size_t lane = 0; lane < model.lanes.size(); ++lane) {
        if (!model.lanes[lane].evictable || model.lanes[lane].layer < policy.skip_layers ||
            !owner.lanes[lane].observed_any) {
            continue;
        }
        newest = std::max(newest, owner.next_position - owner.lanes[lane].given_end);
    }
    return newest;
}

}  // namespace property
