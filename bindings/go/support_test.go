// What the tests share: a small model, its pool, numbers, and attention from its definition.

package kvrt

import (
	"errors"
	"fmt"
	"math"
	"math/rand"
	"os"
	"strings"
	"testing"
)

// TestMain ends with the library's own count of what is alive.
func TestMain(m *testing.M) {
	code := m.Run()
	for _, kind := range []LiveKind{LivePools, LiveSequences, LiveSteps} {
		if left := LiveCount(kind); left != 0 {
			fmt.Printf("--- FAIL: %d objects of kind %d are alive at the end\n", left, kind)
			code = 1
		}
	}
	os.Exit(code)
}

const (
	queryHeads = 4
	kvHeads    = 2
	keyDim     = 64
	valueDim   = 32
)

// smallModel is a full layer, one with a window of 32 and 4 sinks, and one that shares layer 0's
// cache.
func smallModel() Model {
	layer := Layer{QueryHeads: queryHeads, KVHeads: kvHeads, KeyDim: keyDim, ValueDim: valueDim}
	window := layer
	window.Window, window.WindowSinks = 32, 4
	shared := layer
	shared.Flags, shared.SharedLayer = LayerShared, 0
	return Model{Layers: []Layer{layer, window, shared}}
}

// fullModel is `count` full layers in one format.
func fullModel(count int, format Format) Model {
	layers := make([]Layer, count)
	for i := range layers {
		layers[i] = Layer{QueryHeads: queryHeads, KVHeads: kvHeads, KeyDim: keyDim,
			ValueDim: valueDim, KeyFormat: format}
	}
	return Model{Layers: layers}
}

func smallConfig(flags PoolFlags) Config {
	return Config{Flags: flags, ArenaBytes: 4 << 20, MaxSequences: 8, MaxTokensPerSequence: 4096,
		MaxStepSequences: 4, MaxStepTokens: 1024, Threads: 1}
}

func newPool(t testing.TB, config Config, model Model) *Pool {
	t.Helper()
	pool, err := NewPool(config, model)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { must(t, pool.Close()) })
	return pool
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// refused checks an error's status and that its message is one line with `word` in it.
func refused(t testing.TB, err error, status Status, word string) {
	t.Helper()
	var failed *Error
	if !errors.As(err, &failed) || failed.Status != status {
		t.Errorf("got %v, want %v about %q", err, status, word)
		return
	}
	if !strings.Contains(failed.Message, word) || strings.Contains(failed.Message, "\n") {
		t.Errorf("%v: the message %q does not name %q", status, failed.Message, word)
	}
}

func newSequence(t testing.TB, pool *Pool, policy *Policy) Sequence {
	t.Helper()
	sequence, err := pool.CreateSequence(SequenceConfig{Policy: policy})
	must(t, err)
	return sequence
}

// reserve opens a step with `count` tokens of a sequence.
func reserve(t testing.TB, pool *Pool, sequence Sequence, count uint32) Step {
	t.Helper()
	step, err := pool.BeginStep()
	must(t, err)
	_, err = step.Append(sequence, count, nil)
	must(t, err)
	_, err = step.Reserve(nil)
	must(t, err)
	return step
}

// grow appends `count` tokens with random keys and values, and returns the keys of layer 0.
func grow(t testing.TB, pool *Pool, model Model, sequence Sequence, count int) []float32 {
	t.Helper()
	step := reserve(t, pool, sequence, uint32(count))
	var first []float32
	for i, layer := range model.Layers {
		if layer.Flags&LayerShared != 0 {
			continue
		}
		keys := random(count*kvHeads*keyDim, int64(1000*i+count))
		values := random(count*kvHeads*valueDim, int64(1000*i+count+1))
		must(t, step.Write(uint32(i), Float32(keys, count, kvHeads, keyDim),
			Float32(values, count, kvHeads, valueDim)))
		if i == 0 {
			first = keys
		}
	}
	_, err := step.End()
	must(t, err)
	return first
}

