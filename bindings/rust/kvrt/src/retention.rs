//! Compaction by hand.

use std::ptr::null;

use kvrt_sys as sys;

use crate::raw::report;
use crate::{CompressOutcome, Policy, PoolOf, Result, Sequence, Threading};

report! {
    /// What a round did. Sums over layers; tokens are counted per layer and KV head.
    CompressReport from kv_compress_report {
        outcome: CompressOutcome,
        /// Compacted.
        layers: u32,
        tokens_before: u64,
        tokens_after: u64,
        /// In the sequence's tables.
        blocks_before: u64,
        blocks_after: u64,
        bytes_before: u64,
        bytes_after: u64,
        /// To the allocator; a block that others still read is not returned.
        blocks_returned: u64,
        bytes_returned: u64,
        /// Fresh blocks taken because the old ones were shared.
        blocks_copied: u64,
        /// By elastic pools.
        slabs_given_back: u64,
        nanoseconds: u64,
        /// Of `Format::Kivi4` and the like: rows that left a block and were coded again.
        recoded_rows: u64,
        /// Their change, root mean square, as a share of their own.
        recoding_error: f64,
    }
}

impl<T: Threading> PoolOf<T> {
    /// Runs one round now, by the policy given or by the sequence's own. Inside an open step it
    /// runs at the step's end. Errors: Invalid (no policy), Stale, Again (no blocks for the
    /// survivors of shared ones; nothing has changed), Unsupported.
    pub fn compress(&self, sequence: Sequence, policy: Option<&Policy>) -> Result<CompressReport> {
        let options = sys::kv_compress_options {
            policy: policy.map_or(null(), Policy::as_ptr),
            ..Default::default()
        };
        let mut raw = sys::kv_compress_report::default();
        // SAFETY: the policy is valid until the call returns; the report is filled up to its size.
        self.call(|pool| unsafe {
            sys::kv_compress(pool, sequence.to_bits(), &options, &mut raw)
        })?;
        Ok(CompressReport::from(raw))
    }
}
