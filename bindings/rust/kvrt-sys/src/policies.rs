//! The types of section 10 of `kvrt.h`: policies, and what rounds report.

use core::ffi::c_void;

/// Section 10: which tokens to retain.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_policy {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub scorer: u32,
    pub selection: u32,
    pub budget: u32,
    pub every: u32,
    pub prompt_tokens: u32,
    pub sinks: u32,
    pub recent: u32,
    pub offset_max: u32,
    pub skip_layers: u32,
    pub reserved0: u32,
    pub seed: u64,
    pub allocator: u32,
    pub slack: u32,
    pub window: u32,
    pub pool_width: u32,
    pub observe_every: u32,
    pub decay: f32,
    pub prior_share: f32,
    pub redundancy: f32,
    pub similarity: f32,
    pub floor_share: f32,
    pub threshold: f32,
    pub steepness: u32,
    pub value_reserve: u32,
    pub segments: u32,
    pub segment_quota: u32,
    pub reserved1: u32,
}

/// Section 10: options of one round.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_compress_options {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub policy: *const kv_policy,
}

/// Section 10: what a round did.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_compress_report {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub outcome: u32,
    pub layers: u32,
    pub tokens_before: u64,
    pub tokens_after: u64,
    pub blocks_before: u64,
    pub blocks_after: u64,
    pub bytes_before: u64,
    pub bytes_after: u64,
    pub blocks_returned: u64,
    pub bytes_returned: u64,
    pub blocks_copied: u64,
    pub slabs_given_back: u64,
    pub nanoseconds: u64,
    pub recoded_rows: u64,
    pub recoding_error: f64,
    pub lost_attention: f64,
}

/// Section 10: what a sequence takes under a policy.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kv_policy_footprint {
    pub struct_size: u32,
    pub flags: u32,
    pub next: *const c_void,
    pub step_tokens: u64,
    pub tokens: u64,
    pub tokens_after_round: u64,
    pub tokens_steady: u64,
    pub blocks_steady: u64,
    pub bytes_steady: u64,
}
