// Exported tables: against the caller's own bookkeeping, and the memory that they address.

package kvrt

import (
	"errors"
	"fmt"
	"reflect"
	"testing"
	"unsafe"
)

// tableBuffers has room for 4 items, 64 tokens and 32 blocks.
func tableBuffers() *TableBuffers {
	return &TableBuffers{BlockTable: make([]int32, 4*8), BlockTableStride: 8,
		Indptr: make([]int32, 5), Indices: make([]int32, 32), LastPageLen: make([]int32, 4),
		SlotMapping: make([]int64, 64), QueryStart: make([]int32, 5), KVLen: make([]int32, 4),
		Positions: make([]int32, 64), SlotPositions: make([]int32, kvHeads*256),
		SlotIndptr: make([]int32, 5)}
}

// Two sequences of 20 and 3 tokens get 2 and 30 more, in a pool of each layout; keys and values
// that Write stored are found where the tables say.
func TestExport(t *testing.T) {
	for _, layout := range []Layout{LayoutNative, LayoutHND, LayoutNHD} {
		testExport(t, layout)
	}
}

func testExport(t *testing.T, layout Layout) {
	model := fullModel(1, FormatF32)
	config := smallConfig(0)
	config.Layout = layout
	pool := newPool(t, config, model)
	one, two := newSequence(t, pool, nil), newSequence(t, pool, nil)
	grow(t, pool, model, one, 20)
	grow(t, pool, model, two, 3)
	step, err := pool.BeginStep()
	must(t, err)
	must(t, step.AppendBatch([]Sequence{one, two}, []uint32{2, 30}, nil, nil))
	_, err = step.Reserve(nil)
	must(t, err)
	keys := random(32*kvHeads*keyDim, 1)
	values := random(32*kvHeads*valueDim, 2)
	must(t, step.Write(0, Float32(keys, 32, kvHeads, keyDim),
		Float32(values, 32, kvHeads, valueDim)))

	buffers := tableBuffers()
	calls := 0
	var kept *BlockMemory
	marker := errors.New("from the callback")
	var tables Tables
	tables, err = step.Export(0, buffers, func(memory *BlockMemory) error {
		calls++
		kept = memory
		if memory.Base() == nil {
			t.Error("no base")
		}
		if k, v := memory.Scales(); k != nil || v != nil {
			t.Error("f32 has no scales")
		}
		return marker
	})
	if !errors.Is(err, marker) || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
	_, err = kept.Block(0)
	refused(t, err, ErrInvalid, "returned")
	if kept.Base() != nil {
		t.Error("the base outlives the callback")
	}
	if tables.ItemCount != 2 || tables.TokenCount != 32 || tables.MaxBlocks != 3 ||
		tables.IndicesCount != 5 || tables.SlotPositionsCount != kvHeads*55 ||
		tables.Layout != layout || tables.KeyFormat != FormatF32 ||
		tables.ValueFormat != FormatF32 || tables.BlockTokens != 16 ||
		tables.BlockBytes != 16*kvHeads*(keyDim+valueDim)*4 || tables.Fence == 0 ||
		tables.KeyWords != keyDim || tables.ValueWords != valueDim ||
		tables.KeyWordBytes != 4 || tables.ValueWordBytes != 4 {
		t.Errorf("%+v", tables)
	}
	same := func(name string, got, want any) {
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s is %v, want %v", name, got, want)
		}
	}
	same("Indptr", buffers.Indptr[:3], []int32{0, 2, 5})
	same("LastPageLen", buffers.LastPageLen[:2], []int32{6, 1})
	same("QueryStart", buffers.QueryStart[:3], []int32{0, 2, 32})
	same("KVLen", buffers.KVLen[:2], []int32{22, 33})
	same("SlotIndptr", buffers.SlotIndptr[:3], []int32{0, 22, 55})
	same("Positions", buffers.Positions[:3], []int32{20, 21, 3})
	same("BlockTable of 0", buffers.BlockTable[:2], buffers.Indices[:2])
	same("BlockTable of 1", buffers.BlockTable[8:11], buffers.Indices[2:5])
	same("unused BlockTable", buffers.BlockTable[2:8], []int32{-1, -1, -1, -1, -1, -1})
	for slot := int32(0); slot < 22; slot++ {
		same("SlotPositions", buffers.SlotPositions[slot], slot)
		same("SlotPositions of head 1", buffers.SlotPositions[55+slot], slot)
	}
	_, err = step.Export(0, nil, func(memory *BlockMemory) error {
		for row := 0; row < 32; row++ {
			checkStored(t, memory, &tables, buffers.SlotMapping[row],
				keys[row*kvHeads*keyDim:][:kvHeads*keyDim],
				values[row*kvHeads*valueDim:][:kvHeads*valueDim])
		}
		for _, id := range []int32{-1, 1<<31 - 1} {
			_, err := memory.Block(id)
			refused(t, err, ErrInvalid, fmt.Sprintf("id %d is none of the 5 blocks", id))
		}
		return nil
	})
	must(t, err)
	_, err = step.End()
	must(t, err)
}

