//! The types of `kvrt.h`, in its order. Sections are the header's.

use core::ffi::{c_char, c_void};
use core::marker::{PhantomData, PhantomPinned};

use crate::policies::*;

/// Section 2: 0 is success, negative values are errors.
pub type kv_status = i32;

/// Section 6: one request's cache, a generation-checked value. 0 is never valid.
pub type kv_seq = u64;

/// Section 5: known by its address alone.
#[repr(C)]
pub struct kv_pool {
    data: [u8; 0],
    marker: PhantomData<(*mut u8, PhantomPinned)>,
}

/// Section 7: known by its address alone.
#[repr(C)]
pub struct kv_step {
    data: [u8; 0],
    marker: PhantomData<(*mut u8, PhantomPinned)>,
}

/// `kv_hooks.allocate(user, bytes, alignment)`.
pub type kv_allocate_hook = unsafe extern "C" fn(*mut c_void, usize, usize) -> *mut c_void;
/// `kv_hooks.release(user, memory, bytes, alignment)`.
pub type kv_release_hook = unsafe extern "C" fn(*mut c_void, *mut c_void, usize, usize);
/// `kv_hooks.log(user, level, text, length)`.
pub type kv_log_hook = unsafe extern "C" fn(*mut c_void, i32, *const c_char, usize);
/// `kv_hooks.now(user)`: monotonic nanoseconds.
pub type kv_now_hook = unsafe extern "C" fn(*mut c_void) -> u64;
/// The `body(context, index)` that `kv_hooks.parallel_for` runs.
pub type kv_parallel_body = unsafe extern "C" fn(*mut c_void, u32);
/// `kv_hooks.parallel_for(user, count, body, context)`.
pub type kv_parallel_for_hook =
    unsafe extern "C" fn(*mut c_void, u32, kv_parallel_body, *mut c_void);

/// What every sized struct begins with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_struct_header {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
}

/// Section 3: functions of the host that a pool calls.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_hooks {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub user: *mut c_void,
    pub allocate: Option<kv_allocate_hook>,
    pub release: Option<kv_release_hook>,
    pub log: Option<kv_log_hook>,
    pub now: Option<kv_now_hook>,
    pub parallel_for: Option<kv_parallel_for_hook>,
}

/// Section 4: what keys or values are stored with, besides their format.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_storage {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub scales: *const f32,
    pub scale_count: u32,
    pub reserved0: u32,
    pub channel_means: *const f32,
    pub channel_scales: *const f32,
    pub channel_heads: u32,
    pub channel_dim: u32,
}

/// Section 4: how the engine rotates keys and queries.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_rope {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub style: u32,
    pub dimensions: u32,
    pub theta: f64,
    pub attention_factor: f64,
    pub inverse_frequencies: *const f64,
}

/// Section 4: one layer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_layer {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub query_heads: u32,
    pub kv_heads: u32,
    pub key_dim: u32,
    pub value_dim: u32,
    pub key_format: u32,
    pub value_format: u32,
    pub shared_layer: u32,
    pub window: u32,
    pub window_sinks: u32,
    pub reserved0: u32,
    pub softmax_scale: f32,
    pub logit_softcap: f32,
    pub sink_logits: *const f32,
    pub alibi_slopes: *const f32,
    pub rope: *const kv_rope,
    pub key_storage: *const kv_storage,
    pub value_storage: *const kv_storage,
    pub demoted_key_format: u32,
    pub demoted_value_format: u32,
    pub demote_after: u32,
    pub reserved1: u32,
    pub demoted_key_storage: *const kv_storage,
    pub demoted_value_storage: *const kv_storage,
}

/// Section 4: the layers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_model {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub layers: *const kv_layer,
    pub layer_count: u32,
    pub reserved0: u32,
}

/// Section 5: the limits of a pool.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_pool_config {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub arena_bytes: u64,
    pub device: u32,
    pub layout: u32,
    pub block_tokens: u32,
    pub max_sequences: u32,
    pub max_tokens_per_sequence: u32,
    pub max_step_sequences: u32,
    pub max_step_tokens: u32,
    pub threads: u32,
    pub hooks: *const kv_hooks,
    pub max_observed_sequences: u32,
    pub pressure_percent: u32,
}

/// Section 6: what a sequence is created with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_seq_config {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub policy: *const kv_policy,
    pub user_data: u64,
}

/// Section 6: lengths and sizes of a sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_seq_info {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub capacity: u64,
    pub written: u64,
    pub accepted: u64,
    pub published: u64,
    pub blocks: u64,
    pub bytes: u64,
    pub user_data: u64,
    pub in_step: u32,
    pub compactions: u32,
    pub rounds_skipped: u64,
    pub last_outcome: u32,
    pub last_failure: i32,
}

