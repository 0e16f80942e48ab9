//! Which tokens to retain.

use kvrt_sys as sys;

use crate::raw::{flags, setters, Plain};
use crate::{Allocator, Scorer, Selection};

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

    #[must_use]
    pub fn allocator(mut self, allocator: Allocator) -> Self {
        self.raw.0.allocator = allocator.code();
        self
    }

    setters! {
        /// A round at step end when this many tokens were accepted since the last; 0: only when
        /// asked for, or by `slack`.
        every: u32,
        /// A round at step end when more than this is retained above what a round keeps; 0:
        /// `every` alone decides.
        slack: u32,
        /// The prompt's length, for `protect_prompt`, `at_prompt_end` and `segments`.
        prompt_tokens: u32,
        /// Positions below this stay.
        sinks: u32,
        /// The last so many tokens stay.
        recent: u32,
        /// TriAttention: largest future offset, a power of two; 0: 65536.
        offset_max: u32,
        /// The first so many layers are left whole (`KeyNorm`: 2 is usual).
        skip_layers: u32,
        /// Of all draws: `Random`, `VaseAttention`, `VaseSketch`, `sample`.
        seed: u64,
        /// `Scissorhands`, `SnapKv`, `RKv`, `VaseAttention`: the last so many queries count; 0:
        /// 400, 64, 8, 64.
        window: u32,
        /// Odd, at most 127: scores by attention, and of the host, become the mean of so many
        /// neighbours; 0: the scorer's own.
        pool_width: u32,
        /// Attention of one-token steps is observed in every so-manieth alone; 0: 4 for `H2o` and
        /// `Blend`, 1 for the others.
        observe_every: u32,
        /// `H2o`, `Blend`: what a query counts after each one behind it; 0: 1 and 0.97.
        decay: f32,
        /// `Blend`: share of what is expected; the rest is of what was; 0: 0.1.
        prior_share: f32,
        /// `RKv`: weight of redundancy, up to 1; 0: 0.9. `Blend`: share of what stays for being
        /// unlike other keys; 0: 0.3.
        redundancy: f32,
        /// `exact_redundancy`: keys are similar above this cosine; 0: 0.5.
        similarity: f32,
        /// `Allocator::Adaptive`: of its budget each head is sure of; 0: 0.2.
        floor_share: f32,
        /// `Allocator::Threshold`.
        threshold: f32,
        /// `Allocator::Pyramid`: the last layer has budget / steepness; 0: 20.
        steepness: u32,
        /// So many tokens whose values have the widest range stay; 0: none, `VaseAttention` a
        /// quarter of the budget.
        value_reserve: u32,
        /// The prompt in so many equal parts, at most 4096, of each of which at least
        /// `segment_quota` tokens stay; 0: off.
        segments: u32,
        /// So many tokens of each of the `segments` stay, the best.
        segment_quota: u32,
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
        /// Survivors are drawn with probabilities as their scores: scorers by attention but `RKv`,
        /// `VaseSketch`, `ExpectedAttention` and `Host`. Not with `Allocator::Threshold`.
        sample = KV_POLICY_SAMPLE,
        /// `pool_width` takes the greatest score, not the mean.
        pool_max = KV_POLICY_POOL_MAX,
        /// `RKv`: with the rule that spares the newest of similar keys, at a quadratic cost.
        exact_redundancy = KV_POLICY_EXACT_REDUNDANCY,
        /// A round also when `prompt_tokens` have been accepted.
        at_prompt_end = KV_POLICY_AT_PROMPT_END,
    }

    pub(crate) fn as_ptr(&self) -> *const sys::kv_policy {
        &self.raw.0
    }
}
