//! Questions to the library as a whole: its version, what it can do, what a pool would hold.

use std::ffi::CStr;
use std::fmt;

use kvrt_sys as sys;

use crate::error::check;
use crate::raw::report;
use crate::{Device, Format, Layout, LiveKind, Model, PoolConfig, Result, Scorer, Selection};

/// A version of the library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// Of the library that is loaded.
pub fn version() -> Version {
    // SAFETY: a plain function, safe from any thread.
    let number = unsafe { sys::kvrt_version() };
    Version { major: number / 10000, minor: number / 100 % 100, patch: number % 100 }
}

/// How many objects of a kind are alive in this process, over all pools: none, when a program has
/// dropped all its pools.
pub fn live_count(kind: LiveKind) -> u64 {
    // SAFETY: a plain function, safe from any thread.
    unsafe { sys::kv_live_count(kind.code()) }
}

report! {
    /// What a pool would hold.
    #[derive(Eq)]
    PlanReport from kv_plan_report {
        sequences: u64,
        tokens_per_sequence: u64,
        /// Over all layers, full blocks, windows not yet full.
        bytes_per_token: u64,
        /// Of that length, whole blocks, windows respected.
        bytes_per_sequence: u64,
        /// For all those sequences, whole slabs.
        arena_bytes_needed: u64,
        /// Of that length, in the config's arena.
        sequences_that_fit: u64,
        /// Of one sequence alone in the config's arena.
        tokens_that_fit: u64,
        /// Host memory that creating the pool will allocate.
        metadata_bytes: u64,
        /// A block's tokens of one sequence, over all layers.
        bytes_per_block: u64,
        /// Of that length, over all layers.
        blocks_per_sequence: u64,
        /// What a token adds to a sequence whose windows are full.
        full_bytes_per_token: u64,
        /// Of full windows, and blocks that KIVI and KVARN still keep raw.
        constant_bytes_per_sequence: u64,
        /// Of each of `sequences` in the config's arena.
        tokens_that_fit_each: u64,
        /// The config's arena over `bytes_per_token`.
        tokens_by_bytes: u64,
        /// The one that the last two are of.
        layer: u32,
        /// 0: it shares another's cache.
        layer_bytes_per_block: u64,
        /// Of that length.
        layer_bytes_per_sequence: u64,
    }
}

/// Ask before you buy: `sequences` of `tokens_per_sequence` retained tokens; 0 is the config's
/// limit. With an arena of 0 bytes it says how much memory that takes, and nothing fits. Errors: as
/// of creating a pool.
pub fn plan(
    config: &PoolConfig,
    model: &Model,
    sequences: u64,
    tokens_per_sequence: u64,
) -> Result<PlanReport> {
    plan_of_layer(config, model, sequences, tokens_per_sequence, 0)
}

/// As `plan`, with the share of one layer.
pub fn plan_of_layer(
    config: &PoolConfig,
    model: &Model,
    sequences: u64,
    tokens_per_sequence: u64,
    layer: u32,
) -> Result<PlanReport> {
    let model = model.lend()?;
    let config = config.lend(0, None);
    let mut raw =
        sys::kv_plan_report { sequences, tokens_per_sequence, layer, ..Default::default() };
    // SAFETY: config and model are valid structs whose arrays live until the call returns.
    check(unsafe { sys::kv_plan(&config, model.as_ptr(), &mut raw) })?;
    Ok(PlanReport::from(raw))
}

/// What the library at hand can do, on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    formats: u64,
    devices: u64,
    layouts: u64,
    scorers: u64,
    selections: u64,
    pub min_head_dim: u32,
    pub max_head_dim: u32,
    pub head_dim_multiple: u32,
    pub max_layers: u32,
    /// What the kernels run on here, such as "AVX3_ZEN4".
    pub simd_target: String,
}

impl Capabilities {
    /// Whether keys can be stored so; values too, but for `Format::Affine4`.
    pub fn has_format(&self, format: Format) -> bool {
        has_bit(self.formats, format.code())
    }

    pub fn has_device(&self, device: Device) -> bool {
        has_bit(self.devices, device.code())
    }

    pub fn has_layout(&self, layout: Layout) -> bool {
        has_bit(self.layouts, layout.code())
    }

    pub fn has_scorer(&self, scorer: Scorer) -> bool {
        has_bit(self.scorers, scorer.code())
    }

    pub fn has_selection(&self, selection: Selection) -> bool {
        has_bit(self.selections, selection.code())
    }
}

fn has_bit(bits: u64, index: u32) -> bool {
    1u64.checked_shl(index).is_some_and(|bit| bits & bit != 0)
}

pub fn capabilities() -> Result<Capabilities> {
    let mut raw = sys::kv_capabilities_report::default();
    // SAFETY: the struct is filled up to its size.
    check(unsafe { sys::kv_capabilities(&mut raw) })?;
    let target = raw.simd_target.map(|letter| letter as u8);
    let target = CStr::from_bytes_until_nul(&target).unwrap_or_default();
    Ok(Capabilities {
        formats: raw.formats,
        devices: raw.devices,
        layouts: raw.layouts,
        scorers: raw.scorers,
        selections: raw.selections,
        min_head_dim: raw.min_head_dim,
        max_head_dim: raw.max_head_dim,
        head_dim_multiple: raw.head_dim_multiple,
        max_layers: raw.max_layers,
        simd_target: target.to_string_lossy().into_owned(),
    })
}
