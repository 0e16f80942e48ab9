//! Statistics of queries: what TriAttention knows of a layer's queries before rotation.

use std::ffi::CString;
use std::path::Path;

use kvrt_sys as sys;

use crate::error::check_length;
use crate::{Error, PoolOf, Result, Sequence, Threading};

/// Means over the queries of one layer, per query head and band of the rotation: of the complex
/// query, and of its magnitude. Dimensions that are not rotated follow as bands of their own with a
/// real mean, so that bands = rotated / 2 + (key_dim - rotated). Arrays are `[query_heads, bands]`.
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
        }
    }

    /// The raw struct without its arrays, whose lengths are right.
    fn describe(&self) -> Result<sys::kv_query_statistics> {
        let needed = u64::from(self.query_heads) * u64::from(self.bands);
        check_length(&self.mean_real, needed, "statistics: mean_real")?;
        check_length(&self.mean_imaginary, needed, "statistics: mean_imaginary")?;
        check_length(&self.mean_magnitude, needed, "statistics: mean_magnitude")?;
        Ok(sys::kv_query_statistics {
            layer: self.layer,
            query_heads: self.query_heads,
            bands: self.bands,
            tokens: self.tokens,
            ..Default::default()
        })
    }
}

impl<T: Threading> PoolOf<T> {
    /// Gives the pool a layer's statistics (copied); they serve every sequence whose policy does
    /// not say `statistics_online`. Errors: Invalid.
    pub fn set_statistics(&self, statistics: &QueryStatistics) -> Result<()> {
        let mut raw = statistics.describe()?;
        raw.mean_real = statistics.mean_real.as_ptr().cast_mut();
        raw.mean_imaginary = statistics.mean_imaginary.as_ptr().cast_mut();
        raw.mean_magnitude = statistics.mean_magnitude.as_ptr().cast_mut();
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
