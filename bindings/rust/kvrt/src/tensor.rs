//! Views of the caller's memory as `[rows, heads, dim]`, checked against the slice they lie in.

use std::ffi::c_void;
use std::marker::PhantomData;

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
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a> {
    raw: sys::kv_tensor,
    borrow: PhantomData<&'a [f32]>,
}

/// The place for attention's output.
///
/// It is borrowed for as long as the tensor lives:
///
/// ```compile_fail,E0502
/// # use kvrt::{Elements, ElementsMut, Tensor, TensorMut};
/// let mut numbers = vec![0.0f32; 64];
/// let queries = Tensor::dense(Elements::F32(&numbers), [1, 1, 64]).unwrap();
/// let out = TensorMut::dense(ElementsMut::F32(&mut numbers), [1, 1, 64]).unwrap();
/// drop((queries, out));
/// ```
#[derive(Debug)]
pub struct TensorMut<'a> {
    raw: sys::kv_tensor,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: it is a shared slice of plain numbers with a shape.
unsafe impl Send for Tensor<'_> {}
// SAFETY: as above.
unsafe impl Sync for Tensor<'_> {}
// SAFETY: it is an exclusive slice of plain numbers with a shape.
unsafe impl Send for TensorMut<'_> {}
// SAFETY: as above; a shared reference gives no way to the elements.
unsafe impl Sync for TensorMut<'_> {}

impl<'a> Tensor<'a> {
    /// `shape` is rows, heads and dim; the slice holds exactly those, one behind the other.
    pub fn dense(elements: Elements<'a>, shape: [usize; 3]) -> Result<Self> {
        Self::new(elements, Region::dense(shape)?)
    }

    /// The tensor lies somewhere in the slice: in a packed QKV buffer, for example.
    pub fn strided(elements: Elements<'a>, shape: [usize; 3], strides: Strides) -> Result<Self> {
        Self::new(elements, Region::strided(shape, strides)?)
    }

    fn new(elements: Elements<'a>, region: Region) -> Result<Self> {
        let raw = match elements {
            Elements::F32(slice) => region.lend(slice.as_ptr(), slice.len(), sys::KV_DTYPE_F32),
            Elements::F16(slice) => region.lend(slice.as_ptr(), slice.len(), sys::KV_DTYPE_F16),
            Elements::Bf16(slice) => region.lend(slice.as_ptr(), slice.len(), sys::KV_DTYPE_BF16),
        }?;
        Ok(Tensor { raw, borrow: PhantomData })
    }

    /// The library only reads through it.
    pub(crate) fn as_ptr(&self) -> *const sys::kv_tensor {
        &self.raw
    }

    /// rows * heads; a broadcast shape of more than 2^64 saturates, and no step has as many.
    pub(crate) fn row_heads(&self) -> u64 {
        self.raw.rows.saturating_mul(self.raw.heads)
    }
}

impl<'a> TensorMut<'a> {
    /// As `Tensor::dense`.
    pub fn dense(elements: ElementsMut<'a>, shape: [usize; 3]) -> Result<Self> {
        Self::new(elements, Region::dense(shape)?)
    }

    /// As `Tensor::strided`; no two elements may lie in the same place.
    pub fn strided(elements: ElementsMut<'a>, shape: [usize; 3], strides: Strides) -> Result<Self> {
        let region = Region::strided(shape, strides)?;
        region.check_apart()?;
        Self::new(elements, region)
    }

    fn new(elements: ElementsMut<'a>, region: Region) -> Result<Self> {
        let raw = match elements {
            ElementsMut::F32(slice) => {
                region.lend(slice.as_mut_ptr(), slice.len(), sys::KV_DTYPE_F32)
            }
            ElementsMut::F16(slice) => {
                region.lend(slice.as_mut_ptr(), slice.len(), sys::KV_DTYPE_F16)
            }
            ElementsMut::Bf16(slice) => {
                region.lend(slice.as_mut_ptr(), slice.len(), sys::KV_DTYPE_BF16)
            }
        }?;
        Ok(TensorMut { raw, borrow: PhantomData })
    }

