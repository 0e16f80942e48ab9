//! Sequences: one request's cache each.

use std::fmt;
use std::ops::Range;

use kvrt_sys as sys;

use crate::error::count_of;
use crate::raw::report;
use crate::{CompressOutcome, Policy, PoolOf, Result, Status, Threading};

/// A sequence of a pool: a value that the pool checks. After its release every call but another
/// release gives `Error::Stale`. So does a call of another pool, practically always: each pool
/// counts its sequences from a start of its own, far from the others', but nothing in the value
/// names the pool. The default value is known to none.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Sequence(sys::kv_seq);

impl Sequence {
    /// A number that was taken with `to_bits`. Any other is an error when it is used.
    pub fn from_bits(bits: u64) -> Self {
        Sequence(bits)
    }

    pub fn to_bits(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Sequence {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "Sequence({:#x})", self.0)
    }
}

/// What a sequence is created with. The default keeps everything.
#[derive(Clone, Debug, Default)]
pub struct SequenceConfig {
    policy: Option<Policy>,
    user_data: u64,
    gather_statistics: bool,
}

impl SequenceConfig {
    pub fn new() -> Self {
        SequenceConfig::default()
    }

    #[must_use]
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// Comes back in `SequenceInfo`.
    #[must_use]
    pub fn user_data(mut self, value: u64) -> Self {
        self.user_data = value;
        self
    }

    /// Gather query statistics also without a policy that needs them.
    #[must_use]
    pub fn gather_statistics(mut self, on: bool) -> Self {
        self.gather_statistics = on;
        self
    }
}

/// The four lengths are in tokens seen: capacity >= written >= accepted >= published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SequenceInfo {
    /// Positions for which slots are reserved.
    pub capacity: u64,
    /// Positions that the open step has been asked to write, or accepted.
    pub written: u64,
    /// The next position after the last step end.
    pub accepted: u64,
    /// Visible to prefix match.
    pub published: u64,
    /// In this sequence's tables, shared ones included.
    pub blocks: u64,
    /// Of those blocks.
    pub bytes: u64,
    pub user_data: u64,
    /// While an open step holds it.
    pub in_step: bool,
    /// Rounds that have removed something.
    pub compactions: u32,
    /// Rounds of its policy that were due and removed nothing.
    pub rounds_skipped: u64,
    /// Of its last round; `None`: there was none.
    pub last_outcome: Option<CompressOutcome>,
    /// Of its last round: `Status::AGAIN` when blocks were missing.
    pub last_failure: Status,
}

impl From<sys::kv_seq_info> for SequenceInfo {
    fn from(raw: sys::kv_seq_info) -> Self {
        SequenceInfo {
            capacity: raw.capacity,
            written: raw.written,
            accepted: raw.accepted,
            published: raw.published,
            blocks: raw.blocks,
            bytes: raw.bytes,
            user_data: raw.user_data,
            in_step: raw.in_step != 0,
            compactions: raw.compactions,
            rounds_skipped: raw.rounds_skipped,
            last_outcome: CompressOutcome::of_round(raw.last_outcome),
            last_failure: Status::from_code(raw.last_failure),
        }
    }
}

report! {
    /// What one layer of a sequence holds.
    #[derive(Eq)]
    SequenceLayerInfo from kv_seq_layer_info {
        /// Accepted tokens that are stored now.
        retained: u64,
        /// In this layer's table; 0 for a layer that shares another's cache.
        blocks: u64,
        /// Of those, read by others too.
        shared_blocks: u64,
    }
}

impl<T: Threading> PoolOf<T> {
    /// Errors: Invalid, Limit (max_sequences), Unsupported (the policy).
    pub fn create_sequence(&self, config: &SequenceConfig) -> Result<Sequence> {
        let flags = if config.gather_statistics { sys::KV_SEQ_GATHER_STATISTICS } else { 0 };
        let raw = sys::kv_seq_config {
            flags,
            policy: config.policy.as_ref().map_or(std::ptr::null(), Policy::as_ptr),
            user_data: config.user_data,
            ..Default::default()
        };
        let mut sequence = Sequence::default();
        // SAFETY: the config and its policy are valid until the call returns.
        self.call(|pool| unsafe { sys::kv_seq_create(pool, &raw, &mut sequence.0) })?;
        Ok(sequence)
    }

