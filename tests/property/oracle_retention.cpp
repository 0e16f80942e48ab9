#include "oracle_retention.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <limits>
#include <map>
#include <set>

#include "mismatch.hpp"
#include "oracle_observed.hpp"

namespace property {

namespace {

/// Scores of the library are sums of floats, z-scores amplify them: two scores closer than this are
/// a tie that either may win.
constexpr double tie = 2e-3;

/// What the host's NaN counts as: it goes first, and two of them are alike.
constexpr double not_a_number = -1e300;

bool is_protected(const oracle& model, const oracle_sequence& owner, const kv_policy& policy,
                  uint64_t position) {
    const bool prompt = (policy.flags & KV_POLICY_PROTECT_PROMPT) != 0;
    const uint64_t late = model.defect == mutation::late_protection ? 1 : 0;
    if (prompt && position >= late && position < policy.prompt_tokens) return true;
    if (position >= late && position < policy.sinks) return true;
    const uint64_t recent =
        std::max({uint64_t{policy.recent}, newest_without_scores(model, owner, policy),
                  unseen_tokens(owner, policy)});
    if (position + recent >= owner.next_position) return true;
    return std::any_of(owner.pins.begin(), owner.pins.end(), [&](const position_span& pin) {
        return position >= pin.first && position - pin.first < pin.count;
    });
}

uint32_t keep_of_head(const oracle& model, const oracle_sequence& owner, const kv_policy& policy,
                      const std::vector<token>& head) {
    uint32_t held = 0;
    uint32_t prompt = 0;
    for (const token& t : head) {
        if (is_protected(model, owner, policy, t.position)) ++held;
        if ((policy.flags & KV_POLICY_PROTECT_PROMPT) != 0 && t.position < policy.prompt_tokens) {
            ++prompt;
        }
    }
    uint64_t allowed = policy.budget;
    if ((policy.flags & KV_POLICY_PROMPT_ON_TOP) != 0) allowed += prompt;
    return static_cast<uint32_t>(
        std::min<uint64_t>(head.size(), std::max<uint64_t>(held, allowed)));
}

bool same_positions(const std::vector<token>& a, const std::vector<token>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const token& x, const token& y) { return x.position == y.position; });
}

/// Which set of survivors a head of a lane has a part in.
uint32_t set_of(const oracle& model, std::size_t lane, uint32_t head, uint32_t selection) {
    if (selection == KV_SELECT_PER_LAYER) return model.lanes[lane].layer;
    return selection == KV_SELECT_UNION ? 0 : model.lanes[lane].first_head + head;
}

bool sets_differ(const oracle& model, const oracle_sequence& owner, const round_plan& plan,
                 uint32_t selection) {
    if (selection == KV_SELECT_PER_LAYER_PER_HEAD) return false;
    std::map<uint32_t, const std::vector<token>*> sets;
    // The first head of a layer speaks for it, whether or not it loses tokens itself.
    for (std::size_t lane = 0; selection == KV_SELECT_PER_LAYER && lane < model.lanes.size();
         ++lane) {
        sets.emplace(model.lanes[lane].layer, &owner.lanes[lane].heads[0]);
    }
    uint32_t kv_heads = 0;
    for (std::size_t lane = 0; lane < model.lanes.size(); ++lane) {
        bool joins = plan.chosen[lane] != 0;
        for (std::size_t other = 0; other < model.lanes.size(); ++other) {
            joins = joins || (selection == KV_SELECT_PER_LAYER && plan.chosen[other] != 0 &&
                              model.lanes[other].layer == model.lanes[lane].layer);
        }
        if (!joins) continue;
        const uint32_t here = model.spec.layers[model.lanes[lane].layer].kv_heads;
        if (kv_heads == 0) kv_heads = here;
        if (selection == KV_SELECT_PER_HEAD && here != kv_heads) return true;
        for (uint32_t head = 0; head < model.lanes[lane].kv_heads; ++head) {
            const uint32_t set = set_of(model, lane, head, selection);
            const std::vector<token>& tokens = owner.lanes[lane].heads[head];
            const auto [first, fresh] = sets.emplace(set, &tokens);
            if (!fresh && !same_positions(tokens, *first->second)) return true;
        }
    }
    return false;
}

