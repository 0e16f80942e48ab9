// Formats whose rows share numbers over a block: sealed blocks and the raw ones behind them, what
// attention still knows, rows that are coded again.

package kvrt

import (
	"fmt"
	"math"
	"reflect"
	"testing"
)

const sealedTokens = 64 // of a block

func sealedPool(t *testing.T, keys, values Format) (*Pool, Model) {
	t.Helper()
	model := fullModel(1, keys)
	model.Layers[0].ValueFormat = values
	config := smallConfig(PoolDebug)
	config.BlockTokens = sealedTokens
	return newPool(t, config, model), model
}

// After 70 tokens one block is sealed, and the next is read together with the raw one.
func TestAttentionOverSealedBlocks(t *testing.T) {
	for _, kind := range []struct {
		keys, values Format
		tolerance    float64
	}{
		{FormatKIVI4, FormatKIVI4, 0.2},
		{FormatKVARN4, FormatKVARN4, 0.2},
		{FormatTurbo4, FormatTurbo4, 0.2},
		{FormatKIVI4, FormatF16, 0.1},
		{FormatKIVI2, FormatKIVI2, 0.6},
		{FormatKVARN2, FormatKVARN2, 0.6},
		{FormatTurbo3, FormatTurbo3, 0.4},
	} {
		t.Run(fmt.Sprintf("%d/%d", kind.keys, kind.values), func(t *testing.T) {
			pool, model := sealedPool(t, kind.keys, kind.values)
			sequence := newSequence(t, pool, nil)
			reference := past{layer: model.Layers[0]}
			position, worst := 0, 0.0
			for _, rows := range []int{70, 1, 79} {
				keys := random(rows*kvHeads*keyDim, int64(10*rows))
				values := random(rows*kvHeads*valueDim, int64(10*rows+1))
				queries := random(rows*queryHeads*keyDim, int64(10*rows+2))
				out := make([]float32, rows*queryHeads*valueDim)
				reference.add(keys, values)
				step := reserve(t, pool, sequence, uint32(rows))
				must(t, step.WriteAttend(0, Float32(keys, rows, kvHeads, keyDim),
					Float32(values, rows, kvHeads, valueDim),
					Float32(queries, rows, queryHeads, keyDim),
					Float32(out, rows, queryHeads, valueDim), AttendOptions{}))
				_, err := step.End()
				must(t, err)
				for at := 0; at < rows*queryHeads; at++ {
					want, _ := reference.attend(queries[at*keyDim:(at+1)*keyDim], at%queryHeads,
						position+at/queryHeads)
					got := out[at*valueDim : (at+1)*valueDim]
					near(t, fmt.Sprintf("row %d head %d", position+at/queryHeads, at%queryHeads),
						got, want, kind.tolerance)
					if position > 0 { // behind a sealed block
						worst = math.Max(worst, math.Abs(float64(got[0])-want[0]))
					}
				}
				position += rows
			}
			if worst < 1e-3 {
				t.Errorf("an error of at most %v: this was not stored in few bits", worst)
			}
			must(t, pool.Check())
		})
	}
}

// Rows of 64 and 32 channels. Sealed keys of a head: 4 bits, and 2 x 2 bytes for each channel of 32
// tokens. Values: 16 + 4 bytes a row, also when they are raw. Raw keys: f16.
func TestSealedBlocks(t *testing.T) {
	const keyTile, valueRows = sealedTokens*keyDim/2 + 2*keyDim*4, sealedTokens * (16 + 4)
	pool, model := sealedPool(t, FormatKIVI4, FormatKIVI4)
	long, short := newSequence(t, pool, nil), newSequence(t, pool, nil)
	keys := grow(t, pool, model, long, 70)
	grow(t, pool, model, short, 10)
	step, err := pool.BeginStep()
	must(t, err)
	defer step.Close()
	must(t, step.AppendBatch([]Sequence{long, short}, []uint32{1, 1}, nil, nil))
	_, err = step.Reserve(nil)
	must(t, err)
	buffers := tableBuffers()
	buffers.SealedBlocks = []int32{9, 9, 9}
	tables, err := step.Export(0, buffers, nil)
	must(t, err)
	if want := []int32{1, 0, 9}; !reflect.DeepEqual(buffers.SealedBlocks, want) {
		t.Errorf("SealedBlocks is %v, want %v", buffers.SealedBlocks, want)
	}
	if tables.SealedKeyFormat != FormatKIVI4 || tables.SealedValueFormat != FormatKIVI4 ||
		tables.KeyFormat != FormatF16 || tables.ValueFormat != FormatKIVI4 ||
		tables.SealedBlockBytes != kvHeads*(keyTile+valueRows) ||
		tables.BlockBytes != kvHeads*sealedTokens*(2*keyDim+16+4) ||
		tables.SealedValueOffset-tables.SealedKeyOffset != keyTile || // by head in this layout
		tables.SealedKeyHeadBytes != keyTile+valueRows ||
		tables.SealedValueHeadBytes != keyTile+valueRows {
		t.Errorf("%+v", tables)
	}
	_, err = step.Export(0, nil, func(memory *BlockMemory) error { // no buffer tells which
		for i, want := range []int64{tables.SealedBlockBytes, tables.BlockBytes,
			tables.BlockBytes} {
			block, err := memory.Block(buffers.Indices[i])
			must(t, err)
			if int64(len(block)) != want || cap(block) != len(block) {
				t.Errorf("block %d has %d bytes, want %d", i, len(block), want)
			}
		}
		raw, err := memory.Block(buffers.Indices[1]) // token 65 is its second
		must(t, err)
		for dim := int64(0); dim < keyDim; dim++ {
			at := tables.KeyOffset + 2*(tables.KeyStrideSlot+tables.KeyStrideHead+
				dim*tables.KeyStrideDim)
			got := fromHalf(uint16(raw[at]) | uint16(raw[at+1])<<8)
			if want := fromHalf(toHalf(keys[(65*kvHeads+1)*keyDim+int(dim)])); got != want {
				t.Fatalf("key %d is %v, want %v", dim, got, want)
			}
		}
		return nil
	})
	must(t, err)
	small := &TableBuffers{SealedBlocks: []int32{9}}
	_, err = step.Export(0, small, nil)
	refused(t, err, ErrLimit, "item_capacity holds 1")
	if small.SealedBlocks[0] != 9 {
		t.Error("something was written")
	}
}

