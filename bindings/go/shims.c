/* The shims that shims.h describes: calls of kvrt.h, with the message of a failure. */
#include "shims.h"

/* What a call returned, with this thread's message if it failed. */
static kvgo_result finish(kv_status status) {
    kvgo_result result = {status, NULL};
    if (status >= 0) return result;
    const size_t length = kv_last_error(NULL, 0);
    result.message = malloc(length + 1);
    if (result.message != NULL) kv_last_error(result.message, length + 1);
    return result;
}

static kv_pool* pool_of(uintptr_t pool) { return (kv_pool*)pool; }
static kv_step* step_of(uintptr_t step) { return (kv_step*)step; }

/* ---- The model ---------------------------------------------------------------------------- */

kvgo_result kvgo_model_apply_preset(kv_layer* layers, uint32_t layer_count, uint32_t preset) {
    return finish(kv_model_apply_preset(layers, layer_count, preset));
}

/* ---- Pools -------------------------------------------------------------------------------- */

kvgo_pool kvgo_pool_create(const kv_pool_config* config, const kv_model* model) {
    kv_pool* pool = NULL;
    kvgo_pool out = {{KV_OK, NULL}, 0};
    out.result = finish(kv_pool_create(config, model, &pool));
    out.pool = (uintptr_t)pool;
    return out;
}

void kvgo_pool_release(uintptr_t pool) { kv_pool_release(pool_of(pool)); }

kvgo_result kvgo_pool_pass_fence(uintptr_t pool, uint64_t fence) {
    return finish(kv_pool_pass_fence(pool_of(pool), fence));
}

kvgo_result kvgo_pool_check(uintptr_t pool) { return finish(kv_pool_check(pool_of(pool))); }

/* ---- Sequences ---------------------------------------------------------------------------- */

kvgo_seq kvgo_seq_create(uintptr_t pool, uint32_t flags, uint64_t user_data,
                         const kv_policy* policy) {
    kv_seq_config config = KV_INIT(kv_seq_config);
    config.flags = flags;
    config.policy = policy;
    config.user_data = user_data;
    kvgo_seq out = {{KV_OK, NULL}, 0};
    out.result = finish(kv_seq_create(pool_of(pool), &config, &out.seq));
    return out;
}

kvgo_result kvgo_seq_release(uintptr_t pool, kv_seq seq) {
    return finish(kv_seq_release(pool_of(pool), seq));
}

kvgo_result kvgo_seq_fork(uintptr_t pool, kv_seq parent, uint32_t count, kv_seq* children) {
    return finish(kv_seq_fork(pool_of(pool), parent, count, children));
}

kvgo_result kvgo_seq_truncate(uintptr_t pool, kv_seq seq, uint64_t tokens_seen) {
    return finish(kv_seq_truncate(pool_of(pool), seq, tokens_seen));
}

kvgo_result kvgo_seq_set_policy(uintptr_t pool, kv_seq seq, const kv_policy* policy) {
    return finish(kv_seq_set_policy(pool_of(pool), seq, policy));
}

kvgo_result kvgo_seq_pin(uintptr_t pool, kv_seq seq, uint64_t first, uint64_t count) {
    return finish(kv_seq_pin(pool_of(pool), seq, first, count));
}

kvgo_result kvgo_seq_unpin(uintptr_t pool, kv_seq seq) {
    return finish(kv_seq_unpin(pool_of(pool), seq));
}

kvgo_seq_info kvgo_seq_get_info(uintptr_t pool, kv_seq seq) {
    kvgo_seq_info out = {{KV_OK, NULL}, KV_INIT(kv_seq_info)};
    out.result = finish(kv_seq_get_info(pool_of(pool), seq, &out.info));
    return out;
}

kvgo_seq_layer_info kvgo_seq_get_layer_info(uintptr_t pool, kv_seq seq, uint32_t layer) {
    kvgo_seq_layer_info out = {{KV_OK, NULL}, KV_INIT(kv_seq_layer_info)};
    out.result = finish(kv_seq_get_layer_info(pool_of(pool), seq, layer, &out.info));
    return out;
}

kvgo_retention_info kvgo_seq_get_retention(uintptr_t pool, kv_seq seq, uint32_t layer,
                                           uint32_t kv_head) {
    kvgo_retention_info out = {{KV_OK, NULL}, KV_INIT(kv_retention_info)};
    out.info.layer = layer;
    out.info.kv_head = kv_head;
    out.result = finish(kv_seq_get_retention(pool_of(pool), seq, &out.info));
    return out;
}