// checkStored finds one token's keys and values by the formula of the header.
func checkStored(t *testing.T, memory *BlockMemory, tables *Tables, place int64, keys,
	values []float32) {
	t.Helper()
	tokens := int64(tables.BlockTokens)
	block, err := memory.Block(int32(place / tokens))
	must(t, err)
	slot, group := place%tokens, int64(tables.SlotGroup)
	at := func(offset, strideGroup, strideSlot, strideHead, strideDim, head, dim int64) float32 {
		element := slot/group*strideGroup + slot%group*strideSlot + head*strideHead + dim*strideDim
		return *(*float32)(unsafe.Pointer(&block[offset+4*element]))
	}
	for head := int64(0); head < kvHeads; head++ {
		for dim := int64(0); dim < keyDim; dim++ {
			got := at(tables.KeyOffset, tables.KeyStrideGroup, tables.KeyStrideSlot,
				tables.KeyStrideHead, tables.KeyStrideDim, head, dim)
			if want := keys[head*keyDim+dim]; got != want {
				t.Fatalf("key [%d, %d, %d] is %v, want %v", place, head, dim, got, want)
			}
		}
		for dim := int64(0); dim < valueDim; dim++ {
			got := at(tables.ValueOffset, tables.ValueStrideGroup, tables.ValueStrideSlot,
				tables.ValueStrideHead, tables.ValueStrideDim, head, dim)
			if want := values[head*valueDim+dim]; got != want {
				t.Fatalf("value [%d, %d, %d] is %v, want %v", place, head, dim, got, want)
			}
		}
	}
}

// The blocks of other sequences and other layers are out of reach, also of who writes their ids
// into the buffers.
func TestBlocksOfOthersAreNotLent(t *testing.T) {
	model := fullModel(2, FormatF32)
	pool := newPool(t, smallConfig(0), model)
	mine, other := newSequence(t, pool, nil), newSequence(t, pool, nil)
	grow(t, pool, model, mine, 20)
	grow(t, pool, model, other, 40)
	idsOf := func(sequence Sequence, layer uint32) []int32 {
		step := reserve(t, pool, sequence, 1)
		defer step.Close()
		buffers := tableBuffers()
		tables, err := step.Export(layer, buffers, nil)
		must(t, err)
		return buffers.Indices[:tables.IndicesCount]
	}
	foreign := append(idsOf(other, 0), idsOf(mine, 1)...)
	if len(foreign) != 3+2 {
		t.Fatalf("the others have the blocks %v", foreign)
	}
	step := reserve(t, pool, mine, 1)
	defer step.Close()
	buffers := tableBuffers()
	_, err := step.Export(0, buffers, func(memory *BlockMemory) error {
		for _, id := range buffers.Indices[:2] {
			block, err := memory.Block(id)
			must(t, err)
			if len(block) != 16*kvHeads*(keyDim+valueDim)*4 {
				t.Errorf("block %d has %d bytes", id, len(block))
			}
		}
		copy(buffers.Indices, foreign)
		copy(buffers.BlockTable, foreign)
		for _, id := range foreign {
			_, err := memory.Block(id)
			refused(t, err, ErrInvalid, "none of the 2 blocks")
		}
		return nil
	})
	must(t, err)
}

