//! The model: its layers, how it rotates and how it is stored, with the arrays that belong to them.

use std::marker::PhantomData;
use std::ptr::null;

use kvrt_sys as sys;

use crate::error::{check, check_length, count_of};
use crate::raw::{flags, setters, Plain};
use crate::{Format, Preset, Result, RopeStyle};

/// How the engine rotated the keys and queries it hands over. Needed by TriAttention, and by
/// keys in `Format::Affine4`.
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

/// What the keys or the values of a layer are stored with, besides their format.
#[derive(Clone, Debug, Default)]
pub struct Storage {
    raw: Plain<sys::kv_storage>,
    scales: Option<Vec<f32>>,
    channels: Option<Channels>,
}

/// Constants of a layer's channels, `[heads, dim]`.
#[derive(Clone, Debug)]
struct Channels {
    heads: u32,
    dim: u32,
    means: Vec<f32>,
    scales: Vec<f32>,
}

impl Storage {
    pub fn new() -> Self {
        Storage::default()
    }

    /// Static scales for `Format::Fp8E4m3`, `Fp8E5m2` and `Nvfp4`: one for the layer, or one for
    /// each KV head. Finite and positive.
    #[must_use]
    pub fn scales(mut self, values: impl Into<Vec<f32>>) -> Self {
        self.scales = Some(values.into());
        self
    }

    /// Constants for `Format::Affine4`: a mean and a scale for each channel of keys before
    /// rotation, `[kv_heads, key_dim]` each, which `PoolOf::fit_affine` measures. Finite, and
    /// scales positive. They belong to the model like its weights: pools and processes that
    /// exchange bytes need the same.
    #[must_use]
    pub fn channels(
        mut self,
        kv_heads: u32,
        key_dim: u32,
        means: impl Into<Vec<f32>>,
        scales: impl Into<Vec<f32>>,
    ) -> Self {
        let (means, scales) = (means.into(), scales.into());
        self.channels = Some(Channels { heads: kv_heads, dim: key_dim, means, scales });
        self
    }

    flags! {
        /// No static scales, and that is meant: 1.0.
        scale_one = KV_STORAGE_SCALE_ONE,
        /// Store rows rotated by Hadamard's matrix, which spreads outliers; queries and outputs
        /// are rotated to match. Not for f32, f16, bf16.
        rotate = KV_STORAGE_ROTATE,
    }

