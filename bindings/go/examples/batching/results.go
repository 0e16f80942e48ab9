// What came out of a replay, compared with the recording, and the table of it.

package main

import (
	"encoding/binary"
	"fmt"
	"hash"
	"hash/fnv"
	"io"
	"math"

	"kvrt"
)

type requestResult struct {
	rows, dropped  uint64
	seen, retained uint64
	rounds, blocks uint64
	checksum       hash.Hash64 // of the bits of every output row
	equal          bool
}

type results struct {
	expected *recording
	requests []requestResult
	steps    uint64
	totals   kvrt.PoolStats
}

func newResults(expected *recording) *results {
	r := &results{expected: expected, requests: make([]requestResult, len(expected.requests))}
	for i := range r.requests {
		r.requests[i] = requestResult{checksum: fnv.New64a(), equal: true}
	}
	return r
}

// near allows for the kernels of another machine, which may round otherwise. A NaN is near nothing.
func near(found, expected float32) bool {
	distance := math.Abs(float64(found) - float64(expected))
	return distance <= 1e-5+1e-5*math.Abs(float64(expected))
}

// compare takes the outputs of all rows of a turn in a layer.
func (r *results) compare(index int, of *turn, layer int, outputs []float32) {
	result := &r.requests[index]
	if layer == 0 {
		result.rows += uint64(of.rows())
		result.dropped += uint64(of.rows()) - uint64(of.accepted)
	}
	expected := of.layers[layer].outputs
	var bits [4]byte
	for i, value := range outputs[len(outputs)-len(expected):] {
		binary.LittleEndian.PutUint32(bits[:], math.Float32bits(value))
		result.checksum.Write(bits[:])
		result.equal = result.equal && near(value, expected[i])
	}
}

// finish looks at a sequence before it is released.
func (r *results) finish(index int, pool *kvrt.Pool, sequence kvrt.Sequence) error {
	expected, result := &r.expected.requests[index], &r.requests[index]
	info, err := pool.SequenceInfo(sequence)
	if err != nil {
		return err
	}
	result.seen, result.blocks = info.Accepted, info.Blocks
	result.rounds = uint64(info.Compactions)
	result.equal = result.equal && result.seen == uint64(expected.seen) &&
		result.rounds == uint64(expected.rounds)
	for layer, retained := range expected.retained {
		held, err := pool.LayerInfo(sequence, uint32(layer))
		if err != nil {
			return err
		}
		result.retained += held.Retained
		result.equal = result.equal && held.Retained == uint64(retained)
	}
	return nil
}

func (r *results) end(pool *kvrt.Pool) (err error) {
	r.totals, err = pool.Stats()
	return err
}

func (r *results) allEqual() bool {
	for i := range r.requests {
		if !r.requests[i].equal {
			return false
		}
	}
	return true
}

func (r *results) print(to io.Writer) error {
	text := "request prompt  rows dropped  seen retained rounds blocks checksum         outputs\n"
	for i := range r.requests {
		result := &r.requests[i]
		outputs := "equal"
		if !result.equal {
			outputs = "DIFFERENT"
		}
		text += fmt.Sprintf("%7d %6d %5d %7d %5d %8d %6d %6d %016x %s\n", i,
			r.expected.requests[i].promptTokens, result.rows, result.dropped, result.seen,
			result.retained, result.rounds, result.blocks, result.checksum.Sum64(), outputs)
	}
	text += fmt.Sprintf("steps %d, tokens %d, rounds %d, blocks at most %d, returned %d, "+
		"bytes returned %d\n", r.steps, r.totals.TokensAccepted, r.totals.Compactions,
		r.totals.PeakLiveBlocks, r.totals.BlocksReturned, r.totals.BytesReturned)
	_, err := io.WriteString(to, text)
	return err
}
