// Sequences: lengths, forks, going back, pins, positions, handles that are gone.

package kvrt

import (
	"reflect"
	"testing"
)

func positions(t *testing.T, pool *Pool, sequence Sequence, layer, head uint32) []uint32 {
	t.Helper()
	count, err := pool.Positions(sequence, layer, head, nil)
	must(t, err)
	list := make([]uint32, count)
	again, err := pool.Positions(sequence, layer, head, list)
	must(t, err)
	if again != count {
		t.Errorf("%d positions, then %d", count, again)
	}
	return list
}

// span is first, first + 1, ... last.
func span(first, last uint32) []uint32 {
	list := []uint32{}
	for at := first; at <= last; at++ {
		list = append(list, at)
	}
	return list
}

func TestSequenceInfo(t *testing.T) {
	model := smallModel()
	pool := newPool(t, smallConfig(0), model)
	sequence, err := pool.CreateSequence(SequenceConfig{UserData: 0xfedcba9876543210})
	must(t, err)
	grow(t, pool, model, sequence, 20)
	// Two blocks of 16 slots in each of two lanes, 2 heads of (64 + 32) dimensions in f16.
	const bytes = 4 * 16 * 2 * (keyDim + valueDim) * 2
	want := SequenceInfo{Capacity: 20, Written: 20, Accepted: 20, Published: 20, Blocks: 4,
		Bytes: bytes, UserData: 0xfedcba9876543210}
	got := info(t, pool, sequence)
	want.Capacity, want.Published = got.Capacity, got.Published
	if got != want || got.Capacity < 20 {
		t.Errorf("got %+v, want %+v", got, want)
	}
	step := reserve(t, pool, sequence, 3)
	if got := info(t, pool, sequence); !got.InStep || got.Accepted != 20 || got.Capacity < 23 {
		t.Errorf("inside a step: %+v", got)
	}
	must(t, step.Cancel())
	layer, err := pool.LayerInfo(sequence, 0)
	must(t, err)
	if layer != (LayerInfo{Retained: 20, Blocks: 2}) {
		t.Errorf("layer 0: %+v", layer)
	}
}

func TestForkSharesBlocksAndTruncateForgets(t *testing.T) {
	model := fullModel(1, FormatF16)
	pool := newPool(t, smallConfig(0), model)
	parent := newSequence(t, pool, nil)
	grow(t, pool, model, parent, 40)
	children := make([]Sequence, 2)
	must(t, pool.Fork(parent, children))
	if used := stats(t, pool).LiveBlocks; used != 3 {
		t.Errorf("%d blocks are live after a fork of 40 tokens, want 3", used)
	}
	grow(t, pool, model, children[0], 1) // writes into the shared tail: one block is copied
	if used := stats(t, pool).LiveBlocks; used != 4 {
		t.Errorf("%d blocks are live after a child has grown, want 4", used)
	}
	layer, err := pool.LayerInfo(children[0], 0)
	must(t, err)
	if layer != (LayerInfo{Retained: 41, Blocks: 3, SharedBlocks: 2}) {
		t.Errorf("the child: %+v", layer)
	}
	must(t, pool.Truncate(children[0], 10))
	if got := positions(t, pool, children[0], 0, 1); !reflect.DeepEqual(got, span(0, 9)) {
		t.Errorf("after truncate: %v", got)
	}
	if info(t, pool, children[0]).Accepted != 10 || info(t, pool, parent).Accepted != 40 {
		t.Error("truncate has changed another sequence, or not its own")
	}
	refused(t, pool.Truncate(children[0], 11), ErrInvalid, "11")
	few := make([]uint32, 4)
	count, err := pool.Positions(parent, 0, 0, few)
	must(t, err)
	if count != 40 || !reflect.DeepEqual(few, span(0, 3)) {
		t.Errorf("the first 4 of 40 positions: %v of %d", few, count)
	}
	must(t, pool.Check())
}

func TestTruncateBehindAWindowIsNoSnapshot(t *testing.T) {
	model := smallModel()
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, nil)
	for i := 0; i < 8; i++ {
		grow(t, pool, model, sequence, 16)
	}
	refused(t, pool.Truncate(sequence, 20), ErrNoSnapshot, "")
}

