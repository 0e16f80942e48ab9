// Export of tables, for engines with their own kernels.

package kvrt

// #include "shims.h"
import "C"

import (
	"sync"
	"sync/atomic"
	"unsafe"
)

// TableBuffers are the caller's, to be filled by Step.Export. A slice without elements is not
// wanted; the others say by their length how much they hold.
type TableBuffers struct {
	BlockTable       []int32 // [items, BlockTableStride]; unused entries become -1
	BlockTableStride uint64
	Indptr           []int32 // CSR: [items + 1]
	Indices          []int32 // CSR: [Indptr[items]] block ids
	LastPageLen      []int32 // [items], 1 to BlockTokens
	SlotMapping      []int64 // [tokens]: id * BlockTokens + slot, where each new token goes
	QueryStart       []int32 // [items + 1]
	KVLen            []int32 // [items]: retained slots, this step's tokens included
	Positions        []int32 // [tokens] of the new tokens
	SlotPositions    []int32 // [KV heads, SlotIndptr[items]] of every slot; one head of ExportHead
	SlotIndptr       []int32 // [items + 1]: sums of KVLen
	SealedBlocks     []int32 // [items]: how many of an item's first blocks are sealed
}

// Tables are the sizes of what was exported, and where words lie in a block: of the keys,
//
//	KeyOffset + KeyWordBytes * (slot / SlotGroup * KeyStrideGroup + slot % SlotGroup *
//	    KeyStrideSlot + head * KeyStrideHead + word * KeyStrideDim)
//
// bytes from the block's beginning lies one of a row's KeyWords; of the values likewise. In f32,
// f16 and bf16 a word is an element. When a buffer is too small (ErrLimit) the sizes are those that
// are needed.
//
// With FormatKIVI4 and the like, the first SealedBlocks of an item are coded whole, and are not to
// be written: a head's keys lie SealedKeyOffset + head * SealedKeyHeadBytes bytes from the block's
// beginning. All that is not called sealed is about the blocks behind them, where new rows go. In
// other layers nothing is sealed.
type Tables struct {
	IndicesCount       uint64
	SlotPositionsCount uint64
	ItemCount          uint32
	TokenCount         uint32
	MaxBlocks          uint32 // the longest row of BlockTable
	Layout             Layout
	KeyFormat          Format
	ValueFormat        Format
	BlockTokens        uint32
	SlotGroup          uint32
	BlockStride        int64 // bytes per id
	BlockBytes         int64
	KeyOffset          int64 // bytes
	ValueOffset        int64
	KeyStrideGroup     int64 // strides in words
	KeyStrideSlot      int64
	KeyStrideHead      int64
	KeyStrideDim       int64
	ValueStrideGroup   int64
	ValueStrideSlot    int64
	ValueStrideHead    int64
	ValueStrideDim     int64
	Fence              uint64 // the step's number, for Pool.PassFence, also if it is cancelled
	KeyWords           uint32 // of a row
	ValueWords         uint32
	KeyWordBytes       uint32 // of a word
	ValueWordBytes     uint32

	SealedKeyFormat      Format
	SealedValueFormat    Format
	SealedBlockBytes     int64
	SealedKeyOffset      int64 // bytes
	SealedValueOffset    int64
	SealedKeyHeadBytes   int64
	SealedValueHeadBytes int64

	// Hashes of what the bytes of a row depend on besides the row. Rows of one pool can be read in
	// another where they are equal.
	KeyIdentity   uint64
	ValueIdentity uint64

	KVHead uint32 // with LayerLanePerHead, whose all this is; else 0

	// Where rows of sealed blocks lie that are not coded whole; 0 of those that are.
	SealedKeyWords         uint32
	SealedValueWords       uint32
	SealedKeyWordBytes     uint32
	SealedValueWordBytes   uint32
	SealedKeyStrideGroup   int64
	SealedKeyStrideSlot    int64
	SealedKeyStrideHead    int64
	SealedKeyStrideDim     int64
	SealedValueStrideGroup int64
	SealedValueStrideSlot  int64
	SealedValueStrideHead  int64
	SealedValueStrideDim   int64
}

// BlockMemory is the memory that exported ids address, lent for the length of a callback: the pool
// stays until it returns. The blocks belong to the step until its fence, so the callback must not
// end it before it is done with them.
type BlockMemory struct {
	base   unsafe.Pointer
	scales [4]unsafe.Pointer // of keys, of values; of sealed ones
	stride uint64
	listed listedBlocks
	over   atomic.Bool
	onCUDA bool // the host cannot read it
	once   sync.Once
	named  map[int32]uint64 // bytes of a block; made when the first is asked for
}