    /// Ends a sequence, in any state. Inside an open step it takes effect at once, and the step
    /// still runs to its end. One that is gone already is no error.
    pub fn release_sequence(&self, sequence: Sequence) -> Result<()> {
        // SAFETY: the pool is alive; it checks the handle.
        self.call(|pool| unsafe { sys::kv_seq_release(pool, sequence.0) })
    }

    /// Fills `children` with sequences that hold the parent's accepted tokens, policy and
    /// statistics. Nothing is copied until one of them writes into a block that others read. All or
    /// none are made. Errors: Invalid, Stale, Limit.
    pub fn fork_sequence(&self, parent: Sequence, children: &mut [Sequence]) -> Result<()> {
        let count = count_of(children, "children")?;
        let out = children.as_mut_ptr().cast::<sys::kv_seq>();
        // SAFETY: `out` has room for `count` handles, which `Sequence` is transparent over.
        self.call(|pool| unsafe { sys::kv_seq_fork(pool, parent.0, count, out) })
    }

    /// Forgets all tokens at positions >= `tokens_seen`, which becomes the next position. Errors:
    /// Invalid (more than was seen, or in an open step), Stale, NoSnapshot (what queries from there
    /// would see is gone).
    pub fn truncate_sequence(&self, sequence: Sequence, tokens_seen: u64) -> Result<()> {
        // SAFETY: the pool is alive; it checks the handle.
        self.call(|pool| unsafe { sys::kv_seq_truncate(pool, sequence.0, tokens_seen) })
    }

    /// Replaces the policy. It takes effect at the next step end or compression. Errors: Invalid,
    /// Stale, Unsupported.
    pub fn set_policy(&self, sequence: Sequence, policy: Option<&Policy>) -> Result<()> {
        let policy = policy.map_or(std::ptr::null(), Policy::as_ptr);
        // SAFETY: the policy is valid until the call returns.
        self.call(|pool| unsafe { sys::kv_seq_set_policy(pool, sequence.0, policy) })
    }

    /// Protects positions from every policy. At most 16 ranges a sequence (Limit).
    pub fn pin(&self, sequence: Sequence, positions: Range<u64>) -> Result<()> {
        let count = positions.end.saturating_sub(positions.start);
        // SAFETY: the pool is alive; it checks the handle and the range.
        self.call(|pool| unsafe { sys::kv_seq_pin(pool, sequence.0, positions.start, count) })
    }

    /// Removes all ranges that `pin` has set.
    pub fn unpin(&self, sequence: Sequence) -> Result<()> {
        // SAFETY: the pool is alive; it checks the handle.
        self.call(|pool| unsafe { sys::kv_seq_unpin(pool, sequence.0) })
    }

    pub fn sequence_info(&self, sequence: Sequence) -> Result<SequenceInfo> {
        let mut raw = sys::kv_seq_info::default();
        // SAFETY: the struct is filled up to its size.
        self.call(|pool| unsafe { sys::kv_seq_get_info(pool, sequence.0, &mut raw) })?;
        Ok(SequenceInfo::from(raw))
    }

    pub fn sequence_layer_info(&self, sequence: Sequence, layer: u32) -> Result<SequenceLayerInfo> {
        let mut raw = sys::kv_seq_layer_info::default();
        // SAFETY: the struct is filled up to its size.
        self.call(|pool| unsafe { sys::kv_seq_get_layer_info(pool, sequence.0, layer, &mut raw) })?;
        Ok(SequenceLayerInfo::from(raw))
    }

    /// Positions of the retained tokens of one KV head, ascending: as many as `positions` holds are
    /// written, and how many there are is returned.
    pub fn positions(
        &self,
        sequence: Sequence,
        layer: u32,
        kv_head: u32,
        positions: &mut [u32],
    ) -> Result<usize> {
        let (capacity, out) = (positions.len() as u64, positions.as_mut_ptr());
        let mut count = 0;
        // SAFETY: `out` has room for `capacity` numbers.
        self.call(|pool| unsafe {
            sys::kv_seq_get_positions(pool, sequence.0, layer, kv_head, capacity, out, &mut count)
        })?;
        Ok(count as usize)
    }
}
