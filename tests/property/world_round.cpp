#include <algorithm>
#include <map>

#include "api/handles.hpp"
#include "retention/round.hpp"
#include "world.hpp"

namespace property {

survivor_sets world::read_survivors(const oracle_sequence& owner) {
    survivor_sets sets(owner.lanes.size());
    for (uint32_t lane = 0; lane < sets.size(); ++lane) {
        for (uint32_t head = 0; head < owner.lanes[lane].heads.size(); ++head) {
            std::vector<uint32_t> positions(model_.spec.max_tokens);
            uint64_t count = 0;
            require_ok(kv_seq_get_positions(pool_, owner.handle, model_.lanes[lane].layer,
                                            model_.lanes[lane].first_head + head, positions.size(),
                                            positions.data(), &count),
                       "kv_seq_get_positions");
            positions.resize(count);
            require(std::is_sorted(positions.begin(), positions.end(), std::less_equal<>()),
                    "layer {} head {}: survivors do not ascend", model_.lanes[lane].layer, head);
            sets[lane].push_back(std::move(positions));
        }
    }
    return sets;
}

means_reader world::read_means(const oracle_sequence& owner) {
    return [this, handle = owner.handle](uint32_t layer) {
        const layer_spec& shape = model_.spec.layers[layer];
        query_means means;
        const std::size_t length = std::size_t{shape.query_heads} * shape.bands();
        means.real.resize(length);
        means.imaginary.resize(length);
        means.magnitude.resize(length);
        kv_query_statistics found = KV_INIT(kv_query_statistics);
        found.layer = layer;
        found.query_heads = shape.query_heads;
        found.bands = shape.bands();
        found.mean_real = means.real.data();
        found.mean_imaginary = means.imaginary.data();
        found.mean_magnitude = means.magnitude.data();
        require_ok(kv_seq_get_statistics(pool_, handle, &found), "kv_seq_get_statistics");
        means.tokens = found.tokens;
        return means;
    };
}

bool world::has_means(const oracle_sequence& owner, const round_plan& plan) {
    const means_reader means = read_means(owner);
    for (std::size_t lane = 0; lane < model_.lanes.size(); ++lane) {
        if (plan.chosen[lane] != 0 && means(model_.lanes[lane].layer).tokens == 0) return false;
    }
    return true;
}

uint32_t world::blindness(const oracle_sequence& owner, const kv_policy& policy,
                          const round_plan& plan) {
    if (plan.nothing) return 0;
    if (!has_observed(owner, policy, plan.chosen)) return KV_COMPRESS_NO_OBSERVATIONS;
    const bool by_queries = policy.scorer == KV_SCORER_TRIATTENTION ||
                            policy.scorer == KV_SCORER_BLEND ||
                            policy.scorer == KV_SCORER_EXPECTED_ATTENTION;
    return by_queries && !has_means(owner, plan) ? uint32_t{KV_COMPRESS_NO_STATISTICS} : 0u;
}

/// Are there blocks for all that the round may copy?
bool world::has_room(const round_plan& plan) const {
    const kv_pool_stats before = stats();
    uint64_t slabs_left = before.slabs_free;
    bool room = true;
    for (uint32_t c = 0; c < before.classes; ++c) {
        kv_class_stats found = KV_INIT(kv_class_stats);
        require_ok(kv_pool_get_class_stats(pool_, c, &found), "kv_pool_get_class_stats");
        if (plan.fresh[c] <= found.free) continue;
        const uint64_t more =
            (plan.fresh[c] - found.free + found.blocks_per_slab - 1) / found.blocks_per_slab;
        room = room && more <= slabs_left;
        slabs_left -= std::min(more, slabs_left);
    }
    return room;
}

/// Takes over what the library kept; returns what its report must say.
kv_compress_report world::run_round(oracle_sequence& owner, const kv_policy& policy,
                                    const round_plan& plan) {
    kv_compress_report expected = KV_INIT(kv_compress_report);
    const auto count = [&](uint64_t& tokens, uint64_t& blocks, uint64_t& bytes) {
        for (std::size_t lane = 0; lane < model_.lanes.size(); ++lane) {
            const oracle_lane& state = owner.lanes[lane];
            tokens += state.slots() * state.heads.size();
            blocks += state.table.size();
            bytes += state.table.size() * model_.lanes[lane].block_bytes;
        }
    };
    count(expected.tokens_before, expected.blocks_before, expected.bytes_before);
    const round_effect effect = apply_round(model_, owner, policy, plan, read_survivors(owner),
                                            read_means(owner), filling_ == content::real_numbers);
    count(expected.tokens_after, expected.blocks_after, expected.bytes_after);
    if (rules_of(policy).kind != observed_kind::nothing) ++scored_rounds_;
    expected.outcome = KV_COMPRESS_DONE;
    expected.layers = effect.layers;
    expected.blocks_copied = effect.copied;
    expected.blocks_returned = effect.returned.blocks;
    expected.bytes_returned = effect.returned.bytes;
    return expected;
}

/// The round that the library has run by an allocator other than UNIFORM, seen from its survivors.
round_plan world::plan_of_survivors(const oracle_sequence& owner, const kv_policy& policy,
                                    const survivor_sets& survivors) const {
    round_plan plan;
    plan.chosen.assign(model_.lanes.size(), 0);
    plan.keep.assign(model_.lanes.size(), 0);
    std::map<uint32_t, std::pair<uint64_t, uint64_t>> layers;  // kept, and at most
    for (std::size_t lane = 0; lane < model_.lanes.size(); ++lane) {
        const oracle_lane_shape& shape = model_.lanes[lane];
        const uint32_t before = owner.lanes[lane].slots();
        plan.keep[lane] = static_cast<uint32_t>(survivors[lane][0].size());
        plan.chosen[lane] = plan.keep[lane] != before ? 1 : 0;
        if (plan.chosen[lane] == 0) continue;
        plan.nothing = false;
        require(shape.evictable && shape.layer >= policy.skip_layers && plan.keep[lane] < before,
                "layer {}: {} tokens were left of {}", shape.layer, plan.keep[lane], before);
        require(plan.keep[lane] >= held_in_lane(model_, owner, policy, lane),
                "layer {}: {} tokens were left, guards hold more", shape.layer, plan.keep[lane]);
    }
    for (std::size_t lane = 0; lane < model_.lanes.size(); ++lane) {
        auto& [kept, most] = layers[model_.lanes[lane].layer];
        kept += plan.keep[lane];
        const uint64_t budget = budget_of_lane(model_, owner, policy, lane);
        most += policy.allocator == KV_ALLOCATE_PYRAMID ? 2 * budget : budget;
        const bool bounded = policy.allocator == KV_ALLOCATE_THRESHOLD &&
                             model_.lanes[lane].layer >= policy.skip_layers &&
                             model_.lanes[lane].evictable;
        require(!bounded || plan.keep[lane] <= budget, "layer {}: {} tokens are above the budget",
                model_.lanes[lane].layer, plan.keep[lane]);
    }
    for (std::size_t lane = 0; lane < model_.lanes.size(); ++lane) {
        const auto& [kept, most] = layers[model_.lanes[lane].layer];
        require(plan.chosen[lane] == 0 || kept <= most,
                "layer {}: {} tokens stay, at most {} may (allocator {})", model_.lanes[lane].layer,
                kept, most, policy.allocator);
    }
    return plan;
}

/// Allocators other than UNIFORM: how many stay is the library's choice, within bounds; which ones
/// is checked as ever.
kv_status world::compress_by_allocator(oracle_sequence& target, const kv_policy& used,
                                       kv_status found, const kv_compress_report& report) {
    if (found == KV_INVALID) {
        require(resolved_selection(used) == KV_SELECT_PER_LAYER, "a round was refused");
        expect_error(found, KV_INVALID, "kv_compress over different sets");
        return found;
    }
    if (found == KV_AGAIN) {
        expect_error(found, KV_AGAIN, "kv_compress without blocks for copies");
        return found;
    }
    require_ok(found, "kv_compress");
    if (report.outcome == KV_COMPRESS_DONE) {
        const survivor_sets survivors = read_survivors(target);
        const round_plan plan = plan_of_survivors(target, used, survivors);
        require(!plan.nothing && blindness(target, used, plan) == 0, "a round ran that could not");
        const kv_compress_report expected = run_round(target, used, plan);
        require(
            report.layers == expected.layers && report.blocks_copied == expected.blocks_copied &&
                report.tokens_before == expected.tokens_before &&
                report.tokens_after == expected.tokens_after &&
                report.blocks_returned == expected.blocks_returned &&
                report.bytes_after == expected.bytes_after,
            "kv_compress by allocator {}: {} layers, {} copied, {} to {} tokens, {} returned "
            "instead of {}, {}, {} to {}, {}",
            used.allocator, report.layers, report.blocks_copied, report.tokens_before,
            report.tokens_after, report.blocks_returned, expected.layers, expected.blocks_copied,
            expected.tokens_before, expected.tokens_after, expected.blocks_returned);
    } else if (report.outcome == KV_COMPRESS_NOTHING) {
        target.tokens_since_round = 0;
    }
    operated();
    check_sequence(target);
    return found;
}

void world::round_at_step_end(oracle_sequence& owner, uint32_t accepted, kv_step_report& expected) {
    kv_policy policy = owner.policy;
    bool wanted = round_is_due(model_, owner, accepted);
    owner.prompt_was_in = false;
    if (owner.round_deferred) {
        wanted = owner.has_deferred_policy || owner.has_policy;
        if (owner.has_deferred_policy) policy = owner.deferred_policy;
        owner.round_deferred = false;
        owner.has_deferred_policy = false;
    }
    if (!wanted) return;
    if (policy.allocator > KV_ALLOCATE_UNIFORM) {
        kv_seq_info now = KV_INIT(kv_seq_info);
        require_ok(kv_seq_get_info(pool_, owner.handle, &now), "kv_seq_get_info");
        if (now.compactions == owner.compactions) {
            ++expected.compactions_skipped;
            // One that found nothing to remove was a round, one that could not run was none.
            const uint64_t now_since =
                pool_->store.sequences.find(owner.handle)->tokens_since_round;
            require(now_since == 0 || now_since == owner.tokens_since_round,
                    "sequence {}: {} tokens since the last round", owner.serial, now_since);
            owner.tokens_since_round = now_since;
            return;
        }
        const round_plan made = plan_of_survivors(owner, policy, read_survivors(owner));
        require(blindness(owner, policy, made) == 0, "a round ran that could not");
        const kv_compress_report report = run_round(owner, policy, made);
        ++expected.compactions;
        expected.blocks_returned += report.blocks_returned;
        expected.bytes_returned += report.bytes_returned;
        return;
    }
    const round_plan plan = plan_round(model_, owner, policy);
    if (plan.nothing) {
        owner.tokens_since_round = 0;
        ++expected.compactions_skipped;
        return;
    }
    const bool blind = blindness(owner, policy, plan) != 0;
    kv_seq_info info = KV_INIT(kv_seq_info);
    require_ok(kv_seq_get_info(pool_, owner.handle, &info), "kv_seq_get_info");
    if (info.compactions == owner.compactions) {
        // Whether blocks for copies were left just then is not known here.
        require(plan.sets_differ || blind || plan.fresh_blocks != 0,
                "sequence {}: a round that was due did not run", owner.serial);
        ++expected.compactions_skipped;
        return;
    }
    require(!plan.sets_differ && !blind, "sequence {}: a round ran that could not", owner.serial);
    const kv_compress_report report = run_round(owner, policy, plan);
    ++expected.compactions;
    expected.blocks_returned += report.blocks_returned;
    expected.bytes_returned += report.bytes_returned;
}

kv_status world::compress(oracle_sequence& target, const kv_policy* policy) {
    note("compress {} (step {}), {} policy", target.serial, target.step,
         policy != nullptr ? "a given" : "its own");
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = policy;
    kv_compress_report report = KV_INIT(kv_compress_report);
    const kv_policy used = policy != nullptr ? *policy : target.policy;
    const kv_pool_stats before = stats();
    round_plan plan;
    if (policy != nullptr || target.has_policy) plan = plan_round(model_, target, used);
    const bool room = has_room(plan);
    const uint32_t blind = blindness(target, used, plan);

    const kv_status found = kv_compress(pool_, target.handle, &options, &report);
    if (policy == nullptr && !target.has_policy) {
        expect_error(found, KV_INVALID, "kv_compress without a policy");
        return found;
    }
    if (target.step >= 0) {
        require_ok(found, "kv_compress in a step");
        require(report.outcome == KV_COMPRESS_DEFERRED, "kv_compress in a step: outcome {}",
                report.outcome);
        target.round_deferred = true;
        target.has_deferred_policy = policy != nullptr;
        target.deferred_policy = used;
        operated();
        check_sequence(target);
        return found;
    }
    if (used.allocator > KV_ALLOCATE_UNIFORM) {
        return compress_by_allocator(target, used, found, report);
    }
    if (plan.sets_differ) {
        expect_error(found, KV_INVALID, "kv_compress over different sets");
        return found;
    }
    if (!plan.nothing && blind == 0 && !room) {
        expect_error(found, KV_AGAIN, "kv_compress without blocks for copies");
        return found;
    }
    require_ok(found, "kv_compress");
    kv_compress_report expected = KV_INIT(kv_compress_report);
    if (plan.nothing || blind != 0) {
        expected.outcome = plan.nothing ? uint32_t{KV_COMPRESS_NOTHING} : blind;
        if (plan.nothing) target.tokens_since_round = 0;
    } else {
        expected = run_round(target, used, plan);
    }
    require(report.outcome == expected.outcome, "kv_compress: outcome {} instead of {}",
            report.outcome, expected.outcome);
    const kv_pool_stats after = stats();
    require(after.blocks_returned - before.blocks_returned == report.blocks_returned &&
                after.bytes_returned - before.bytes_returned == report.bytes_returned,
            "kv_compress reports {} blocks, {} bytes returned, the pool counts {}, {}",
            report.blocks_returned, report.bytes_returned,
            after.blocks_returned - before.blocks_returned,
            after.bytes_returned - before.bytes_returned);
    if (expected.outcome == KV_COMPRESS_DONE) {
        require(report.layers == expected.layers && report.blocks_copied == expected.blocks_copied,
                "kv_compress: {} layers, {} blocks copied instead of {}, {}", report.layers,
                report.blocks_copied, expected.layers, expected.blocks_copied);
        require(report.tokens_before == expected.tokens_before &&
                    report.tokens_after == expected.tokens_after,
                "kv_compress: {} tokens before, {} after instead of {}, {}", report.tokens_before,
                report.tokens_after, expected.tokens_before, expected.tokens_after);
        require(report.blocks_before == expected.blocks_before &&
                    report.blocks_after == expected.blocks_after &&
                    report.bytes_before == expected.bytes_before &&
                    report.bytes_after == expected.bytes_after,
                "kv_compress: {} blocks before, {} after instead of {}, {}", report.blocks_before,
                report.blocks_after, expected.blocks_before, expected.blocks_after);
        require(report.blocks_returned == expected.blocks_returned &&
                    report.bytes_returned == expected.bytes_returned,
                "kv_compress: {} blocks, {} bytes returned instead of {}, {}",
                report.blocks_returned, report.bytes_returned, expected.blocks_returned,
                expected.bytes_returned);
    }
    operated();
    check_sequence(target);
    return found;
}

void world::compress_unevenly(oracle_sequence& target, const kv_policy& policy) {
    note("compress {} unevenly", target.serial);
    round_plan plan;
    plan.chosen.assign(model_.lanes.size(), 0);
    plan.keep.assign(model_.lanes.size(), 0);
    for (std::size_t lane = 0; lane < model_.lanes.size(); ++lane) {
        const uint32_t held = held_in_lane(model_, target, policy, lane);
        const uint32_t slots = target.lanes[lane].slots();
        if (!model_.lanes[lane].evictable || held >= slots || below(4) == 0) continue;
        plan.chosen[lane] = 1;
        plan.keep[lane] = held + static_cast<uint32_t>(below(slots - held));
        plan.nothing = false;
    }
    if (plan.nothing) return;
    bound_fresh(model_, target, policy, plan);
    const bool room = has_room(plan);
    const bool blind = blindness(target, policy, plan) != 0;

    kvrt::sequence& inside = *pool_->store.sequences.find(target.handle);
    kvrt::round_plan round = kvrt::plan_of(pool_->store, pool_->retention, inside, policy);
    for (std::size_t lane = 0; lane < model_.lanes.size(); ++lane) {
        pool_->retention.chosen_lanes[lane] = static_cast<uint8_t>(plan.chosen[lane]);
        pool_->retention.keep[lane] = plan.keep[lane];
    }
    kvrt::compaction_report report;
    const kv_status found = kvrt::run_round(round, report);
    kvrt::publish_stats(*pool_);
    if (blind || !room) {
        require(found == (blind ? KV_OK : KV_AGAIN) && report.outcome != KV_COMPRESS_DONE,
                "an uneven round ran that could not: status {}", found);
    } else {
        require_ok(found, "an uneven round");
        const kv_compress_report expected = run_round(target, policy, plan);
        require(report.layers == expected.layers && report.blocks_copied == expected.blocks_copied,
                "an uneven round: {} layers, {} blocks copied instead of {}, {}", report.layers,
                report.blocks_copied, expected.layers, expected.blocks_copied);
        require(report.tokens_before == expected.tokens_before &&
                    report.tokens_after == expected.tokens_after &&
                    report.returned.blocks == expected.blocks_returned &&
                    report.returned.bytes == expected.bytes_returned,
                "an uneven round: {} tokens to {}, {} blocks, {} bytes returned instead of {} to "
                "{}, {}, {}",
                report.tokens_before, report.tokens_after, report.returned.blocks,
                report.returned.bytes, expected.tokens_before, expected.tokens_after,
                expected.blocks_returned, expected.bytes_returned);
    }
    operated();
    check_sequence(target);
}

}  // namespace property