kvgo_count kvgo_seq_get_positions(uintptr_t pool, kv_seq seq, uint32_t layer, uint32_t kv_head,
                                  uint64_t capacity, uint32_t* positions) {
    kvgo_count out = {{KV_OK, NULL}, 0};
    out.result = finish(
        kv_seq_get_positions(pool_of(pool), seq, layer, kv_head, capacity, positions, &out.count));
    return out;
}

/* ---- Steps -------------------------------------------------------------------------------- */

kvgo_step kvgo_step_begin(uintptr_t pool) {
    kv_step* step = NULL;
    kvgo_step out = {{KV_OK, NULL}, 0};
    out.result = finish(kv_step_begin(pool_of(pool), &step));
    out.step = (uintptr_t)step;
    return out;
}

kvgo_append kvgo_seq_append(uintptr_t step, kv_seq seq, const uint32_t* token_ids, uint32_t count) {
    kvgo_append out = {{KV_OK, NULL}, KV_INIT(kv_append_info)};
    out.result = finish(kv_seq_append(step_of(step), seq, token_ids, count, &out.info));
    return out;
}

kvgo_result kvgo_step_append_batch(uintptr_t step, uint32_t items, const kv_seq* seqs,
                                   const uint32_t* counts, const uint32_t* token_ids,
                                   uintptr_t infos) {
    kv_append_info* list = (kv_append_info*)infos;
    for (uint32_t i = 0; list != NULL && i < items; ++i) kv_struct_init(&list[i], sizeof list[i]);
    return finish(kv_step_append_batch(step_of(step), items, seqs, counts, token_ids, list));
}

kvgo_reserve kvgo_step_reserve(uintptr_t step, kv_status* item_statuses, uint32_t capacity) {
    kvgo_reserve out = {{KV_OK, NULL}, KV_INIT(kv_reserve_report)};
    out.report.item_statuses = item_statuses;
    out.report.item_status_capacity = capacity;
    out.result = finish(kv_step_reserve(step_of(step), &out.report));
    out.report.item_statuses = NULL;
    return out;
}

kvgo_result kvgo_step_remove(uintptr_t step, kv_seq seq) {
    return finish(kv_step_remove(step_of(step), seq));
}

kvgo_result kvgo_step_accept(uintptr_t step, kv_seq seq, uint32_t count) {
    return finish(kv_step_accept(step_of(step), seq, count));
}

kvgo_result kvgo_step_accept_batch(uintptr_t step, uint32_t items, const kv_seq* seqs,
                                   const uint32_t* counts) {
    return finish(kv_step_accept_batch(step_of(step), items, seqs, counts));
}

kvgo_end kvgo_step_end(uintptr_t step) {
    kvgo_end out = {{KV_OK, NULL}, KV_INIT(kv_step_report)};
    out.result = finish(kv_step_end(step_of(step), &out.report));
    return out;
}

kvgo_result kvgo_step_cancel(uintptr_t step) { return finish(kv_step_cancel(step_of(step))); }

/* ---- Tables and attention ----------------------------------------------------------------- */

kvgo_tables kvgo_step_export(uintptr_t step, uint32_t layer, uint32_t kv_head,
                             kvgo_buffers buffers) {
    kvgo_tables out = {{KV_OK, NULL}, KV_INIT(kv_tables)};
    kv_tables* tables = &out.tables;
    tables->block_table = buffers.block_table;
    tables->block_table_stride = buffers.block_table_stride;
    tables->block_table_capacity = buffers.block_table_capacity;
    tables->indptr = buffers.indptr;
    tables->indices = buffers.indices;
    tables->last_page_len = buffers.last_page_len;
    tables->slot_mapping = buffers.slot_mapping;
    tables->query_start = buffers.query_start;
    tables->kv_len = buffers.kv_len;
    tables->positions = buffers.positions;
    tables->slot_positions = buffers.slot_positions;
    tables->slot_indptr = buffers.slot_indptr;
    tables->sealed_blocks = buffers.sealed_blocks;
    tables->indices_capacity = buffers.indices_capacity;
    tables->item_capacity = buffers.item_capacity;
    tables->token_capacity = buffers.token_capacity;
    tables->slot_positions_capacity = buffers.slot_positions_capacity;
    tables->kv_head = kv_head;
    out.result = finish(kv_step_export(step_of(step), layer, tables));
    tables->block_table = tables->indptr = tables->indices = tables->last_page_len = NULL;
    tables->slot_mapping = NULL;
    tables->query_start = tables->kv_len = tables->positions = NULL;
    tables->slot_positions = tables->slot_indptr = tables->sealed_blocks = NULL;
    return out;
}

