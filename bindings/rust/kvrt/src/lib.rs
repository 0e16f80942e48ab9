//! Safe Rust over libkvrt, a KV-cache runtime for LLM engines.
//!
//! The README's example in one breath: a [`Model`] of [`Layer`]s and a [`PoolConfig`] make a
//! [`Pool`]; a [`Sequence`] is one request's cache; a [`Step`] is one forward pass over a batch of
//! them, which writes keys and values and attends queries, all as [`Tensor`]s over the engine's
//! own memory.
//!
//! Errors are [`Error`]s with the library's message. A [`Pool`] belongs to one thread at a time, a
//! [`SharedPool`] to all; [`Counters`] can be read from any thread. The C header, `kvrt.h`, is the
//! reference for what each call does.

mod codes;
mod config;
mod counters;
mod cuda;
mod error;
mod hooks;
mod library;
mod model;
mod policy;
mod pool;
mod raw;
mod retention;
mod sequence;
mod statistics;
mod step;
mod tables;
mod tensor;

pub use codes::{
    Allocator, Category, CompressOutcome, CudaScoreMethod, Device, Format, Layout, LiveKind,
    LogLevel, Preset, RopeStyle, Scorer, Selection,
};
pub use config::PoolConfig;
pub use counters::{ClassStats, Counters, LayerStats, PoolStats};
pub use cuda::{
    cuda_device, CudaAllocator, CudaDevice, CudaScoring, CudaScoringReport, CudaTables,
    DeviceElement, DeviceTensor,
};
pub use error::{Error, Result, Status};
pub use hooks::{Hooks, Work};
pub use library::{
    capabilities, live_count, plan, plan_of_layer, version, Capabilities, PlanReport, Version,
};
pub use model::{Layer, Model, Rope, Storage};
pub use policy::Policy;
pub use pool::{Pool, PoolOf, Serial, Shared, SharedPool, Threading};
pub use retention::{CompressReport, PolicyFootprint, RetentionInfo};
pub use sequence::{Sequence, SequenceConfig, SequenceInfo, SequenceLayerInfo};
pub use statistics::{AffineFit, QueryStatistics};
pub use step::{AppendInfo, AttendOptions, ReserveReport, Step, StepReport};
pub use tables::{SealedLayout, TableBuffers, TableSizes, Tables, TileStrides};
pub use tensor::{Elements, ElementsMut, Strides, Tensor, TensorMut};

/// The README's example is compiled and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct ReadmeExample;
