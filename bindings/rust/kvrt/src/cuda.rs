//! Pools on a CUDA device (`PoolConfig::device`): which one it is, the streams of their steps,
//! tables and tensors in its memory.

use std::ffi::{c_char, c_void, CStr};
use std::ops::Range;
use std::ptr::null_mut;

use kvrt_sys as sys;

use crate::error::check;
use crate::{
    CudaScoreMethod, Error, Model, PoolConfig, PoolOf, Result, Sequence, Step, Strides, Threading,
};

/// The device that pools are made on: the one that is current for the calling thread, or the first.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaDevice {
    pub name: String,
    pub memory_bytes: u64,
    /// As the driver counts.
    pub ordinal: u32,
    /// Its compute capability: major and minor.
    pub compute: (u32, u32),
    pub multiprocessors: u32,
    /// 13000: made for CUDA 13.0.
    pub driver_version: u32,
    /// It can map memory piece by piece, as `PoolConfig::elastic` needs.
    pub elastic: bool,
    /// Why pools there have no kernels; `None`: they do.
    pub without_kernels: Option<String>,
}

/// What there is, or what is missing. Loads the driver and starts it, so that processes forked from
/// this one afterwards cannot use CUDA. Errors: Unsupported (no plugin, no driver or no device),
/// Device.
pub fn cuda_device() -> Result<CudaDevice> {
    let mut raw = sys::kv_cuda_device::default();
    // SAFETY: the struct is filled up to its size.
    check(unsafe { sys::kv_cuda_get_device(&mut raw) })?;
    Ok(CudaDevice {
        name: text_of(&raw.name),
        memory_bytes: raw.memory_bytes,
        ordinal: raw.ordinal,
        compute: (raw.compute_major, raw.compute_minor),
        multiprocessors: raw.multiprocessors,
        driver_version: raw.driver_version,
        elastic: raw.elastic != 0,
        without_kernels: (raw.has_kernels == 0).then(|| text_of(&raw.reason)),
    })
}

fn text_of(letters: &[c_char]) -> String {
    let bytes: Vec<u8> = letters.iter().map(|&letter| letter as u8).collect();
    CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy().into_owned()
}

/// What a tensor in device memory is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceElement {
    F32,
    F16,
    Bf16,
}

/// `[rows, heads, dim]` in the memory of the pool's device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceTensor {
    raw: sys::kv_tensor,
}

impl DeviceTensor {
    /// Dense, from an address of the device on.
    pub fn dense(address: u64, element: DeviceElement, shape: [usize; 3]) -> Self {
        let [rows, heads, dim] = shape;
        DeviceTensor {
            raw: sys::kv_tensor {
                data: address as *mut c_void,
                dtype: match element {
                    DeviceElement::F32 => sys::KV_DTYPE_F32,
                    DeviceElement::F16 => sys::KV_DTYPE_F16,
                    DeviceElement::Bf16 => sys::KV_DTYPE_BF16,
                },
                rows: rows as u64,
                heads: heads as u64,
                dim: dim as u64,
                ..Default::default()
            },
        }
    }

    /// The strides say where its elements lie, counted in elements from the address.
    pub fn strided(
        address: u64,
        element: DeviceElement,
        shape: [usize; 3],
        strides: Strides,
    ) -> Self {
        let size = if element == DeviceElement::F32 { 4 } else { 2 };
        let mut made = Self::dense(address + strides.offset as u64 * size, element, shape);
        made.raw.row_stride = strides.row;
        made.raw.head_stride = strides.head;
        made.raw.dim_stride = strides.dim;
        made
    }
}

/// Addresses of a step's tables in device memory, as `Step::export` fills them on the host. They
/// stay: kernels on them can be captured in a graph, one for each place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaTables {
    /// Which of the two sets, for the two steps that can be open: 0 or 1.
    pub place: u32,
    /// `[max_step_sequences, block_table_stride]` of i32; -1 behind a row's end.
    pub block_table: u64,
    pub block_table_stride: u64,
    /// `[max_step_tokens]` of i64; -1: no row.
    pub slot_mapping: u64,
    /// `[max_step_sequences + 1]` of i32.
    pub query_start: u64,
    /// `[max_step_sequences]` of i32; 0: no item.
    pub kv_len: u64,
    /// `[max_step_tokens]` of i32.
    pub positions: u64,
}

/// Whose device memory a pool lives in: `allocate` and `release` of `kv_cuda_memory`, and what they
/// get as `user`.
#[derive(Clone, Copy, Debug)]
pub struct CudaAllocator {
    pub user: *mut c_void,
    pub allocate: unsafe extern "C" fn(*mut c_void, usize, usize) -> *mut c_void,
    pub release: unsafe extern "C" fn(*mut c_void, *mut c_void, usize, usize),
}