static kv_tensor tensor_of(const kvgo_tensor* view) {
    kv_tensor tensor = KV_INIT(kv_tensor);
    tensor.data = view->data;
    tensor.dtype = view->dtype;
    tensor.rows = view->rows;
    tensor.heads = view->heads;
    tensor.dim = view->dim;
    tensor.row_stride = view->row_stride;
    tensor.head_stride = view->head_stride;
    tensor.dim_stride = view->dim_stride;
    return tensor;
}

static kv_status write_layer(kv_step* step, uint32_t layer, const kvgo_tensor* keys,
                             const kvgo_tensor* values) {
    const kv_tensor k = tensor_of(keys), v = tensor_of(values);
    return kv_write(step, layer, &k, &v);
}

static kv_status attend_layer(kv_step* step, uint32_t layer, const kvgo_tensor* queries,
                              const kvgo_tensor* out, uint32_t flags, float* log_sum_exp) {
    const kv_tensor q = tensor_of(queries), o = tensor_of(out);
    kv_attend_options options = KV_INIT(kv_attend_options);
    options.flags = flags;
    options.log_sum_exp = log_sum_exp;
    return kv_attend(step, layer, &q, &o, &options);
}

kvgo_result kvgo_write(uintptr_t step, uint32_t layer, kvgo_tensor keys, kvgo_tensor values) {
    return finish(write_layer(step_of(step), layer, &keys, &values));
}

kvgo_result kvgo_attend(uintptr_t step, uint32_t layer, kvgo_tensor queries, kvgo_tensor out,
                        uint32_t flags, float* log_sum_exp) {
    return finish(attend_layer(step_of(step), layer, &queries, &out, flags, log_sum_exp));
}

kvgo_result kvgo_write_attend(uintptr_t step, uint32_t layer, kvgo_tensor keys, kvgo_tensor values,
                              kvgo_tensor queries, kvgo_tensor out, uint32_t flags,
                              float* log_sum_exp) {
    kv_status status = write_layer(step_of(step), layer, &keys, &values);
    if (status >= 0)
        status = attend_layer(step_of(step), layer, &queries, &out, flags, log_sum_exp);
    return finish(status);
}

/* ---- Pools on CUDA devices ---------------------------------------------------------------- */

kvgo_cuda_device kvgo_cuda_get_device(void) {
    kvgo_cuda_device out = {{KV_OK, NULL}, KV_INIT(kv_cuda_device)};
    out.result = finish(kv_cuda_get_device(&out.device));
    return out;
}

kvgo_pool kvgo_cuda_pool_create(const kv_pool_config* config, const kv_model* model, uintptr_t user,
                                uintptr_t allocate, uintptr_t release) {
    kv_cuda_memory memory = KV_INIT(kv_cuda_memory);
    memory.user = (void*)user;
    memory.allocate = (void* (*)(void*, size_t, size_t))allocate;
    memory.release = (void (*)(void*, void*, size_t, size_t))release;
    kv_pool* pool = NULL;
    kvgo_pool out = {{KV_OK, NULL}, 0};
    out.result = finish(kv_cuda_pool_create(config, model, &memory, &pool));
    out.pool = (uintptr_t)pool;
    return out;
}

kvgo_count kvgo_cuda_pool_memory(uintptr_t pool) {
    kvgo_count out = {{KV_OK, NULL}, 0};
    out.result = finish(kv_cuda_pool_memory(pool_of(pool), &out.count));
    return out;
}

kvgo_result kvgo_cuda_pool_set_scoring(uintptr_t pool, uint32_t method, uint64_t workspace_bytes,
                                       uint32_t flags) {
    kv_cuda_scoring scoring = KV_INIT(kv_cuda_scoring);
    scoring.flags = flags;
    scoring.method = method;
    scoring.workspace_bytes = workspace_bytes;
    return finish(kv_cuda_pool_set_scoring(pool_of(pool), &scoring));
}

kvgo_cuda_scoring kvgo_cuda_pool_get_scoring(uintptr_t pool) {
    kvgo_cuda_scoring out = {{KV_OK, NULL}, KV_INIT(kv_cuda_scoring_report)};
    out.result = finish(kv_cuda_pool_get_scoring(pool_of(pool), &out.report));
    return out;
}