func TestNothingIsSealedInOtherLayers(t *testing.T) {
	pool, model := sealedPool(t, FormatQ8_0, FormatQ8_0)
	sequence := newSequence(t, pool, nil)
	grow(t, pool, model, sequence, 70)
	step := reserve(t, pool, sequence, 1)
	defer step.Close()
	buffers := &TableBuffers{SealedBlocks: []int32{9}}
	tables, err := step.Export(0, buffers, nil)
	must(t, err)
	if buffers.SealedBlocks[0] != 0 || tables.SealedBlockBytes != tables.BlockBytes ||
		tables.SealedKeyFormat != FormatQ8_0 || tables.SealedValueFormat != FormatQ8_0 {
		t.Errorf("%v, %+v", buffers.SealedBlocks, tables)
	}
}

// Of 200 tokens 0 to 3 and 134 to 199 are kept. Three blocks were sealed, of 192 tokens: 4 + 58
// survivors leave one, and their keys go into another, which the first 64 survivors fill.
func TestRecodedRows(t *testing.T) {
	pool, model := sealedPool(t, FormatKIVI4, FormatKIVI4)
	sequence := newSequence(t, pool, nil)
	grow(t, pool, model, sequence, 200)
	before, err := pool.LayerStats(0)
	must(t, err)
	if before.RecodedRows != 0 || before.RecodingError != 0 {
		t.Errorf("before: %+v", before)
	}
	report, err := pool.Compress(sequence, &Policy{Scorer: ScorerStreaming, Budget: 70, Sinks: 4,
		Recent: 66})
	must(t, err)
	if report.TokensAfter != kvHeads*70 || report.RecodedRows != kvHeads*62 ||
		!(report.RecodingError > 1e-4 && report.RecodingError < 0.2) {
		t.Errorf("%+v", report)
	}
	after, err := pool.LayerStats(0)
	must(t, err)
	if after.RecodedRows != report.RecodedRows ||
		math.Abs(after.RecodingError-report.RecodingError) > 1e-12 {
		t.Errorf("%+v, the report says %+v", after, report)
	}
}

func TestBlocksHoldWholeGroupsOfTokens(t *testing.T) {
	for format, multiple := range map[Format]uint32{FormatKIVI4: 32, FormatKIVI2: 32,
		FormatKVARN4: 64, FormatKVARN2: 64} {
		for _, tokens := range []uint32{16, 32, 64, 128} {
			config := smallConfig(0)
			config.BlockTokens = tokens
			pool, err := NewPool(config, fullModel(1, format))
			if tokens%multiple == 0 {
				must(t, err)
				must(t, pool.Close())
			} else {
				refused(t, err, ErrUnsupported, fmt.Sprintf("block_tokens is %d", tokens))
			}
		}
	}
}

func TestIdentities(t *testing.T) {
	identities := func(keys, values Format) (uint64, uint64) {
		pool, _ := sealedPool(t, keys, values)
		step := reserve(t, pool, newSequence(t, pool, nil), 1)
		defer step.Close()
		tables, err := step.Export(0, nil, nil)
		must(t, err)
		return tables.KeyIdentity, tables.ValueIdentity
	}
	keys, values := identities(FormatKIVI4, FormatQ8_0)
	for _, kind := range []struct {
		keys, values         Format
		sameKeys, sameValues bool
	}{{FormatKIVI4, FormatQ8_0, true, true}, {FormatKIVI2, FormatQ8_0, false, true},
		{FormatKIVI4, FormatQ4_0, true, false}} {
		k, v := identities(kind.keys, kind.values)
		if (k == keys) != kind.sameKeys || (v == values) != kind.sameValues {
			t.Errorf("%+v: %x and %x, %x and %x", kind, k, keys, v, values)
		}
	}
}