/// (first, second) of band f of a head's vector.
std::pair<uint32_t, uint32_t> band_dimensions(const layer_spec& layer, uint32_t band) {
    const uint32_t half = layer.rotated() / 2;
    if (layer.rope_style == KV_ROPE_INTERLEAVED) return {2 * band, 2 * band + 1};
    return {band, band + half};
}

/// exp(i w_f (t0 + d)) for d = 1, 2, 4, ...: [offset][rotated band].
using phase_table = std::vector<std::vector<std::complex<double>>>;

phase_table future_phases(const layer_spec& layer, const kv_policy& policy,
                          uint64_t next_position) {
    const uint32_t offset_max = policy.offset_max != 0 ? policy.offset_max : 65536;
    phase_table phases(static_cast<std::size_t>(std::bit_width(offset_max)));
    for (std::size_t i = 0; i < phases.size(); ++i) {
        for (uint32_t band = 0; band < layer.rotated() / 2; ++band) {
            const double frequency = std::pow(rope_theta, -2.0 * band / layer.rotated());
            phases[i].push_back(std::polar(
                1.0, frequency * static_cast<double>(next_position + (uint64_t{1} << i))));
        }
    }
    return phases;
}

/// The expected logit of future queries: for each offset the sum over bands of
/// Re(mean q e^{i w (t0 + d)} conj k), their mean or maximum, and the part of the norms.
double triattention_score(const layer_spec& layer, const kv_policy& policy,
                          const query_means& means, uint32_t query_head, const phase_table& phases,
                          const float* key) {
    const uint32_t half = layer.rotated() / 2;
    double norm_part = 0.0;
    std::vector<double> logits(phases.size(), 0.0);
    for (uint32_t band = 0; band < layer.bands(); ++band) {
        std::complex<double> cached;
        if (band < half) {
            const auto [first, second] = band_dimensions(layer, band);
            cached = {key[first], key[second]};
        } else {
            cached = {key[layer.rotated() + (band - half)], 0.0};
        }
        const std::size_t at = std::size_t{query_head} * layer.bands() + band;
        const std::complex<double> mean(means.real[at], means.imaginary[at]);
        // The cached key holds one factor of the rotation, the query will hold another; dimensions
        // that are not rotated have none.
        if (band < half) cached *= layer.attention_factor;
        norm_part += std::max(0.0, double{means.magnitude[at]} - std::abs(mean)) * std::abs(cached);
        const std::complex<double> product = mean * std::conj(cached);
        for (std::size_t i = 0; i < phases.size(); ++i) {
            logits[i] += band < half ? (product * phases[i][band]).real() : product.real();
        }
    }
    double trigonometric = 0.0;
    if ((policy.flags & KV_POLICY_OFFSETS_MAX) != 0) {
        trigonometric = *std::max_element(logits.begin(), logits.end());
    } else {
        for (const double logit : logits) {
            trigonometric += logit / static_cast<double>(logits.size());
        }
    }
    return trigonometric + norm_part;
}

struct scorer {
    const oracle& model;
    const oracle_sequence& owner;
    const kv_policy& policy;
    const means_reader& means;
    bool numbers = true;  // the oracle has followed attention