/// How keys are scored by TriAttention (`PoolOf::set_cuda_scoring`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaScoring {
    pub method: CudaScoreMethod,
    /// Of products, in device memory; 0: the library's choice.
    pub workspace_bytes: u64,
    /// Products may round keys and weights to 11 bits.
    pub tf32: bool,
}

/// How keys were scored so far.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaScoringReport {
    pub method: CudaScoreMethod,
    pub tf32: bool,
    /// As cublasLtGetVersion counts; 0: products were never asked for.
    pub library_version: u32,
    pub workspace_bytes: u64,
    /// Lanes of one kind that were scored together.
    pub kernel_cohorts: u64,
    pub product_cohorts: u64,
    /// Of products: descriptors that were there, or not.
    pub shape_hits: u64,
    pub shape_misses: u64,
    /// Kinds of work whose choice has been made, and that are still being timed.
    pub kernel_kinds: u32,
    pub product_kinds: u32,
    pub open_kinds: u32,
    /// Why a measured round last was the kernel's without being timed.
    pub reason: Option<String>,
}

impl<T: Threading> PoolOf<T> {
    /// `create`, for a config on `Device::Cuda` that is not elastic, with all of the pool's device
    /// memory from the allocator. Errors: as `create`; Invalid (on the CPU, or an address that is
    /// not aligned), Unsupported (elastic), NoMemory.
    ///
    /// # Safety
    ///
    /// The functions can be called with `user` until the pool is dropped, by whichever thread
    /// creates or drops it, and what `allocate` returns is memory of the pool's device, of that
    /// size, that nobody else uses.
    pub unsafe fn create_in_device_memory(
        config: &PoolConfig,
        model: &Model,
        allocator: CudaAllocator,
    ) -> Result<Self> {
        Self::create_raw(config, model, None, |config, model, out| {
            let memory = sys::kv_cuda_memory {
                user: allocator.user,
                allocate: Some(allocator.allocate),
                release: Some(allocator.release),
                ..Default::default()
            };
            sys::kv_cuda_pool_create(config, model, &memory, out)
        })
    }

    /// Bytes of device memory behind the arena now. Errors: Invalid (the pool is on the CPU).
    pub fn cuda_memory_bytes(&self) -> Result<u64> {
        let mut bytes = 0;
        // SAFETY: the pool is alive.
        self.call(|pool| unsafe { sys::kv_cuda_pool_memory(pool, &mut bytes) })?;
        Ok(bytes)
    }

    /// As `set_scores`, for scores in device memory, which are read behind all that `stream` has.
    /// Errors: as there, and Invalid (also: the pool is on the CPU), Again (too much is on its way
    /// to the device: nothing has changed), Device.
    ///
    /// # Safety
    ///
    /// `scores` is an address of the device, of `[kv_heads, positions]` that nothing overwrites
    /// before `stream` is behind this call. `stream` is a `CUstream` or `cudaStream_t` of the
    /// device's primary context, not the default one, and alive until the work on it is done.
    pub unsafe fn set_cuda_scores(
        &self,
        sequence: Sequence,
        layer: u32,
        positions: Range<u64>,
        scores: *const f32,
        stream: *mut c_void,
    ) -> Result<()> {
        let tokens = positions.end.saturating_sub(positions.start);
        let (seq, first, stream) = (sequence.to_bits(), positions.start, stream.cast());
        self.call(|pool| {
            sys::kv_cuda_seq_set_scores(pool, seq, layer, first, tokens, scores, stream)
        })
    }

    /// Who scores keys by TriAttention, from the next round on; what products take stays until the
    /// pool is dropped. Errors: Invalid (also: the pool is on the CPU), Unsupported (there is no
    /// library of matrix products), NoMemory, Device.
    pub fn set_cuda_scoring(&self, scoring: &CudaScoring) -> Result<()> {
        let raw = sys::kv_cuda_scoring {
            flags: if scoring.tf32 { sys::KV_CUDA_SCORING_TF32 } else { 0 },
            method: scoring.method.code(),
            workspace_bytes: scoring.workspace_bytes,
            ..Default::default()
        };
        // SAFETY: the pool is alive.
        self.call(|pool| unsafe { sys::kv_cuda_pool_set_scoring(pool, &raw) })?;
        Ok(())
    }

