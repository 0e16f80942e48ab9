//! The model: its layers and how it rotates, with the arrays that belong to them.

use std::marker::PhantomData;
use std::ptr::null;

use kvrt_sys as sys;

use crate::error::{check_length, count_of};
use crate::raw::{setters, Plain};
use crate::{Format, Result, RopeStyle};

/// How the engine rotated the keys and queries it hands over. Needed by TriAttention alone.
#[derive(Clone, Debug)]
pub struct Rope {
    raw: Plain<sys::kv_rope>,
    inverse_frequencies: Option<Vec<f64>>,
}

impl Rope {
    /// All dimensions of a head, with base 10000.
    pub fn new(style: RopeStyle) -> Self {
        let raw = sys::kv_rope { style: style.code(), ..Default::default() };
        Rope { raw: Plain(raw), inverse_frequencies: None }
    }

    setters! {
        /// Rotated dimensions, the first ones of a head; 0: all of key_dim.
        dimensions: u32,
        /// The base. Ignored when inverse frequencies are given.
        theta: f64,
        /// Factor on rotated queries and on rotated keys (YaRN).
        attention_factor: f64,
    }

    /// The model's actual frequencies, `[dimensions / 2]`.
    #[must_use]
    pub fn inverse_frequencies(mut self, values: impl Into<Vec<f64>>) -> Self {
        self.inverse_frequencies = Some(values.into());
        self
    }

    /// The raw struct, which points into `self`.
    fn lend(&self, key_dim: u32) -> Result<sys::kv_rope> {
        let mut raw = self.raw.0;
        if let Some(values) = &self.inverse_frequencies {
            let dimensions = if raw.dimensions == 0 { key_dim } else { raw.dimensions };
            check_length(values, u64::from(dimensions / 2), "rope: inverse_frequencies")?;
            raw.inverse_frequencies = values.as_ptr();
        }
        Ok(raw)
    }
}

/// One layer. What is not said fits a Llama-like layer.
#[derive(Clone, Debug)]
pub struct Layer {
    raw: Plain<sys::kv_layer>,
    sink_logits: Option<Vec<f32>>,
    alibi_slopes: Option<Vec<f32>>,
    rope: Option<Rope>,
}

impl Layer {
    /// `query_heads` is a multiple of `kv_heads`; `key_dim` is 32 to 256, a multiple of 8, and the
    /// dimension of values too.
    pub fn new(query_heads: u32, kv_heads: u32, key_dim: u32) -> Self {
        let raw = sys::kv_layer { query_heads, kv_heads, key_dim, ..Default::default() };
        Layer { raw: Plain(raw), sink_logits: None, alibi_slopes: None, rope: None }
    }

    setters! {
        /// When it differs from the keys'.
        value_dim: u32,
        /// A query at p sees positions > p - window; 0: all.
        window: u32,
        /// Positions below this stay visible behind the window.
        window_sinks: u32,
        /// 0: 1 / sqrt(key_dim).
        softmax_scale: f32,
        /// Logits become cap * tanh(logit / cap); 0: off.
        logit_softcap: f32,
    }

    /// How keys are stored, and values too unless `value_format` says otherwise.
    #[must_use]
    pub fn key_format(mut self, format: Format) -> Self {
        self.raw.0.key_format = format.code();
        self
    }

    #[must_use]
    pub fn value_format(mut self, format: Format) -> Self {
        self.raw.0.value_format = format.code();
        self
    }

    /// Stores nothing and attends over the cache of an earlier layer with the same kv_heads,
    /// key_dim and value_dim.
    #[must_use]
    pub fn shares_cache_of(mut self, layer: u32) -> Self {
        self.raw.0.flags |= sys::KV_LAYER_SHARED;
        self.raw.0.shared_layer = layer;
        self
    }

    /// `[query_heads]`: a learned logit that only joins the denominator.
    #[must_use]
    pub fn sink_logits(mut self, values: impl Into<Vec<f32>>) -> Self {
        self.sink_logits = Some(values.into());
        self
    }

    /// `[query_heads]`: slope * (key position - query position) is added to a logit.
    #[must_use]
    pub fn alibi_slopes(mut self, values: impl Into<Vec<f32>>) -> Self {
        self.alibi_slopes = Some(values.into());
        self
    }

    #[must_use]
    pub fn rope(mut self, rope: Rope) -> Self {
        self.rope = Some(rope);
        self
    }

    /// The raw struct, which points into `self` and to `rope`.
    fn lend(&self, rope: &sys::kv_rope) -> Result<sys::kv_layer> {
        let mut raw = self.raw.0;
        let heads = u64::from(raw.query_heads);
        if let Some(values) = &self.sink_logits {
            check_length(values, heads, "layer: sink_logits")?;
            raw.sink_logits = values.as_ptr();
        }
        if let Some(values) = &self.alibi_slopes {
            check_length(values, heads, "layer: alibi_slopes")?;
            raw.alibi_slopes = values.as_ptr();
        }
        raw.rope = if self.rope.is_some() { rope } else { null() };
        Ok(raw)
    }
}

/// The layers of a model, from the first to the last.
#[derive(Clone, Debug)]
pub struct Model {
    layers: Vec<Layer>,
}

impl Model {
    pub fn new(layers: impl Into<Vec<Layer>>) -> Self {
        Model { layers: layers.into() }
    }

    pub(crate) fn lend(&self) -> Result<LentModel<'_>> {
        let ropes = self
            .layers
            .iter()
            .map(|layer| match &layer.rope {
                Some(rope) => rope.lend(layer.raw.0.key_dim),
                None => Ok(sys::kv_rope::default()),
            })
            .collect::<Result<Vec<_>>>()?;
        let layers = self
            .layers
            .iter()
            .zip(&ropes)
            .map(|(layer, rope)| layer.lend(rope))
            .collect::<Result<Vec<_>>>()?;
        let raw = sys::kv_model {
            layers: layers.as_ptr(),
            layer_count: count_of(&layers, "model: layers")?,
            ..Default::default()
        };
        Ok(LentModel { raw, _layers: layers, _ropes: ropes, model: PhantomData })
    }
}

/// A model as the library reads it, for the time of a call.
pub(crate) struct LentModel<'m> {
    raw: sys::kv_model,
    _layers: Vec<sys::kv_layer>,
    _ropes: Vec<sys::kv_rope>,
    model: PhantomData<&'m Model>,
}

impl LentModel<'_> {
    pub(crate) fn as_ptr(&self) -> *const sys::kv_model {
        &self.raw
    }
}
