/* The raw layer: one shim for each call of kvrt.h and kv_cuda.h that can fail.
 *
 * kv_last_error is of the thread, and a goroutine may change threads between two calls into C. So
 * each shim fetches the message in the call that failed and returns it by value with the status and
 * the results: nothing that Go owns is written through a pointer unless it is the caller's own
 * buffer, and nothing has to be allocated for a call that succeeds.
 *
 * Go may not hand C a struct in Go memory that points to other Go memory, so what holds pointers
 * (tensors, tables, statistics) comes by value and becomes a struct of kvrt.h on this side. Pools,
 * steps and the results of a batch travel as integers: cgo's check of a pointer to a C struct puts
 * it into an interface, which allocates, at every call. */
#ifndef KVRT_GO_SHIMS_H
#define KVRT_GO_SHIMS_H

#include <kvrt/kv_cuda.h>
#include <kvrt/kvrt.h>
#include <stdint.h>
#include <stdlib.h>

typedef struct kvgo_result {
    kv_status status;
    char* message; /* malloc'ed when status < 0 (NULL: no memory for it), else NULL */
} kvgo_result;

/* ---- The model ---------------------------------------------------------------------------- */

kvgo_result kvgo_model_apply_preset(kv_layer* layers, uint32_t layer_count, uint32_t preset);

/* ---- Pools -------------------------------------------------------------------------------- */

typedef struct kvgo_pool {
    kvgo_result result;
    uintptr_t pool;
} kvgo_pool;

kvgo_pool kvgo_pool_create(const kv_pool_config* config, const kv_model* model);
void kvgo_pool_release(uintptr_t pool);
kvgo_result kvgo_pool_pass_fence(uintptr_t pool, uint64_t fence);
kvgo_result kvgo_pool_check(uintptr_t pool);

/* ---- Sequences ---------------------------------------------------------------------------- */

typedef struct kvgo_seq {
    kvgo_result result;
    kv_seq seq;
} kvgo_seq;

typedef struct kvgo_seq_info {
    kvgo_result result;
    kv_seq_info info;
} kvgo_seq_info;

typedef struct kvgo_seq_layer_info {
    kvgo_result result;
    kv_seq_layer_info info;
} kvgo_seq_layer_info;

typedef struct kvgo_retention_info {
    kvgo_result result;
    kv_retention_info info;
} kvgo_retention_info;

typedef struct kvgo_count {
    kvgo_result result;
    uint64_t count;
} kvgo_count;

kvgo_seq kvgo_seq_create(uintptr_t pool, uint32_t flags, uint64_t user_data,
                         const kv_policy* policy);
kvgo_result kvgo_seq_release(uintptr_t pool, kv_seq seq);
kvgo_result kvgo_seq_fork(uintptr_t pool, kv_seq parent, uint32_t count, kv_seq* children);
kvgo_result kvgo_seq_truncate(uintptr_t pool, kv_seq seq, uint64_t tokens_seen);
kvgo_result kvgo_seq_set_policy(uintptr_t pool, kv_seq seq, const kv_policy* policy);
kvgo_result kvgo_seq_pin(uintptr_t pool, kv_seq seq, uint64_t first, uint64_t count);
kvgo_result kvgo_seq_unpin(uintptr_t pool, kv_seq seq);
kvgo_seq_info kvgo_seq_get_info(uintptr_t pool, kv_seq seq);
kvgo_seq_layer_info kvgo_seq_get_layer_info(uintptr_t pool, kv_seq seq, uint32_t layer);
kvgo_retention_info kvgo_seq_get_retention(uintptr_t pool, kv_seq seq, uint32_t layer,
                                           uint32_t kv_head);
kvgo_count kvgo_seq_get_positions(uintptr_t pool, kv_seq seq, uint32_t layer, uint32_t kv_head,
                                  uint64_t capacity, uint32_t* positions);

/* ---- Steps -------------------------------------------------------------------------------- */

typedef struct kvgo_step {
    kvgo_result result;
    uintptr_t step;
} kvgo_step;

typedef struct kvgo_append {
    kvgo_result result;
    kv_append_info info;
} kvgo_append;

typedef struct kvgo_reserve {
    kvgo_result result;
    kv_reserve_report report;
} kvgo_reserve;

typedef struct kvgo_end {
    kvgo_result result;
    kv_step_report report;
} kvgo_end;

kvgo_step kvgo_step_begin(uintptr_t pool);
kvgo_append kvgo_seq_append(uintptr_t step, kv_seq seq, const uint32_t* token_ids, uint32_t count);
/* `infos` is a kv_append_info [items] in C memory, not yet initialised, or 0. */
kvgo_result kvgo_step_append_batch(uintptr_t step, uint32_t items, const kv_seq* seqs,
                                   const uint32_t* counts, const uint32_t* token_ids,
                                   uintptr_t infos);
