//! What a pool is created with.

use std::ptr::null;

use kvrt_sys as sys;

use crate::raw::{flags, setters, Plain};
use crate::{Device, Layout};

/// The limits of a pool. All that it will ever need besides the arena is allocated at creation, by
/// these limits; 0 is the default everywhere.
#[derive(Clone, Debug)]
pub struct PoolConfig {
    raw: Plain<sys::kv_pool_config>,
}

impl PoolConfig {
    /// `arena_bytes` are for keys and values, rounded down to slabs of 2 MiB.
    pub fn new(arena_bytes: u64) -> Self {
        PoolConfig { raw: Plain(sys::kv_pool_config { arena_bytes, ..Default::default() }) }
    }

    #[must_use]
    pub fn device(mut self, device: Device) -> Self {
        self.raw.0.device = device.code();
        self
    }

    #[must_use]
    pub fn layout(mut self, layout: Layout) -> Self {
        self.raw.0.layout = layout.code();
        self
    }

    setters! {
        /// 16 (default), 32, 64 or 128.
        block_tokens: u32,
        /// Alive at once; default 64, at most 65536.
        max_sequences: u32,
        /// Retained at once; default 32768.
        max_tokens_per_sequence: u32,
        /// In one step; default max_sequences.
        max_step_sequences: u32,
        /// In one step; default 8192.
        max_step_tokens: u32,
        /// Of the library's own pool, the caller's included; 0: one per processor.
        threads: u32,
        /// Whose policies need observed attention, or scores of the host; default 0. Each takes
        /// host memory: 12 bytes per layer, KV head and token of max_tokens_per_sequence.
        max_observed_sequences: u32,
        /// When more of the arena's bytes are pinned at a step's end, policies of sequences outside
        /// of open steps run at once, until that is over; 0: never.
        pressure_percent: u32,
    }

    flags! {
        /// Empty slabs are given back to the system.
        elastic = KV_POOL_ELASTIC,
        /// Fill fresh and freed blocks with NaN patterns and guard them, for `Pool::check`.
        debug = KV_POOL_DEBUG,
        /// The host's own kernels may still read after a step's end: its fence passes when
        /// `Pool::pass_fence` says so.
        host_fences = KV_POOL_HOST_FENCES,
    }

    /// The raw struct for one call; `hooks` must outlive it.
    pub(crate) fn lend(
        &self,
        more_flags: u32,
        hooks: Option<&sys::kv_hooks>,
    ) -> sys::kv_pool_config {
        let mut raw = self.raw.0;
        raw.flags |= more_flags;
        raw.hooks = hooks.map_or(null(), |hooks| hooks);
        raw
    }
}
