// Storage formats: what attention still knows of what was stored, and what did not fit.

package kvrt

import (
	"fmt"
	"math"
	"reflect"
	"testing"
)

// The bytes of a row of 64 keys and of 32 values: codes, scales, and what fills up to 4 bytes.
var quantised = []struct {
	keys, values         Format
	storage              *Storage
	keyBytes, valueBytes uint32
	tolerance            float64
}{
	{FormatInt8Token, FormatInt8Token, nil, 64 + 4, 32 + 4, 0.01},
	{FormatQ4_0, FormatQ4_0, nil, 2 * 18, 18 + 2, 0.15},
	{FormatInt8Token, FormatQ4_0, nil, 64 + 4, 18 + 2, 0.15},
	{FormatQ4_0, FormatQ4_0, &Storage{Flags: StorageRotate}, 2 * 18, 18 + 2, 0.25},
	{FormatFP8E4M3, FormatFP8E4M3, &Storage{Flags: StorageScaleOne}, 64, 32, 0.08},
}

// Short windows and, but for the nearly lossless one, both ends of the model are spared.
func TestPresets(t *testing.T) {
	rotated := &Storage{Flags: StorageRotate}
	for preset, want := range map[Preset][2]Format{
		PresetNearLossless: {FormatInt8Token, FormatInt8Token},
		PresetBalanced:     {FormatInt8Token, FormatInt4Token},
		PresetSmallest:     {FormatInt4Token, FormatInt4Token},
	} {
		model := fullModel(8, FormatDefault)
		model.Layers[0].KeyFormat = FormatBF16
		model.Layers[3].Window = 1024
		model.Layers[4].KeyStorage = &Storage{Scales: []float32{2}}
		model.Layers[7].Flags, model.Layers[7].SharedLayer = LayerShared, 4
		model.Layers[7].ValueStorage = &Storage{Scales: []float32{3}}
		wanted := append([]Layer(nil), model.Layers...)
		for i := range wanted {
			layer := &wanted[i]
			end := i < 2 || i == 5 || i == 6 // 7 stores nothing
			switch {
			case i == 7:
			case i == 3 || end && preset != PresetNearLossless:
				layer.ValueFormat = layer.KeyFormat
			default:
				layer.KeyFormat, layer.ValueFormat = want[0], want[1]
				layer.KeyStorage, layer.ValueStorage = rotated, rotated
			}
		}
		given := append([]Layer(nil), model.Layers...)
		got, err := model.WithPreset(preset)
		must(t, err)
		if !reflect.DeepEqual(got.Layers, wanted) {
			t.Errorf("preset %d: %+v, want %+v", preset, got.Layers, wanted)
		}
		if !reflect.DeepEqual(model.Layers, given) {
			t.Errorf("preset %d has changed the model that it was asked of", preset)
		}
		must(t, newPool(t, smallConfig(0), got).Check())
	}
	_, err := fullModel(1, FormatDefault).WithPreset(4)
	refused(t, err, ErrUnsupported, "preset 4")
	_, err = Model{}.WithPreset(PresetBalanced)
	refused(t, err, ErrInvalid, "layer_count")
}

// Attention over keys and values that are stored in fewer bits is near that over the exact ones.
func TestAttentionOverQuantisedStorage(t *testing.T) {
	for _, kind := range quantised {
		t.Run(fmt.Sprintf("%d/%d/%v", kind.keys, kind.values, kind.storage), func(t *testing.T) {
			layer := Layer{QueryHeads: queryHeads, KVHeads: kvHeads, KeyDim: keyDim,
				ValueDim: valueDim, KeyFormat: kind.keys, ValueFormat: kind.values,
				KeyStorage: kind.storage, ValueStorage: kind.storage}
			pool := newPool(t, smallConfig(0), Model{Layers: []Layer{layer}})
			const rows = 40
			step := reserve(t, pool, newSequence(t, pool, nil), rows)
			keys, values := random(rows*kvHeads*keyDim, 1), random(rows*kvHeads*valueDim, 2)
			queries := random(rows*queryHeads*keyDim, 3)
			out := make([]float32, rows*queryHeads*valueDim)
			must(t, step.WriteAttend(0, Float32(keys, rows, kvHeads, keyDim),
				Float32(values, rows, kvHeads, valueDim),
				Float32(queries, rows, queryHeads, keyDim),
				Float32(out, rows, queryHeads, valueDim), AttendOptions{}))
			reference := past{layer: layer}
			reference.add(keys, values)
			worst := 0.0
			for at := 0; at < rows*queryHeads; at++ {
				want, _ := reference.attend(queries[at*keyDim:(at+1)*keyDim], at%queryHeads,
					at/queryHeads)
				got := out[at*valueDim : (at+1)*valueDim]
				near(t, fmt.Sprintf("row %d head %d", at/queryHeads, at%queryHeads), got, want,
					kind.tolerance)
				for d := range want {
					worst = math.Max(worst, math.Abs(float64(got[d])-want[d]))
				}
			}
			if worst < 1e-4 {
				t.Errorf("an error of at most %v: this was not stored in 8 or 4 bits", worst)
			}
			tables, err := step.Export(0, nil, nil)
			must(t, err)
			if tables.KeyFormat != kind.keys || tables.ValueFormat != kind.values ||
				tables.KeyWords*tables.KeyWordBytes != kind.keyBytes ||
				tables.ValueWords*tables.ValueWordBytes != kind.valueBytes {
				t.Errorf("%+v", tables)
			}
			_, err = step.End()
			must(t, err)
			must(t, pool.Check())
		})
	}
}

