//! Views of the caller's memory as `[rows, heads, dim]`, checked against the slice they lie in by
//! the call that uses them, which says which of its tensors is wrong.

use std::ffi::c_void;
use std::fmt;

use kvrt_sys as sys;

use crate::{Error, Result};

/// What a tensor is made of: numbers, or the bits of 16-bit ones.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Elements<'a> {
    F32(&'a [f32]),
    /// IEEE 754 half precision.
    F16(&'a [u16]),
    /// The upper half of an f32.
    Bf16(&'a [u16]),
}

/// What an output tensor is made of.
#[derive(Debug)]
#[non_exhaustive]
pub enum ElementsMut<'a> {
    F32(&'a mut [f32]),
    /// IEEE 754 half precision.
    F16(&'a mut [u16]),
    /// The upper half of an f32.
    Bf16(&'a mut [u16]),
}

/// Where the elements of a tensor lie in its slice, counted in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strides {
    /// Of element `[0, 0, 0]`.
    pub offset: usize,
    /// From row to row, head to head, and within a head; they may be negative.
    pub row: i64,
    pub head: i64,
    pub dim: i64,
}

/// Keys, values or queries where the caller has them.
#[derive(Clone, Copy)]
pub struct Tensor<'a> {
    elements: Elements<'a>,
    region: Region,
}

/// The place for attention's output.
///
/// It is borrowed for as long as the tensor lives:
///
/// ```compile_fail,E0502
/// # use kvrt::{Elements, ElementsMut, Tensor, TensorMut};
/// let mut numbers = vec![0.0f32; 64];
/// let queries = Tensor::dense(Elements::F32(&numbers), [1, 1, 64]);
/// let out = TensorMut::dense(ElementsMut::F32(&mut numbers), [1, 1, 64]);
/// drop((queries, out));
/// ```
pub struct TensorMut<'a> {
    elements: ElementsMut<'a>,
    region: Region,
}

impl<'a> Tensor<'a> {
    /// `shape` is rows, heads and dim; the slice holds exactly those, one behind the other, or the
    /// call that gets the tensor is an error.
    pub fn dense(elements: Elements<'a>, shape: [usize; 3]) -> Self {
        Tensor { elements, region: Region { shape, strides: None } }
    }

    /// The tensor lies somewhere in the slice: in a packed QKV buffer, for example.
    pub fn strided(elements: Elements<'a>, shape: [usize; 3], strides: Strides) -> Self {
        Tensor { elements, region: Region { shape, strides: Some(strides) } }
    }

    /// The raw tensor, which the library only reads through. `name` is the call's for it.
    pub(crate) fn lend(&self, name: &str) -> Result<sys::kv_tensor> {
        let region = &self.region;
        let lent = match self.elements {
            Elements::F32(slice) => region.lend(slice.as_ptr(), slice.len(), sys::KV_DTYPE_F32),
            Elements::F16(slice) => region.lend(slice.as_ptr(), slice.len(), sys::KV_DTYPE_F16),
            Elements::Bf16(slice) => region.lend(slice.as_ptr(), slice.len(), sys::KV_DTYPE_BF16),
        };
        lent.map_err(|flaw| Error::Invalid(format!("{name}: {flaw}")))
    }
}

impl<'a> TensorMut<'a> {
    /// As `Tensor::dense`.
    pub fn dense(elements: ElementsMut<'a>, shape: [usize; 3]) -> Self {
        TensorMut { elements, region: Region { shape, strides: None } }
    }

    /// As `Tensor::strided`; no two elements may lie in the same place.
    pub fn strided(elements: ElementsMut<'a>, shape: [usize; 3], strides: Strides) -> Self {
        TensorMut { elements, region: Region { shape, strides: Some(strides) } }
    }

    /// The raw tensor, which the library writes through. `name` is the call's for it.
    pub(crate) fn lend(&mut self, name: &str) -> Result<sys::kv_tensor> {
        let region = &self.region;
        let lent = match &mut self.elements {
            ElementsMut::F32(slice) => {
                region.lend(slice.as_mut_ptr(), slice.len(), sys::KV_DTYPE_F32)
            }
            ElementsMut::F16(slice) => {
                region.lend(slice.as_mut_ptr(), slice.len(), sys::KV_DTYPE_F16)
            }
            ElementsMut::Bf16(slice) => {
                region.lend(slice.as_mut_ptr(), slice.len(), sys::KV_DTYPE_BF16)
            }
        };
        let apart = lent.and_then(|raw| region.check_apart().map(|()| raw));
        apart.map_err(|flaw| Error::Invalid(format!("{name}: {flaw}")))
    }
}

impl fmt::Debug for Tensor<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.region.describe("Tensor", formatter)
    }
}

