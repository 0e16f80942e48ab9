// Sequences: create, release, fork, truncate, pin, look.
#include <algorithm>

#include "api/handles.hpp"

namespace kvrt {

namespace {

status adopt_policy(kv_pool& pool, const kv_policy* policy, kv_policy& local) {
    KVRT_TRY(adopt(policy, policy_flags, "policy (kv_policy)", local));
    KVRT_TRY(check_policy(pool.store, local));
    return pool.store.on_device() ? prepare_policy_on_device(pool.steps, local) : KV_OK;
}

/// Whether a policy wants a round at the end of a prompt that is in already, and did not before.
bool finds_prompt_in(const sequence& target, const kv_policy& policy) {
    if ((policy.flags & KV_POLICY_AT_PROMPT_END) == 0 ||
        target.next_position < policy.prompt_tokens) {
        return false;
    }
    const bool asked_before = target.has_policy &&
                              (target.policy.flags & KV_POLICY_AT_PROMPT_END) != 0 &&
                              target.policy.prompt_tokens == policy.prompt_tokens;
    return !asked_before || target.prompt_was_in;
}

/// Gives a sequence a policy, or none.
status take_policy(kv_pool& pool, sequence& target, const kv_policy* policy) {
    KVRT_TRY(prepare_observations(pool.store, pool.retention.observations, target, policy));
    target.prompt_was_in = policy != nullptr && finds_prompt_in(target, *policy);
    target.policy = policy != nullptr ? *policy : KV_INIT(kv_policy);
    target.has_policy = policy != nullptr;
    pool.steps.rounds.counted.forget_others(pool.store, target, policy);
    return KV_OK;
}

status create(kv_pool& pool, const kv_seq_config* config, kv_seq* out_seq) {
    kv_seq_config local = KV_INIT(kv_seq_config);
    kv_policy policy = KV_INIT(kv_policy);
    if (config != nullptr) {
        KVRT_TRY(adopt(config, KV_SEQ_GATHER_STATISTICS, "config (kv_seq_config)", local));
    }
    if (local.policy != nullptr) KVRT_TRY(adopt_policy(pool, local.policy, policy));
    sequence* target = pool.store.sequences.open();
    if (target == nullptr) {
        return fail(KV_LIMIT, "max_sequences = {} sequences are alive",
                    pool.store.limits.max_sequences);
    }
    const status verdict = take_policy(pool, *target, local.policy != nullptr ? &policy : nullptr);
    if (verdict < 0) {
        release_sequence(pool.store, *target);
        return verdict;
    }
    if (pool.store.on_device() && (local.flags & KV_SEQ_GATHER_STATISTICS) != 0) {
        const status prepared = pool.steps.queries.prepare(pool.steps);
        if (prepared < 0) {
            release_sequence(pool.store, *target);
            return prepared;
        }
    }
    target->user_data = local.user_data;
    target->gathers_statistics = (local.flags & KV_SEQ_GATHER_STATISTICS) != 0;
    reset_statistics(pool.store, pool.retention.statistics, pool.store.sequences.index(*target));
    reset_history(pool.store, pool.retention, *target);
    *out_seq = pool.store.sequences.handle(*target);
    return KV_OK;
}

status release(kv_pool& pool, kv_seq handle) {
    sequence* target = pool.store.sequences.find(handle);
    if (target == nullptr) {
        if (pool.store.sequences.is_handle(handle)) return KV_OK;  // no error, so no message
        return pool.store.sequences.fail_stale(handle);
    }
    if (target->in_step) {
        // Its place may be another's before the step ends.
        KVRT_TRY(prepare_observations(pool.store, pool.retention.observations, *target, nullptr));
        target->release_at_step_end = true;
    } else {
        release_sequence(pool.store, *target);
    }
    return KV_OK;
}

status fork(kv_pool& pool, sequence& parent, uint32_t count, kv_seq* out_children) {
    if (count == 0 || out_children == nullptr) {
        return fail(KV_INVALID, "count is {}: at least one child, with out_children set", count);
    }
    cache& store = pool.store;
    if (count > store.sequences.free()) {
        return fail(KV_LIMIT, "{} children, {} of max_sequences = {} are free", count,
                    store.sequences.free(), store.limits.max_sequences);
    }
    observation_store& observations = pool.retention.observations;
    KVRT_TRY(check_child_places(store, observations, parent, count));
    for (uint32_t i = 0; i < count; ++i) {
        sequence* child = fork_sequence(store, parent);
        copy_observations(store, observations, parent, *child);
        copy_history(store, pool.retention, parent, *child);
        copy_statistics(store, pool.retention.statistics, store.sequences.index(parent),
                        store.sequences.index(*child));
        out_children[i] = store.sequences.handle(*child);
    }
    if (!store.on_device()) return KV_OK;
    status verdict = copy_sums(pool.steps, parent, out_children, count);
    for (uint32_t i = 0; i < count && verdict == KV_OK; ++i) {
        verdict = copy_queries(pool.steps, store.sequences.index(parent),
                               store.sequences.index(*store.sequences.find(out_children[i])));
    }
    for (uint32_t i = 0; i < count && verdict < 0; ++i) {
        release_sequence(store, *store.sequences.find(out_children[i]));
        out_children[i] = 0;  // no sequence's handle
    }
    return verdict;
}

status truncate(kv_pool& pool, sequence& target, uint64_t tokens_seen) {
    if (target.in_step) {
        return fail(KV_INVALID, "the sequence is in an open step: use kv_step_accept, or end it");
    }
    KVRT_TRY(truncate_sequence(pool.store, target, tokens_seen));
    pool.steps.rounds.counted.forget(pool.store, target);
    truncate_observations(pool.store, pool.retention.observations, target);
    return KV_OK;
}

status pin(sequence& target, uint64_t first, uint64_t count) {
    if (count == 0) return fail(KV_INVALID, "count is 0: pin at least one position");
    if (target.pinned_count == max_pinned_ranges) {
        return fail(KV_LIMIT, "{} ranges are pinned already", max_pinned_ranges);
    }
    target.pinned[target.pinned_count++] = {first, count};
    return KV_OK;
}

void describe(const kv_pool& pool, const sequence& source, kv_seq_info& info) {
    const returned_blocks size = table_size(pool.store, source);
    info.accepted = source.next_position;
    info.published = source.next_position;
    info.capacity = source.next_position + source.reserved_rows;
    info.written = source.next_position + source.written_rows;
    info.blocks = size.blocks;
    info.bytes = size.bytes;
    info.user_data = source.user_data;
    info.in_step = source.in_step ? 1 : 0;
    info.compactions = source.compactions;
    info.rounds_skipped = source.rounds_skipped;
    info.last_outcome = source.last_outcome;
    info.last_failure = source.last_round;
}

status check_layer(const kv_pool& pool, uint32_t layer) {
    if (layer < pool.store.model.layers.size()) return KV_OK;
    return fail(KV_INVALID, "layer {} of a model of {} layers", layer,
                pool.store.model.layers.size());
}

status describe_retention(kv_pool& pool, const sequence& source, kv_retention_info* user) {
    kv_retention_info local;
    KVRT_TRY(adopt(user, 0, "info (kv_retention_info)", local));
    KVRT_TRY(check_layer(pool, local.layer));
    const layer_geometry& layer = pool.store.model.layers[local.layer];
    if (local.kv_head >= layer.kv_heads) {
        return fail(KV_INVALID, "info: KV head {} of layer {}, which has {}", local.kv_head,
                    local.layer, layer.kv_heads);
    }
    const head_place place = layer.place_of(local.kv_head);
    const head_history& history =
        history_of(pool.store, pool.retention, source, place.lane, place.head);
    local.rounds = history.rounds;
    local.tokens_removed = history.tokens_removed;
    local.lost_attention = history.lost;
    local.lost_attention_sum = history.lost_sum;
    local.blocks_returned = blocks_returned_of(pool.store, pool.retention, source, place.lane);
    deliver(local, user);
    return KV_OK;
}

status describe_layer(const kv_pool& pool, const sequence& source, uint32_t layer,
                      kv_seq_layer_info& info) {
    KVRT_TRY(check_layer(pool, layer));
    const layer_geometry& geometry = pool.store.model.layers[layer];
    for (uint32_t lane = geometry.first_lane; lane < geometry.end_lane(); ++lane) {
        const lane_state& state = source.lanes[lane];
        info.retained = std::max<uint64_t>(info.retained, state.slots);
        if (!geometry.stores) continue;
        info.blocks += state.blocks;
        for (uint32_t i = 0; i < state.blocks; ++i) {
            if (pool.store.blocks.references(state.table[i]) > 1) ++info.shared_blocks;
        }
    }
    return KV_OK;
}

status list_positions(kv_pool& pool, const sequence& source, uint32_t layer, uint32_t kv_head,
                      uint64_t capacity, uint32_t* out_positions, uint64_t* out_count) {
    KVRT_TRY(check_layer(pool, layer));
    const layer_geometry& geometry = pool.store.model.layers[layer];
    if (kv_head >= geometry.kv_heads) {
        return fail(KV_INVALID, "kv_head {} of a layer of {} KV heads", kv_head, geometry.kv_heads);
    }
    if (out_count == nullptr || (out_positions == nullptr && capacity != 0)) {
        return fail(KV_INVALID, "out_count, and out_positions with a capacity, must be set");
    }
    const head_place place = geometry.place_of(kv_head);
    const slot_positions positions = positions_of(pool.store, source, place.lane, place.head);
    const uint64_t written = std::min<uint64_t>(capacity, positions.slots);
    uint64_t first = 0;  // that is not there yet
    if (device_has_positions(pool.store, source, place.lane)) {
        const retained_spans retained = retained_of(pool.store, source, place.lane);
        const bool known = list_known_positions(retained, written, out_positions);
        first = known ? written : std::min<uint64_t>(written, positions.explicit_slots);
        if (!known && first != 0) {
            KVRT_TRY(
                read_positions(pool.steps, source, place.lane, place.head, first, out_positions));
        }
    }
    for (uint64_t slot = first; slot < written; ++slot) {
        out_positions[slot] = static_cast<uint32_t>(positions.at(static_cast<uint32_t>(slot)));
    }
    *out_count = positions.slots;
    return KV_OK;
}

}  // namespace

}  // namespace kvrt