    /// Errors: Invalid (the pool is on the CPU).
    pub fn cuda_scoring(&self) -> Result<CudaScoringReport> {
        let mut raw = sys::kv_cuda_scoring_report::default();
        // SAFETY: the struct is filled up to its size.
        self.call(|pool| unsafe { sys::kv_cuda_pool_get_scoring(pool, &mut raw) })?;
        let reason = text_of(&raw.reason);
        Ok(CudaScoringReport {
            method: raw.method.into(),
            tf32: raw.scoring_flags & sys::KV_CUDA_SCORING_TF32 != 0,
            library_version: raw.library_version,
            workspace_bytes: raw.workspace_bytes,
            kernel_cohorts: raw.kernel_cohorts,
            product_cohorts: raw.product_cohorts,
            shape_hits: raw.shape_hits,
            shape_misses: raw.shape_misses,
            kernel_kinds: raw.kernel_kinds,
            product_kinds: raw.product_kinds,
            open_kinds: raw.open_kinds,
            reason: (!reason.is_empty()).then_some(reason),
        })
    }
}

impl<T: Threading> Step<'_, T> {
    /// The stream that all of the step's work goes to, before `reserve`. Errors: Invalid (also: the
    /// pool is on the CPU), Again (too many steps are in flight), Device.
    ///
    /// # Safety
    ///
    /// `stream` is a `CUstream` or `cudaStream_t` of the device's primary context, not the default
    /// one, and lives until the step's work is done.
    pub unsafe fn use_cuda_stream(&self, stream: *mut c_void) -> Result<()> {
        self.call(|step| sys::kv_cuda_step_use_stream(step, stream.cast()))
    }

    /// Where the tables of a layer's lane are, from `reserve` until the step's end. `kv_head` is 0
    /// but with `Layer::lane_per_head`. The layer counts as written. Errors: Invalid.
    pub fn cuda_tables(&self, layer: u32, kv_head: u32) -> Result<CudaTables> {
        self.tables_on_device(layer, kv_head, 0)
    }

    /// The same in a step that replays a graph in which the layer's `attend_on_device` was captured
    /// with statistics: what it observes and gathers counts. Errors: Invalid (also: none was).
    pub fn cuda_tables_attended(&self, layer: u32, kv_head: u32) -> Result<CudaTables> {
        self.tables_on_device(layer, kv_head, sys::KV_CUDA_TABLES_ATTENDED)
    }

    fn tables_on_device(&self, layer: u32, kv_head: u32, flags: u32) -> Result<CudaTables> {
        let mut raw = sys::kv_cuda_tables { flags, kv_head, ..Default::default() };
        // SAFETY: the struct is filled up to its size.
        self.call(|step| unsafe { sys::kv_cuda_step_tables(step, layer, &mut raw) })?;
        Ok(CudaTables {
            place: raw.place,
            block_table: raw.block_table as u64,
            block_table_stride: raw.block_table_stride,
            slot_mapping: raw.slot_mapping as u64,
            query_start: raw.query_start as u64,
            kv_len: raw.kv_len as u64,
            positions: raw.positions as u64,
        })
    }

    /// `write`, of tensors in device memory: enqueued on the step's stream.
    ///
    /// # Safety
    ///
    /// All elements of both are in memory of the pool's device that stays until the stream has
    /// done the step's work.
    pub unsafe fn write_on_device(
        &self,
        layer: u32,
        keys: &DeviceTensor,
        values: &DeviceTensor,
    ) -> Result<()> {
        self.check_device(true)?;
        self.call(|step| sys::kv_write(step, layer, &keys.raw, &values.raw))
    }

    /// `attend`, of tensors in device memory: enqueued on the step's stream. `log_sum_exp` is the
    /// address of `[rows, query_heads]` f32, or 0.
    ///
    /// # Safety
    ///
    /// As for `write_on_device`; nothing else uses what `out` and `log_sum_exp` cover meanwhile.
    pub unsafe fn attend_on_device(
        &self,
        layer: u32,
        queries: &DeviceTensor,
        out: &DeviceTensor,
        log_sum_exp: u64,
    ) -> Result<()> {
        self.check_device(true)?;
        let options = sys::kv_attend_options {
            log_sum_exp: if log_sum_exp == 0 { null_mut() } else { log_sum_exp as *mut f32 },
            ..Default::default()
        };
        self.call(|step| sys::kv_attend(step, layer, &queries.raw, &out.raw, &options))
    }

    /// Slices are the host's: kernels must not follow them, nor the CPU an address of the device.
    pub(crate) fn check_device(&self, wanted: bool) -> Result<()> {
        if self.on_cuda() == wanted {
            return Ok(());
        }
        Err(Error::Invalid(if wanted {
            "the pool is on the CPU: tensors of device memory are for one on Device::Cuda".into()
        } else {
            "the pool is on Device::Cuda: its tensors are in device memory (write_on_device, \
             attend_on_device)"
                .to_string()
        }))
    }
}
