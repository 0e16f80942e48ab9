// Attention against a softmax in double: formats, element types, strides, every option of a layer.

package kvrt

import (
	"fmt"
	"math"
	"testing"
)

// element is one element type, and how precise outputs stored in it are.
type element struct {
	name      string
	format    Format
	tolerance float64
	round     func(float32) float32
	tensor    func(values []float32, rows, heads, dim int) (Tensor, func() []float32)
}

var elements = []element{
	{"f32", FormatF32, 2e-6, func(v float32) float32 { return v },
		func(values []float32, rows, heads, dim int) (Tensor, func() []float32) {
			return Float32(values, rows, heads, dim), func() []float32 { return values }
		}},
	{"f16", FormatF16, 1.5e-3, func(v float32) float32 { return fromHalf(toHalf(v)) },
		bitsTensor(toHalf, fromHalf, Float16)},
	{"bf16", FormatBF16, 1e-2, func(v float32) float32 { return fromBrain(toBrain(v)) },
		bitsTensor(toBrain, fromBrain, BFloat16)},
}

func bitsTensor(to func(float32) uint16, from func(uint16) float32,
	view func([]uint16, int, int, int) Tensor) func([]float32, int, int, int) (Tensor,
	func() []float32) {
	return func(values []float32, rows, heads, dim int) (Tensor, func() []float32) {
		bits := make([]uint16, len(values))
		for i, value := range values {
			bits[i] = to(value)
		}
		return view(bits, rows, heads, dim), func() []float32 {
			read := make([]float32, len(bits))
			for i := range bits {
				read[i] = from(bits[i])
			}
			return read
		}
	}
}

// rounded is random numbers that the element type holds exactly.
func (e *element) rounded(count int, seed int64) []float32 {
	values := random(count, seed)
	for i := range values {
		values[i] = e.round(values[i])
	}
	return values
}

// TestAttention: two sequences, a prompt in chunks, then decode steps in one batch, in each element
// type for storage and tensors, through Write and Attend and through WriteAttend.
func TestAttention(t *testing.T) {
	for _, kind := range elements {
		for _, fused := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/fused=%v", kind.name, fused), func(t *testing.T) {
				testAttention(t, kind, fused)
			})
		}
	}
}

func testAttention(t *testing.T, kind element, fused bool) {
	model := fullModel(2, kind.format)
	model.Layers[1].ValueFormat = FormatF32 // values apart from keys
	pool := newPool(t, smallConfig(0), model)
	sequences := []Sequence{newSequence(t, pool, nil), newSequence(t, pool, nil)}
	var pasts [2][2]past // [layer][sequence]
	for l := range pasts {
		for s := range pasts[l] {
			pasts[l][s].layer = model.Layers[l]
		}
	}
	seen := [2]int{}
	for round, counts := range [][]uint32{{20, 3}, {1, 40}, {1, 1}, {5, 1}} {
		step, err := pool.BeginStep()
		must(t, err)
		infos := make([]AppendInfo, 2)
		tokens := make([]uint32, counts[0]+counts[1])
		must(t, step.AppendBatch(sequences, counts, tokens, infos))
		want := []AppendInfo{{uint64(seen[0]), 0, 0}, {uint64(seen[1]), 1, counts[0]}}
		if infos[0] != want[0] || infos[1] != want[1] {
			t.Fatalf("appended %v, want %v", infos, want)
		}
		_, err = step.Reserve(nil)
		must(t, err)
		rows := int(counts[0] + counts[1])
		for layer := range model.Layers {
			seed := int64(100*round + 10*layer)
			keys := kind.rounded(rows*kvHeads*keyDim, seed)
			values := kind.rounded(rows*kvHeads*valueDim, seed+1)
			queries := kind.rounded(rows*queryHeads*keyDim, seed+2)
			split := int(counts[0])
			pasts[layer][0].add(keys[:split*kvHeads*keyDim], values[:split*kvHeads*valueDim])
			pasts[layer][1].add(keys[split*kvHeads*keyDim:], values[split*kvHeads*valueDim:])

			k, _ := kind.tensor(keys, rows, kvHeads, keyDim)
			v, _ := kind.tensor(values, rows, kvHeads, valueDim)
			q, _ := kind.tensor(queries, rows, queryHeads, keyDim)
			o, read := kind.tensor(make([]float32, rows*queryHeads*valueDim), rows, queryHeads,
				valueDim)
			logs := make([]float32, rows*queryHeads)
			if fused {
				must(t, step.WriteAttend(uint32(layer), k, v, q, o, AttendOptions{LogSumExp: logs}))
			} else {
				must(t, step.Write(uint32(layer), k, v))
				must(t, step.Attend(uint32(layer), q, o, AttendOptions{LogSumExp: logs}))
			}
			out := read()
			for row := 0; row < rows; row++ {
				s := 0
				position := seen[0] + row
				if row >= split {
					s, position = 1, seen[1]+row-split
				}
				for head := 0; head < queryHeads; head++ {
					at := row*queryHeads + head
					want, lse := pasts[layer][s].attend(queries[at*keyDim:(at+1)*keyDim], head,
						position)
					what := fmt.Sprintf("round %d layer %d row %d head %d", round, layer, row, head)
					near(t, what, out[at*valueDim:(at+1)*valueDim], want, kind.tolerance)
					if math.Abs(float64(logs[at])-lse) > 1e-5 {
						t.Errorf("%s: log-sum-exp is %v, want %v", what, logs[at], lse)
					}
				}
			}
		}
		_, err = step.End()
		must(t, err)
		seen[0], seen[1] = seen[0]+int(counts[0]), seen[1]+int(counts[1])
	}
	must(t, pool.Check())
}