using namespace kvrt;

extern "C" {

kv_status kv_seq_create(kv_pool* pool, const kv_seq_config* config, kv_seq* out_seq) {
    if (out_seq == nullptr) return fail(KV_INVALID, "out_seq is NULL");
    *out_seq = 0;
    return call_pool(pool, [&] {
        const status verdict = create(*pool, config, out_seq);
        publish_stats(*pool);
        return verdict;
    });
}

kv_status kv_seq_release(kv_pool* pool, kv_seq seq) {
    return call_pool(pool, [&] {
        const status verdict = release(*pool, seq);
        publish_stats(*pool);
        return verdict;
    });
}

kv_status kv_seq_fork(kv_pool* pool, kv_seq parent, uint32_t count, kv_seq* out_children) {
    return call_pool(pool, [&] {
        const status verdict = with_sequence(*pool, parent, [&](sequence& source) {
            return fork(*pool, source, count, out_children);
        });
        publish_stats(*pool);
        return verdict;
    });
}

kv_status kv_seq_truncate(kv_pool* pool, kv_seq seq, uint64_t tokens_seen) {
    return call_pool(pool, [&] {
        const status verdict = with_sequence(
            *pool, seq, [&](sequence& target) { return truncate(*pool, target, tokens_seen); });
        publish_stats(*pool);
        return verdict;
    });
}

kv_status kv_seq_set_policy(kv_pool* pool, kv_seq seq, const kv_policy* policy) {
    return call_pool(pool, [&] {
        return with_sequence(*pool, seq, [&](sequence& target) -> status {
            kv_policy local = KV_INIT(kv_policy);
            if (policy != nullptr) KVRT_TRY(adopt_policy(*pool, policy, local));
            return take_policy(*pool, target, policy != nullptr ? &local : nullptr);
        });
    });
}

kv_status kv_seq_pin(kv_pool* pool, kv_seq seq, uint64_t first, uint64_t count) {
    return call_pool(pool, [&] {
        return with_sequence(*pool, seq,
                             [&](sequence& target) { return pin(target, first, count); });
    });
}

kv_status kv_seq_unpin(kv_pool* pool, kv_seq seq) {
    return call_pool(pool, [&] {
        return with_sequence(*pool, seq, [&](sequence& target) {
            target.pinned_count = 0;
            return KV_OK;
        });
    });
}

kv_status kv_seq_get_info(kv_pool* pool, kv_seq seq, kv_seq_info* out_info) {
    return call_pool(pool, [&]() -> status {
        KVRT_TRY(check_struct(out_info, sizeof *out_info, 0, "out_info (kv_seq_info)"));
        return with_sequence(*pool, seq, [&](sequence& source) {
            kv_seq_info info = KV_INIT(kv_seq_info);
            describe(*pool, source, info);
            deliver(info, out_info);
            return KV_OK;
        });
    });
}

kv_status kv_seq_get_layer_info(kv_pool* pool, kv_seq seq, uint32_t layer,
                                kv_seq_layer_info* out_info) {
    return call_pool(pool, [&]() -> status {
        KVRT_TRY(check_struct(out_info, sizeof *out_info, 0, "out_info (kv_seq_layer_info)"));
        return with_sequence(*pool, seq, [&](sequence& source) -> status {
            kv_seq_layer_info info = KV_INIT(kv_seq_layer_info);
            KVRT_TRY(describe_layer(*pool, source, layer, info));
            deliver(info, out_info);
            return KV_OK;
        });
    });
}

kv_status kv_seq_get_retention(kv_pool* pool, kv_seq seq, kv_retention_info* info) {
    return call_pool(pool, [&] {
        return with_sequence(
            *pool, seq, [&](sequence& source) { return describe_retention(*pool, source, info); });
    });
}

kv_status kv_seq_get_positions(kv_pool* pool, kv_seq seq, uint32_t layer, uint32_t kv_head,
                               uint64_t capacity, uint32_t* out_positions, uint64_t* out_count) {
    return call_pool(pool, [&] {
        return with_sequence(*pool, seq, [&](sequence& source) {
            return list_positions(*pool, source, layer, kv_head, capacity, out_positions,
                                  out_count);
        });
    });
}

}  // extern "C"
