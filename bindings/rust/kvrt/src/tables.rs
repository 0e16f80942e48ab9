//! Export of block tables, for engines with their own kernels.

use std::marker::PhantomData;
use std::ptr::null_mut;

use kvrt_sys as sys;

use crate::{Error, Format, Layout, Result, Status, Step, Threading};

/// The caller's buffers for one layer of a step; `None`: not wanted. `items` are the sequences of
/// the step, `tokens` those appended to it.
#[derive(Debug, Default)]
pub struct TableBuffers<'b> {
    /// `[items, block_table_stride]`; unused entries become -1.
    pub block_table: Option<&'b mut [i32]>,
    pub block_table_stride: usize,
    /// CSR: `[items + 1]`.
    pub indptr: Option<&'b mut [i32]>,
    /// CSR: `[indptr[items]]` block ids.
    pub indices: Option<&'b mut [i32]>,
    /// `[items]`, 1 to block_tokens.
    pub last_page_len: Option<&'b mut [i32]>,
    /// `[tokens]`: id * block_tokens + slot, where each new token goes.
    pub slot_mapping: Option<&'b mut [i64]>,
    /// `[items + 1]`.
    pub query_start: Option<&'b mut [i32]>,
    /// `[items]`: retained slots, this step's tokens included.
    pub kv_len: Option<&'b mut [i32]>,
    /// `[tokens]`, of the new tokens.
    pub positions: Option<&'b mut [i32]>,
    /// `[kv_heads, slot_indptr[items]]`, of every slot of every item; of one KV head with
    /// `Layer::lane_per_head`.
    pub slot_positions: Option<&'b mut [i32]>,
    /// `[items + 1]`: sums of kv_len.
    pub slot_indptr: Option<&'b mut [i32]>,
    /// `[items]`: how many of an item's first blocks are sealed (see `Tables::sealed`).
    pub sealed_blocks: Option<&'b mut [i32]>,
    /// What an export needs: filled also when it was `Error::Limit`.
    pub needed: TableSizes,
}

/// How many elements the buffers of an export need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableSizes {
    pub items: usize,
    pub tokens: usize,
    /// The longest row of block_table.
    pub max_blocks: usize,
    pub indices: usize,
    pub slot_positions: usize,
}

/// Distances within a block's keys or values, in words: in plain formats a word is an element, in
/// others a row of a head is `Tables::key_words` words of codes and scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TileStrides {
    pub group: i64,
    /// Within a group of `Tables::slot_group` slots.
    pub slot: i64,
    pub head: i64,
    /// From word to word of a row.
    pub dim: i64,
}

/// How the sealed blocks of a layer lie: the first blocks of an item, as many as
/// `TableBuffers::sealed_blocks` says, which are not to be written. With `Format::Kivi4` and the
/// like they are coded whole, with `Layer::demoted_key_format` row by row. In other layers nothing
/// is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SealedLayout {
    pub key_format: Format,
    pub value_format: Format,
    pub block_bytes: usize,
    /// Bytes from a block to its first head's keys.
    pub key_offset: i64,
    /// Bytes from a block to its first head's values.
    pub value_offset: i64,
    /// Bytes from a head's keys to the next one's.
    pub key_head_bytes: i64,
    pub value_head_bytes: i64,
    /// Of a row of one head's keys; 0 where keys are coded whole, as are their bytes and strides.
    pub key_words: u32,
    pub value_words: u32,
    pub key_word_bytes: u32,
    pub value_word_bytes: u32,
    pub key_strides: TileStrides,
    pub value_strides: TileStrides,
}

/// The filled tables of one layer and the memory that they name, until they are dropped. The step
/// lends them, so nothing is written to it meanwhile.
///
/// ```compile_fail,E0505
/// # fn f(mut step: kvrt::Step<'_>) -> kvrt::Result<()> {
/// let mut buffers = kvrt::TableBuffers::default();
/// let tables = step.export(0, &mut buffers)?;
/// step.end()?;
/// println!("{:?}", tables.base());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Tables<'s> {
    raw: sys::kv_tables,
    on_cuda: bool,
    buffers: &'s TableBuffers<'s>,
    step: PhantomData<&'s mut [u8]>,
}

