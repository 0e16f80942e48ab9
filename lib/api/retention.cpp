// Compaction by hand, and query statistics.
#include <algorithm>
#include <cmath>
#include <initializer_list>

#include "api/handles.hpp"
#include "sequence/fit_affine.hpp"
#include "step/device_fit.hpp"
#include "step/round_cohort.hpp"

namespace kvrt {

namespace {

void fill_report(const compaction_report& round, kv_compress_report& report) {
    report.outcome = round.outcome;
    report.layers = round.layers;
    report.tokens_before = round.tokens_before;
    report.tokens_after = round.tokens_after;
    report.blocks_before = round.tables_before.blocks;
    report.blocks_after = round.tables_after.blocks;
    report.bytes_before = round.tables_before.bytes;
    report.bytes_after = round.tables_after.bytes;
    report.blocks_returned = round.returned.blocks;
    report.bytes_returned = round.returned.bytes;
    report.blocks_copied = round.blocks_copied;
    if (round.heads_lost != 0) {
        report.lost_attention = round.lost / static_cast<double>(round.heads_lost);
    }
}

status compress(kv_pool& pool, sequence& target, const kv_compress_options* options,
                kv_compress_report& report) {
    kv_compress_options local = KV_INIT(kv_compress_options);
    kv_policy policy = target.policy;
    if (options != nullptr) {
        KVRT_TRY(adopt(options, 0, "options (kv_compress_options)", local));
    }
    if (local.policy != nullptr) {
        KVRT_TRY(adopt(local.policy, policy_flags, "options.policy (kv_policy)", policy));
        KVRT_TRY(check_policy(pool.store, policy));
        if (pool.store.on_device()) KVRT_TRY(prepare_policy_on_device(pool.steps, policy));
    } else if (!target.has_policy) {
        return fail(KV_INVALID,
                    "the sequence has no policy: give one in options or with kv_seq_set_policy");
    }
    if (target.in_step) {
        target.compress_at_step_end = true;
        target.has_deferred_policy = local.policy != nullptr;
        target.deferred_policy = policy;
        report.outcome = KV_COMPRESS_DEFERRED;
        return KV_OK;
    }
    const uint64_t slabs_before = pool.store.blocks.totals().slabs_given_back;
    const uint64_t start = now(pool);
    compaction_report round;
    if (pool.store.on_device()) {
        KVRT_TRY(compress_on_device(pool.steps, target, policy, round));
    } else {
        KVRT_TRY(compact_sequence(pool.store, pool.retention, target, policy, round));
    }
    fill_report(round, report);
    report.nanoseconds = now(pool) - start;
    report.recoded_rows = round.recoded.rows;
    report.recoding_error = round.recoded.relative_change();
    report.slabs_given_back = pool.store.blocks.totals().slabs_given_back - slabs_before;
    return KV_OK;
}

/// Checks a caller's statistics struct against its layer.
status check_statistics(const kv_pool& pool, const kv_query_statistics& statistics) {
    const model_geometry& model = pool.store.model;
    if (statistics.layer >= model.layers.size()) {
        return fail(KV_INVALID, "statistics: layer {} of a model of {} layers", statistics.layer,
                    model.layers.size());
    }
    const layer_geometry& layer = model.layers[statistics.layer];
    if (!has_statistics(pool.store, statistics.layer)) {
        return fail(KV_INVALID,
                    "statistics: layer {} has none: it shares a cache, has a window, no kv_rope, "
                    "or KV_LAYER_CACHE_POSITIONS",
                    statistics.layer);
    }
    const uint32_t bands = layer.rope.bands(model.lanes[layer.first_lane].layout.keys.dim);
    if (statistics.query_heads != layer.query_heads || statistics.bands != bands) {
        return fail(KV_INVALID, "statistics: [{}, {}], layer {} has [{}, {}]",
                    statistics.query_heads, statistics.bands, statistics.layer, layer.query_heads,
                    bands);
    }
    if (statistics.mean_real == nullptr || statistics.mean_imaginary == nullptr ||
        statistics.mean_magnitude == nullptr) {
        return fail(KV_INVALID,
                    "statistics: mean_real, mean_imaginary, mean_magnitude must be set");
    }
    const bool some = statistics.variance_real != nullptr ||
                      statistics.variance_imaginary != nullptr || statistics.covariance != nullptr;
    const bool all = statistics.variance_real != nullptr &&
                     statistics.variance_imaginary != nullptr && statistics.covariance != nullptr;
    if (some && !all) {
        return fail(KV_INVALID,
                    "statistics: variance_real, variance_imaginary, covariance: all or none");
    }
    return KV_OK;
}

query_moments<float> arrays_of(const kv_query_statistics& user) {
    return {user.mean_real,     user.mean_imaginary,     user.mean_magnitude,
            user.variance_real, user.variance_imaginary, user.covariance};
}

/// Whether covariances are possible beside means: of two dimensions that cannot vary together more
/// than each does alone, up to rounding.
bool possible(const query_moments<float>& moments, uint64_t i) {
    const double first = moments.variance_real[i], second = moments.variance_imaginary[i];
    const double both = moments.covariance[i];
    return first >= 0.0 && second >= 0.0 && both * both <= 1.001 * first * second &&
           std::isfinite(first) && std::isfinite(second);
}

status set_statistics(kv_pool& pool, const kv_query_statistics* user) {
    kv_query_statistics local;
    KVRT_TRY(adopt(user, 0, "statistics (kv_query_statistics)", local));
    KVRT_TRY(check_statistics(pool, local));
    if (local.tokens == 0) {
        return fail(KV_INVALID,
                    "statistics: tokens is 0: of how many queries are these the means?");
    }
    statistics_store& statistics = pool.retention.statistics;
    const uint64_t length = layer_statistics_length(pool.store, local.layer);
    for (const float* values : {local.mean_real, local.mean_imaginary, local.mean_magnitude}) {
        if (!std::all_of(values, values + length, [](float v) { return std::isfinite(v); })) {
            return fail(KV_INVALID, "statistics: layer {}: a mean is not finite", local.layer);
        }
    }
    const query_moments<float> source = arrays_of(local);
    for (uint64_t i = 0; source.has_covariances() && i < length; ++i) {
        if (possible(source, i)) continue;
        return fail(KV_INVALID, "statistics: layer {}: a covariance is not possible", local.layer);
    }
    const query_moments<float> target = moments_at(statistics, statistics.given, local.layer);
    std::copy_n(source.mean_real, length, target.mean_real);
    std::copy_n(source.mean_imaginary, length, target.mean_imaginary);
    std::copy_n(source.mean_magnitude, length, target.mean_magnitude);
    if (source.has_covariances()) {
        std::copy_n(source.variance_real, length, target.variance_real);
        std::copy_n(source.variance_imaginary, length, target.variance_imaginary);
        std::copy_n(source.covariance, length, target.covariance);
    }
    ++statistics.given_changes;
    statistics.given_tokens[local.layer] = local.tokens;
    statistics.given_spread[local.layer] = source.has_covariances() ? 1 : 0;
    return KV_OK;
}

/// Of a sequence's own queries, wherever their sums are.
status own_moments(kv_pool& pool, const sequence& source, uint32_t layer,
                   const query_moments<float>& out, uint64_t& tokens) {
    const uint32_t index = pool.store.sequences.index(source);
    if (pool.store.on_device()) return read_moments(pool.steps, index, layer, out, tokens);
    tokens = online_moments(pool.store, pool.retention.statistics, index, layer, out);
    return KV_OK;
}

status get_statistics(kv_pool& pool, const sequence& source, kv_query_statistics* user) {
    kv_query_statistics local;
    KVRT_TRY(adopt(user, 0, "statistics (kv_query_statistics)", local));
    KVRT_TRY(check_statistics(pool, local));
    const uint64_t length = layer_statistics_length(pool.store, local.layer);
    const query_moments<float> target = arrays_of(local);
    KVRT_TRY(own_moments(pool, source, local.layer, target, local.tokens));
    if (local.tokens == 0) {
        for (float* array : {target.mean_real, target.mean_imaginary, target.mean_magnitude,
                             target.variance_real, target.variance_imaginary, target.covariance}) {
            if (array != nullptr) std::fill_n(array, length, 0.0f);
        }
    }
    deliver(local, user);
    return KV_OK;
}

/// What a file holds: the layers that store, in order.
struct file_layers {
    host_array<layer_statistics> records;  ///< over the scratch of a round
    host_array<uint32_t> layer;            ///< whose each record is
};

status describe_layers(kv_pool& pool, host_allocator& allocator, file_layers& file) {
    model_geometry& model = pool.store.model;
    statistics_store& statistics = pool.retention.statistics;
    const uint64_t storing =
        static_cast<uint64_t>(std::count_if(model.layers.begin(), model.layers.end(),
                                            [](const layer_geometry& l) { return l.stores; }));
    KVRT_TRY(file.records.allocate(allocator, storing, "statistics file"));
    KVRT_TRY(file.layer.allocate(allocator, storing, "statistics file"));
    uint32_t next = 0;
    for (uint32_t index = 0; index < model.layers.size(); ++index) {
        const layer_geometry& layer = model.layers[index];
        if (!layer.stores) continue;
        file.layer[next] = index;
        layer_statistics& record = file.records[next++];
        record.query_heads = has_statistics(pool.store, index) ? layer.query_heads : 0;
        record.key_dim = model.lanes[layer.first_lane].layout.keys.dim;
        record.rope = &layer.rope;
        record.moments = moments_at(statistics, statistics.present, index);
    }
    return KV_OK;
}

status save(kv_pool& pool, const sequence& source, const char* path) {
    if (path == nullptr) return fail(KV_INVALID, "path is NULL");
    host_allocator own;
    file_layers file;
    KVRT_TRY(describe_layers(pool, own, file));
    bool any = false;
    for (uint32_t i = 0; i < file.records.size(); ++i) {
        layer_statistics& record = file.records[i];
        if (record.query_heads == 0) continue;
        KVRT_TRY(own_moments(pool, source, file.layer[i], record.moments, record.tokens));
        any = any || record.tokens != 0;
    }
    if (!any) {
        return fail(KV_INVALID,
                    "the sequence has gathered no queries: give it KV_SEQ_GATHER_STATISTICS or a "
                    "policy that needs them before kv_attend");
    }
    return save_statistics(file.records.data(), static_cast<uint32_t>(file.records.size()), path);
}

status load(kv_pool& pool, const char* path) {
    if (path == nullptr) return fail(KV_INVALID, "path is NULL");
    host_allocator own;
    file_layers file;
    KVRT_TRY(describe_layers(pool, own, file));
    KVRT_TRY(
        load_statistics(path, file.records.data(), static_cast<uint32_t>(file.records.size())));
    statistics_store& statistics = pool.retention.statistics;
    std::copy(statistics.present.begin(), statistics.present.end(), statistics.given.begin());
    ++statistics.given_changes;
    for (uint32_t i = 0; i < file.records.size(); ++i) {
        statistics.given_tokens[file.layer[i]] = file.records[i].tokens;
        statistics.given_spread[file.layer[i]] = file.records[i].has_covariances ? 1 : 0;
    }
    return KV_OK;
}

status fit(kv_pool& pool, const sequence& source, kv_affine_fit* user) {
    kv_affine_fit local;
    KVRT_TRY(adopt(user, 0, "fit (kv_affine_fit)", local));
    const model_geometry& model = pool.store.model;
    if (local.layer >= model.layers.size()) {
        return fail(KV_INVALID, "fit: layer {} of a model of {} layers", local.layer,
                    model.layers.size());
    }
    affine_fit wanted;
    const lane_geometry& lane = model.lanes[model.layers[local.layer].first_lane];
    wanted.layer = lane.layer;
    const layer_geometry& layer = model.layers[lane.layer];
    if (local.kv_heads != layer.kv_heads || local.key_dim != lane.layout.keys.dim) {
        return fail(KV_INVALID, "fit: arrays of [{}, {}], layer {} has [{}, {}]", local.kv_heads,
                    local.key_dim, local.layer, layer.kv_heads, lane.layout.keys.dim);
    }
    if (local.channel_means == nullptr || local.channel_scales == nullptr) {
        return fail(KV_INVALID, "fit: channel_means and channel_scales must be set");
    }
    if (!layer.rope_known) {
        return fail(KV_INVALID,
                    "fit: layer {} has no kv_rope: say KV_ROPE_NONE if keys are not rotated",
                    lane.layer);
    }
    wanted.positions = {local.first_position, local.tokens != 0 ? local.tokens : ~uint64_t{0}};
    wanted.means = local.channel_means;
    wanted.scales = local.channel_scales;
    const status verdict = pool.store.on_device() ? fit_affine_on_device(pool.steps, source, wanted)
                                                  : fit_affine(pool.store, source, wanted);
    local.tokens_used = wanted.tokens_used;
    local.identity = wanted.identity;
    if (verdict == KV_OK || verdict == KV_LIMIT) deliver(local, user);
    return verdict;
}

}  // namespace

}  // namespace kvrt

