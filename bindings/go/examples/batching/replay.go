// The engine's loop: admits requests, runs steps over mixed batches, releases what is done.

package main

import (
	"errors"
	"fmt"

	"kvrt"
)

// limits are what the command line sets.
type limits struct {
	slots    uint // sequences that run at once
	arenaMiB uint
	threads  uint
}

// runningRequest is a request that has a sequence.
type runningRequest struct {
	index    int
	sequence kvrt.Sequence
	nextTurn int
}

// replay is an engine whose model is a recording. The slices are one step's, used again by the
// next: the items of the step in the order of their rows.
type replay struct {
	recorded *recording
	found    *results
	pool     *kvrt.Pool
	slots    int
	waiting  int              // the next request to be admitted
	running  []runningRequest // oldest first

	sequences             []kvrt.Sequence
	counts, accepted      []uint32
	tokens                []uint32
	queries, keys, values []uint16
	outputs               []float32
}

// run replays a whole recording.
func run(recorded *recording, given limits) (*results, error) {
	r := &replay{recorded: recorded, found: newResults(recorded)}
	r.slots = len(recorded.requests)
	if uint(r.slots) > given.slots {
		r.slots = int(given.slots)
	}
	pool, err := kvrt.NewPool(r.config(given), r.model())
	if err != nil {
		return nil, err
	}
	r.pool = pool
	err = r.replayAll()
	if closed := pool.Close(); err == nil {
		err = closed
	}
	return r.found, err
}

func (r *replay) config(given limits) kvrt.Config {
	mostRows, mostTokens := 0, 0
	for _, request := range r.recorded.requests {
		tokens := 0
		for _, turn := range request.turns {
			if turn.rows() > mostRows {
				mostRows = turn.rows()
			}
			tokens += turn.rows()
		}
		if tokens > mostTokens {
			mostTokens = tokens
		}
	}
	return kvrt.Config{
		ArenaBytes:           uint64(given.arenaMiB) << 20,
		BlockTokens:          16,
		MaxSequences:         uint32(r.slots),
		MaxTokensPerSequence: uint32(mostTokens),
		MaxStepTokens:        uint32(r.slots * mostRows),
		Threads:              uint32(given.threads),
	}
}

func (r *replay) model() kvrt.Model {
	layer := kvrt.Layer{
		QueryHeads: r.recorded.QueryHeads,
		KVHeads:    r.recorded.KVHeads,
		KeyDim:     r.recorded.HeadDim,
		KeyFormat:  kvrt.Format(r.recorded.Format),
	}
	if r.recorded.RopeDimensions != 0 {
		layer.Rope = &kvrt.Rope{
			Style:              kvrt.RopeStyle(r.recorded.RopeStyle),
			Dimensions:         r.recorded.RopeDimensions,
			InverseFrequencies: r.recorded.inverseFrequencies,
		}
	}
	layers := make([]kvrt.Layer, len(r.recorded.layerNumbers))
	for i := range layers {
		layers[i] = layer
	}
	return kvrt.Model{Layers: layers}
}

func (r *replay) replayAll() error {
	for r.waiting < len(r.recorded.requests) || len(r.running) > 0 {
		if err := r.admit(); err != nil {
			return err
		}
		if err := r.step(); err != nil {
			return err
		}
		if err := r.retire(); err != nil {
			return err
		}
	}
	return r.found.end(r.pool)
}

// admit gives free slots to waiting requests.
func (r *replay) admit() error {
	for ; len(r.running) < r.slots && r.waiting < len(r.recorded.requests); r.waiting++ {
		sequence, err := r.pool.CreateSequence(kvrt.SequenceConfig{Policy: r.policy(r.waiting)})
		if err != nil {
			return err
		}
		r.running = append(r.running, runningRequest{index: r.waiting, sequence: sequence})
	}
	return nil
}

func (r *replay) policy(index int) *kvrt.Policy {
	header := &r.recorded.traceHeader
	if kvrt.Scorer(header.Scorer) == kvrt.ScorerNone {
		return nil
	}
	return &kvrt.Policy{
		Flags:        kvrt.PolicyFlags(header.PolicyFlags),
		Scorer:       kvrt.Scorer(header.Scorer),
		Selection:    kvrt.Selection(header.Selection),
		Budget:       header.Budget,
		Every:        header.Every,
		PromptTokens: r.recorded.requests[index].promptTokens,
		Sinks:        header.Sinks,
		Recent:       header.Recent,
		OffsetMax:    header.OffsetMax,
		Seed:         r.recorded.seed,
	}
}