/// Section 6: what one layer of a sequence holds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_seq_layer_info {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub retained: u64,
    pub blocks: u64,
    pub shared_blocks: u64,
}

/// Section 6: what rounds have done to one layer and head of a sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_retention_info {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub layer: u32,
    pub kv_head: u32,
    pub rounds: u64,
    pub tokens_removed: u64,
    pub blocks_returned: u64,
    pub lost_attention: f64,
    pub lost_attention_sum: f64,
}

/// Section 7: where appended tokens lie.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_append_info {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub first_position: u64,
    pub item: u32,
    pub first_row: u32,
}

/// Section 7: what reserve found.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_reserve_report {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub need_blocks: u64,
    pub need_bytes: u64,
    pub free_bytes_now: u64,
    pub free_bytes_after_fence: u64,
    pub items_that_fit: u32,
    pub item_status_capacity: u32,
    pub item_statuses: *mut kv_status,
}

/// Section 7: what the end of a step did.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_step_report {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub fence: u64,
    pub accepted_tokens: u64,
    pub window_blocks_returned: u64,
    pub compactions: u64,
    pub compactions_skipped: u64,
    pub blocks_returned: u64,
    pub bytes_returned: u64,
    pub pressure_rounds: u64,
    pub last_skip_outcome: u32,
    pub last_skip_status: i32,
    pub demoted_blocks: u64,
    pub demoted_bytes: u64,
}

/// Section 8: block tables for foreign kernels.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_tables {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub block_table: *mut i32,
    pub block_table_stride: u64,
    pub block_table_capacity: u64,
    pub indptr: *mut i32,
    pub indices: *mut i32,
    pub last_page_len: *mut i32,
    pub slot_mapping: *mut i64,
    pub query_start: *mut i32,
    pub kv_len: *mut i32,
    pub positions: *mut i32,
    pub slot_positions: *mut i32,
    pub slot_indptr: *mut i32,
    pub indices_capacity: u64,
    pub item_capacity: u64,
    pub token_capacity: u64,
    pub slot_positions_capacity: u64,
    pub indices_count: u64,
    pub slot_positions_count: u64,
    pub item_count: u32,
    pub token_count: u32,
    pub max_blocks: u32,
    pub layout: u32,
    pub key_format: u32,
    pub value_format: u32,
    pub block_tokens: u32,
    pub slot_group: u32,
    pub base: *mut c_void,
    pub block_stride: i64,
    pub block_bytes: i64,
    pub key_offset: i64,
    pub value_offset: i64,
    pub key_stride_group: i64,
    pub key_stride_slot: i64,
    pub key_stride_head: i64,
    pub key_stride_dim: i64,
    pub value_stride_group: i64,
    pub value_stride_slot: i64,
    pub value_stride_head: i64,
    pub value_stride_dim: i64,
    pub key_scales: *const f32,
    pub value_scales: *const f32,
    pub fence: u64,
    pub key_words: u32,
    pub value_words: u32,
    pub key_word_bytes: u32,
    pub value_word_bytes: u32,
    pub sealed_key_format: u32,
    pub sealed_value_format: u32,
    pub sealed_blocks: *mut i32,
    pub sealed_block_bytes: i64,
    pub sealed_key_offset: i64,
    pub sealed_value_offset: i64,
    pub sealed_key_head_bytes: i64,
    pub sealed_value_head_bytes: i64,
    pub key_identity: u64,
    pub value_identity: u64,
    pub kv_head: u32,
    pub reserved0: u32,
    pub sealed_key_words: u32,
    pub sealed_value_words: u32,
    pub sealed_key_word_bytes: u32,
    pub sealed_value_word_bytes: u32,
    pub sealed_key_stride_group: i64,
    pub sealed_key_stride_slot: i64,
    pub sealed_key_stride_head: i64,
    pub sealed_key_stride_dim: i64,
    pub sealed_value_stride_group: i64,
    pub sealed_value_stride_slot: i64,
    pub sealed_value_stride_head: i64,
    pub sealed_value_stride_dim: i64,
    pub sealed_key_scales: *const f32,
    pub sealed_value_scales: *const f32,
}

/// Section 9: `[rows, heads, dim]` in the caller's memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_tensor {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub data: *mut c_void,
    pub dtype: u32,
    pub reserved0: u32,
    pub rows: u64,
    pub heads: u64,
    pub dim: u64,
    pub row_stride: i64,
    pub head_stride: i64,
    pub dim_stride: i64,
}

/// Section 9: options of one attention call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_attend_options {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub log_sum_exp: *mut f32,
}