    /// Scores of one lane and head for its candidate slots; NaN for protected ones.
    std::vector<double> head_scores(uint32_t lane, uint32_t head) const {
        const oracle_lane_shape& shape = model.lanes[lane];
        const std::vector<token>& tokens = owner.lanes[lane].heads[head];
        std::vector<double> scores(tokens.size(), std::numeric_limits<double>::quiet_NaN());
        std::vector<std::size_t> candidates;
        for (std::size_t slot = 0; slot < tokens.size(); ++slot) {
            if (!is_protected(model, owner, policy, tokens[slot].position)) {
                candidates.push_back(slot);
            }
        }
        if (is_adjusted()) {
            for (const std::size_t slot : candidates) scores[slot] = 0.0;  // any of them
        } else if (policy.scorer == KV_SCORER_STREAMING) {
            for (const std::size_t slot : candidates) scores[slot] = tokens[slot].position;
        } else if (policy.scorer == KV_SCORER_KEY_NORM) {
            for (const std::size_t slot : candidates) {
                const float* key = shape.key(tokens[slot], head);
                double sum = 0.0;
                for (uint32_t d = 0; d < shape.key_dim; ++d) sum += double{key[d]} * double{key[d]};
                scores[slot] = -std::sqrt(sum);
            }
        } else if (policy.scorer == KV_SCORER_TRIATTENTION) {
            by_triattention(lane, head, candidates, scores);
        } else if (policy.scorer == KV_SCORER_KEYDIFF) {
            by_direction(lane, head, candidates, scores);
        } else if (is_known()) {
            for (const std::size_t slot : candidates) {
                const double score = observed_at(owner, lane, head, slot);
                scores[slot] = std::isnan(score) ? not_a_number : score;
            }
        } else {
            for (const std::size_t slot : candidates) scores[slot] = 0.0;  // any of them
        }
        return scores;
    }

    /// Are scores not what decides alone?
    bool is_adjusted() const {
        return (policy.flags & KV_POLICY_SAMPLE) != 0 || policy.value_reserve != 0 ||
               policy.segments != 0;
    }
    /// Observed scores that the oracle has followed, and nothing else decides.
    bool is_known() const {
        if (policy.pool_width > 1 || policy.scorer == KV_SCORER_BLEND) return false;
        const observed_kind kind = rules_of(policy).kind;
        return kind == observed_kind::given ||
               (numbers && (kind == observed_kind::mass || kind == observed_kind::last));
    }

    /// KeyDiff: keys unlike the mean of all directions stay.
    void by_direction(uint32_t lane, uint32_t head, const std::vector<std::size_t>& candidates,
                      std::vector<double>& scores) const {
        const oracle_lane_shape& shape = model.lanes[lane];
        const std::vector<token>& tokens = owner.lanes[lane].heads[head];
        std::vector<double> sum(shape.key_dim, 0.0);
        const auto length = [&](const float* key) {
            double square = 0.0;
            for (uint32_t d = 0; d < shape.key_dim; ++d) square += double{key[d]} * double{key[d]};
            return std::sqrt(square);
        };
        for (const token& t : tokens) {
            const float* key = shape.key(t, head);
            const double norm = length(key);
            for (uint32_t d = 0; norm != 0.0 && d < shape.key_dim; ++d)
                sum[d] += double{key[d]} / norm;
        }
        double total = 0.0;
        for (const double s : sum) total += s * s;
        for (const std::size_t slot : candidates) {
            const float* key = shape.key(tokens[slot], head);
            double dot = 0.0;
            for (uint32_t d = 0; d < shape.key_dim; ++d) dot += sum[d] * double{key[d]};
            const double both = std::sqrt(total) * length(key);
            scores[slot] = both == 0.0 ? 0.0 : -dot / both;
        }
    }

    void by_triattention(uint32_t lane, uint32_t head, const std::vector<std::size_t>& candidates,
                         std::vector<double>& scores) const {
        const layer_spec& layer = model.spec.layers[model.lanes[lane].layer];
        const query_means mean = means(model.lanes[lane].layer);
        const phase_table phases = future_phases(layer, policy, owner.next_position);
        const std::vector<token>& tokens = owner.lanes[lane].heads[head];
        const double count = static_cast<double>(candidates.size());
        for (uint32_t member = 0; member < layer.group(); ++member) {
            std::vector<double> raw;
            for (const std::size_t slot : candidates) {
                const uint32_t kv_head = model.lanes[lane].first_head + head;
                raw.push_back(triattention_score(layer, policy, mean,
                                                 kv_head * layer.group() + member, phases,
                                                 model.lanes[lane].key(tokens[slot], head)));
            }
            double average = 0.0;
            for (const double s : raw) average += s / count;
            double variance = 0.0;
            for (const double s : raw) variance += (s - average) * (s - average) / count;
            const double deviation = std::max(std::sqrt(variance), 1e-6);
            for (std::size_t i = 0; i < raw.size(); ++i) {
                const double z = (raw[i] - average) / deviation;
                double& best = scores[candidates[i]];
                best = member == 0 ? z : std::max(best, z);
            }
        }
    }
};