// SAFETY: it gives shared views of memory and numbers. The step that could write there is borrowed
// exclusively, and others do not write to the blocks of its sequences.
unsafe impl Send for Tables<'_> {}
// SAFETY: as above.
unsafe impl Sync for Tables<'_> {}

impl<T: Threading> Step<'_, T> {
    /// Fills the caller's buffers for a layer of this reserved step. A layer that shares another's
    /// cache exports its owner's; an exported layer counts as written. Errors: Invalid (not
    /// reserved), Limit (a buffer is too small; nothing but `needed` is written).
    pub fn export<'s, 'b: 's>(
        &'s mut self,
        layer: u32,
        buffers: &'s mut TableBuffers<'b>,
    ) -> Result<Tables<'s>> {
        self.export_head(layer, 0, buffers)
    }

    /// `export` for one KV head of a layer with `Layer::lane_per_head`: its tables are about that
    /// head alone, and the layer counts as written when all heads are exported. Errors: as
    /// `export`; Invalid also for another head than 0 in other layers.
    pub fn export_head<'s, 'b: 's>(
        &'s mut self,
        layer: u32,
        kv_head: u32,
        buffers: &'s mut TableBuffers<'b>,
    ) -> Result<Tables<'s>> {
        let mut raw = buffers.lend()?;
        raw.kv_head = kv_head;
        // SAFETY: each buffer holds at least as many elements as the capacity that speaks for it.
        let verdict = self.call(|step| unsafe { sys::kv_step_export(step, layer, &mut raw) });
        let filled =
            verdict.as_ref().map_or_else(|error| error.status() == Status::LIMIT, |_| true);
        if filled {
            buffers.needed = TableSizes {
                items: raw.item_count as usize,
                tokens: raw.token_count as usize,
                max_blocks: raw.max_blocks as usize,
                indices: raw.indices_count as usize,
                slot_positions: raw.slot_positions_count as usize,
            };
        }
        verdict?;
        Ok(Tables { raw, on_cuda: self.on_cuda(), buffers, step: PhantomData })
    }
}

impl TableBuffers<'_> {
    /// The raw struct. One capacity speaks for several buffers: the smallest of them counts.
    fn lend(&mut self) -> Result<sys::kv_tables> {
        let mut items = u64::MAX;
        let mut tokens = u64::MAX;
        let mut raw = sys::kv_tables {
            block_table_stride: self.block_table_stride as u64,
            block_table_capacity: length(&self.block_table),
            indices_capacity: length(&self.indices),
            slot_positions_capacity: length(&self.slot_positions),
            block_table: pointer(&mut self.block_table),
            indices: pointer(&mut self.indices),
            slot_positions: pointer(&mut self.slot_positions),
            ..Default::default()
        };
        raw.last_page_len = lend(&mut self.last_page_len, 0, &mut items, "last_page_len")?;
        raw.sealed_blocks = lend(&mut self.sealed_blocks, 0, &mut items, "sealed_blocks")?;
        raw.kv_len = lend(&mut self.kv_len, 0, &mut items, "kv_len")?;
        raw.indptr = lend(&mut self.indptr, 1, &mut items, "indptr")?;
        raw.query_start = lend(&mut self.query_start, 1, &mut items, "query_start")?;
        raw.slot_indptr = lend(&mut self.slot_indptr, 1, &mut items, "slot_indptr")?;
        raw.slot_mapping = lend(&mut self.slot_mapping, 0, &mut tokens, "slot_mapping")?;
        raw.positions = lend(&mut self.positions, 0, &mut tokens, "positions")?;
        raw.item_capacity = items;
        raw.token_capacity = tokens;
        Ok(raw)
    }
}

fn length<E>(buffer: &Option<&mut [E]>) -> u64 {
    buffer.as_ref().map_or(0, |buffer| buffer.len() as u64)
}

fn pointer<E>(buffer: &mut Option<&mut [E]>) -> *mut E {
    buffer.as_mut().map_or(null_mut(), |buffer| buffer.as_mut_ptr())
}