func info(t testing.TB, pool *Pool, sequence Sequence) SequenceInfo {
	t.Helper()
	read, err := pool.SequenceInfo(sequence)
	must(t, err)
	return read
}

func stats(t testing.TB, pool *Pool) PoolStats {
	t.Helper()
	read, err := pool.Stats()
	must(t, err)
	return read
}

// random is `count` numbers in [-1, 1).
func random(count int, seed int64) []float32 {
	source := rand.New(rand.NewSource(seed))
	out := make([]float32, count)
	for i := range out {
		out[i] = source.Float32()*2 - 1
	}
	return out
}

// toHalf is the nearest f16 of a number that is normal in f16, ties to even.
func toHalf(value float32) uint16 {
	bits := math.Float32bits(value)
	sign := uint16(bits >> 16 & 0x8000)
	magnitude := math.Abs(float64(value))
	if magnitude < 1.0/(1<<14) {
		return sign | uint16(math.RoundToEven(magnitude*(1<<24)))
	}
	rounded := bits&0x7fffffff + 0xfff + bits>>13&1
	return sign | uint16((rounded-(112<<23))>>13)
}

func fromHalf(bits uint16) float32 {
	exponent, mantissa := int(bits>>10&31), float64(bits&1023)
	value := math.Ldexp(mantissa, -24)
	if exponent != 0 {
		value = math.Ldexp(1024+mantissa, exponent-25)
	}
	if bits&0x8000 != 0 {
		value = -value
	}
	return float32(value)
}

func toBrain(value float32) uint16 {
	bits := math.Float32bits(value)
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

func fromBrain(bits uint16) float32 { return math.Float32frombits(uint32(bits) << 16) }

// past is what one sequence has stored in a layer: a row per position, [KV heads, dim].
type past struct {
	layer        Layer
	keys, values [][]float32
}

func (p *past) add(keys, values []float32) {
	width := int(p.layer.KVHeads * p.layer.KeyDim)
	depth := int(p.layer.KVHeads * p.layer.ValueDim)
	for row := 0; row*width < len(keys); row++ {
		p.keys = append(p.keys, keys[row*width:(row+1)*width])
		p.values = append(p.values, values[row*depth:(row+1)*depth])
	}
}

// attend is softmax in double from the definition: one query [key dim] of `head` at `position`.
func (p *past) attend(query []float32, head, position int) (out []float64, logSumExp float64) {
	layer := &p.layer
	scale := float64(layer.SoftmaxScale)
	if scale == 0 {
		scale = 1 / math.Sqrt(float64(layer.KeyDim))
	}
	group := head / int(layer.QueryHeads/layer.KVHeads)
	kDim, vDim := int(layer.KeyDim), int(layer.ValueDim)
	total := 0.0
	if layer.SinkLogits != nil {
		total = math.Exp(float64(layer.SinkLogits[head]))
	}
	out = make([]float64, vDim)
	for at := 0; at <= position; at++ {
		if w := int(layer.Window); w != 0 && at <= position-w && at >= int(layer.WindowSinks) {
			continue
		}
		logit := 0.0
		for d := 0; d < kDim; d++ {
			logit += float64(query[d]) * float64(p.keys[at][group*kDim+d])
		}
		logit *= scale
		if limit := float64(layer.LogitSoftcap); limit != 0 {
			logit = limit * math.Tanh(logit/limit)
		}
		if layer.AlibiSlopes != nil {
			logit += float64(layer.AlibiSlopes[head]) * float64(at-position)
		}
		weight := math.Exp(logit)
		total += weight
		for d := range out {
			out[d] += weight * float64(p.values[at][group*vDim+d])
		}
	}
	for d := range out {
		out[d] /= total
	}
	return out, math.Log(total)
}

// near compares one head's output with the reference.
func near(t *testing.T, what string, got []float32, want []float64, tolerance float64) {
	t.Helper()
	for d := range want {
		if !(math.Abs(float64(got[d])-want[d]) <= tolerance) {
			t.Errorf("%s: dimension %d is %v, want %v", what, d, got[d], want[d])
			return
		}
	}
}
