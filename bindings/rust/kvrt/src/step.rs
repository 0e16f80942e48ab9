//! Steps: one forward pass over a batch, as a transaction.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::{null, null_mut, NonNull};

use kvrt_sys as sys;

use crate::error::{check_length, count_of};
use crate::raw::Plain;
use crate::{
    CompressOutcome, Error, PoolOf, Result, Sequence, Serial, Status, Tensor, TensorMut, Threading,
};

/// An open step. Up to two steps of a pool are open at once, over different sequences; calls on
/// sequences go on meanwhile. Dropped without `end`, it is cancelled. One that is forgotten,
/// or that is dropped or ended inside a hook of its own pool, stays open until the pool goes.
pub struct Step<'p, T: Threading = Serial> {
    pool: &'p PoolOf<T>,
    raw: NonNull<sys::kv_step>,
}

// SAFETY: a step is called under the rules of its pool, which it borrows: from other threads only
// where the pool is `Sync`.
unsafe impl<T: Threading> Send for Step<'_, T> where PoolOf<T>: Sync {}
// SAFETY: as above.
unsafe impl<T: Threading> Sync for Step<'_, T> where PoolOf<T>: Sync {}

/// Where appended tokens lie.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct AppendInfo {
    raw: Plain<sys::kv_append_info>,
}

impl AppendInfo {
    /// The position of the first appended token.
    pub fn first_position(&self) -> u64 {
        self.raw.0.first_position
    }

    /// This sequence's row in the exported tables.
    pub fn item(&self) -> u32 {
        self.raw.0.item
    }

    /// The row of the first appended token in queries, keys, values and output.
    pub fn first_row(&self) -> u32 {
        self.raw.0.first_row
    }
}

impl fmt::Debug for AppendInfo {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("AppendInfo")
            .field("first_position", &self.first_position())
            .field("item", &self.item())
            .field("first_row", &self.first_row())
            .finish()
    }
}

/// What reserve found, over all classes of blocks. It can be used again for the next step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReserveReport {
    pub need_blocks: u64,
    pub need_bytes: u64,
    /// Could be handed out at once.
    pub free_bytes_now: u64,
    /// With what is parked behind open steps and fences.
    pub free_bytes_after_fence: u64,
    /// The first so many items would have fitted.
    pub items_that_fit: u32,
    item_statuses: Vec<Status>,
}

impl ReserveReport {
    /// A report with a status for each of the first `items` items.
    pub fn with_item_statuses(items: usize) -> Self {
        ReserveReport { item_statuses: vec![Status::OK; items], ..Default::default() }
    }

    /// OK, AGAIN, TOO_LARGE or LIMIT for each item; OK behind the last item of the step.
    pub fn item_statuses(&self) -> &[Status] {
        &self.item_statuses
    }
}

/// Options of an attention call.
#[derive(Debug, Default)]
pub struct AttendOptions<'a> {
    /// `[rows, query_heads]`, dense: receives the natural logarithm of the softmax denominators.
    pub log_sum_exp: Option<&'a mut [f32]>,
    /// Do not learn query statistics from this call.
    pub no_statistics: bool,
}

/// What the end of a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct StepReport {
    /// This step's number, for `Pool::pass_fence`.
    pub fence: u64,
    pub accepted_tokens: u64,
    /// Slid out of window layers.
    pub window_blocks_returned: u64,
    /// Rounds run at this step end, by policy or deferred call.
    pub compactions: u64,
    /// Rounds due that had nothing to remove or no statistics.
    pub compactions_skipped: u64,
    /// To the allocator, in all (some may wait for a fence).
    pub blocks_returned: u64,
    pub bytes_returned: u64,
    /// Rounds run because of `PoolConfig::pressure_percent`.
    pub pressure_rounds: u64,
    /// Of the last round that was skipped; `None`: none was.
    pub last_skip_outcome: Option<CompressOutcome>,
    /// Its status: `Status::AGAIN` when blocks were missing.
    pub last_skip_status: Status,
    /// Coded into the smaller formats of their layers (`Layer::demoted_key_format`).
    pub demoted_blocks: u64,
    /// How many fewer these take now.
    pub demoted_bytes: u64,
}

impl From<sys::kv_step_report> for StepReport {
    fn from(raw: sys::kv_step_report) -> Self {
        StepReport {
            fence: raw.fence,
            accepted_tokens: raw.accepted_tokens,
            window_blocks_returned: raw.window_blocks_returned,
            compactions: raw.compactions,
            compactions_skipped: raw.compactions_skipped,
            blocks_returned: raw.blocks_returned,
            bytes_returned: raw.bytes_returned,
            pressure_rounds: raw.pressure_rounds,
            last_skip_outcome: CompressOutcome::of_round(raw.last_skip_outcome),
            last_skip_status: Status::from_code(raw.last_skip_status),
            demoted_blocks: raw.demoted_blocks,
            demoted_bytes: raw.demoted_bytes,
        }
    }
}

