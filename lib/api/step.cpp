// Steps: begin, append, reserve, export, write, attend, accept, end, cancel.
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
        return with_sequence(*step->pool, seq, [&](sequence& owner) -> status {
            KVRT_TRY(step_append(step->core, owner, seq, count, &info));
            if (out_info != nullptr) deliver(info, out_info);
            return KV_OK;
        });
    });
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