kvgo_reserve kvgo_step_reserve(uintptr_t step, kv_status* item_statuses, uint32_t capacity);
kvgo_result kvgo_step_remove(uintptr_t step, kv_seq seq);
kvgo_result kvgo_step_accept(uintptr_t step, kv_seq seq, uint32_t count);
kvgo_result kvgo_step_accept_batch(uintptr_t step, uint32_t items, const kv_seq* seqs,
                                   const uint32_t* counts);
kvgo_end kvgo_step_end(uintptr_t step);
kvgo_result kvgo_step_cancel(uintptr_t step);

/* ---- Tables and attention ----------------------------------------------------------------- */

/* The in-part of kv_tables. */
typedef struct kvgo_buffers {
    int32_t* block_table;
    uint64_t block_table_stride, block_table_capacity;
    int32_t *indptr, *indices, *last_page_len;
    int64_t* slot_mapping;
    int32_t *query_start, *kv_len, *positions, *slot_positions, *slot_indptr, *sealed_blocks;
    uint64_t indices_capacity, item_capacity, token_capacity, slot_positions_capacity;
} kvgo_buffers;

typedef struct kvgo_tables {
    kvgo_result result;
    kv_tables tables; /* its in-part is zero */
} kvgo_tables;

kvgo_tables kvgo_step_export(uintptr_t step, uint32_t layer, uint32_t kv_head,
                             kvgo_buffers buffers);

/* kv_tensor, whose data is bytes so that cgo sees memory without pointers. */
typedef struct kvgo_tensor {
    unsigned char* data;
    uint32_t dtype;
    uint64_t rows, heads, dim;
    int64_t row_stride, head_stride, dim_stride;
} kvgo_tensor;

kvgo_result kvgo_write(uintptr_t step, uint32_t layer, kvgo_tensor keys, kvgo_tensor values);
kvgo_result kvgo_attend(uintptr_t step, uint32_t layer, kvgo_tensor queries, kvgo_tensor out,
                        uint32_t flags, float* log_sum_exp);
/* kvgo_write, then kvgo_attend if that went well: a layer of a step for one crossing into C. */
kvgo_result kvgo_write_attend(uintptr_t step, uint32_t layer, kvgo_tensor keys, kvgo_tensor values,
                              kvgo_tensor queries, kvgo_tensor out, uint32_t flags,
                              float* log_sum_exp);

/* ---- Pools on CUDA devices: addresses of the device travel as integers ----------------------- */

typedef struct kvgo_cuda_device {
    kvgo_result result;
    kv_cuda_device device;
} kvgo_cuda_device;

typedef struct kvgo_cuda_tables {
    kvgo_result result;
    uint32_t place;
    uint64_t block_table_stride;
    uintptr_t block_table, slot_mapping, query_start, kv_len, positions;
} kvgo_cuda_tables;

typedef struct kvgo_cuda_scoring {
    kvgo_result result;
    kv_cuda_scoring_report report;
} kvgo_cuda_scoring;

typedef struct kvgo_device_tensor {
    uintptr_t address;
    uint32_t dtype;
    uint64_t rows, heads, dim;
    int64_t row_stride, head_stride, dim_stride;
} kvgo_device_tensor;

kvgo_cuda_device kvgo_cuda_get_device(void);
/* `allocate` and `release` are the functions of kv_cuda_memory. */
kvgo_pool kvgo_cuda_pool_create(const kv_pool_config* config, const kv_model* model, uintptr_t user,
                                uintptr_t allocate, uintptr_t release);
kvgo_count kvgo_cuda_pool_memory(uintptr_t pool);
kvgo_result kvgo_cuda_pool_set_scoring(uintptr_t pool, uint32_t method, uint64_t workspace_bytes,
                                       uint32_t flags);
kvgo_cuda_scoring kvgo_cuda_pool_get_scoring(uintptr_t pool);
kvgo_result kvgo_cuda_seq_set_scores(uintptr_t pool, kv_seq seq, uint32_t layer,
                                     uint64_t first_position, uint64_t tokens, uintptr_t scores,
                                     uintptr_t stream);
kvgo_result kvgo_cuda_step_use_stream(uintptr_t step, uintptr_t stream);
kvgo_cuda_tables kvgo_cuda_step_tables(uintptr_t step, uint32_t layer, uint32_t kv_head,
                                       uint32_t flags);
kvgo_result kvgo_write_on_device(uintptr_t step, uint32_t layer, kvgo_device_tensor keys,
                                 kvgo_device_tensor values);
kvgo_result kvgo_attend_on_device(uintptr_t step, uint32_t layer, kvgo_device_tensor queries,
                                  kvgo_device_tensor out, uintptr_t log_sum_exp);

