//! Statistics of queries: what TriAttention and Expected Attention know of a layer's queries before
//! rotation. Constants of channels: what `Format::Affine4` stores keys with.

use std::ffi::CString;
use std::ops::{Bound, RangeBounds};
use std::path::Path;

use kvrt_sys as sys;

use crate::error::check_length;
use crate::{Error, PoolOf, Result, Sequence, Storage, Threading};

/// Means over the queries of one layer, per query head and band of the rotation: of the complex
/// query, and of its magnitude. Dimensions that are not rotated follow as bands of their own with a
/// real mean, so that bands = rotated / 2 + (key_dim - rotated). Arrays are `[query_heads, bands]`.
///
/// Expected Attention works with the mean and, where all three are known, with the variances of a
/// band's two dimensions and their covariance. They are all there or all empty.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct QueryStatistics {
    pub layer: u32,
    pub query_heads: u32,
    pub bands: u32,
    /// How many queries were averaged.
    pub tokens: u64,
    pub mean_real: Vec<f32>,
    pub mean_imaginary: Vec<f32>,
    pub mean_magnitude: Vec<f32>,
    pub variance_real: Vec<f32>,
    pub variance_imaginary: Vec<f32>,
    pub covariance: Vec<f32>,
}

impl QueryStatistics {
    /// Room for a layer's means.
    pub fn new(layer: u32, query_heads: u32, bands: u32) -> Self {
        let zeroes = vec![0.0; query_heads as usize * bands as usize];
        QueryStatistics {
            layer,
            query_heads,
            bands,
            tokens: 0,
            mean_real: zeroes.clone(),
            mean_imaginary: zeroes.clone(),
            mean_magnitude: zeroes,
            ..Default::default()
        }
    }

    /// Room for a layer's means, variances and covariances.
    pub fn with_covariances(layer: u32, query_heads: u32, bands: u32) -> Self {
        let mut statistics = QueryStatistics::new(layer, query_heads, bands);
        statistics.variance_real = statistics.mean_real.clone();
        statistics.variance_imaginary = statistics.mean_real.clone();
        statistics.covariance = statistics.mean_real.clone();
        statistics
    }

    fn has_covariances(&self) -> bool {
        let empty = self.variance_real.is_empty() && self.variance_imaginary.is_empty();
        !(empty && self.covariance.is_empty())
    }

    /// The raw struct without its arrays, whose lengths are right.
    fn describe(&self) -> Result<sys::kv_query_statistics> {
        let needed = u64::from(self.query_heads) * u64::from(self.bands);
        check_length(&self.mean_real, needed, "statistics: mean_real")?;
        check_length(&self.mean_imaginary, needed, "statistics: mean_imaginary")?;
        check_length(&self.mean_magnitude, needed, "statistics: mean_magnitude")?;
        if self.has_covariances() {
            check_length(&self.variance_real, needed, "statistics: variance_real")?;
            check_length(&self.variance_imaginary, needed, "statistics: variance_imaginary")?;
            check_length(&self.covariance, needed, "statistics: covariance")?;
        }
        Ok(sys::kv_query_statistics {
            layer: self.layer,
            query_heads: self.query_heads,
            bands: self.bands,
            tokens: self.tokens,
            ..Default::default()
        })
    }
}

/// Constants of `Format::Affine4` for one layer. Arrays are `[kv_heads, key_dim]`.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct AffineFit {
    pub kv_heads: u32,
    pub key_dim: u32,
    pub channel_means: Vec<f32>,
    pub channel_scales: Vec<f32>,
    /// Of the KV head that holds the fewest.
    pub tokens_used: u64,
    /// `Tables::key_identity` of a layer that is stored with them.
    pub identity: u64,
}

impl AffineFit {
    /// What keys are stored with by these constants.
    pub fn storage(&self) -> Storage {
        let (means, scales) = (self.channel_means.clone(), self.channel_scales.clone());
        Storage::new().channels(self.kv_heads, self.key_dim, means, scales)
    }
}

/// More than any layer has: a row of keys takes half a byte a channel, and fits a slab of 2 MiB.
const MOST_CHANNELS: u64 = 1 << 22;

/// The first position, and how many from there on; 0: all.
fn positions_to_fit(range: impl RangeBounds<u64>) -> Result<(u64, u64)> {
    let first = match range.start_bound() {
        Bound::Included(&first) => Some(first),
        Bound::Excluded(&before) => before.checked_add(1),
        Bound::Unbounded => Some(0),
    };
    let count = first.and_then(|first| match range.end_bound() {
        Bound::Included(&last) => last.checked_sub(first).map(|rest| rest.saturating_add(1)),
        Bound::Excluded(&end) => end.checked_sub(first).filter(|&count| count != 0),
        Bound::Unbounded => Some(0),
    });
    first.zip(count).ok_or_else(|| Error::Invalid("fit: the range of positions is empty".into()))
}

