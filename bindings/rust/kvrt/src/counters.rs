//! Counters of a pool and of its classes of blocks.

use std::marker::PhantomData;
use std::ptr::{null_mut, NonNull};

use kvrt_sys as sys;

use crate::error::check;
use crate::raw::report;
use crate::Result;

/// Reads a pool's counters, from any thread, while others call the pool.
#[derive(Clone, Copy, Debug)]
pub struct Counters<'p> {
    pool: NonNull<sys::kv_pool>,
    borrow: PhantomData<&'p ()>,
}

// SAFETY: kvrt.h: the three functions called here are *safe* on every pool, and the pool is
// borrowed for 'p.
unsafe impl Send for Counters<'_> {}
// SAFETY: as above.
unsafe impl Sync for Counters<'_> {}

impl<'p> Counters<'p> {
    /// `pool` stays alive while it is borrowed for 'p.
    pub(crate) fn new(pool: NonNull<sys::kv_pool>, borrow: PhantomData<&'p ()>) -> Self {
        Counters { pool, borrow }
    }

    /// Of the pool: the values belong to one moment.
    pub fn pool(&self) -> Result<PoolStats> {
        let mut raw = sys::kv_pool_stats::default();
        // SAFETY: the pool is alive, and the struct is filled up to its size.
        check(unsafe { sys::kv_pool_get_stats(self.pool.as_ptr(), &mut raw) })?;
        Ok(PoolStats::from(raw))
    }

    /// Of one of `PoolStats::classes`. Errors: Invalid.
    pub fn class(&self, class_index: u32) -> Result<ClassStats> {
        let mut raw = sys::kv_class_stats::default();
        // SAFETY: as above.
        check(unsafe { sys::kv_pool_get_class_stats(self.pool.as_ptr(), class_index, &mut raw) })?;
        Ok(ClassStats::from(raw))
    }

    /// Of one layer; one that shares another's cache shows its owner's. Errors: Invalid.
    pub fn layer(&self, layer: u32) -> Result<LayerStats> {
        let heads = self.kv_heads(layer)?;
        let mut saturated_keys = vec![0; heads as usize];
        let mut saturated_values = vec![0; heads as usize];
        let (keys, values) = (saturated_keys.as_mut_ptr(), saturated_values.as_mut_ptr());
        let raw = self.read_layer(layer, heads, keys, values)?;
        Ok(LayerStats {
            saturated_keys,
            saturated_values,
            recoded_rows: raw.recoded_rows,
            recoding_error: raw.recoding_error,
        })
    }

    /// Of one layer. Errors: Invalid.
    pub(crate) fn kv_heads(&self, layer: u32) -> Result<u32> {
        Ok(self.read_layer(layer, 0, null_mut(), null_mut())?.kv_heads)
    }

    /// Fills the raw struct. `keys` and `values` are null or have room for `capacity`.
    fn read_layer(
        &self,
        layer: u32,
        capacity: u32,
        keys: *mut u64,
        values: *mut u64,
    ) -> Result<sys::kv_layer_stats> {
        let mut raw = sys::kv_layer_stats {
            layer,
            head_capacity: capacity,
            saturated_keys: keys,
            saturated_values: values,
            ..Default::default()
        };
        // SAFETY: as above, and the arrays have room for `head_capacity` counts.
        check(unsafe { sys::kv_pool_get_layer_stats(self.pool.as_ptr(), &mut raw) })?;
        Ok(raw)
    }
}

/// Counters of one layer since creation.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct LayerStats {
    /// `[kv_heads]`: elements written that were beyond the largest number of their format and
    /// scale, and were stored as that number. Counts that grow ask for other scales, or for a
    /// format that scales each token.
    pub saturated_keys: Vec<u64>,
    /// `[kv_heads]`.
    pub saturated_values: Vec<u64>,
    /// Of `Format::Kivi4` and the like: rows that left a block and were coded again, by compaction
    /// or after a sequence went back.
    pub recoded_rows: u64,
    /// Their change, root mean square, as a share of their own.
    pub recoding_error: f64,
}

report! {
    /// A snapshot: total = free + cached + pinned + parked + loading.
    #[derive(Eq)]
    PoolStats from kv_pool_stats {
        slab_bytes: u64,
        slabs_total: u64,
        slabs_free: u64,
        /// Backed by memory now.
        slabs_resident: u64,
        /// slabs_total * slab_bytes.
        arena_bytes: u64,
        /// Of pinned blocks.
        live_bytes: u64,
        live_blocks: u64,
        peak_live_blocks: u64,
        /// Blocks over all classes, and the five states that add up to it.
        total: u64,
        free: u64,
        cached: u64,
        pinned: u64,
        parked: u64,
        loading: u64,
        /// Since creation, as the following ones.
        blocks_allocated: u64,
        blocks_returned: u64,
        bytes_returned: u64,
        blocks_returned_by_compaction: u64,
        bytes_returned_by_compaction: u64,
        compactions: u64,
        compactions_skipped: u64,
        slabs_given_back: u64,
        steps_ended: u64,
        steps_cancelled: u64,
        tokens_accepted: u64,
        /// Through the allocator hook or the library's own allocator.
        host_allocations: u64,
        sequences: u32,
        open_steps: u32,
        classes: u32,
        /// Host memory besides the arena.
        metadata_bytes: u64,
    }
}

report! {
    /// A class of blocks has one size; total counts the blocks of the slabs it holds now.
    #[derive(Eq)]
    ClassStats from kv_class_stats {
        block_bytes: u64,
        blocks_per_slab: u64,
        slabs: u64,
        total: u64,
        free: u64,
        cached: u64,
        pinned: u64,
        parked: u64,
        loading: u64,
    }
}