void check_best(const std::vector<token>& tokens, const std::vector<double>& scores,
                const std::vector<uint32_t>& survivors, double tolerance, uint32_t layer,
                std::size_t head) {
    double worst_kept = std::numeric_limits<double>::infinity();
    double best_gone = -std::numeric_limits<double>::infinity();
    uint32_t kept_at = 0, gone_at = 0;
    for (std::size_t slot = 0; slot < tokens.size(); ++slot) {
        const uint32_t position = tokens[slot].position;
        const double score = scores[slot] < not_a_number / 2 ? not_a_number : scores[slot];
        const bool stays = std::binary_search(survivors.begin(), survivors.end(), position);
        if (std::isnan(scores[slot])) {
            require(stays, "layer {} head {}: the protected position {} was evicted", layer, head,
                    position);
        } else if (stays && score < worst_kept) {
            worst_kept = score;
            kept_at = position;
        } else if (!stays && score > best_gone) {
            best_gone = score;
            gone_at = position;
        }
    }
    // Sums of weights, which are kept as f16, may be large.
    const double near = std::max(tolerance, std::isfinite(best_gone) ? tolerance * best_gone : 0.0);
    require(
        worst_kept >= best_gone - near,
        "layer {} head {}: position {} with score {} stays, {} with {} was evicted, {} of {} stay",
        layer, head, kept_at, worst_kept, gone_at, best_gone, survivors.size(), tokens.size());
}

/// Scores joined over lanes and heads as the selection says, and the survivors compared with them.
void check_selection(const scorer& by, const round_plan& plan, const survivor_sets& survivors) {
    const uint32_t selection = resolved_selection(by.policy);
    const double tolerance = by.policy.scorer == KV_SCORER_STREAMING ? 0.0 : tie;
    const uint32_t lanes = static_cast<uint32_t>(by.model.lanes.size());
    struct joined_set {
        uint32_t lane, head;  // the first that has a part in it
        std::vector<double> scores;
    };
    std::map<uint32_t, joined_set> joined;
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        if (plan.chosen[lane] == 0) continue;
        const uint32_t heads = by.model.lanes[lane].kv_heads;
        const uint32_t layer = by.model.lanes[lane].layer;
        for (uint32_t head = 0; head < heads; ++head) {
            const std::vector<double> scores = by.head_scores(lane, head);
            if (selection == KV_SELECT_PER_LAYER_PER_HEAD) {
                check_best(by.owner.lanes[lane].heads[head], scores, survivors[lane][head],
                           tolerance, layer, by.model.lanes[lane].first_head + head);
                continue;
            }
            const uint32_t set = set_of(by.model, lane, head, selection);
            const auto [found, fresh] = joined.emplace(set, joined_set{lane, head, scores});
            joined_set& whole = found->second;
            require(survivors[lane][head] == survivors[whole.lane][whole.head],
                    "layer {} head {}: its survivors differ from those of layer {}, set {}", layer,
                    by.model.lanes[lane].first_head + head, by.model.lanes[whole.lane].layer, set);
            for (std::size_t slot = 0; !fresh && slot < scores.size(); ++slot) {
                whole.scores[slot] = selection != KV_SELECT_UNION
                                         ? whole.scores[slot] + scores[slot]
                                         : std::max(whole.scores[slot], scores[slot]);
            }
        }
    }
    for (const auto& [set, whole] : joined) {
        check_best(by.owner.lanes[whole.lane].heads[whole.head], whole.scores,
                   survivors[whole.lane][whole.head], tolerance * lanes,
                   by.model.lanes[whole.lane].layer, set);
    }
}