// A sequence of one token attends to exactly its values, so that the output shows what static
// scales made of them: e4m3 ends at 448 times the scale.
func TestStaticScalesSaturateAndAreCounted(t *testing.T) {
	scales := []float32{0.5, 0.25}
	plain := Layer{QueryHeads: queryHeads, KVHeads: kvHeads, KeyDim: keyDim, ValueDim: valueDim}
	scaled := plain
	scaled.KeyFormat = FormatFP8E4M3
	scaled.KeyStorage = &Storage{Scales: []float32{1}}
	scaled.ValueStorage = &Storage{Scales: scales}
	shared := plain
	shared.Flags, shared.SharedLayer = LayerShared, 1
	pool := newPool(t, smallConfig(0), Model{Layers: []Layer{plain, scaled, shared}})
	copy(scales, []float32{7, 7}) // the library has its copy

	step := reserve(t, pool, newSequence(t, pool, nil), 1)
	keys, values := make([]float32, kvHeads*keyDim), make([]float32, kvHeads*valueDim)
	for i := range values {
		values[i] = 1.5
	}
	keys[3], keys[keyDim+1], keys[keyDim+2] = 500, -500, 1e6
	values[0], values[1], values[2] = 104, 300, -300
	values[valueDim], values[valueDim+1] = 200, 112
	out := make([]float32, queryHeads*valueDim)
	q := Float32(make([]float32, queryHeads*keyDim), 1, queryHeads, keyDim)
	o := Float32(out, 1, queryHeads, valueDim)
	k, v := Float32(keys, 1, kvHeads, keyDim), Float32(values, 1, kvHeads, valueDim)
	must(t, step.WriteAttend(0, k, v, q, o, AttendOptions{}))
	must(t, step.WriteAttend(1, k, v, q, o, AttendOptions{}))
	must(t, step.Attend(2, q, o, AttendOptions{}))
	want := [2][4]float32{{104, 224, -224, 1.5}, {112, 112, 1.5, 1.5}}
	for head := 0; head < queryHeads; head++ {
		got := out[head*valueDim:][:4]
		if wanted := want[head/2][:]; !reflect.DeepEqual(got, wanted) {
			t.Errorf("head %d is %v, want %v", head, got, wanted)
		}
	}
	for layer, wanted := range []LayerStats{
		{SaturatedKeys: []uint64{0, 0}, SaturatedValues: []uint64{0, 0}},
		{SaturatedKeys: []uint64{1, 2}, SaturatedValues: []uint64{2, 1}},
		{SaturatedKeys: []uint64{1, 2}, SaturatedValues: []uint64{2, 1}}} {
		got, err := pool.LayerStats(uint32(layer))
		must(t, err)
		if !reflect.DeepEqual(got, wanted) {
			t.Errorf("layer %d: %+v, want %+v", layer, got, wanted)
		}
	}
	_, err := pool.LayerStats(3)
	refused(t, err, ErrInvalid, "layer 3")
	_, err = step.Export(1, nil, func(memory *BlockMemory) error {
		keyScales, valueScales := memory.Scales()
		if a, b := *(*[kvHeads]float32)(keyScales), *(*[kvHeads]float32)(valueScales); a !=
			[kvHeads]float32{1, 1} || b != [kvHeads]float32{0.5, 0.25} {
			t.Errorf("scales %v and %v", a, b)
		}
		return nil
	})
	must(t, err)
	_, err = step.End()
	must(t, err)
}