/// A buffer with `extra` elements more than `capacity` may say.
fn lend<E>(
    buffer: &mut Option<&mut [E]>,
    extra: u64,
    capacity: &mut u64,
    name: &str,
) -> Result<*mut E> {
    if buffer.is_some() {
        let room = length(buffer)
            .checked_sub(extra)
            .ok_or_else(|| Error::Invalid(format!("{name}: no elements, items + 1 are needed")))?;
        *capacity = room.min(*capacity);
    }
    Ok(pointer(buffer))
}

impl Tables<'_> {
    /// The buffers, as the library filled them.
    pub fn buffers(&self) -> &TableBuffers<'_> {
        self.buffers
    }

    pub fn sizes(&self) -> TableSizes {
        self.buffers.needed
    }

    /// Whose tables these are, with `Layer::lane_per_head`; else 0.
    pub fn kv_head(&self) -> u32 {
        self.raw.kv_head
    }

    /// The memory that block ids count from: the device's, of a pool there. Kernels may write the
    /// slots of the new tokens through it, and read the blocks of the tables, until the step's
    /// fence.
    pub fn base(&self) -> *mut u8 {
        self.raw.base.cast()
    }

    /// Bytes per id: a block begins at `base() + id * block_stride()`.
    pub fn block_stride(&self) -> i64 {
        self.raw.block_stride
    }

    pub fn block_bytes(&self) -> usize {
        self.raw.block_bytes as usize
    }

    pub fn block_tokens(&self) -> u32 {
        self.raw.block_tokens
    }

    /// Slots of a group, which the strides step over apart from those within one.
    pub fn slot_group(&self) -> u32 {
        self.raw.slot_group
    }

    pub fn layout(&self) -> Layout {
        Layout::from(self.raw.layout)
    }

    pub fn key_format(&self) -> Format {
        Format::from(self.raw.key_format)
    }

    pub fn value_format(&self) -> Format {
        Format::from(self.raw.value_format)
    }

    /// Bytes from a block to its keys.
    pub fn key_offset(&self) -> i64 {
        self.raw.key_offset
    }

    /// Bytes from a block to its values.
    pub fn value_offset(&self) -> i64 {
        self.raw.value_offset
    }

    pub fn key_strides(&self) -> TileStrides {
        TileStrides {
            group: self.raw.key_stride_group,
            slot: self.raw.key_stride_slot,
            head: self.raw.key_stride_head,
            dim: self.raw.key_stride_dim,
        }
    }

    pub fn value_strides(&self) -> TileStrides {
        TileStrides {
            group: self.raw.value_stride_group,
            slot: self.raw.value_stride_slot,
            head: self.raw.value_stride_head,
            dim: self.raw.value_stride_dim,
        }
    }

    /// How many words a row of one head's keys is.
    pub fn key_words(&self) -> u32 {
        self.raw.key_words
    }

    pub fn value_words(&self) -> u32 {
        self.raw.value_words
    }

    /// Bytes of a word of keys.
    pub fn key_word_bytes(&self) -> u32 {
        self.raw.key_word_bytes
    }

    pub fn value_word_bytes(&self) -> u32 {
        self.raw.value_word_bytes
    }

    /// `[kv_heads]`, the pool's static ones; null when the format has none.
    pub fn key_scales(&self) -> *const f32 {
        self.raw.key_scales
    }

    /// `[kv_heads]`, the pool's static ones; null when the format has none.
    pub fn value_scales(&self) -> *const f32 {
        self.raw.value_scales
    }

    /// The layout of sealed blocks. All else here is about the blocks behind them, where new rows
    /// go.
    pub fn sealed(&self) -> SealedLayout {
        SealedLayout {
            key_format: Format::from(self.raw.sealed_key_format),
            value_format: Format::from(self.raw.sealed_value_format),
            block_bytes: self.raw.sealed_block_bytes as usize,
            key_offset: self.raw.sealed_key_offset,
            value_offset: self.raw.sealed_value_offset,
            key_head_bytes: self.raw.sealed_key_head_bytes,
            value_head_bytes: self.raw.sealed_value_head_bytes,
            key_words: self.raw.sealed_key_words,
            value_words: self.raw.sealed_value_words,
            key_word_bytes: self.raw.sealed_key_word_bytes,
            value_word_bytes: self.raw.sealed_value_word_bytes,
            key_strides: TileStrides {
                group: self.raw.sealed_key_stride_group,
                slot: self.raw.sealed_key_stride_slot,
                head: self.raw.sealed_key_stride_head,
                dim: self.raw.sealed_key_stride_dim,
            },
            value_strides: TileStrides {
                group: self.raw.sealed_value_stride_group,
                slot: self.raw.sealed_value_stride_slot,
                head: self.raw.sealed_value_stride_head,
                dim: self.raw.sealed_value_stride_dim,
            },
        }
    }

    /// `key_scales` of sealed blocks.
    pub fn sealed_key_scales(&self) -> *const f32 {
        self.raw.sealed_key_scales
    }

    /// `value_scales` of sealed blocks.
    pub fn sealed_value_scales(&self) -> *const f32 {
        self.raw.sealed_value_scales
    }

    /// A hash of what the bytes of keys depend on besides the keys. Rows of one pool can be read in
    /// another where it is equal.
    pub fn key_identity(&self) -> u64 {
        self.raw.key_identity
    }

    /// The same of values.
    pub fn value_identity(&self) -> u64 {
        self.raw.value_identity
    }

    /// This step's number, for `Pool::pass_fence`, also if the step is cancelled.
    pub fn fence(&self) -> u64 {
        self.raw.fence
    }

    /// The bytes of block `index` of an item, `sealed().block_bytes` of a sealed one and
    /// `block_bytes()` of another. Needs `block_table`, or `indptr` and `indices`, and in layers
    /// that seal `sealed_blocks` too. Not of a pool on `Device::Cuda`, whose blocks the host
    /// cannot read.
    pub fn block(&self, item: usize, index: usize) -> Result<&[u8]> {
        if self.on_cuda {
            return Err(Error::Invalid(
                "tables: blocks of a pool on Device::Cuda are in device memory".into(),
            ));
        }
        let id = self.block_id(item, index)?;
        let bytes = self.bytes_of_block(item, index)?;
        let offset = i64::from(id) * self.raw.block_stride;
        // SAFETY: the id comes from buffers that the library has filled and that are borrowed
        // since, so it names a block of this step's, `bytes` long. The step is borrowed
        // exclusively, and nobody else writes to a block that one of its sequences reads.
        Ok(unsafe {
            let start = self.raw.base.cast::<u8>().offset(offset as isize);
            std::slice::from_raw_parts(start, bytes)
        })
    }

    /// `item` is one of the step's.
    fn bytes_of_block(&self, item: usize, index: usize) -> Result<usize> {
        let sealed = self.sealed().block_bytes;
        if sealed == self.block_bytes() {
            return Ok(sealed);
        }
        let counts = self.buffers.sealed_blocks.as_ref().ok_or_else(|| {
            Error::Invalid("tables: blocks of this layer are told apart by sealed_blocks".into())
        })?;
        let is_sealed = index < counts[item] as usize;
        Ok(if is_sealed { sealed } else { self.block_bytes() })
    }

    fn block_id(&self, item: usize, index: usize) -> Result<i32> {
        let buffers = self.buffers;
        let id = match (&buffers.block_table, &buffers.indptr, &buffers.indices) {
            (Some(table), _, _) => {
                let row = table.chunks_exact(buffers.block_table_stride).nth(item);
                row.filter(|_| item < buffers.needed.items).and_then(|row| row.get(index))
            }
            (None, Some(indptr), Some(indices)) => {
                let row = indptr[..=buffers.needed.items].get(item..item.saturating_add(2));
                row.and_then(|row| indices.get(row[0] as usize..row[1] as usize)?.get(index))
            }
            _ => None,
        };
        id.copied().filter(|&id| id >= 0).ok_or_else(|| {
            Error::Invalid(format!(
                "tables: there is no block {index} of item {item} in the buffers"
            ))
        })
    }
}