// Block is the memory of one of the blocks that the exported tables name, of SealedBlockBytes or,
// where it is not sealed, BlockBytes. Only the slots of the
// step's new tokens may be written: other sequences may read the rest. The slice must not be kept
// longer than the BlockMemory; nothing stops its use afterwards, when the memory is another's or
// gone.
func (m *BlockMemory) Block(id int32) ([]byte, error) {
	if m == nil || m.over.Load() {
		return nil, errMemoryReturned
	}
	if m.onCUDA {
		return nil, invalid("blocks of a pool on DeviceCUDA are in device memory: Base is an " +
			"address there")
	}
	m.once.Do(func() {
		m.named = m.listed.bytesOfEach()
	})
	bytes, known := m.named[id]
	if !known {
		return nil, invalid("id %d is none of the %d blocks that the tables of this layer and "+
			"step name", id, len(m.named))
	}
	offset := uint64(id) * m.stride
	return unsafe.Slice((*byte)(unsafe.Add(m.base, offset)), bytes), nil
}

// Base is the address of id 0, for kernels in C, in device memory of a pool there; nil once the
// callback has returned.
func (m *BlockMemory) Base() unsafe.Pointer { return m.lent(m.base) }

// Scales are the static scales, arrays of [KVHeads] floats; nil: the format has none.
func (m *BlockMemory) Scales() (keys, values unsafe.Pointer) {
	return m.lent(m.scales[0]), m.lent(m.scales[1])
}

// SealedScales are those of sealed blocks.
func (m *BlockMemory) SealedScales() (keys, values unsafe.Pointer) {
	return m.lent(m.scales[2]), m.lent(m.scales[3])
}

func (m *BlockMemory) lent(address unsafe.Pointer) unsafe.Pointer {
	if m.over.Load() {
		return nil
	}
	return address
}

// listedBlocks is the library's own list of a layer's blocks, whatever became of the caller's
// buffers.
type listedBlocks struct {
	ids                []int32 // of all items
	indptr             []int32 // [items + 1]
	sealed             []int32 // [items]
	bytes, sealedBytes uint64  // of a block
}

func (l *listedBlocks) bytesOfEach() map[int32]uint64 {
	named := make(map[int32]uint64, len(l.ids))
	for item, sealed := range l.sealed {
		for i, id := range l.ids[l.indptr[item]:l.indptr[item+1]] {
			named[id] = l.bytes
			if int32(i) < sealed {
				named[id] = l.sealedBytes
			}
		}
	}
	return named
}

func (s Step) listBlocks(step *openStep, layer, kvHead uint32, tables *Tables) (listedBlocks,
	error) {
	items := tables.ItemCount
	list := listedBlocks{
		ids:         make([]int32, tables.IndicesCount),
		indptr:      make([]int32, items+1),
		sealed:      make([]int32, items),
		bytes:       uint64(tables.BlockBytes),
		sealedBytes: uint64(tables.SealedBlockBytes),
	}
	exported := C.kvgo_step_export(step.handle, C.uint32_t(layer), C.uint32_t(kvHead), C.kvgo_buffers{
		indices:          int32Pointer(list.ids),
		indptr:           int32Pointer(list.indptr),
		sealed_blocks:    int32Pointer(list.sealed),
		indices_capacity: C.uint64_t(len(list.ids)),
		item_capacity:    C.uint64_t(items),
	})
	return list, s.pool.failure(exported.result)
}

// Export fills the buffers for one layer of a reserved step; the layer counts as written then.
// `use` is called with the memory that the ids address, and may be nil; its error is returned.
func (s Step) Export(layer uint32, buffers *TableBuffers, use func(*BlockMemory) error) (Tables,
	error) {
	return s.ExportHead(layer, 0, buffers, use)
}

// ExportHead is Export for one KV head of a layer with LayerLanePerHead: the tables are about that
// head alone, and the layer counts as written once all its heads are exported.
func (s Step) ExportHead(layer, kvHead uint32, buffers *TableBuffers,
	use func(*BlockMemory) error) (Tables, error) {
	native := buffers.native()
	step, err := s.enter()
	if err != nil {
		return Tables{}, err
	}
	exported := C.kvgo_step_export(step.handle, C.uint32_t(layer), C.uint32_t(kvHead), native)
	err = s.pool.failure(exported.result)
	tables := tablesOf(&exported.tables)
	var listed listedBlocks
	if err == nil && use != nil {
		listed, err = s.listBlocks(step, layer, kvHead, &tables)
	}
	lends := err == nil && use != nil && s.pool.stay() == nil
	s.pool.leave()
	if !lends {
		return tables, err
	}
	memory := &BlockMemory{
		base: exported.tables.base,
		scales: [4]unsafe.Pointer{unsafe.Pointer(exported.tables.key_scales),
			unsafe.Pointer(exported.tables.value_scales),
			unsafe.Pointer(exported.tables.sealed_key_scales),
			unsafe.Pointer(exported.tables.sealed_value_scales)},
		stride: uint64(tables.BlockStride),
		listed: listed,
		onCUDA: s.pool.onCUDA,
	}
	defer s.pool.quit()
	defer memory.over.Store(true)
	return tables, use(memory)
}

func int32Pointer(values []int32) *C.int32_t {
	if len(values) == 0 {
		return nil
	}
	return (*C.int32_t)(&values[0])
}

// least keeps the smallest capacity of the slices that are wanted, `more` of each apart.
func least(capacity *uint64, length, more int) {
	if length != 0 && uint64(length-more) < *capacity {
		*capacity = uint64(length - more)
	}
}

