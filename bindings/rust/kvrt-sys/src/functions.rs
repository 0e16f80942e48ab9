//! The functions of `kvrt.h`, in its order. What each does, and from which threads, is said there.

use core::ffi::{c_char, c_void};

use crate::policies::*;
use crate::structs::*;

extern "C" {
    // 1. Version and linkage
    pub fn kv_struct_init(object: *mut c_void, struct_size: u32);
    pub fn kvrt_version() -> u32;

    // 2. Statuses and messages
    pub fn kv_status_name(status: kv_status) -> *const c_char;
    pub fn kv_status_category(status: kv_status) -> i32;
    pub fn kv_last_error(buffer: *mut c_char, capacity: usize) -> usize;

    // 4. The model
    pub fn kv_model_apply_preset(layers: *mut kv_layer, layer_count: u32, preset: u32)
        -> kv_status;

    // 5. Pool
    pub fn kv_pool_create(
        config: *const kv_pool_config,
        model: *const kv_model,
        out_pool: *mut *mut kv_pool,
    ) -> kv_status;
    pub fn kv_pool_release(pool: *mut kv_pool);
    pub fn kv_pool_pass_fence(pool: *mut kv_pool, fence: u64) -> kv_status;
    pub fn kv_pool_check(pool: *mut kv_pool) -> kv_status;

    // 6. Sequences
    pub fn kv_seq_create(
        pool: *mut kv_pool,
        config: *const kv_seq_config,
        out_seq: *mut kv_seq,
    ) -> kv_status;
    pub fn kv_seq_release(pool: *mut kv_pool, seq: kv_seq) -> kv_status;
    pub fn kv_seq_fork(
        pool: *mut kv_pool,
        parent: kv_seq,
        count: u32,
        out_children: *mut kv_seq,
    ) -> kv_status;
    pub fn kv_seq_truncate(pool: *mut kv_pool, seq: kv_seq, tokens_seen: u64) -> kv_status;
    pub fn kv_seq_set_policy(
        pool: *mut kv_pool,
        seq: kv_seq,
        policy: *const kv_policy,
    ) -> kv_status;
    pub fn kv_seq_pin(pool: *mut kv_pool, seq: kv_seq, first: u64, count: u64) -> kv_status;
    pub fn kv_seq_unpin(pool: *mut kv_pool, seq: kv_seq) -> kv_status;
    pub fn kv_seq_get_info(
        pool: *mut kv_pool,
        seq: kv_seq,
        out_info: *mut kv_seq_info,
    ) -> kv_status;
    pub fn kv_seq_get_layer_info(
        pool: *mut kv_pool,
        seq: kv_seq,
        layer: u32,
        out_info: *mut kv_seq_layer_info,
    ) -> kv_status;
    pub fn kv_seq_get_retention(
        pool: *mut kv_pool,
        seq: kv_seq,
        info: *mut kv_retention_info,
    ) -> kv_status;
    pub fn kv_seq_get_positions(
        pool: *mut kv_pool,
        seq: kv_seq,
        layer: u32,
        kv_head: u32,
        capacity: u64,
        out_positions: *mut u32,
        out_count: *mut u64,
    ) -> kv_status;

    // 7. Steps
    pub fn kv_step_begin(pool: *mut kv_pool, out_step: *mut *mut kv_step) -> kv_status;
    pub fn kv_seq_append(
        step: *mut kv_step,
        seq: kv_seq,
        token_ids: *const u32,
        count: u32,
        out_info: *mut kv_append_info,
    ) -> kv_status;
    pub fn kv_step_append_batch(
        step: *mut kv_step,
        items: u32,
        seqs: *const kv_seq,
        counts: *const u32,
        token_ids: *const u32,
        out_infos: *mut kv_append_info,
    ) -> kv_status;
    pub fn kv_step_reserve(step: *mut kv_step, report: *mut kv_reserve_report) -> kv_status;
    pub fn kv_step_remove(step: *mut kv_step, seq: kv_seq) -> kv_status;
    pub fn kv_step_accept(step: *mut kv_step, seq: kv_seq, count: u32) -> kv_status;
    pub fn kv_step_accept_batch(
        step: *mut kv_step,
        items: u32,
        seqs: *const kv_seq,
        counts: *const u32,
    ) -> kv_status;
    pub fn kv_step_end(step: *mut kv_step, report: *mut kv_step_report) -> kv_status;
    pub fn kv_step_cancel(step: *mut kv_step) -> kv_status;

    // 8. Export of tables
    pub fn kv_step_export(step: *mut kv_step, layer: u32, tables: *mut kv_tables) -> kv_status;

    // 9. Attention
    pub fn kv_write(
        step: *mut kv_step,
        layer: u32,
        keys: *const kv_tensor,
        values: *const kv_tensor,
    ) -> kv_status;
    pub fn kv_attend(
        step: *mut kv_step,
        layer: u32,
        queries: *const kv_tensor,
        out: *const kv_tensor,
        options: *const kv_attend_options,
    ) -> kv_status;

    // 10. Retention
    pub fn kv_compress(
        pool: *mut kv_pool,
        seq: kv_seq,
        options: *const kv_compress_options,
        report: *mut kv_compress_report,
    ) -> kv_status;
    pub fn kv_pool_policy_footprint(
        pool: *mut kv_pool,
        policy: *const kv_policy,
        footprint: *mut kv_policy_footprint,
    ) -> kv_status;
    pub fn kv_seq_set_scores(
        pool: *mut kv_pool,
        seq: kv_seq,
        layer: u32,
        first_position: u64,
        tokens: u64,
        scores: *const f32,
    ) -> kv_status;
    pub fn kv_seq_get_scores(
        pool: *mut kv_pool,
        seq: kv_seq,
        layer: u32,
        kv_head: u32,
        capacity: u64,
        out_scores: *mut f32,
        out_count: *mut u64,
    ) -> kv_status;

    // 11. Statistics of queries
    pub fn kv_pool_set_statistics(
        pool: *mut kv_pool,
        statistics: *const kv_query_statistics,
    ) -> kv_status;
    pub fn kv_seq_get_statistics(
        pool: *mut kv_pool,
        seq: kv_seq,
        statistics: *mut kv_query_statistics,
    ) -> kv_status;
    pub fn kv_seq_save_statistics(
        pool: *mut kv_pool,
        seq: kv_seq,
        path: *const c_char,
    ) -> kv_status;
    pub fn kv_pool_load_statistics(pool: *mut kv_pool, path: *const c_char) -> kv_status;
    pub fn kv_seq_fit_affine(pool: *mut kv_pool, seq: kv_seq, fit: *mut kv_affine_fit)
        -> kv_status;

    // 12. Counters, capacity, capabilities
    pub fn kv_pool_get_stats(pool: *mut kv_pool, out_stats: *mut kv_pool_stats) -> kv_status;
    pub fn kv_pool_get_class_stats(
        pool: *mut kv_pool,
        class_index: u32,
        out_stats: *mut kv_class_stats,
    ) -> kv_status;
    pub fn kv_pool_get_layer_stats(pool: *mut kv_pool, stats: *mut kv_layer_stats) -> kv_status;
    pub fn kv_plan(
        config: *const kv_pool_config,
        model: *const kv_model,
        report: *mut kv_plan_report,
    ) -> kv_status;
    pub fn kv_capabilities(out_report: *mut kv_capabilities_report) -> kv_status;
    pub fn kv_live_count(kind: u32) -> u64;
}