    /// The raw struct, which points into `self`.
    fn lend(&self) -> Result<sys::kv_storage> {
        let mut raw = self.raw.0;
        if let Some(values) = &self.scales {
            raw.scale_count = count_of(values, "storage: scales")?;
            raw.scales = values.as_ptr();
        }
        if let Some(channels) = &self.channels {
            let needed = u64::from(channels.heads) * u64::from(channels.dim);
            check_length(&channels.means, needed, "storage: means of channels")?;
            check_length(&channels.scales, needed, "storage: scales of channels")?;
            raw.channel_means = channels.means.as_ptr();
            raw.channel_scales = channels.scales.as_ptr();
            raw.channel_heads = channels.heads;
            raw.channel_dim = channels.dim;
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
    key_storage: Option<Storage>,
    value_storage: Option<Storage>,
    demoted_key_storage: Option<Storage>,
    demoted_value_storage: Option<Storage>,
}

impl Layer {
    /// `query_heads` is a multiple of `kv_heads`; `key_dim` is 32 to 256, a multiple of 8, and the
    /// dimension of values too.
    pub fn new(query_heads: u32, kv_heads: u32, key_dim: u32) -> Self {
        let raw = sys::kv_layer { query_heads, kv_heads, key_dim, ..Default::default() };
        Layer {
            raw: Plain(raw),
            sink_logits: None,
            alibi_slopes: None,
            rope: None,
            key_storage: None,
            value_storage: None,
            demoted_key_storage: None,
            demoted_value_storage: None,
        }
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
        /// With `demoted_key_format`: blocks behind the newest so many retained tokens are demoted
        /// at the end of steps; 0: only under pressure (`PoolConfig::pressure_percent`), before
        /// policies evict.
        demote_after: u32,
    }

    flags! {
        /// Each KV head is a lane of its own, with blocks of its own: policies may keep other
        /// numbers of tokens in each. Not for a layer that shares another's cache, whose lanes are
        /// the owner's.
        lane_per_head = KV_LAYER_LANE_PER_HEAD,
        /// Queries and keys are handed over before rotation: the library rotates them, as `rope`
        /// says, by their places in the cache. Not for a layer that shares another's cache, which
        /// follows its owner.
        cache_positions = KV_LAYER_CACHE_POSITIONS,
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

    /// What the format of keys wants besides.
    #[must_use]
    pub fn key_storage(mut self, storage: Storage) -> Self {
        self.key_storage = Some(storage);
        self
    }

    /// What the format of values wants besides. The keys' storage does not serve them too.
    #[must_use]
    pub fn value_storage(mut self, storage: Storage) -> Self {
        self.value_storage = Some(storage);
        self
    }

    /// Full blocks of older tokens are coded into this format, from the oldest on, and their bytes
    /// return; values too unless `demoted_value_format` says otherwise. Token-local, and not
    /// `Format::Affine4`; keys and values are f32, f16 or bf16 before. `demote_after` says when.
    #[must_use]
    pub fn demoted_key_format(mut self, format: Format) -> Self {
        self.raw.0.demoted_key_format = format.code();
        self
    }

    /// The same of values. Theirs before: they stay as they are.
    #[must_use]
    pub fn demoted_value_format(mut self, format: Format) -> Self {
        self.raw.0.demoted_value_format = format.code();
        self
    }

    /// What the demoted format of keys wants besides. With `Storage::rotate` keys are written
    /// rotated, too.
    #[must_use]
    pub fn demoted_key_storage(mut self, storage: Storage) -> Self {
        self.demoted_key_storage = Some(storage);
        self
    }

    /// The same of values.
    #[must_use]
    pub fn demoted_value_storage(mut self, storage: Storage) -> Self {
        self.demoted_value_storage = Some(storage);
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

    /// The structs that the raw layer points to.
    fn lend_parts(&self) -> Result<LayerParts> {
        Ok(LayerParts {
            rope: self.rope.as_ref().map(|rope| rope.lend(self.raw.0.key_dim)).transpose()?,
            key_storage: lend_storage(&self.key_storage)?,
            value_storage: lend_storage(&self.value_storage)?,
            demoted_key_storage: lend_storage(&self.demoted_key_storage)?,
            demoted_value_storage: lend_storage(&self.demoted_value_storage)?,
        })
    }

    /// The raw struct, which points into `self` and into `parts`.
    fn lend(&self, parts: &LayerParts) -> Result<sys::kv_layer> {
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
        raw.rope = pointer(&parts.rope);
        raw.key_storage = pointer(&parts.key_storage);
        raw.value_storage = pointer(&parts.value_storage);
        raw.demoted_key_storage = pointer(&parts.demoted_key_storage);
        raw.demoted_value_storage = pointer(&parts.demoted_value_storage);
        Ok(raw)
    }
}

/// The structs that belong to one raw layer.
struct LayerParts {
    rope: Option<sys::kv_rope>,
    key_storage: Option<sys::kv_storage>,
    value_storage: Option<sys::kv_storage>,
    demoted_key_storage: Option<sys::kv_storage>,
    demoted_value_storage: Option<sys::kv_storage>,
}

fn lend_storage(storage: &Option<Storage>) -> Result<Option<sys::kv_storage>> {
    storage.as_ref().map(Storage::lend).transpose()
}

fn pointer<T>(part: &Option<T>) -> *const T {
    part.as_ref().map_or(null(), |part| part)
}

/// Takes a storage from a layer that the library has written to: what was `lent`, nothing, or a
/// constant of the library.
fn take_back(
    storage: &mut Option<Storage>,
    lent: &Option<sys::kv_storage>,
    written: *const sys::kv_storage,
) {
    if written == pointer(lent) {
        return;
    }
    // SAFETY: null, or a constant of the library, without arrays.
    let flags = unsafe { written.as_ref() }.map(|raw| raw.flags);
    *storage = flags.map(|flags| Storage {
        raw: Plain(sys::kv_storage { flags, ..Default::default() }),
        scales: None,
        channels: None,
    });
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

    /// The same layers with the formats and storages of a preset, whatever they had. Layers that
    /// share another's cache stay as they are.
    pub fn with_preset(mut self, preset: Preset) -> Result<Self> {
        let (mut layers, parts) = self.lend_layers()?;
        let count = count_of(&layers, "model: layers")?;
        // SAFETY: an array of `count` valid structs, of which four fields each are written.
        check(unsafe { sys::kv_model_apply_preset(layers.as_mut_ptr(), count, preset.code()) })?;
        for ((layer, parts), written) in self.layers.iter_mut().zip(&parts).zip(&layers) {
            layer.raw.0.key_format = written.key_format;
            layer.raw.0.value_format = written.value_format;
            take_back(&mut layer.key_storage, &parts.key_storage, written.key_storage);
            take_back(&mut layer.value_storage, &parts.value_storage, written.value_storage);
        }
        Ok(self)
    }

    fn lend_layers(&self) -> Result<(Vec<sys::kv_layer>, Vec<LayerParts>)> {
        let parts = self.layers.iter().map(Layer::lend_parts).collect::<Result<Vec<_>>>()?;
        let layers = self
            .layers
            .iter()
            .zip(&parts)
            .map(|(layer, parts)| layer.lend(parts))
            .collect::<Result<Vec<_>>>()?;
        Ok((layers, parts))
    }

    pub(crate) fn lend(&self) -> Result<LentModel<'_>> {
        let (layers, parts) = self.lend_layers()?;
        let raw = sys::kv_model {
            layers: layers.as_ptr(),
            layer_count: count_of(&layers, "model: layers")?,
            ..Default::default()
        };
        Ok(LentModel { raw, _layers: layers, _parts: parts, model: PhantomData })
    }
}

/// A model as the library reads it, for the time of a call.
pub(crate) struct LentModel<'m> {
    raw: sys::kv_model,
    _layers: Vec<sys::kv_layer>,
    _parts: Vec<LayerParts>,
    model: PhantomData<&'m Model>,
}

impl LentModel<'_> {
    pub(crate) fn as_ptr(&self) -> *const sys::kv_model {
        &self.raw
    }
}
