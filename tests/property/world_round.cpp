#include <algorithm>

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
    const round_effect effect =
        apply_round(model_, owner, policy, plan, read_survivors(owner), read_means(owner));
    count(expected.tokens_after, expected.blocks_after, expected.bytes_after);
    expected.outcome = KV_COMPRESS_DONE;
    expected.layers = effect.layers;
    expected.blocks_copied = effect.copied;
    expected.blocks_returned = effect.returned.blocks;
    expected.bytes_returned = effect.returned.bytes;
    return expected;
}

void world::round_at_step_end(oracle_sequence& owner, kv_step_report& expected) {
    kv_policy policy = owner.policy;
    bool wanted = owner.has_policy && policy.every != 0 && owner.tokens_since_round >= policy.every;
    if (wanted) {
        wanted = false;
        for (std::size_t lane = 0; lane < model_.lanes.size(); ++lane) {
            wanted = wanted ||
                     (model_.lanes[lane].evictable && owner.lanes[lane].slots() > policy.budget);
        }
    }
    if (owner.round_deferred) {
        wanted = owner.has_deferred_policy || owner.has_policy;
        if (owner.has_deferred_policy) policy = owner.deferred_policy;
        owner.round_deferred = false;
        owner.has_deferred_policy = false;
    }
    if (!wanted) return;
    const round_plan plan = plan_round(model_, owner, policy);
    if (plan.nothing) {
        owner.tokens_since_round = 0;
        ++expected.compactions_skipped;
        return;
    }
    const bool blind = policy.scorer == KV_SCORER_TRIATTENTION && !has_means(owner, plan);
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
    const bool blind =
        !plan.nothing && used.scorer == KV_SCORER_TRIATTENTION && !has_means(target, plan);

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
    if (plan.sets_differ) {
        expect_error(found, KV_INVALID, "kv_compress over different sets");
        return found;
    }
    if (!plan.nothing && !blind && !room) {
        expect_error(found, KV_AGAIN, "kv_compress without blocks for copies");
        return found;
    }
    require_ok(found, "kv_compress");
    kv_compress_report expected = KV_INIT(kv_compress_report);
    if (plan.nothing || blind) {
        expected.outcome = plan.nothing ? KV_COMPRESS_NOTHING : KV_COMPRESS_NO_STATISTICS;
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
    const bool blind = policy.scorer == KV_SCORER_TRIATTENTION && !has_means(target, plan);

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