func TestPinnedPositionsSurvive(t *testing.T) {
	model := fullModel(1, FormatF16)
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, nil)
	grow(t, pool, model, sequence, 200)
	must(t, pool.Pin(sequence, 50, 3))
	must(t, pool.Pin(sequence, 90, 1))
	policy := &Policy{Scorer: ScorerStreaming, Budget: 32, Sinks: 4}
	_, err := pool.Compress(sequence, policy)
	must(t, err)
	// 4 sinks and 4 pinned leave 24 of the budget to the most recent.
	want := append(append(append(span(0, 3), span(50, 52)...), 90), span(176, 199)...)
	if got := positions(t, pool, sequence, 0, 0); !reflect.DeepEqual(got, want) {
		t.Errorf("pinned: %v, want %v", got, want)
	}
	must(t, pool.Unpin(sequence))
	policy.Budget = 16
	_, err = pool.Compress(sequence, policy)
	must(t, err)
	want = append(span(0, 3), span(188, 199)...)
	if got := positions(t, pool, sequence, 0, 0); !reflect.DeepEqual(got, want) {
		t.Errorf("unpinned: %v, want %v", got, want)
	}
	for i := 0; i < 16; i++ {
		must(t, pool.Pin(sequence, uint64(i), 1))
	}
	refused(t, pool.Pin(sequence, 20, 1), ErrLimit, "16")
	refused(t, pool.Pin(sequence, 20, 0), ErrInvalid, "count")
}

func TestStaleAndWrongSequences(t *testing.T) {
	model := smallModel()
	pool := newPool(t, smallConfig(0), model)
	stale := newSequence(t, pool, nil)
	must(t, pool.ReleaseSequence(stale))
	must(t, pool.ReleaseSequence(stale)) // idempotent
	fresh := newSequence(t, pool, nil)
	if fresh == stale {
		t.Error("a handle came back")
	}
	step, err := pool.BeginStep()
	must(t, err)
	defer step.Close()
	statistics := &QueryStatistics{Layer: 0, QueryHeads: queryHeads, Bands: keyDim,
		MeanReal:      make([]float32, queryHeads*keyDim),
		MeanImaginary: make([]float32, queryHeads*keyDim),
		MeanMagnitude: make([]float32, queryHeads*keyDim)}
	calls := map[string]func(Sequence) error{
		"Fork":         func(s Sequence) error { return pool.Fork(s, make([]Sequence, 1)) },
		"Truncate":     func(s Sequence) error { return pool.Truncate(s, 0) },
		"SetPolicy":    func(s Sequence) error { return pool.SetPolicy(s, nil) },
		"Pin":          func(s Sequence) error { return pool.Pin(s, 0, 1) },
		"Unpin":        func(s Sequence) error { return pool.Unpin(s) },
		"SequenceInfo": func(s Sequence) error { _, err := pool.SequenceInfo(s); return err },
		"LayerInfo":    func(s Sequence) error { _, err := pool.LayerInfo(s, 0); return err },
		"Positions": func(s Sequence) error {
			_, err := pool.Positions(s, 0, 0, nil)
			return err
		},
		"Compress":      func(s Sequence) error { _, err := pool.Compress(s, nil); return err },
		"GetStatistics": func(s Sequence) error { return pool.GetStatistics(s, statistics) },
		"SaveStatistics": func(s Sequence) error {
			return pool.SaveStatistics(s, t.TempDir()+"/x")
		},
		"Append": func(s Sequence) error { _, err := step.Append(s, 1, nil); return err },
		"AppendBatch": func(s Sequence) error {
			return step.AppendBatch([]Sequence{s}, []uint32{1}, nil, nil)
		},
		"Accept": func(s Sequence) error { return step.Accept(s, 0) },
		"Remove": func(s Sequence) error { return step.Remove(s) },
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			refused(t, call(stale), ErrStale, "")
			refused(t, call(0), ErrInvalid, "")
		})
	}
	refused(t, pool.ReleaseSequence(0), ErrInvalid, "")
	for i := 0; i < 7; i++ {
		newSequence(t, pool, nil)
	}
	_, err = pool.CreateSequence(SequenceConfig{})
	refused(t, err, ErrLimit, "max_sequences")
	refused(t, pool.Fork(fresh, make([]Sequence, 1)), ErrLimit, "max_sequences")
	refused(t, pool.Fork(fresh, nil), ErrInvalid, "count")
	_, err = pool.LayerInfo(fresh, 3)
	refused(t, err, ErrInvalid, "layer")
	_, err = pool.Positions(fresh, 0, 2, nil)
	refused(t, err, ErrInvalid, "head")
	_, err = pool.CreateSequence(SequenceConfig{Flags: 1 << 20})
	refused(t, err, ErrUnsupported, "flags")
}