/* ---- Retention and statistics ------------------------------------------------------------- */

typedef struct kvgo_compress_report {
    kvgo_result result;
    kv_compress_report report;
} kvgo_compress_report;

/* `policy` is for this round only; NULL: the sequence's own. */
kvgo_compress_report kvgo_compress(uintptr_t pool, kv_seq seq, const kv_policy* policy);

typedef struct kvgo_policy_footprint {
    kvgo_result result;
    kv_policy_footprint footprint;
} kvgo_policy_footprint;

kvgo_policy_footprint kvgo_pool_policy_footprint(uintptr_t pool, const kv_policy* policy,
                                                 uint64_t step_tokens, uint64_t tokens);
/* `scores` are [KV heads of the layer, tokens]. */
kvgo_result kvgo_seq_set_scores(uintptr_t pool, kv_seq seq, uint32_t layer, uint64_t first_position,
                                uint64_t tokens, const float* scores);
kvgo_count kvgo_seq_get_scores(uintptr_t pool, kv_seq seq, uint32_t layer, uint32_t kv_head,
                               uint64_t capacity, float* scores);

typedef struct kvgo_statistics {
    uint32_t layer, query_heads, bands;
    uint64_t tokens;
    float *mean_real, *mean_imaginary, *mean_magnitude;
    float *variance_real, *variance_imaginary, *covariance;
} kvgo_statistics;

kvgo_result kvgo_pool_set_statistics(uintptr_t pool, kvgo_statistics statistics);
/* The count is that of the tokens. */
kvgo_count kvgo_seq_get_statistics(uintptr_t pool, kv_seq seq, kvgo_statistics statistics);
kvgo_result kvgo_seq_save_statistics(uintptr_t pool, kv_seq seq, const char* path);
kvgo_result kvgo_pool_load_statistics(uintptr_t pool, const char* path);

typedef struct kvgo_affine_fit {
    kvgo_result result;
    uint64_t tokens_used, identity;
} kvgo_affine_fit;

/* The constants are [kv_heads, key_dim] each. */
kvgo_affine_fit kvgo_seq_fit_affine(uintptr_t pool, kv_seq seq, uint32_t layer, uint32_t kv_heads,
                                    uint32_t key_dim, uint64_t first_position, uint64_t tokens,
                                    float* channel_means, float* channel_scales);

/* ---- Counters, capacity, capabilities ----------------------------------------------------- */

typedef struct kvgo_pool_stats {
    kvgo_result result;
    kv_pool_stats stats;
} kvgo_pool_stats;

typedef struct kvgo_class_stats {
    kvgo_result result;
    kv_class_stats stats;
} kvgo_class_stats;

typedef struct kvgo_layer_stats {
    kvgo_result result;
    kv_layer_stats stats; /* its arrays are NULL */
} kvgo_layer_stats;

typedef struct kvgo_plan_report {
    kvgo_result result;
    kv_plan_report report;
} kvgo_plan_report;

typedef struct kvgo_capabilities_report {
    kvgo_result result;
    kv_capabilities_report report;
} kvgo_capabilities_report;

kvgo_pool_stats kvgo_pool_get_stats(uintptr_t pool);
kvgo_class_stats kvgo_pool_get_class_stats(uintptr_t pool, uint32_t class_index);
/* The counts are [head_capacity] or NULL: without them it says how many heads there are. */
kvgo_layer_stats kvgo_pool_get_layer_stats(uintptr_t pool, uint32_t layer, uint32_t head_capacity,
                                           uint64_t* saturated_keys, uint64_t* saturated_values);
kvgo_plan_report kvgo_plan(const kv_pool_config* config, const kv_model* model, uint64_t sequences,
                           uint64_t tokens_per_sequence, uint32_t layer);
kvgo_capabilities_report kvgo_capabilities(void);

/* ---- Hooks -------------------------------------------------------------------------------- */

enum {
    KVGO_HOOK_ALLOCATE = 1u << 0, /* and release */
    KVGO_HOOK_LOG = 1u << 1,
    KVGO_HOOK_NOW = 1u << 2,
    KVGO_HOOK_PARALLEL_FOR = 1u << 3
};

/* Points the hooks that are wanted at the trampolines into Go; `user` is a cgo.Handle. */
void kvgo_set_hooks(kv_hooks* hooks, uintptr_t user, uint32_t wanted);

/* 1 if the calling thread is inside a hook of that handle. */
int kvgo_inside_hook(uintptr_t user);

/* Calls the body that the library handed to the parallel_for hook. */
void kvgo_run_body(uintptr_t body, uintptr_t context, uint32_t index);

#endif /* KVRT_GO_SHIMS_H */