// Each buffer in turn is too small by one: ErrLimit, the needed sizes, and nothing written.
func TestExportIntoSmallBuffers(t *testing.T) {
	model := fullModel(1, FormatF16)
	pool := newPool(t, smallConfig(0), model)
	step := reserve(t, pool, newSequence(t, pool, nil), 40)
	defer step.Close()
	for name, shrink := range map[string]func(*TableBuffers){
		"block_table":    func(b *TableBuffers) { b.BlockTable = b.BlockTable[:7] },
		"stride":         func(b *TableBuffers) { b.BlockTableStride = 2 },
		"stride is huge": func(b *TableBuffers) { b.BlockTableStride = 1 << 63 },
		"indptr":         func(b *TableBuffers) { b.Indptr = b.Indptr[:1] },
		"indices":        func(b *TableBuffers) { b.Indices = b.Indices[:2] },
		"slot_mapping":   func(b *TableBuffers) { b.SlotMapping = b.SlotMapping[:39] },
		"query_start":    func(b *TableBuffers) { b.QueryStart = b.QueryStart[:1] },
		"positions":      func(b *TableBuffers) { b.Positions = b.Positions[:39] },
		"slot_indptr":    func(b *TableBuffers) { b.SlotIndptr = b.SlotIndptr[:1] },
		"slot_positions": func(b *TableBuffers) { b.SlotPositions = b.SlotPositions[:79] },
	} {
		t.Run(name, func(t *testing.T) {
			buffers := tableBuffers()
			buffers.LastPageLen[0], buffers.KVLen[0] = 77, 77
			shrink(buffers)
			tables, err := step.Export(0, buffers, func(*BlockMemory) error {
				t.Error("the callback runs without tables")
				return nil
			})
			refused(t, err, ErrLimit, "")
			if tables.IndicesCount != 3 || tables.SlotPositionsCount != 80 ||
				tables.ItemCount != 1 || tables.TokenCount != 40 || tables.MaxBlocks != 3 {
				t.Errorf("needed sizes: %+v", tables)
			}
			if buffers.LastPageLen[0] != 77 || buffers.KVLen[0] != 77 {
				t.Error("something was written")
			}
		})
	}
	_, err := step.Export(9, nil, nil)
	refused(t, err, ErrInvalid, "layer")
}

func TestFences(t *testing.T) {
	model := fullModel(1, FormatF16)
	pool := newPool(t, smallConfig(PoolHostFences), model)
	sequence := newSequence(t, pool, nil)
	step := reserve(t, pool, sequence, 40)
	tables, err := step.Export(0, nil, nil)
	must(t, err)
	report, err := step.End()
	must(t, err)
	if report.Fence != tables.Fence {
		t.Errorf("the step ended as %d, its tables say %d", report.Fence, tables.Fence)
	}
	must(t, pool.ReleaseSequence(sequence))
	if got := stats(t, pool); got.Parked != 3 || got.Pinned != 0 {
		t.Errorf("before the fence: %+v", got)
	}
	must(t, pool.PassFence(report.Fence))
	if got := stats(t, pool); got.Parked != 0 {
		t.Errorf("behind the fence: %+v", got)
	}
	refused(t, pool.PassFence(report.Fence+1), ErrInvalid, "fence")
	plain := newPool(t, smallConfig(0), model)
	refused(t, plain.PassFence(1), ErrInvalid, "HOST_FENCES")
}