using namespace kvrt;

extern "C" {

kv_status kv_compress(kv_pool* pool, kv_seq seq, const kv_compress_options* options,
                      kv_compress_report* report) {
    return call_pool(pool, [&]() -> status {
        kv_compress_report local = KV_INIT(kv_compress_report);
        if (report != nullptr) {
            KVRT_TRY(check_struct(report, sizeof *report, 0, "report (kv_compress_report)"));
        }
        const status verdict = with_sequence(
            *pool, seq, [&](sequence& target) { return compress(*pool, target, options, local); });
        if (verdict == KV_OK && report != nullptr) deliver(local, report);
        publish_stats(*pool);
        return verdict;
    });
}

kv_status kv_pool_set_statistics(kv_pool* pool, const kv_query_statistics* statistics) {
    return call_pool(pool, [&] { return set_statistics(*pool, statistics); });
}

kv_status kv_seq_get_statistics(kv_pool* pool, kv_seq seq, kv_query_statistics* statistics) {
    return call_pool(pool, [&] {
        return with_sequence(*pool, seq, [&](sequence& source) {
            return get_statistics(*pool, source, statistics);
        });
    });
}

kv_status kv_seq_save_statistics(kv_pool* pool, kv_seq seq, const char* path) {
    return call_pool(pool, [&] {
        return with_sequence(*pool, seq,
                             [&](sequence& source) { return save(*pool, source, path); });
    });
}

kv_status kv_pool_load_statistics(kv_pool* pool, const char* path) {
    return call_pool(pool, [&] { return load(*pool, path); });
}

kv_status kv_seq_fit_affine(kv_pool* pool, kv_seq seq, kv_affine_fit* wanted) {
    return call_pool(pool, [&] {
        return with_sequence(*pool, seq,
                             [&](sequence& source) { return fit(*pool, source, wanted); });
    });
}

}  // extern "C"