    /// The library writes through it.
    pub(crate) fn as_mut_ptr(&mut self) -> *const sys::kv_tensor {
        &self.raw
    }
}

/// A shape with its strides, before it is known whether a slice holds it.
struct Region {
    shape: [usize; 3],
    strides: Strides,
    /// Dense ones fill their slice to the end.
    dense: bool,
}

impl Region {
    fn dense(shape: [usize; 3]) -> Result<Region> {
        let strides = || {
            let head = i64::try_from(shape[2]).ok()?;
            let row = head.checked_mul(i64::try_from(shape[1]).ok()?)?;
            row.checked_mul(i64::try_from(shape[0]).ok()?)?;
            Some(Strides { offset: 0, row, head, dim: 1 })
        };
        let strides = strides().ok_or_else(|| out_of_reach(shape))?;
        Ok(Region { shape, strides, dense: true })
    }

    fn strided(shape: [usize; 3], strides: Strides) -> Result<Region> {
        // The library takes three zeroes for "dense", which is not what the caller has said.
        if strides.row == 0 && strides.head == 0 && strides.dim == 0 {
            return Err(Error::Invalid("tensor: the strides are all 0".to_string()));
        }
        Ok(Region { shape, strides, dense: false })
    }

    fn axes(&self) -> [(usize, i64); 3] {
        let Strides { row, head, dim, .. } = self.strides;
        [(self.shape[0], row), (self.shape[1], head), (self.shape[2], dim)]
    }

    /// The lowest and the highest index of an element, or None when they are out of reach.
    fn bounds(&self) -> Option<(i64, i64)> {
        let mut low = i64::try_from(self.strides.offset).ok()?;
        let mut high = low;
        for (length, stride) in self.axes() {
            let span = i64::try_from(length).ok()?.checked_sub(1)?.checked_mul(stride)?;
            low = low.checked_add(span.min(0))?;
            high = high.checked_add(span.max(0))?;
        }
        Some((low, high))
    }

    /// Each axis must step over all that the narrower ones cover.
    fn check_apart(&self) -> Result<()> {
        let mut axes = self.axes();
        axes.sort_by_key(|(_, stride)| stride.unsigned_abs());
        let mut covered = 0u64;
        for (length, stride) in axes {
            if length <= 1 {
                continue;
            }
            if stride.unsigned_abs() <= covered {
                return Err(Error::Invalid(format!(
                    "tensor: with strides {:?} elements of {:?} lie on each other",
                    self.strides, self.shape
                )));
            }
            let span = (length as u64 - 1).checked_mul(stride.unsigned_abs());
            covered = span
                .and_then(|span| covered.checked_add(span))
                .ok_or_else(|| out_of_reach(self.shape))?;
        }
        Ok(())
    }

    /// The raw tensor at its place in a slice, all of whose elements are in the slice.
    fn lend<T>(&self, slice: *const T, length: usize, dtype: u32) -> Result<sys::kv_tensor> {
        let [rows, heads, dim] = self.shape;
        if self.shape.contains(&0) {
            return Err(Error::Invalid(format!("tensor: {:?} has no elements", self.shape)));
        }
        let (low, high) = self.bounds().ok_or_else(|| out_of_reach(self.shape))?;
        let fits = low >= 0 && (high as u64) < length as u64;
        if !fits || (self.dense && high as u64 + 1 != length as u64) {
            return Err(Error::Invalid(format!(
                "tensor: {:?} at {:?} takes elements {low} to {high}, the slice holds {length}",
                self.shape, self.strides
            )));
        }
        Ok(sys::kv_tensor {
            // SAFETY: element [0, 0, 0] is one of the slice's.
            data: unsafe { slice.add(self.strides.offset) } as *mut c_void,
            dtype,
            rows: rows as u64,
            heads: heads as u64,
            dim: dim as u64,
            row_stride: self.strides.row,
            head_stride: self.strides.head,
            dim_stride: self.strides.dim,
            ..Default::default()
        })
    }
}

fn out_of_reach(shape: [usize; 3]) -> Error {
    Error::Invalid(format!("tensor: {shape:?} is out of reach"))
}
