// Layers whose older blocks are coded into a smaller format: what a step's report says of it, and
// where such rows lie.

package kvrt

import (
	"encoding/binary"
	"math"
	"testing"
)

func demotingModel() Model {
	model := fullModel(1, FormatDefault)
	model.Layers[0].DemotedKeyFormat = FormatInt8Token
	model.Layers[0].DemoteAfter = 20
	return model
}

// writeAll writes `count` tokens of a sequence as one step.
func writeAll(t *testing.T, pool *Pool, sequence Sequence, keys, values []float32,
	count int) StepReport {
	t.Helper()
	step := reserve(t, pool, sequence, uint32(count))
	must(t, step.Write(0, Float32(keys, count, kvHeads, keyDim),
		Float32(values, count, kvHeads, valueDim)))
	report, err := step.End()
	must(t, err)
	return report
}

func TestOldBlocksAreDemoted(t *testing.T) {
	config := smallConfig(PoolDebug)
	pool := newPool(t, config, demotingModel())
	sequence := newSequence(t, pool, nil)
	keys, values := random(70*kvHeads*keyDim, 801), random(70*kvHeads*valueDim, 802)
	report := writeAll(t, pool, sequence, keys, values, 70)
	// 50 tokens are old, in 3 full blocks. A number of f16 is 2 bytes; a code is one, and a row has
	// a scale of 4.
	const saved = 16 * kvHeads * (keyDim - 4 + valueDim - 4)
	if report.DemotedBlocks != 3 || report.DemotedBytes != 3*saved {
		t.Errorf("%+v, want 3 blocks and %d bytes", report, 3*saved)
	}
	step := reserve(t, pool, sequence, 1)
	defer step.Close()
	buffers := &TableBuffers{Indices: make([]int32, 5), SealedBlocks: []int32{9}}
	_, err := step.Export(0, buffers, func(memory *BlockMemory) error {
		if k, v := memory.SealedScales(); k != nil || v != nil {
			t.Errorf("scales %v and %v", k, v)
		}
		return nil
	})
	must(t, err)
	if buffers.SealedBlocks[0] != 3 {
		t.Errorf("%d blocks are sealed", buffers.SealedBlocks[0])
	}
	var tables Tables
	tables, err = step.Export(0, buffers, nil)
	must(t, err)
	if tables.KeyFormat != FormatF16 || tables.ValueFormat != FormatF16 ||
		tables.SealedKeyFormat != FormatInt8Token || tables.SealedValueFormat != FormatInt8Token ||
		tables.BlockBytes-tables.SealedBlockBytes != saved || tables.SealedKeyWords != 17 ||
		tables.SealedValueWords != 9 || tables.SealedKeyWordBytes != 4 ||
		tables.SealedValueWordBytes != 4 {
		t.Errorf("%+v", tables)
	}
	_, err = step.Export(0, nil, func(memory *BlockMemory) error {
		for i, want := range []int64{tables.SealedBlockBytes, tables.SealedBlockBytes,
			tables.SealedBlockBytes, tables.BlockBytes, tables.BlockBytes} {
			block, err := memory.Block(buffers.Indices[i])
			must(t, err)
			if int64(len(block)) != want {
				t.Errorf("block %d has %d bytes, want %d", i, len(block), want)
			}
		}
		block, err := memory.Block(buffers.Indices[1]) // token 21 is its sixth
		must(t, err)
		checkInt8Row(t, block[tables.SealedKeyOffset:], tables.SealedKeyStrideSlot*5+
			tables.SealedKeyStrideHead, tables.SealedKeyStrideDim,
			keys[(21*kvHeads+1)*keyDim:(21*kvHeads+2)*keyDim])
		checkInt8Row(t, block[tables.SealedValueOffset:], tables.SealedValueStrideSlot*5+
			tables.SealedValueStrideHead, tables.SealedValueStrideDim,
			values[(21*kvHeads+1)*valueDim:(21*kvHeads+2)*valueDim])
		return nil
	})
	must(t, err)
}

