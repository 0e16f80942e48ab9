//! The types and functions of `kv_cuda.h`. What each does, and from which threads, is said there.

use core::ffi::{c_char, c_void};
use core::marker::{PhantomData, PhantomPinned};

use crate::structs::{
    initial_values, kv_allocate_hook, kv_model, kv_pool, kv_pool_config, kv_release_hook, kv_seq,
    kv_status, kv_step,
};

/// What `CUstream` and `cudaStream_t` point to.
#[repr(C)]
pub struct CUstream_st {
    data: [u8; 0],
    marker: PhantomData<(*mut u8, PhantomPinned)>,
}

/// A device that pools can be made on.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_cuda_device {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub memory_bytes: u64,
    pub ordinal: u32,
    pub compute_major: u32,
    pub compute_minor: u32,
    pub multiprocessors: u32,
    pub driver_version: u32,
    pub elastic: u32,
    pub has_kernels: u32,
    pub reserved0: u32,
    pub name: [c_char; 64],
    pub reason: [c_char; 128],
}

/// Whose device memory a pool lives in.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_cuda_memory {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub user: *mut c_void,
    pub allocate: Option<kv_allocate_hook>,
    pub release: Option<kv_release_hook>,
}

/// Tables of a step in device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_cuda_tables {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub kv_head: u32,
    pub place: u32,
    pub block_table: *const i32,
    pub slot_mapping: *const i64,
    pub query_start: *const i32,
    pub kv_len: *const i32,
    pub positions: *const i32,
    pub block_table_stride: u64,
}

/// How keys are scored by TriAttention.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_cuda_scoring {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub method: u32,
    pub reserved0: u32,
    pub workspace_bytes: u64,
}

/// How keys were scored.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_cuda_scoring_report {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub method: u32,
    pub library_version: u32,
    pub workspace_bytes: u64,
    pub kernel_cohorts: u64,
    pub product_cohorts: u64,
    pub shape_hits: u64,
    pub shape_misses: u64,
    pub kernel_kinds: u32,
    pub product_kinds: u32,
    pub open_kinds: u32,
    pub scoring_flags: u32,
    pub reason: [c_char; 128],
}

initial_values! {
    kv_cuda_device kv_cuda_memory kv_cuda_tables kv_cuda_scoring kv_cuda_scoring_report
}

extern "C" {
    pub fn kv_cuda_get_device(device: *mut kv_cuda_device) -> kv_status;
    pub fn kv_cuda_pool_create(
        config: *const kv_pool_config,
        model: *const kv_model,
        memory: *const kv_cuda_memory,
        out_pool: *mut *mut kv_pool,
    ) -> kv_status;
    pub fn kv_cuda_step_use_stream(step: *mut kv_step, stream: *mut CUstream_st) -> kv_status;
    pub fn kv_cuda_step_tables(
        step: *mut kv_step,
        layer: u32,
        tables: *mut kv_cuda_tables,
    ) -> kv_status;
    pub fn kv_cuda_pool_memory(pool: *mut kv_pool, out_bytes: *mut u64) -> kv_status;
    pub fn kv_cuda_pool_set_scoring(
        pool: *mut kv_pool,
        scoring: *const kv_cuda_scoring,
    ) -> kv_status;
    pub fn kv_cuda_pool_get_scoring(
        pool: *mut kv_pool,
        report: *mut kv_cuda_scoring_report,
    ) -> kv_status;
    pub fn kv_cuda_seq_set_scores(
        pool: *mut kv_pool,
        seq: kv_seq,
        layer: u32,
        first_position: u64,
        tokens: u64,
        scores: *const f32,
        stream: *mut CUstream_st,
    ) -> kv_status;
}