impl fmt::Debug for TensorMut<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.region.describe("TensorMut", formatter)
    }
}

/// What is wrong with a tensor is said without its name, which the call puts in front.
type Checked<T> = std::result::Result<T, String>;

/// A shape with its strides, before it is known whether a slice holds it.
#[derive(Clone, Copy)]
struct Region {
    shape: [usize; 3],
    /// None: dense, to the end of the slice.
    strides: Option<Strides>,
}

impl Region {
    fn describe(&self, name: &str, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = formatter.debug_struct(name);
        text.field("shape", &self.shape).field("strides", &self.strides).finish_non_exhaustive()
    }

    /// The strides as the library shall take them.
    fn explicit_strides(&self) -> Checked<Strides> {
        match self.strides {
            None => self.dense_strides().ok_or_else(|| self.out_of_reach()),
            // The library takes three zeroes for "dense", which is not what the caller has said.
            Some(Strides { row: 0, head: 0, dim: 0, .. }) => {
                Err("the strides are all 0".to_string())
            }
            Some(strides) => Ok(strides),
        }
    }

    fn dense_strides(&self) -> Option<Strides> {
        let [rows, heads, dim] = self.shape;
        let head = i64::try_from(dim).ok()?;
        let row = head.checked_mul(i64::try_from(heads).ok()?)?;
        row.checked_mul(i64::try_from(rows).ok()?)?;
        Some(Strides { offset: 0, row, head, dim: 1 })
    }

    fn axes(&self, strides: Strides) -> [(usize, i64); 3] {
        let [rows, heads, dim] = self.shape;
        [(rows, strides.row), (heads, strides.head), (dim, strides.dim)]
    }

    /// The lowest and the highest index of an element, or None when they are out of reach.
    fn bounds(&self, strides: Strides) -> Option<(i64, i64)> {
        let mut low = i64::try_from(strides.offset).ok()?;
        let mut high = low;
        for (length, stride) in self.axes(strides) {
            let span = i64::try_from(length).ok()?.checked_sub(1)?.checked_mul(stride)?;
            low = low.checked_add(span.min(0))?;
            high = high.checked_add(span.max(0))?;
        }
        Some((low, high))
    }

    /// Each axis must step over all that the narrower ones cover.
    fn check_apart(&self) -> Checked<()> {
        let strides = self.explicit_strides()?;
        let mut axes = self.axes(strides);
        axes.sort_by_key(|(_, stride)| stride.unsigned_abs());
        let mut covered = 0u64;
        for (length, stride) in axes {
            if length <= 1 {
                continue;
            }
            if stride.unsigned_abs() <= covered {
                return Err(format!(
                    "with strides {strides:?} elements of {:?} lie on each other",
                    self.shape
                ));
            }
            let span = (length as u64 - 1).checked_mul(stride.unsigned_abs());
            covered = span
                .and_then(|span| covered.checked_add(span))
                .ok_or_else(|| self.out_of_reach())?;
        }
        Ok(())
    }

    /// The raw tensor at its place in a slice, all of whose elements are in the slice.
    fn lend<T>(&self, slice: *const T, length: usize, dtype: u32) -> Checked<sys::kv_tensor> {
        let [rows, heads, dim] = self.shape;
        if self.shape.contains(&0) {
            return Err(format!("{:?} has no elements", self.shape));
        }
        let strides = self.explicit_strides()?;
        let (low, high) = self.bounds(strides).ok_or_else(|| self.out_of_reach())?;
        let fits = low >= 0 && (high as u64) < length as u64;
        if !fits || (self.strides.is_none() && high as u64 + 1 != length as u64) {
            return Err(format!(
                "{:?} at {strides:?} takes elements {low} to {high}, the slice holds {length}",
                self.shape
            ));
        }
        Ok(sys::kv_tensor {
            // SAFETY: element [0, 0, 0] is one of the slice's.
            data: unsafe { slice.add(strides.offset) } as *mut c_void,
            dtype,
            rows: rows as u64,
            heads: heads as u64,
            dim: dim as u64,
            row_stride: strides.row,
            head_stride: strides.head,
            dim_stride: strides.dim,
            ..Default::default()
        })
    }

    fn out_of_reach(&self) -> String {
        format!("{:?} is out of reach", self.shape)
    }
}
