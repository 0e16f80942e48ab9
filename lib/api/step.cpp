// Steps: begin, append, reserve, export, write, attend, accept, end, cancel.
#include <cstddef>
#include <cstdio>

#include "api/handles.hpp"

using namespace kvrt;

namespace {

status begin(kv_pool& pool, kv_step** out_step) {
    kv_step* handle = nullptr;
    for (uint32_t tries = 0; tries < step_handles && handle == nullptr; ++tries) {
        kv_step& candidate = pool.handles[pool.next_handle];
        pool.next_handle = (pool.next_handle + 1) % step_handles;
        if (candidate.core.state == step_state::closed) handle = &candidate;
    }
    KVRT_TRY(step_begin(pool.steps, handle->core));
    *out_step = handle;
    return KV_OK;
}

status reserve(kv_step& step, kv_reserve_report* report) {
    kv_reserve_report local = KV_INIT(kv_reserve_report);
    if (report != nullptr) {
        KVRT_TRY(adopt(report, 0, "report (kv_reserve_report)", local));
        if (local.item_statuses == nullptr && local.item_status_capacity != 0) {
            return fail(KV_INVALID, "report: item_status_capacity is {} without item_statuses",
                        local.item_status_capacity);
        }
    }
    const status verdict = step_reserve(step.core, local);
    if (report != nullptr) deliver(local, report);
    return verdict;
}

status end(kv_step& step, kv_step_report* report) {
    kv_step_report local = KV_INIT(kv_step_report);
    if (report != nullptr) {
        KVRT_TRY(check_struct(report, sizeof *report, 0, "report (kv_step_report)"));
    }
    kv_pool& pool = *step.pool;
    const bool was_open = step.core.state != step_state::closed;
    const status verdict = step_end(step.core, local);
    if (verdict == KV_OK) {
        ++pool.steps_ended;
        pool.tokens_accepted += local.accepted_tokens;
        if (report != nullptr) deliver(local, report);
    } else if (was_open) {
        ++pool.steps_cancelled;
    }
    return verdict;
}

/// Says in the last error's message which item of a batch it is about.
status fail_item(status verdict, uint32_t item) {
    char message[message_capacity];
    std::snprintf(message, sizeof message, "%s", message_buffer());
    return fail(verdict, "item {}: {}", item, message);
}

status append(kv_step& step, kv_seq seq, uint32_t count, kv_append_info& info) {
    return with_sequence(*step.pool, seq, [&](sequence& owner) {
        return step_append(step.core, owner, seq, count, &info);
    });
}

/// The i-th of the caller's structs, which are as long as the caller says.
kv_append_info* info_at(kv_append_info* infos, uint32_t index) {
    return reinterpret_cast<kv_append_info*>(reinterpret_cast<std::byte*>(infos) +
                                             uint64_t{index} * infos->struct_size);
}

status check_infos(kv_append_info* infos, uint32_t items) {
    KVRT_TRY(check_struct(infos, sizeof *infos, 0, "out_infos[0] (kv_append_info)"));
    if (infos->struct_size % alignof(kv_append_info) != 0) {
        return fail(KV_INVALID,
                    "out_infos: struct_size {} is no multiple of {}, so that an array "
                    "of them is misaligned",
                    infos->struct_size, alignof(kv_append_info));
    }
    for (uint32_t i = 1; i < items; ++i) {
        kv_append_info* info = info_at(infos, i);
        if (info->struct_size != infos->struct_size) {
            return fail(KV_INVALID, "out_infos[{}]: struct_size {} differs from out_infos[0]'s {}",
                        i, info->struct_size, infos->struct_size);
        }
        KVRT_TRY(check_struct(info, sizeof *info, 0, "out_infos (kv_append_info)"));
    }
    return KV_OK;
}

status check_batch(uint32_t items, const kv_seq* seqs, const uint32_t* counts) {
    if (items == 0) return fail(KV_INVALID, "items is 0: at least one sequence");
    if (seqs == nullptr) return fail(KV_INVALID, "seqs is NULL");
    if (counts == nullptr) return fail(KV_INVALID, "counts is NULL");
    return KV_OK;
}

status append_batch(kv_step& step, uint32_t items, const kv_seq* seqs, const uint32_t* counts,
                    kv_append_info* infos) {
    KVRT_TRY(check_batch(items, seqs, counts));
    const uint32_t most = step.pool->store.limits.max_step_sequences;
    if (items > most) {  // before the arrays are read: a wild number meets no memory
        return fail(KV_LIMIT, "{} items exceed max_step_sequences = {}", items, most);
    }
    if (infos != nullptr) KVRT_TRY(check_infos(infos, items));
    for (uint32_t i = 0; i < items; ++i) {
        kv_append_info info = KV_INIT(kv_append_info);
        const status verdict = append(step, seqs[i], counts[i], info);
        if (verdict < 0) {
            const status named = fail_item(verdict, i);
            while (i-- > 0) {
                KVRT_TRY(step_remove(step.core, *step.pool->store.sequences.find(seqs[i])));
            }
            return named;
        }
        if (infos != nullptr) deliver(info, info_at(infos, i));
    }
    return KV_OK;
}

/// Checks all before it notes any.
status accept_batch(kv_step& step, uint32_t items, const kv_seq* seqs, const uint32_t* counts) {
    KVRT_TRY(check_batch(items, seqs, counts));
    if (items > step.core.item_count) {
        return fail(KV_INVALID, "{} items, the step holds {}", items, step.core.item_count);
    }
    for (uint32_t i = 0; i < items; ++i) {
        const status verdict = with_sequence(*step.pool, seqs[i], [&](sequence& owner) {
            return check_accept(step.core, owner, counts[i]);
        });
        if (verdict < 0) return fail_item(verdict, i);
    }
    for (uint32_t i = 0; i < items; ++i) {
        KVRT_TRY(step_accept(step.core, *step.pool->store.sequences.find(seqs[i]), counts[i]));
    }
    return KV_OK;
}

}  // namespace