/// Moves one lane's tokens and blocks as a compaction does.
void compact(oracle& model, oracle_sequence& owner, uint32_t lane, uint32_t keep,
             const std::vector<std::vector<uint32_t>>& survivors, round_effect& effect) {
    oracle_lane& state = owner.lanes[lane];
    uint32_t first_moving = keep;
    for (std::size_t head = 0; head < state.heads.size(); ++head) {
        std::vector<token> kept;
        std::vector<double> sums;
        const std::vector<token>& old = state.heads[head];
        std::size_t slot = 0;
        for (const uint32_t position : survivors[head]) {
            while (slot < old.size() && old[slot].position < position) ++slot;
            require(slot < old.size() && old[slot].position == position,
                    "layer {} head {}: survivor {} was not retained before",
                    model.lanes[lane].layer, head, position);
            if (slot != kept.size()) {
                first_moving = std::min(first_moving, static_cast<uint32_t>(kept.size()));
            }
            kept.push_back(old[slot]);
            sums.push_back(observed_at(owner, lane, head, slot));
        }
        state.heads[head] = std::move(kept);
        if (head >= state.sums.size()) continue;
        if (model.defect == mutation::unmoved_scores) sums = state.sums[head];
        state.sums[head] = std::move(sums);
    }
    const uint32_t kept_blocks = model.blocks_for(keep);
    std::vector<block_reference> replaced;
    for (uint32_t i = first_moving / model.spec.block_tokens;
         first_moving < keep && i < kept_blocks; ++i) {
        if (is_private(model, owner, state.table[i])) continue;
        replaced.push_back(state.table[i]);
        state.table[i] = model.new_block(lane);
        ++effect.copied;
    }
    for (block_reference& block : replaced) {
        model.drop(block, lane, owner.last_fence, effect.returned);
    }
    model.shrink(owner, lane, kept_blocks, effect.returned);
    state.survivors = keep;
}

}  // namespace

bool is_private(const oracle& model, const oracle_sequence& owner, const block_reference& block) {
    return block.use_count() == 1 && model.fences.passed(owner.last_fence) &&
           model.fences.passed(block->last_reader);
}

round_plan plan_round(const oracle& model, const oracle_sequence& owner, const kv_policy& policy) {
    round_plan plan;
    plan.chosen.assign(model.lanes.size(), 0);
    uint32_t keep = 0;
    for (std::size_t lane = 0; lane < model.lanes.size(); ++lane) {
        const oracle_lane_shape& shape = model.lanes[lane];
        const bool skipped = shape.layer < policy.skip_layers;
        if (!shape.evictable || skipped || owner.lanes[lane].slots() == 0) continue;
        plan.chosen[lane] = 1;
        for (const std::vector<token>& head : owner.lanes[lane].heads) {
            keep = std::max(keep, keep_of_head(model, owner, policy, head));
        }
    }
    for (std::size_t lane = 0; lane < model.lanes.size(); ++lane) {
        if (plan.chosen[lane] != 0 && owner.lanes[lane].slots() <= keep) plan.chosen[lane] = 0;
        if (plan.chosen[lane] != 0) plan.nothing = false;
    }
    plan.keep.assign(model.lanes.size(), keep);
    bound_fresh(model, owner, policy, plan);
    plan.sets_differ = !plan.nothing && sets_differ(model, owner, plan, resolved_selection(policy));
    return plan;
}

uint32_t held_in_lane(const oracle& model, const oracle_sequence& owner, const kv_policy& policy,
                      std::size_t lane) {
    std::ptrdiff_t most = 0;
    for (const std::vector<token>& head : owner.lanes[lane].heads) {
        most = std::max(most, std::count_if(head.begin(), head.end(), [&](const token& t) {
                            return is_protected(model, owner, policy, t.position);
                        }));
    }
    return static_cast<uint32_t>(most);
}

uint32_t budget_of_lane(const oracle& model, const oracle_sequence& owner, const kv_policy& policy,
                        std::size_t lane) {
    uint32_t most = held_in_lane(model, owner, policy, lane);
    for (const std::vector<token>& head : owner.lanes[lane].heads) {
        uint32_t allowed = policy.budget;
        const uint32_t both = KV_POLICY_PROTECT_PROMPT | KV_POLICY_PROMPT_ON_TOP;
        for (const token& t : head) {
            allowed += (policy.flags & both) == both && t.position < policy.prompt_tokens ? 1 : 0;
        }
        most = std::max(most, allowed);
    }
    return most;
}