// TestEveryOptionOfALayer sets all that shapes attention, and compares with the definition.
func TestEveryOptionOfALayer(t *testing.T) {
	base := Layer{QueryHeads: queryHeads, KVHeads: kvHeads, KeyDim: keyDim, ValueDim: valueDim,
		KeyFormat: FormatF32}
	scaled, capped, sinks, alibi, window := base, base, base, base, base
	scaled.SoftmaxScale = 0.5
	capped.LogitSoftcap, capped.SoftmaxScale = 1.5, 1
	sinks.SinkLogits = []float32{0.5, -1, 2, 3}
	alibi.AlibiSlopes = []float32{0.5, 0.25, 0.125, 0.0625}
	window.Window, window.WindowSinks = 7, 2
	shared := base
	shared.Flags, shared.SharedLayer = LayerShared, 2
	model := Model{Layers: []Layer{scaled, capped, sinks, alibi, window, shared}}
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, nil)
	const rows = 30
	step := reserve(t, pool, sequence, rows)
	var stored []past
	for l, layer := range model.Layers {
		queries := random(rows*queryHeads*keyDim, int64(10*l+2))
		out := make([]float32, rows*queryHeads*valueDim)
		q := Float32(queries, rows, queryHeads, keyDim)
		o := Float32(out, rows, queryHeads, valueDim)
		reference := past{layer: layer}
		if layer.Flags&LayerShared != 0 {
			reference.keys, reference.values = stored[2].keys, stored[2].values
			must(t, step.Attend(uint32(l), q, o, AttendOptions{}))
		} else {
			keys := random(rows*kvHeads*keyDim, int64(10*l))
			values := random(rows*kvHeads*valueDim, int64(10*l+1))
			reference.add(keys, values)
			must(t, step.WriteAttend(uint32(l), Float32(keys, rows, kvHeads, keyDim),
				Float32(values, rows, kvHeads, valueDim), q, o, AttendOptions{}))
		}
		stored = append(stored, reference)
		for row := 0; row < rows; row++ {
			for head := 0; head < queryHeads; head++ {
				at := row*queryHeads + head
				want, _ := reference.attend(queries[at*keyDim:(at+1)*keyDim], head, row)
				near(t, fmt.Sprintf("layer %d row %d head %d", l, row, head),
					out[at*valueDim:(at+1)*valueDim], want, 5e-6)
			}
		}
	}
	_, err := step.End()
	must(t, err)
}

// TestStridedViews: keys, values and queries of a packed buffer, outputs with heads in reverse.
func TestStridedViews(t *testing.T) {
	const dim, rows = 64, 9
	const width = (queryHeads + 2*kvHeads) * dim
	layer := Layer{QueryHeads: queryHeads, KVHeads: kvHeads, KeyDim: dim, ValueDim: dim,
		KeyFormat: FormatF32}
	pool := newPool(t, smallConfig(0), Model{Layers: []Layer{layer}})
	step := reserve(t, pool, newSequence(t, pool, nil), rows)
	packed := random(rows*width, 1)
	part := func(offset, heads int) Tensor {
		return Float32(packed, rows, heads, dim).Strided(offset, width, dim, 1)
	}
	out := make([]float32, rows*queryHeads*dim)
	reversed := Float32(out, rows, queryHeads, dim).Strided((queryHeads-1)*dim, queryHeads*dim,
		-dim, 1)
	must(t, step.WriteAttend(0, part(queryHeads*dim, kvHeads), part((queryHeads+kvHeads)*dim,
		kvHeads), part(0, queryHeads), reversed, AttendOptions{}))
	reference := past{layer: layer}
	for row := 0; row < rows; row++ {
		line := packed[row*width:]
		reference.add(line[queryHeads*dim:(queryHeads+kvHeads)*dim],
			line[(queryHeads+kvHeads)*dim:width])
		for head := 0; head < queryHeads; head++ {
			want, _ := reference.attend(line[head*dim:(head+1)*dim], head, row)
			at := row*queryHeads + queryHeads - 1 - head
			near(t, fmt.Sprintf("row %d head %d", row, head), out[at*dim:(at+1)*dim], want, 5e-6)
		}
	}
	_, err := step.End()
	must(t, err)
}

// A slice inside a struct that holds Go pointers is handed to C all the same.
func TestTensorsInsideStructsWithPointers(t *testing.T) {
	type engine struct {
		name *string
		keys [kvHeads * keyDim]float32
		rest []float32
	}
	text := "engine"
	mine := &engine{name: &text, rest: make([]float32, kvHeads*valueDim)}
	pool := newPool(t, smallConfig(0), fullModel(1, FormatF32))
	step := reserve(t, pool, newSequence(t, pool, nil), 1)
	must(t, step.Write(0, Float32(mine.keys[:], 1, kvHeads, keyDim),
		Float32(mine.rest, 1, kvHeads, valueDim)))
	_, err := step.End()
	must(t, err)
}
