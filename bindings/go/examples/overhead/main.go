// Overhead times decode steps that do nothing but call the library: 32 layers, 64 sequences, one
// token each. It prints one line, the median of the timed steps.
package main

import (
	"fmt"
	"math"
	"os"
	"sort"
	"time"

	"kvrt"
)

const (
	queryHeads = 8
	kvHeads    = 2
	dim        = 64
)

// workload is what is measured; a test makes it small.
type workload struct {
	layers, sequences int
	prompt            int // tokens of each sequence
	stepTokens        int // of a prefill step, at most
	warmUp, timed     int // decode steps
	arenaBytes        uint64
}

func main() {
	full := workload{layers: 32, sequences: 64, prompt: 128, stepTokens: 8192, warmUp: 20,
		timed: 200, arenaBytes: 1 << 30}
	median, err := full.measure()
	if err != nil {
		fmt.Fprintln(os.Stderr, "overhead:", err)
		os.Exit(1)
	}
	fmt.Printf("overhead language=go layers=%d sequences=%d median_us=%.1f\n", full.layers,
		full.sequences, median)
}

// batch is the arguments of steps with so many tokens of each sequence.
type batch struct {
	sequences                  []kvrt.Sequence
	counts                     []uint32
	keys, values, queries, out kvrt.Tensor
}

func newBatch(sequences []kvrt.Sequence, tokens int) *batch {
	rows := len(sequences) * tokens
	tensor := func(heads int) kvrt.Tensor {
		data := make([]float32, rows*heads*dim)
		for i := range data {
			data[i] = float32(math.Sin(0.01 * float64(i)))
		}
		return kvrt.Float32(data, rows, heads, dim)
	}
	b := &batch{sequences: sequences, counts: make([]uint32, len(sequences)), keys: tensor(kvHeads),
		values: tensor(kvHeads), queries: tensor(queryHeads), out: tensor(queryHeads)}
	for i := range b.counts {
		b.counts[i] = uint32(tokens)
	}
	return b
}

// step is one forward pass.
func (b *batch) step(pool *kvrt.Pool, layers int) error {
	step, err := pool.BeginStep()
	if err != nil {
		return err
	}
	defer step.Close()
	if err := step.AppendBatch(b.sequences, b.counts, nil, nil); err != nil {
		return err
	}
	if _, err := step.Reserve(nil); err != nil {
		return err
	}
	for layer := 0; layer < layers; layer++ {
		err := step.WriteAttend(uint32(layer), b.keys, b.values, b.queries, b.out,
			kvrt.AttendOptions{})
		if err != nil {
			return err
		}
	}
	if err := step.AcceptBatch(b.sequences, b.counts); err != nil {
		return err
	}
	_, err = step.End()
	return err
}

// measure returns the median of the timed steps in microseconds.
func (w workload) measure() (float64, error) {
	layers := make([]kvrt.Layer, w.layers)
	for i := range layers {
		layers[i] = kvrt.Layer{QueryHeads: queryHeads, KVHeads: kvHeads, KeyDim: dim,
			KeyFormat: kvrt.FormatF16}
	}
	pool, err := kvrt.NewPool(kvrt.Config{ArenaBytes: w.arenaBytes, BlockTokens: 16,
		MaxSequences: uint32(w.sequences), MaxStepTokens: uint32(w.stepTokens), Threads: 1},
		kvrt.Model{Layers: layers})
	if err != nil {
		return 0, err
	}
	defer pool.Close()
	sequences := make([]kvrt.Sequence, w.sequences)
	for i := range sequences {
		if sequences[i], err = pool.CreateSequence(kvrt.SequenceConfig{}); err != nil {
			return 0, err
		}
	}
	chunk := w.stepTokens / w.sequences
	if chunk > w.prompt {
		chunk = w.prompt
	}
	for done := 0; done < w.prompt; done += chunk {
		if chunk > w.prompt-done {
			chunk = w.prompt - done
		}
		if err := newBatch(sequences, chunk).step(pool, w.layers); err != nil {
			return 0, err
		}
	}
	decode := newBatch(sequences, 1)
	times := make([]float64, w.timed)
	for i := -w.warmUp; i < w.timed; i++ {
		start := time.Now()
		if err := decode.step(pool, w.layers); err != nil {
			return 0, err
		}
		if i >= 0 {
			times[i] = float64(time.Since(start).Nanoseconds()) / 1000
		}
	}
	sort.Float64s(times)
	return (times[(w.timed-1)/2] + times[w.timed/2]) / 2, nil
}