bool round_is_due(const oracle& model, const oracle_sequence& owner, uint32_t accepted) {
    const kv_policy& policy = owner.policy;
    if (!owner.has_policy) return false;
    const bool by_count = policy.every != 0 && owner.tokens_since_round >= policy.every;
    const bool at_prompt_end = (policy.flags & KV_POLICY_AT_PROMPT_END) != 0 &&
                               owner.next_position >= policy.prompt_tokens &&
                               (owner.prompt_was_in ||
                                owner.next_position - accepted < policy.prompt_tokens);
    std::map<uint32_t, std::pair<double, double>> layers;  // slots and lanes
    uint64_t left = 0, largest = 0;
    for (std::size_t lane = 0; lane < model.lanes.size(); ++lane) {
        if (!model.lanes[lane].evictable) continue;
        const uint32_t slots = owner.lanes[lane].slots();
        const bool above = slots > policy.budget || policy.allocator == KV_ALLOCATE_THRESHOLD;
        if (above && (by_count || at_prompt_end)) return true;
        if (model.lanes[lane].layer < policy.skip_layers) continue;
        layers[model.lanes[lane].layer].first += slots;
        layers[model.lanes[lane].layer].second += 1.0;
        left = std::max<uint64_t>(left, budget_of_lane(model, owner, policy, lane));
        largest = std::max<uint64_t>(largest, slots);
    }
    if (policy.slack != 0 && policy.allocator == KV_ALLOCATE_THRESHOLD) {
        return largest > left + policy.slack;
    }
    double retained = 0.0;
    for (const auto& [layer, sums] : layers) retained += sums.first / sums.second;
    const double allowed = static_cast<double>(left + policy.slack);
    return policy.slack != 0 && retained > static_cast<double>(layers.size()) * allowed;
}

void bound_fresh(const oracle& model, const oracle_sequence& owner, const kv_policy& policy,
                 round_plan& plan) {
    for (std::size_t lane = 0; lane < model.lanes.size(); ++lane) {
        if (plan.chosen[lane] == 0) continue;
        uint32_t first_moving = plan.keep[lane];
        for (const std::vector<token>& head : owner.lanes[lane].heads) {
            for (uint32_t slot = 0; slot < first_moving; ++slot) {
                if (!is_protected(model, owner, policy, head[slot].position)) first_moving = slot;
            }
        }
        for (uint32_t i = first_moving / model.spec.block_tokens;
             i < model.blocks_for(plan.keep[lane]); ++i) {
            if (is_private(model, owner, owner.lanes[lane].table[i])) continue;
            ++plan.fresh[model.lanes[lane].block_class];
            ++plan.fresh_blocks;
        }
    }
}

round_effect apply_round(oracle& model, oracle_sequence& owner, const kv_policy& policy,
                         const round_plan& plan, const survivor_sets& survivors,
                         const means_reader& means, bool numbers) {
    for (std::size_t lane = 0; lane < model.lanes.size(); ++lane) {
        if (plan.chosen[lane] == 0) continue;
        for (const std::vector<uint32_t>& head : survivors[lane]) {
            require(head.size() == plan.keep[lane], "layer {}: {} tokens stay instead of {}",
                    model.lanes[lane].layer, head.size(), plan.keep[lane]);
        }
    }
    try {
        check_selection({model, owner, policy, means, numbers}, plan, survivors);
    } catch (const mismatch& found) {
        throw mismatch(
            fmt::format("{} (scorer {} selection {} flags {} budget {} sinks {} recent {} prompt "
                        "{} offsets {} allocator {} skips {})",
                        found.what(), policy.scorer, policy.selection, policy.flags, policy.budget,
                        policy.sinks, policy.recent, policy.prompt_tokens, policy.offset_max,
                        policy.allocator, policy.skip_layers));
    }
    round_effect effect;
    std::set<uint32_t> compacted;
    for (uint32_t lane = 0; lane < model.lanes.size(); ++lane) {
        if (plan.chosen[lane] == 0) continue;
        compact(model, owner, lane, plan.keep[lane], survivors[lane], effect);
        compacted.insert(model.lanes[lane].layer);
    }
    effect.layers = static_cast<uint32_t>(compacted.size());
    owner.tokens_since_round = 0;
    ++owner.compactions;
    return effect;
}

}  // namespace property
