//! Compaction by hand, what policies take, and scores.

use std::ops::Range;
use std::ptr::null;

use kvrt_sys as sys;

use crate::error::check_length;
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
        /// Fresh blocks, where the old were shared, or of another format.
        blocks_copied: u64,
        /// By elastic pools.
        slabs_given_back: u64,
        nanoseconds: u64,
        /// Of `Format::Kivi4` and the like: rows that left a block and were coded again.
        recoded_rows: u64,
        /// Their change, root mean square, as a share of their own.
        recoding_error: f64,
        /// As in `RetentionInfo`, the mean of the heads that lost tokens.
        lost_attention: f64,
    }
}

report! {
    /// What rounds have done to one layer and KV head of a sequence.
    RetentionInfo from kv_retention_info {
        /// That removed tokens here.
        rounds: u64,
        /// In all of them.
        tokens_removed: u64,
        /// To the allocator, by the layer, or by the head alone with `Layer::lane_per_head`.
        blocks_returned: u64,
        /// Share of the observed attention that the tokens had which the last round removed: 0 to
        /// 1; 0 when the policy observes none.
        lost_attention: f64,
        /// Of all rounds; each is a share of what was there then.
        lost_attention_sum: f64,
    }
}

report! {
    /// What a sequence under a policy takes once its rounds run.
    #[derive(Eq)]
    PolicyFootprint from kv_policy_footprint {
        /// Per layer and head.
        tokens_after_round: u64,
        /// The most before the next round, an open step's included.
        tokens_steady: u64,
        blocks_steady: u64,
        bytes_steady: u64,
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

    /// What a sequence takes under a policy, so that a scheduler can admit by it. `step_tokens`:
    /// its most tokens in a step, a prefill chunk or a token with its drafts; 0: 1. `tokens`: its
    /// length, for windows and layers that the policy leaves whole; 0: `tokens_steady`, and full
    /// windows. Pinned ranges come on top. Errors: Invalid (a policy with neither `every` nor
    /// `slack`), Unsupported, TooLarge.
    pub fn policy_footprint(
        &self,
        policy: &Policy,
        step_tokens: u64,
        tokens: u64,
    ) -> Result<PolicyFootprint> {
        let mut raw = sys::kv_policy_footprint { step_tokens, tokens, ..Default::default() };
        // SAFETY: the policy is valid until the call returns; the struct is filled up to its size.
        self.call(|pool| unsafe {
            sys::kv_pool_policy_footprint(pool, policy.as_ptr(), &mut raw)
        })?;
        Ok(PolicyFootprint::from(raw))
    }

    /// What rounds have done to one layer and KV head of a sequence. Errors: Invalid, Stale.
    pub fn retention_info(
        &self,
        sequence: Sequence,
        layer: u32,
        kv_head: u32,
    ) -> Result<RetentionInfo> {
        let mut raw = sys::kv_retention_info { layer, kv_head, ..Default::default() };
        // SAFETY: the struct is filled up to its size.
        self.call(|pool| unsafe { sys::kv_seq_get_retention(pool, sequence.to_bits(), &mut raw) })?;
        Ok(RetentionInfo::from(raw))
    }

    /// Scores of one layer for `Scorer::Host`: `[kv_heads, positions]`, higher stays, NaN goes
    /// first. Positions that a head no longer retains are passed over; a token that was given no
    /// score ranks above all that have one. Errors: Invalid (also: another policy), Stale.
    pub fn set_scores(
        &self,
        sequence: Sequence,
        layer: u32,
        positions: Range<u64>,
        scores: &[f32],
    ) -> Result<()> {
        let tokens = positions.end.saturating_sub(positions.start);
        let heads = u64::from(self.counters().kv_heads(layer)?);
        // No slice is longer than what saturates here.
        check_length(scores, heads.saturating_mul(tokens), "scores")?;
        // SAFETY: an element for each KV head of the layer and position.
        self.call(|pool| unsafe {
            let (first, scores) = (positions.start, scores.as_ptr());
            sys::kv_seq_set_scores(pool, sequence.to_bits(), layer, first, tokens, scores)
        })
    }

    /// What a sequence's scorer has observed of one layer and KV head, or was given: a number per
    /// retained token, in the order of `positions`. As many as `scores` holds are written, and how
    /// many there are is returned: 0 where nothing was observed. Errors: Invalid, Stale.
    pub fn scores(
        &self,
        sequence: Sequence,
        layer: u32,
        kv_head: u32,
        scores: &mut [f32],
    ) -> Result<usize> {
        let (capacity, out) = (scores.len() as u64, scores.as_mut_ptr());
        let (bits, mut count) = (sequence.to_bits(), 0);
        // SAFETY: `out` has room for `capacity` numbers.
        self.call(|pool| unsafe {
            sys::kv_seq_get_scores(pool, bits, layer, kv_head, capacity, out, &mut count)
        })?;
        Ok(count as usize)
    }
}