impl<T: Threading> PoolOf<T> {
    /// Errors: Limit (two steps are open).
    pub fn begin_step(&self) -> Result<Step<'_, T>> {
        let mut raw = null_mut();
        // SAFETY: the pool is alive.
        self.call(|pool| unsafe { sys::kv_step_begin(pool, &mut raw) })?;
        match NonNull::new(raw) {
            Some(raw) => Ok(Step { pool: self, raw }),
            None => Err(Error::Internal("kv_step_begin gave no step".to_string())),
        }
    }
}

impl<T: Threading> Step<'_, T> {
    /// Makes a call on this step, which is open until `end`, `cancel` or `drop` take it.
    pub(crate) fn call(
        &self,
        body: impl FnOnce(*mut sys::kv_step) -> sys::kv_status,
    ) -> Result<()> {
        self.pool.call(|_| body(self.raw.as_ptr()))
    }

    pub(crate) fn on_cuda(&self) -> bool {
        self.pool.on_cuda()
    }

    /// Adds `count` tokens of a sequence: a prefill chunk, a decode token, or a token with drafts
    /// to verify behind it. Rows follow in the order of the calls. Errors: Invalid (count 0,
    /// already in a step, after reserve, not `count` ids), Stale, Limit.
    pub fn append(
        &self,
        sequence: Sequence,
        count: u32,
        token_ids: Option<&[u32]>,
    ) -> Result<AppendInfo> {
        let ids = lend_ids(token_ids, u64::from(count))?;
        let mut info = AppendInfo::default();
        // SAFETY: `ids` is null or holds `count` ids; `info` is filled up to its size.
        self.call(|step| unsafe {
            sys::kv_seq_append(step, sequence.to_bits(), ids, count, &mut info.raw.0)
        })?;
        Ok(info)
    }

    /// `append` for a whole batch: `counts[i]` tokens of `sequences[i]`, the ids of all one behind
    /// the other. `infos` has an element for each item. All are appended, or none.
    pub fn append_batch(
        &self,
        sequences: &[Sequence],
        counts: &[u32],
        token_ids: Option<&[u32]>,
        infos: Option<&mut [AppendInfo]>,
    ) -> Result<()> {
        let (items, sequences) = lend_batch(sequences, counts)?;
        let ids = lend_ids(token_ids, counts.iter().map(|&count| u64::from(count)).sum())?;
        let infos = match infos {
            None => null_mut(),
            Some(infos) => {
                check_length(infos, u64::from(items), "infos")?;
                infos.as_mut_ptr().cast::<sys::kv_append_info>()
            }
        };
        // SAFETY: the arrays hold `items` elements each, `ids` as many as `counts` add up to, and
        // `AppendInfo` is transparent over a struct with its size set.
        self.call(|step| unsafe {
            sys::kv_step_append_batch(step, items, sequences, counts.as_ptr(), ids, infos)
        })
    }

    /// Reserves slots for everything appended: all blocks, or none and an error. After `Again` the
    /// step stays open: release or compress other sequences, or remove some, and call again.
    /// Errors: Again, TooLarge (one sequence larger than the pool), Limit, Invalid (twice, or
    /// nothing appended).
    pub fn reserve(&self) -> Result<()> {
        // SAFETY: the report may be null.
        self.call(|step| unsafe { sys::kv_step_reserve(step, null_mut()) })
    }

    /// `reserve`, with what it found: also when it fails.
    pub fn reserve_with(&self, report: &mut ReserveReport) -> Result<()> {
        let mut statuses = std::mem::take(&mut report.item_statuses);
        statuses.fill(Status::OK);
        let mut raw = sys::kv_reserve_report {
            item_status_capacity: count_of(&statuses, "item_statuses")?,
            item_statuses: if statuses.is_empty() {
                null_mut()
            } else {
                statuses.as_mut_ptr().cast::<sys::kv_status>()
            },
            ..Default::default()
        };
        // SAFETY: `item_statuses` has room for its capacity; `Status` is transparent over a status.
        let verdict = self.call(|step| unsafe { sys::kv_step_reserve(step, &mut raw) });
        *report = ReserveReport {
            need_blocks: raw.need_blocks,
            need_bytes: raw.need_bytes,
            free_bytes_now: raw.free_bytes_now,
            free_bytes_after_fence: raw.free_bytes_after_fence,
            items_that_fit: raw.items_that_fit,
            item_statuses: statuses,
        };
        verdict
    }

    /// Takes a sequence out of a step that has not been reserved. Items and rows behind it move up.
    pub fn remove(&self, sequence: Sequence) -> Result<()> {
        // SAFETY: the step is open; it checks the handle.
        self.call(|step| unsafe { sys::kv_step_remove(step, sequence.to_bits()) })
    }

    /// Accepts the first `count` of the tokens that the sequence appended; the others are rolled
    /// back at the end. Default: all. Errors: Invalid, Stale.
    pub fn accept(&self, sequence: Sequence, count: u32) -> Result<()> {
        // SAFETY: the step is open; it checks the handle.
        self.call(|step| unsafe { sys::kv_step_accept(step, sequence.to_bits(), count) })
    }

    /// `accept` for several sequences: all are noted, or none.
    pub fn accept_batch(&self, sequences: &[Sequence], counts: &[u32]) -> Result<()> {
        let (items, sequences) = lend_batch(sequences, counts)?;
        // SAFETY: both arrays hold `items` elements.
        self.call(|step| unsafe {
            sys::kv_step_accept_batch(step, items, sequences, counts.as_ptr())
        })
    }

    /// Stores keys and values of all rows of the step in a layer, as attention will use them
    /// (rotated, if the model rotates). A second call overwrites. Errors: Invalid.
    pub fn write(&self, layer: u32, keys: &Tensor<'_>, values: &Tensor<'_>) -> Result<()> {
        self.check_device(false)?;
        let (keys, values) = (keys.lend("keys")?, values.lend("values")?);
        // SAFETY: all elements of both tensors lie in slices that are borrowed until the return.
        self.call(|step| unsafe { sys::kv_write(step, layer, &keys, &values) })
    }

    /// out[row, head] = softmax(scale * q . K) V over the slots that the row may see. Errors:
    /// Invalid (also: the layer was not written).
    pub fn attend(&self, layer: u32, queries: &Tensor<'_>, out: &mut TensorMut<'_>) -> Result<()> {
        self.check_device(false)?;
        let (queries, out) = (queries.lend("queries")?, out.lend("out")?);
        // SAFETY: as for `write`; the output's slice is borrowed exclusively and its elements lie
        // apart, so that no two threads of the library write one place.
        self.call(|step| unsafe { sys::kv_attend(step, layer, &queries, &out, null()) })
    }

    /// `attend`, with options.
    pub fn attend_with(
        &self,
        layer: u32,
        queries: &Tensor<'_>,
        out: &mut TensorMut<'_>,
        options: AttendOptions<'_>,
    ) -> Result<()> {
        self.check_device(false)?;
        let (queries, out) = (queries.lend("queries")?, out.lend("out")?);
        let log_sum_exp = match options.log_sum_exp {
            None => null_mut(),
            Some(values) => {
                // A broadcast shape of more than 2^64 saturates, and no step has as many.
                let needed = queries.rows.saturating_mul(queries.heads);
                check_length(values, needed, "log_sum_exp")?;
                values.as_mut_ptr()
            }
        };
        let raw = sys::kv_attend_options {
            flags: if options.no_statistics { sys::KV_ATTEND_NO_STATISTICS } else { 0 },
            log_sum_exp,
            ..Default::default()
        };
        // SAFETY: as for `attend`; `log_sum_exp` has an element for each row and head of queries,
        // whose shape the library compares with the step's before it writes.
        self.call(|step| unsafe { sys::kv_attend(step, layer, &queries, &out, &raw) })
    }

    /// Ends the step: accepted tokens become part of their sequences, the rest is rolled back,
    /// blocks behind windows return, policies that are due run. The step is gone afterwards, also
    /// after an error. Errors: Invalid (not reserved, or a layer that stores was neither written
    /// nor exported; the step is cancelled then).
    pub fn end(self) -> Result<StepReport> {
        let step = ManuallyDrop::new(self);
        let mut raw = sys::kv_step_report::default();
        // SAFETY: the handle dies with this call, and `drop` does not see it again.
        step.call(|handle| unsafe { sys::kv_step_end(handle, &mut raw) })?;
        Ok(StepReport::from(raw))
    }

    /// Undoes the step: every sequence is as before it.
    pub fn cancel(self) -> Result<()> {
        let step = ManuallyDrop::new(self);
        // SAFETY: the handle dies with this call, and `drop` does not see it again.
        step.call(|handle| unsafe { sys::kv_step_cancel(handle) })
    }
}

impl<T: Threading> Drop for Step<'_, T> {
    fn drop(&mut self) {
        // The only error is a call from inside a hook; the step ends with its pool then.
        // SAFETY: the step is open, since `end` and `cancel` do not drop it.
        let _ = self.call(|handle| unsafe { sys::kv_step_cancel(handle) });
    }
}

impl<T: Threading> fmt::Debug for Step<'_, T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Step").field("address", &self.raw).finish_non_exhaustive()
    }
}

fn lend_ids(token_ids: Option<&[u32]>, count: u64) -> Result<*const u32> {
    let Some(ids) = token_ids else { return Ok(null()) };
    check_length(ids, count, "token_ids")?;
    Ok(ids.as_ptr())
}

fn lend_batch(sequences: &[Sequence], counts: &[u32]) -> Result<(u32, *const sys::kv_seq)> {
    check_length(counts, sequences.len() as u64, "counts")?;
    Ok((count_of(sequences, "sequences")?, sequences.as_ptr().cast()))
}