impl<T: Threading> PoolOf<T> {
    /// Measures the constants of `Format::Affine4` for one layer, which has `kv_heads` and
    /// `key_dim`, on the retained keys of a sequence at some positions (`..`: all). The pool stores
    /// keys in f16, say, and its layers have a `Rope`. Some hundred tokens suffice, of a text like
    /// those that will be read. Errors: Invalid (no `Rope`, keys that are not finite), Stale, Limit
    /// (fewer than 64 tokens).
    pub fn fit_affine(
        &self,
        sequence: Sequence,
        layer: u32,
        kv_heads: u32,
        key_dim: u32,
        positions: impl RangeBounds<u64>,
    ) -> Result<AffineFit> {
        let channels = u64::from(kv_heads) * u64::from(key_dim);
        if channels > MOST_CHANNELS {
            return Err(Error::Invalid(format!(
                "fit: {kv_heads} heads of {key_dim} channels are more than a layer can have"
            )));
        }
        let (first_position, tokens) = positions_to_fit(positions)?;
        let mut channel_means = vec![0.0; channels as usize];
        let mut channel_scales = vec![0.0; channels as usize];
        let mut raw = sys::kv_affine_fit {
            layer,
            kv_heads,
            key_dim,
            first_position,
            tokens,
            channel_means: channel_means.as_mut_ptr(),
            channel_scales: channel_scales.as_mut_ptr(),
            ..Default::default()
        };
        // SAFETY: the arrays are as long as kv_heads and key_dim say.
        self.call(|pool| unsafe { sys::kv_seq_fit_affine(pool, sequence.to_bits(), &mut raw) })?;
        let (tokens_used, identity) = (raw.tokens_used, raw.identity);
        Ok(AffineFit { kv_heads, key_dim, channel_means, channel_scales, tokens_used, identity })
    }

    /// Gives the pool a layer's statistics (copied); they serve every sequence whose policy does
    /// not say `statistics_online`. Errors: Invalid.
    pub fn set_statistics(&self, statistics: &QueryStatistics) -> Result<()> {
        let mut raw = statistics.describe()?;
        raw.mean_real = statistics.mean_real.as_ptr().cast_mut();
        raw.mean_imaginary = statistics.mean_imaginary.as_ptr().cast_mut();
        raw.mean_magnitude = statistics.mean_magnitude.as_ptr().cast_mut();
        if statistics.has_covariances() {
            raw.variance_real = statistics.variance_real.as_ptr().cast_mut();
            raw.variance_imaginary = statistics.variance_imaginary.as_ptr().cast_mut();
            raw.covariance = statistics.covariance.as_ptr().cast_mut();
        }
        // SAFETY: the arrays are as long as query_heads and bands say; this call only reads them.
        self.call(|pool| unsafe { sys::kv_pool_set_statistics(pool, &raw) })
    }

    /// Reads what a sequence has gathered so far, for the layer, heads and bands of `statistics`.
    /// Errors: Invalid, Stale.
    pub fn read_statistics(
        &self,
        sequence: Sequence,
        statistics: &mut QueryStatistics,
    ) -> Result<()> {
        let mut raw = statistics.describe()?;
        raw.mean_real = statistics.mean_real.as_mut_ptr();
        raw.mean_imaginary = statistics.mean_imaginary.as_mut_ptr();
        raw.mean_magnitude = statistics.mean_magnitude.as_mut_ptr();
        if statistics.has_covariances() {
            raw.variance_real = statistics.variance_real.as_mut_ptr();
            raw.variance_imaginary = statistics.variance_imaginary.as_mut_ptr();
            raw.covariance = statistics.covariance.as_mut_ptr();
        }
        // SAFETY: the arrays are as long as query_heads and bands say.
        self.call(|pool| unsafe {
            sys::kv_seq_get_statistics(pool, sequence.to_bits(), &mut raw)
        })?;
        statistics.tokens = raw.tokens;
        Ok(())
    }

    /// Writes a file with what a sequence has gathered, in every layer. Errors: Io, Stale, Invalid.
    pub fn save_statistics(&self, sequence: Sequence, path: impl AsRef<Path>) -> Result<()> {
        let path = c_path(path.as_ref())?;
        // SAFETY: the path is terminated.
        self.call(|pool| unsafe {
            sys::kv_seq_save_statistics(pool, sequence.to_bits(), path.as_ptr())
        })
    }

    /// Sets the statistics of a file on the pool, all layers or none. Errors: Io, Corrupt (also:
    /// another geometry or rotation), Invalid.
    pub fn load_statistics(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = c_path(path.as_ref())?;
        // SAFETY: the path is terminated.
        self.call(|pool| unsafe { sys::kv_pool_load_statistics(pool, path.as_ptr()) })
    }
}

#[cfg(unix)]
fn path_bytes(path: &Path) -> Result<Vec<u8>> {
    use std::os::unix::ffi::OsStrExt;
    Ok(path.as_os_str().as_bytes().to_vec())
}

#[cfg(not(unix))]
fn path_bytes(path: &Path) -> Result<Vec<u8>> {
    let text = path.to_str();
    text.map(|text| text.as_bytes().to_vec())
        .ok_or_else(|| Error::Invalid(format!("path {path:?} is not valid Unicode")))
}

fn c_path(path: &Path) -> Result<CString> {
    CString::new(path_bytes(path)?)
        .map_err(|_| Error::Invalid(format!("path {path:?} holds a zero byte")))
}
