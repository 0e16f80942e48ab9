//! Which tokens to retain.

use kvrt_sys as sys;

use crate::raw::{flags, setters, Plain};
use crate::{Scorer, Selection};

/// A scorer, a budget, guards and a trigger. Applies to full layers; layers with a window keep
/// their window. The newest tokens are never dropped for lack of budget.
#[derive(Clone, Debug)]
pub struct Policy {
    raw: Plain<sys::kv_policy>,
}

impl Policy {
    /// `budget` tokens are retained per layer and head after a round.
    pub fn new(scorer: Scorer, budget: u32) -> Self {
        let raw = sys::kv_policy { scorer: scorer.code(), budget, ..Default::default() };
        Policy { raw: Plain(raw) }
    }

    #[must_use]
    pub fn selection(mut self, selection: Selection) -> Self {
        self.raw.0.selection = selection.code();
        self
    }

    setters! {
        /// A round at step end when this many tokens were accepted since the last; 0: only when
        /// asked for.
        every: u32,
        /// The prompt's length, for `protect_prompt`.
        prompt_tokens: u32,
        /// Positions below this stay.
        sinks: u32,
        /// The last so many tokens stay.
        recent: u32,
        /// TriAttention: largest future offset, a power of two; 0: 65536.
        offset_max: u32,
        /// Key norm: the first so many layers are left whole.
        skip_layers: u32,
        /// Random.
        seed: u64,
    }

    /// All switches at once, as `KV_POLICY_*` bits: for policies that are kept in a file.
    #[must_use]
    pub fn flag_bits(mut self, bits: u32) -> Self {
        self.raw.0.flags = bits;
        self
    }

    flags! {
        /// Positions below prompt_tokens stay.
        protect_prompt = KV_POLICY_PROTECT_PROMPT,
        /// The protected prompt does not count in the budget.
        prompt_on_top = KV_POLICY_PROMPT_ON_TOP,
        /// TriAttention: the maximum over future offsets, not the mean.
        offsets_max = KV_POLICY_OFFSETS_MAX,
        /// TriAttention: ignore statistics set on the pool.
        statistics_online = KV_POLICY_STATISTICS_ONLINE,
    }

    pub(crate) fn as_ptr(&self) -> *const sys::kv_policy {
        &self.raw.0
    }
}