kvgo_result kvgo_cuda_seq_set_scores(uintptr_t pool, kv_seq seq, uint32_t layer,
                                     uint64_t first_position, uint64_t tokens, uintptr_t scores,
                                     uintptr_t stream) {
    return finish(kv_cuda_seq_set_scores(pool_of(pool), seq, layer, first_position, tokens,
                                         (const float*)scores, (struct CUstream_st*)stream));
}

kvgo_result kvgo_cuda_step_use_stream(uintptr_t step, uintptr_t stream) {
    return finish(kv_cuda_step_use_stream(step_of(step), (struct CUstream_st*)stream));
}

kvgo_cuda_tables kvgo_cuda_step_tables(uintptr_t step, uint32_t layer, uint32_t kv_head,
                                       uint32_t flags) {
    kv_cuda_tables tables = KV_INIT(kv_cuda_tables);
    tables.flags = flags;
    tables.kv_head = kv_head;
    kvgo_cuda_tables out = {{KV_OK, NULL}, 0, 0, 0, 0, 0, 0, 0};
    out.result = finish(kv_cuda_step_tables(step_of(step), layer, &tables));
    out.place = tables.place;
    out.block_table_stride = tables.block_table_stride;
    out.block_table = (uintptr_t)tables.block_table;
    out.slot_mapping = (uintptr_t)tables.slot_mapping;
    out.query_start = (uintptr_t)tables.query_start;
    out.kv_len = (uintptr_t)tables.kv_len;
    out.positions = (uintptr_t)tables.positions;
    return out;
}

static kvgo_tensor at_address(const kvgo_device_tensor* from) {
    const kvgo_tensor tensor = {(unsigned char*)from->address,
                                from->dtype,
                                from->rows,
                                from->heads,
                                from->dim,
                                from->row_stride,
                                from->head_stride,
                                from->dim_stride};
    return tensor;
}

kvgo_result kvgo_write_on_device(uintptr_t step, uint32_t layer, kvgo_device_tensor keys,
                                 kvgo_device_tensor values) {
    const kvgo_tensor k = at_address(&keys), v = at_address(&values);
    return finish(write_layer(step_of(step), layer, &k, &v));
}

kvgo_result kvgo_attend_on_device(uintptr_t step, uint32_t layer, kvgo_device_tensor queries,
                                  kvgo_device_tensor out, uintptr_t log_sum_exp) {
    const kvgo_tensor q = at_address(&queries), o = at_address(&out);
    return finish(attend_layer(step_of(step), layer, &q, &o, 0, (float*)log_sum_exp));
}

/* ---- Retention and statistics ------------------------------------------------------------- */

kvgo_compress_report kvgo_compress(uintptr_t pool, kv_seq seq, const kv_policy* policy) {
    kv_compress_options options = KV_INIT(kv_compress_options);
    options.policy = policy;
    kvgo_compress_report out = {{KV_OK, NULL}, KV_INIT(kv_compress_report)};
    out.result = finish(kv_compress(pool_of(pool), seq, &options, &out.report));
    return out;
}

kvgo_policy_footprint kvgo_pool_policy_footprint(uintptr_t pool, const kv_policy* policy,
                                                 uint64_t step_tokens, uint64_t tokens) {
    kvgo_policy_footprint out = {{KV_OK, NULL}, KV_INIT(kv_policy_footprint)};
    out.footprint.step_tokens = step_tokens;
    out.footprint.tokens = tokens;
    out.result = finish(kv_pool_policy_footprint(pool_of(pool), policy, &out.footprint));
    return out;
}

kvgo_result kvgo_seq_set_scores(uintptr_t pool, kv_seq seq, uint32_t layer, uint64_t first_position,
                                uint64_t tokens, const float* scores) {
    return finish(kv_seq_set_scores(pool_of(pool), seq, layer, first_position, tokens, scores));
}

kvgo_count kvgo_seq_get_scores(uintptr_t pool, kv_seq seq, uint32_t layer, uint32_t kv_head,
                               uint64_t capacity, float* scores) {
    kvgo_count out = {{KV_OK, NULL}, 0};
    out.result =
        finish(kv_seq_get_scores(pool_of(pool), seq, layer, kv_head, capacity, scores, &out.count));
    return out;
}