func (b *TableBuffers) native() C.kvgo_buffers {
	if b == nil {
		return C.kvgo_buffers{}
	}
	items, tokens := ^uint64(0), ^uint64(0)
	least(&items, len(b.Indptr), 1)
	least(&items, len(b.LastPageLen), 0)
	least(&items, len(b.QueryStart), 1)
	least(&items, len(b.KVLen), 0)
	least(&items, len(b.SlotIndptr), 1)
	least(&items, len(b.SealedBlocks), 0)
	least(&tokens, len(b.SlotMapping), 0)
	least(&tokens, len(b.Positions), 0)
	var slotMapping *C.int64_t
	if len(b.SlotMapping) != 0 {
		slotMapping = (*C.int64_t)(&b.SlotMapping[0])
	}
	return C.kvgo_buffers{
		block_table:             int32Pointer(b.BlockTable),
		block_table_stride:      C.uint64_t(b.BlockTableStride),
		block_table_capacity:    C.uint64_t(len(b.BlockTable)),
		indptr:                  int32Pointer(b.Indptr),
		indices:                 int32Pointer(b.Indices),
		last_page_len:           int32Pointer(b.LastPageLen),
		slot_mapping:            slotMapping,
		query_start:             int32Pointer(b.QueryStart),
		kv_len:                  int32Pointer(b.KVLen),
		positions:               int32Pointer(b.Positions),
		slot_positions:          int32Pointer(b.SlotPositions),
		slot_indptr:             int32Pointer(b.SlotIndptr),
		sealed_blocks:           int32Pointer(b.SealedBlocks),
		indices_capacity:        C.uint64_t(len(b.Indices)),
		item_capacity:           C.uint64_t(items),
		token_capacity:          C.uint64_t(tokens),
		slot_positions_capacity: C.uint64_t(len(b.SlotPositions)),
	}
}

func tablesOf(from *C.kv_tables) Tables {
	return Tables{
		IndicesCount:       uint64(from.indices_count),
		SlotPositionsCount: uint64(from.slot_positions_count),
		ItemCount:          uint32(from.item_count),
		TokenCount:         uint32(from.token_count),
		MaxBlocks:          uint32(from.max_blocks),
		Layout:             Layout(from.layout),
		KeyFormat:          Format(from.key_format),
		ValueFormat:        Format(from.value_format),
		BlockTokens:        uint32(from.block_tokens),
		SlotGroup:          uint32(from.slot_group),
		BlockStride:        int64(from.block_stride),
		BlockBytes:         int64(from.block_bytes),
		KeyOffset:          int64(from.key_offset),
		ValueOffset:        int64(from.value_offset),
		KeyStrideGroup:     int64(from.key_stride_group),
		KeyStrideSlot:      int64(from.key_stride_slot),
		KeyStrideHead:      int64(from.key_stride_head),
		KeyStrideDim:       int64(from.key_stride_dim),
		ValueStrideGroup:   int64(from.value_stride_group),
		ValueStrideSlot:    int64(from.value_stride_slot),
		ValueStrideHead:    int64(from.value_stride_head),
		ValueStrideDim:     int64(from.value_stride_dim),
		Fence:              uint64(from.fence),
		KeyWords:           uint32(from.key_words),
		ValueWords:         uint32(from.value_words),
		KeyWordBytes:       uint32(from.key_word_bytes),
		ValueWordBytes:     uint32(from.value_word_bytes),

		SealedKeyFormat:      Format(from.sealed_key_format),
		SealedValueFormat:    Format(from.sealed_value_format),
		SealedBlockBytes:     int64(from.sealed_block_bytes),
		SealedKeyOffset:      int64(from.sealed_key_offset),
		SealedValueOffset:    int64(from.sealed_value_offset),
		SealedKeyHeadBytes:   int64(from.sealed_key_head_bytes),
		SealedValueHeadBytes: int64(from.sealed_value_head_bytes),
		KeyIdentity:          uint64(from.key_identity),
		ValueIdentity:        uint64(from.value_identity),
		KVHead:               uint32(from.kv_head),

		SealedKeyWords:         uint32(from.sealed_key_words),
		SealedValueWords:       uint32(from.sealed_value_words),
		SealedKeyWordBytes:     uint32(from.sealed_key_word_bytes),
		SealedValueWordBytes:   uint32(from.sealed_value_word_bytes),
		SealedKeyStrideGroup:   int64(from.sealed_key_stride_group),
		SealedKeyStrideSlot:    int64(from.sealed_key_stride_slot),
		SealedKeyStrideHead:    int64(from.sealed_key_stride_head),
		SealedKeyStrideDim:     int64(from.sealed_key_stride_dim),
		SealedValueStrideGroup: int64(from.sealed_value_stride_group),
		SealedValueStrideSlot:  int64(from.sealed_value_stride_slot),
		SealedValueStrideHead:  int64(from.sealed_value_stride_head),
		SealedValueStrideDim:   int64(from.sealed_value_stride_dim),
	}
}