// checkInt8Row compares codes and scale, in words of 4 bytes, with what they were made of.
func checkInt8Row(t *testing.T, block []byte, first, stride int64, row []float32) {
	t.Helper()
	var record []byte
	for word := int64(0); word < int64(len(row))/4+1; word++ {
		at := 4 * (first + word*stride)
		record = append(record, block[at:at+4]...)
	}
	step := math.Float32frombits(binary.LittleEndian.Uint32(record[len(row):]))
	for i, exact := range row {
		found := float32(int8(record[i])) * step
		if off := math.Abs(float64(found - exact)); off > 0.51*float64(step)+2e-3 {
			t.Fatalf("channel %d is %v, was %v", i, found, exact)
		}
	}
}

func TestDemotedFormatsHaveStoragesOfTheirOwn(t *testing.T) {
	model := fullModel(1, FormatDefault)
	layer := &model.Layers[0]
	layer.DemotedKeyFormat, layer.DemotedValueFormat = FormatFP8E4M3, FormatInt4Token
	layer.DemoteAfter = 1000
	layer.DemotedKeyStorage = &Storage{Scales: []float32{0.5, 0.25}}
	layer.DemotedValueStorage = &Storage{Flags: StorageRotate}
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, nil)
	report := writeAll(t, pool, sequence, random(70*kvHeads*keyDim, 803),
		random(70*kvHeads*valueDim, 804), 70)
	if report.DemotedBlocks != 0 { // all are among the newest
		t.Errorf("%+v", report)
	}
	step := reserve(t, pool, sequence, 1)
	defer step.Close()
	tables, err := step.Export(0, nil, func(memory *BlockMemory) error {
		if k, v := memory.Scales(); k != nil || v != nil {
			t.Errorf("scales %v and %v", k, v)
		}
		k, v := memory.SealedScales()
		if v != nil || *(*[kvHeads]float32)(k) != [kvHeads]float32{0.5, 0.25} {
			t.Errorf("scales of sealed blocks: %v and %v", k, v)
		}
		return nil
	})
	must(t, err)
	if tables.SealedKeyFormat != FormatFP8E4M3 || tables.SealedValueFormat != FormatInt4Token ||
		tables.SealedKeyWords != keyDim/4 || tables.SealedValueWords != valueDim/8+1 {
		t.Errorf("%+v", tables)
	}
}

func TestWhatCannotBeDemoted(t *testing.T) {
	for words, kind := range map[string]struct {
		status Status
		change func(*Layer)
	}{
		"demote_after without demoted_key_format": {ErrInvalid,
			func(l *Layer) { l.DemotedKeyFormat = 0 }},
		"demoted_value_storage without demoted_key_format": {ErrInvalid, func(l *Layer) {
			l.DemotedKeyFormat, l.DemoteAfter, l.DemotedValueStorage = 0, 0, &Storage{}
		}},
		"demote_after is 1073741825": {ErrInvalid,
			func(l *Layer) { l.DemoteAfter = 1<<30 + 1 }},
		"key_format q8_0": {ErrUnsupported, func(l *Layer) { l.KeyFormat = FormatQ8_0 }},
		"demoted_value_format is kvarn4": {ErrUnsupported,
			func(l *Layer) { l.DemotedValueFormat = FormatKVARN4 }},
		"save nothing": {ErrInvalid, func(l *Layer) { l.DemotedKeyFormat = FormatF16 }},
		"demoted_key_storage: fp8_e5m2 needs static scales": {ErrInvalid,
			func(l *Layer) { l.DemotedKeyFormat = FormatFP8E5M2 }},
		"DemotedKeyStorage: ChannelMeans has 1 elements": {ErrInvalid, func(l *Layer) {
			l.DemotedKeyStorage = &Storage{ChannelMeans: []float32{1}}
		}},
		"DemotedValueStorage: ChannelScales has 1 elements": {ErrInvalid, func(l *Layer) {
			l.DemotedValueStorage = &Storage{ChannelScales: []float32{1}}
		}},
	} {
		model := demotingModel()
		kind.change(&model.Layers[0])
		_, err := NewPool(smallConfig(0), model)
		refused(t, err, kind.status, words)
	}
}