static kv_query_statistics statistics_of(const kvgo_statistics* view) {
    kv_query_statistics statistics = KV_INIT(kv_query_statistics);
    statistics.layer = view->layer;
    statistics.query_heads = view->query_heads;
    statistics.bands = view->bands;
    statistics.tokens = view->tokens;
    statistics.mean_real = view->mean_real;
    statistics.mean_imaginary = view->mean_imaginary;
    statistics.mean_magnitude = view->mean_magnitude;
    statistics.variance_real = view->variance_real;
    statistics.variance_imaginary = view->variance_imaginary;
    statistics.covariance = view->covariance;
    return statistics;
}

kvgo_result kvgo_pool_set_statistics(uintptr_t pool, kvgo_statistics statistics) {
    const kv_query_statistics given = statistics_of(&statistics);
    return finish(kv_pool_set_statistics(pool_of(pool), &given));
}

kvgo_count kvgo_seq_get_statistics(uintptr_t pool, kv_seq seq, kvgo_statistics statistics) {
    kv_query_statistics wanted = statistics_of(&statistics);
    kvgo_count out = {{KV_OK, NULL}, 0};
    out.result = finish(kv_seq_get_statistics(pool_of(pool), seq, &wanted));
    out.count = wanted.tokens;
    return out;
}

kvgo_result kvgo_seq_save_statistics(uintptr_t pool, kv_seq seq, const char* path) {
    return finish(kv_seq_save_statistics(pool_of(pool), seq, path));
}

kvgo_result kvgo_pool_load_statistics(uintptr_t pool, const char* path) {
    return finish(kv_pool_load_statistics(pool_of(pool), path));
}

kvgo_affine_fit kvgo_seq_fit_affine(uintptr_t pool, kv_seq seq, uint32_t layer, uint32_t kv_heads,
                                    uint32_t key_dim, uint64_t first_position, uint64_t tokens,
                                    float* channel_means, float* channel_scales) {
    kv_affine_fit fit = KV_INIT(kv_affine_fit);
    fit.layer = layer;
    fit.kv_heads = kv_heads;
    fit.key_dim = key_dim;
    fit.first_position = first_position;
    fit.tokens = tokens;
    fit.channel_means = channel_means;
    fit.channel_scales = channel_scales;
    kvgo_affine_fit out = {{KV_OK, NULL}, 0, 0};
    out.result = finish(kv_seq_fit_affine(pool_of(pool), seq, &fit));
    out.tokens_used = fit.tokens_used;
    out.identity = fit.identity;
    return out;
}

/* ---- Counters, capacity, capabilities ----------------------------------------------------- */

kvgo_pool_stats kvgo_pool_get_stats(uintptr_t pool) {
    kvgo_pool_stats out = {{KV_OK, NULL}, KV_INIT(kv_pool_stats)};
    out.result = finish(kv_pool_get_stats(pool_of(pool), &out.stats));
    return out;
}

kvgo_class_stats kvgo_pool_get_class_stats(uintptr_t pool, uint32_t class_index) {
    kvgo_class_stats out = {{KV_OK, NULL}, KV_INIT(kv_class_stats)};
    out.result = finish(kv_pool_get_class_stats(pool_of(pool), class_index, &out.stats));
    return out;
}

kvgo_layer_stats kvgo_pool_get_layer_stats(uintptr_t pool, uint32_t layer, uint32_t head_capacity,
                                           uint64_t* saturated_keys, uint64_t* saturated_values) {
    kvgo_layer_stats out = {{KV_OK, NULL}, KV_INIT(kv_layer_stats)};
    out.stats.layer = layer;
    out.stats.head_capacity = head_capacity;
    out.stats.saturated_keys = saturated_keys;
    out.stats.saturated_values = saturated_values;
    out.result = finish(kv_pool_get_layer_stats(pool_of(pool), &out.stats));
    out.stats.saturated_keys = out.stats.saturated_values = NULL;
    return out;
}

kvgo_plan_report kvgo_plan(const kv_pool_config* config, const kv_model* model, uint64_t sequences,
                           uint64_t tokens_per_sequence, uint32_t layer) {
    kvgo_plan_report out = {{KV_OK, NULL}, KV_INIT(kv_plan_report)};
    out.report.sequences = sequences;
    out.report.tokens_per_sequence = tokens_per_sequence;
    out.report.layer = layer;
    out.result = finish(kv_plan(config, model, &out.report));
    return out;
}

kvgo_capabilities_report kvgo_capabilities(void) {
    kvgo_capabilities_report out = {{KV_OK, NULL}, KV_INIT(kv_capabilities_report)};
    out.result = finish(kv_capabilities(&out.report));
    return out;
}