extern "C" {

kv_status kv_step_begin(kv_pool* pool, kv_step** out_step) {
    if (out_step == nullptr) return fail(KV_INVALID, "out_step is NULL");
    *out_step = nullptr;
    return call_pool(pool, [&] {
        const status verdict = begin(*pool, out_step);
        publish_stats(*pool);
        return verdict;
    });
}

kv_status kv_seq_append(kv_step* step, kv_seq seq, const uint32_t*, uint32_t count,
                        kv_append_info* out_info) {
    return call_step(step, [&]() -> status {
        kv_append_info info = KV_INIT(kv_append_info);
        if (out_info != nullptr) {
            KVRT_TRY(check_struct(out_info, sizeof *out_info, 0, "out_info (kv_append_info)"));
        }
        KVRT_TRY(append(*step, seq, count, info));
        if (out_info != nullptr) deliver(info, out_info);
        return KV_OK;
    });
}

kv_status kv_step_append_batch(kv_step* step, uint32_t items, const kv_seq* seqs,
                               const uint32_t* counts, const uint32_t*, kv_append_info* out_infos) {
    return call_step(step, [&] { return append_batch(*step, items, seqs, counts, out_infos); });
}

kv_status kv_step_reserve(kv_step* step, kv_reserve_report* report) {
    return call_step(step, [&] {
        const status verdict = reserve(*step, report);
        publish_stats(*step->pool);
        return verdict;
    });
}

kv_status kv_step_remove(kv_step* step, kv_seq seq) {
    return call_step(step, [&] {
        return with_sequence(*step->pool, seq,
                             [&](sequence& owner) { return step_remove(step->core, owner); });
    });
}

kv_status kv_step_accept(kv_step* step, kv_seq seq, uint32_t count) {
    return call_step(step, [&] {
        return with_sequence(*step->pool, seq, [&](sequence& owner) {
            return step_accept(step->core, owner, count);
        });
    });
}

kv_status kv_step_accept_batch(kv_step* step, uint32_t items, const kv_seq* seqs,
                               const uint32_t* counts) {
    return call_step(step, [&] { return accept_batch(*step, items, seqs, counts); });
}

kv_status kv_step_end(kv_step* step, kv_step_report* report) {
    return call_step(step, [&] {
        const status verdict = end(*step, report);
        publish_stats(*step->pool);
        return verdict;
    });
}

kv_status kv_step_cancel(kv_step* step) {
    if (step == nullptr) return KV_OK;
    return call_step(step, [&]() -> status {
        if (step->core.state == step_state::closed) {
            return fail(KV_INVALID, "kv_step_cancel: the step was ended or cancelled");
        }
        step_cancel(step->core);
        ++step->pool->steps_cancelled;
        publish_stats(*step->pool);
        return KV_OK;
    });
}

kv_status kv_step_export(kv_step* step, uint32_t layer, kv_tables* tables) {
    return call_step(step, [&]() -> status {
        kv_tables local;
        KVRT_TRY(adopt(tables, 0, "tables (kv_tables)", local));
        const status verdict = step_export(step->core, layer, local);
        if (verdict == KV_OK || verdict == KV_LIMIT) deliver(local, tables);
        return verdict;
    });
}

kv_status kv_write(kv_step* step, uint32_t layer, const kv_tensor* keys, const kv_tensor* values) {
    return call_step(step, [&] { return step_write(step->core, layer, keys, values); });
}

kv_status kv_attend(kv_step* step, uint32_t layer, const kv_tensor* queries, const kv_tensor* out,
                    const kv_attend_options* options) {
    return call_step(step, [&]() -> status {
        kv_attend_options local = KV_INIT(kv_attend_options);
        if (options != nullptr) {
            KVRT_TRY(adopt(options, KV_ATTEND_NO_STATISTICS, "options (kv_attend_options)", local));
        }
        return step_attend(step->core, layer, queries, out, local);
    });
}

}  // extern "C"