func (r *replay) turnOf(item int) *turn {
	one := &r.running[item]
	return &r.recorded.requests[one.index].turns[one.nextTurn]
}

// step is one forward pass over the next turn of every running request.
func (r *replay) step() error {
	step, err := r.pool.BeginStep()
	if err != nil {
		return err
	}
	defer step.Close() // of a step that an error leaves open
	r.gather()
	if err := step.AppendBatch(r.sequences, r.counts, r.tokens, nil); err != nil {
		return err
	}
	if err := r.reserve(step); err != nil {
		return err
	}
	for layer := range r.recorded.layerNumbers {
		if err := r.runLayer(step, layer); err != nil {
			return err
		}
	}
	if err := step.AcceptBatch(r.sequences, r.accepted); err != nil {
		return err
	}
	if _, err := step.End(); err != nil {
		return err
	}
	for item := range r.sequences {
		r.running[item].nextTurn++
	}
	r.found.steps++
	return nil
}

func (r *replay) gather() {
	r.sequences, r.counts = r.sequences[:0], r.counts[:0]
	r.accepted, r.tokens = r.accepted[:0], r.tokens[:0]
	for item, one := range r.running {
		turn := r.turnOf(item)
		r.sequences = append(r.sequences, one.sequence)
		r.counts = append(r.counts, uint32(turn.rows()))
		r.accepted = append(r.accepted, turn.accepted)
		r.tokens = append(r.tokens, turn.tokens...)
	}
}

// reserve lets the youngest wait for a later step where blocks are short: older ones will return
// theirs.
func (r *replay) reserve(step kvrt.Step) error {
	_, err := step.Reserve(nil)
	for errors.Is(err, kvrt.ErrAgain) && len(r.sequences) > 1 {
		last := len(r.sequences) - 1
		if err := step.Remove(r.sequences[last]); err != nil {
			return err
		}
		r.sequences, r.accepted = r.sequences[:last], r.accepted[:last]
		_, err = step.Reserve(nil)
	}
	return err
}

func (r *replay) runLayer(step kvrt.Step, layer int) error {
	// Here an engine computes; the rows of the sequences follow each other.
	r.queries, r.keys, r.values = r.queries[:0], r.keys[:0], r.values[:0]
	for item := range r.sequences {
		rows := &r.turnOf(item).layers[layer]
		r.queries = append(r.queries, rows.queries...)
		r.keys = append(r.keys, rows.keys...)
		r.values = append(r.values, rows.values...)
	}
	if cap(r.outputs) < len(r.queries) {
		r.outputs = make([]float32, len(r.queries))
	}
	r.outputs = r.outputs[:len(r.queries)]
	rows := len(r.queries) / r.recorded.querySize()
	queryHeads, kvHeads := int(r.recorded.QueryHeads), int(r.recorded.KVHeads)
	dim := int(r.recorded.HeadDim)
	err := step.WriteAttend(uint32(layer), kvrt.Float16(r.keys, rows, kvHeads, dim),
		kvrt.Float16(r.values, rows, kvHeads, dim), kvrt.Float16(r.queries, rows, queryHeads, dim),
		kvrt.Float32(r.outputs, rows, queryHeads, dim), kvrt.AttendOptions{})
	if err != nil {
		return fmt.Errorf("layer %d: %w", layer, err)
	}
	outputs := r.outputs
	for item := range r.sequences {
		turn := r.turnOf(item)
		size := turn.rows() * r.recorded.querySize()
		r.found.compare(r.running[item].index, turn, layer, outputs[:size])
		outputs = outputs[size:]
	}
	return nil
}

// retire ends the sequences whose turns are done; the others keep their order.
func (r *replay) retire() error {
	left := r.running[:0]
	for _, one := range r.running {
		if one.nextTurn < len(r.recorded.requests[one.index].turns) {
			left = append(left, one)
			continue
		}
		if err := r.found.finish(one.index, r.pool, one.sequence); err != nil {
			return err
		}
		if err := r.pool.ReleaseSequence(one.sequence); err != nil {
			return err
		}
	}
	r.running = left
	return nil
}