/// Section 11: means and covariances of a layer's queries.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_query_statistics {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub layer: u32,
    pub query_heads: u32,
    pub bands: u32,
    pub reserved0: u32,
    pub tokens: u64,
    pub mean_real: *mut f32,
    pub mean_imaginary: *mut f32,
    pub mean_magnitude: *mut f32,
    pub variance_real: *mut f32,
    pub variance_imaginary: *mut f32,
    pub covariance: *mut f32,
}

/// Section 11: constants of channels, measured on a layer's keys.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_affine_fit {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub layer: u32,
    pub kv_heads: u32,
    pub key_dim: u32,
    pub reserved0: u32,
    pub first_position: u64,
    pub tokens: u64,
    pub channel_means: *mut f32,
    pub channel_scales: *mut f32,
    pub tokens_used: u64,
    pub identity: u64,
}

/// Section 12: counters of one class of blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_class_stats {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub block_bytes: u64,
    pub blocks_per_slab: u64,
    pub slabs: u64,
    pub total: u64,
    pub free: u64,
    pub cached: u64,
    pub pinned: u64,
    pub parked: u64,
    pub loading: u64,
}

/// Section 12: counters of a pool.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_pool_stats {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub slab_bytes: u64,
    pub slabs_total: u64,
    pub slabs_free: u64,
    pub slabs_resident: u64,
    pub arena_bytes: u64,
    pub live_bytes: u64,
    pub live_blocks: u64,
    pub peak_live_blocks: u64,
    pub total: u64,
    pub free: u64,
    pub cached: u64,
    pub pinned: u64,
    pub parked: u64,
    pub loading: u64,
    pub blocks_allocated: u64,
    pub blocks_returned: u64,
    pub bytes_returned: u64,
    pub blocks_returned_by_compaction: u64,
    pub bytes_returned_by_compaction: u64,
    pub compactions: u64,
    pub compactions_skipped: u64,
    pub slabs_given_back: u64,
    pub steps_ended: u64,
    pub steps_cancelled: u64,
    pub tokens_accepted: u64,
    pub host_allocations: u64,
    pub sequences: u32,
    pub open_steps: u32,
    pub classes: u32,
    pub reserved0: u32,
    pub metadata_bytes: u64,
}

/// Section 12: counters of one layer, by KV head.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_layer_stats {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub layer: u32,
    pub head_capacity: u32,
    pub kv_heads: u32,
    pub reserved0: u32,
    pub saturated_keys: *mut u64,
    pub saturated_values: *mut u64,
    pub recoded_rows: u64,
    pub recoding_error: f64,
}

/// Section 12: what a pool would hold.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_plan_report {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub sequences: u64,
    pub tokens_per_sequence: u64,
    pub bytes_per_token: u64,
    pub bytes_per_sequence: u64,
    pub arena_bytes_needed: u64,
    pub sequences_that_fit: u64,
    pub tokens_that_fit: u64,
    pub metadata_bytes: u64,
    pub bytes_per_block: u64,
    pub blocks_per_sequence: u64,
    pub full_bytes_per_token: u64,
    pub constant_bytes_per_sequence: u64,
    pub tokens_that_fit_each: u64,
    pub tokens_by_bytes: u64,
    pub layer: u32,
    pub reserved0: u32,
    pub layer_bytes_per_block: u64,
    pub layer_bytes_per_sequence: u64,
}

/// Section 12: what this library can do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_capabilities_report {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub formats: u64,
    pub devices: u64,
    pub layouts: u64,
    pub scorers: u64,
    pub selections: u64,
    pub min_head_dim: u32,
    pub max_head_dim: u32,
    pub head_dim_multiple: u32,
    pub max_layers: u32,
    pub simd_target: [c_char; 32],
}

/// `KV_INIT(struct)`: zeroes, with `struct_size` set.
macro_rules! initial_values {
    ($($name:ident)*) => {$(
        impl Default for $name {
            fn default() -> Self {
                // SAFETY: plain numbers, pointers and optional functions, for which zero is valid.
                let mut value: Self = unsafe { core::mem::zeroed() };
                value.struct_size = core::mem::size_of::<Self>() as u32;
                value
            }
        }
    )*};
}

pub(crate) use initial_values;

initial_values! {
    kv_struct_header kv_hooks kv_storage kv_rope kv_layer kv_model kv_pool_config kv_seq_config
    kv_seq_info kv_seq_layer_info kv_retention_info kv_append_info kv_reserve_report
    kv_step_report kv_tables kv_tensor kv_attend_options kv_policy kv_compress_options
    kv_compress_report kv_policy_footprint
    kv_query_statistics kv_affine_fit kv_class_stats kv_pool_stats kv_layer_stats kv_plan_report
    kv_capabilities_report
}
