// Steps: transactions, drafts, space, wrong order and wrong arguments.

package kvrt

import (
	"testing"
)

func TestDraftsAreAcceptedAndRolledBack(t *testing.T) {
	model := fullModel(1, FormatF16)
	pool := newPool(t, smallConfig(0), model)
	one, two := newSequence(t, pool, nil), newSequence(t, pool, nil)
	grow(t, pool, model, one, 15)
	grow(t, pool, model, two, 15)
	step, err := pool.BeginStep()
	must(t, err)
	must(t, step.AppendBatch([]Sequence{one, two}, []uint32{5, 5}, nil, nil))
	_, err = step.Reserve(nil)
	must(t, err)
	must(t, step.Write(0, Float32(make([]float32, 10*kvHeads*keyDim), 10, kvHeads, keyDim),
		Float32(make([]float32, 10*kvHeads*valueDim), 10, kvHeads, valueDim)))
	refused(t, step.AcceptBatch([]Sequence{one, two}, []uint32{2, 6}), ErrInvalid, "item 1")
	refused(t, step.Accept(one, 6), ErrInvalid, "count")
	must(t, step.AcceptBatch([]Sequence{one, two}, []uint32{2, 5}))
	must(t, step.Accept(two, 1))
	report, err := step.End()
	must(t, err)
	// 15 + 2 needs a second block, 15 + 1 does not: it is returned.
	if report.AcceptedTokens != 3 || report.BlocksReturned != 1 || report.Fence == 0 {
		t.Errorf("%+v", report)
	}
	if a, b := info(t, pool, one).Accepted, info(t, pool, two).Accepted; a != 17 || b != 16 {
		t.Errorf("accepted %d and %d, want 17 and 16", a, b)
	}
	must(t, pool.Check())
}

func TestCancelledStepsLeaveNothing(t *testing.T) {
	model := smallModel()
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, nil)
	grow(t, pool, model, sequence, 20)
	before := info(t, pool, sequence)
	step := reserve(t, pool, sequence, 100)
	must(t, step.Cancel())
	if after := info(t, pool, sequence); after != before {
		t.Errorf("%+v, was %+v", after, before)
	}
	refused(t, step.Cancel(), ErrInvalid, "closed")
	must(t, step.Close()) // idempotent
	step = reserve(t, pool, sequence, 100)
	must(t, step.Close())
	must(t, step.Close())
	got := stats(t, pool)
	if got.OpenSteps != 0 || got.StepsCancelled != 2 || got.StepsEnded != 1 {
		t.Errorf("%+v", got)
	}
}

func TestClosedSteps(t *testing.T) {
	model := fullModel(1, FormatF16)
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, nil)
	ended := reserve(t, pool, sequence, 1)
	must(t, ended.Write(0, Float32(make([]float32, kvHeads*keyDim), 1, kvHeads, keyDim),
		Float32(make([]float32, kvHeads*valueDim), 1, kvHeads, valueDim)))
	_, err := ended.End()
	must(t, err)
	// Another step now has its place, and must not be met through the old value.
	other := reserve(t, pool, sequence, 1)
	for name, step := range map[string]Step{"ended": ended, "zero": {}} {
		for call, err := range stepCalls(step, sequence) {
			t.Run(name+"/"+call, func(t *testing.T) { refused(t, err, ErrInvalid, "closed") })
		}
	}
	must(t, other.Cancel())
}

// stepCalls calls every method of a step but Close, with arguments that are right.
func stepCalls(step Step, sequence Sequence) map[string]error {
	float := func(heads, dim int) Tensor {
		return Float32(make([]float32, heads*dim), 1, heads, dim)
	}
	keys, values := float(kvHeads, keyDim), float(kvHeads, valueDim)
	queries, out := float(queryHeads, keyDim), float(queryHeads, valueDim)
	calls := map[string]error{}
	_, calls["Append"] = step.Append(sequence, 1, nil)
	calls["AppendBatch"] = step.AppendBatch([]Sequence{sequence}, []uint32{1}, nil,
		make([]AppendInfo, 1))
	_, calls["Reserve"] = step.Reserve(nil)
	calls["Remove"] = step.Remove(sequence)
	calls["Accept"] = step.Accept(sequence, 1)
	calls["AcceptBatch"] = step.AcceptBatch([]Sequence{sequence}, []uint32{1})
	_, calls["Export"] = step.Export(0, nil, nil)
	calls["Write"] = step.Write(0, keys, values)
	calls["Attend"] = step.Attend(0, queries, out, AttendOptions{})
	calls["WriteAttend"] = step.WriteAttend(0, keys, values, queries, out, AttendOptions{})
	_, calls["End"] = step.End()
	calls["Cancel"] = step.Cancel()
	return calls
}

func TestOutOfSpace(t *testing.T) {
	// Blocks of 16 * 2 * (64 + 32) * 2 = 6144 bytes: 341 in the only slab, for one layer.
	config := smallConfig(0)
	config.ArenaBytes = 2 << 20
	config.MaxTokensPerSequence = 8192
	config.MaxStepTokens = 16384
	model := fullModel(1, FormatF16)
	pool := newPool(t, config, model)
	one, two := newSequence(t, pool, nil), newSequence(t, pool, nil)
	grow(t, pool, model, one, 300*16)

	step, err := pool.BeginStep()
	must(t, err)
	must(t, step.AppendBatch([]Sequence{one, two}, []uint32{16, 41 * 16}, nil, nil))
	statuses := []Status{7, 7, 7}
	report, err := step.Reserve(statuses)
	refused(t, err, ErrAgain, "")
	want := ReserveReport{NeedBlocks: 42, NeedBytes: 42 * 6144, FreeBytesNow: 41 * 6144,
		FreeBytesAfterFence: 41 * 6144, ItemsThatFit: 1}
	if report != want {
		t.Errorf("%+v, want %+v", report, want)
	}
	if statuses[0] != StatusOK || statuses[1] != ErrAgain || statuses[2] != 7 {
		t.Errorf("statuses %v", statuses)
	}
	must(t, step.Remove(one))
	report, err = step.Reserve(statuses[:1])
	must(t, err)
	if report.NeedBlocks != 41 || report.ItemsThatFit != 1 || statuses[0] != StatusOK {
		t.Errorf("%+v, statuses %v", report, statuses)
	}
	must(t, step.Cancel())

	step, err = pool.BeginStep()
	must(t, err)
	_, err = step.Append(two, 342*16, nil)
	must(t, err)
	_, err = step.Reserve(nil)
	refused(t, err, ErrTooLarge, "")
	must(t, step.Remove(two))
	_, err = step.Append(two, 8193, nil)
	must(t, err)
	_, err = step.Reserve(nil)
	refused(t, err, ErrLimit, "max_tokens_per_sequence")
	must(t, step.Cancel())
	must(t, pool.Check())
}

func TestTwoStepsAtOnce(t *testing.T) {
	model := fullModel(1, FormatF16)
	pool := newPool(t, smallConfig(0), model)
	one, two := newSequence(t, pool, nil), newSequence(t, pool, nil)
	first, second := reserve(t, pool, one, 3), reserve(t, pool, two, 4)
	_, err := pool.BeginStep()
	refused(t, err, ErrLimit, "open")
	must(t, first.Cancel())
	third := reserve(t, pool, one, 5)
	must(t, second.Cancel())
	must(t, third.Cancel())
	refused(t, second.Cancel(), ErrInvalid, "closed")
	if got := stats(t, pool); got.OpenSteps != 0 || got.StepsCancelled != 3 {
		t.Errorf("%+v", got)
	}
}

func TestWrongOrder(t *testing.T) {
	model := fullModel(2, FormatF16)
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, nil)
	step, err := pool.BeginStep()
	must(t, err)
	_, err = step.Reserve(nil)
	refused(t, err, ErrInvalid, "appended")
	_, err = step.Append(sequence, 1, nil)
	must(t, err)
	for name, err := range map[string]error{
		"Write":  stepCallsBefore(step, "Write"),
		"Attend": stepCallsBefore(step, "Attend"),
		"Export": stepCallsBefore(step, "Export"),
	} {
		t.Run(name, func(t *testing.T) { refused(t, err, ErrInvalid, "reserve") })
	}
	_, err = step.Reserve(nil)
	must(t, err)
	refused(t, stepCallsBefore(step, "Attend"), ErrInvalid, "write")
	_, err = step.Append(sequence, 1, nil)
	refused(t, err, ErrInvalid, "")
	refused(t, pool.Truncate(sequence, 0), ErrInvalid, "open step")
	_, err = step.End() // nothing was written: cancelled, and closed all the same
	refused(t, err, ErrInvalid, "")
	_, err = step.End()
	refused(t, err, ErrInvalid, "closed")
	if got := stats(t, pool); got.OpenSteps != 0 || got.StepsCancelled != 1 {
		t.Errorf("%+v", got)
	}
}

// stepCallsBefore makes one call on layer 0 with the tensors of one row.
func stepCallsBefore(step Step, name string) error {
	float := func(heads, dim int) Tensor {
		return Float32(make([]float32, heads*dim), 1, heads, dim)
	}
	switch name {
	case "Write":
		return step.Write(0, float(kvHeads, keyDim), float(kvHeads, valueDim))
	case "Attend":
		return step.Attend(0, float(queryHeads, keyDim), float(queryHeads, valueDim),
			AttendOptions{})
	}
	_, err := step.Export(0, nil, nil)
	return err
}

func TestBatchesAreAllOrNothing(t *testing.T) {
	model := fullModel(1, FormatF16)
	pool := newPool(t, smallConfig(0), model)
	one, two := newSequence(t, pool, nil), newSequence(t, pool, nil)
	stale := newSequence(t, pool, nil)
	must(t, pool.ReleaseSequence(stale))
	step, err := pool.BeginStep()
	must(t, err)
	defer step.Close()
	infos := []AppendInfo{{FirstPosition: 77}, {FirstPosition: 77}}
	err = step.AppendBatch([]Sequence{one, stale}, []uint32{1, 1}, nil, infos)
	refused(t, err, ErrStale, "item 1")
	if infos[0].FirstPosition != 77 || infos[1].FirstPosition != 77 {
		t.Errorf("a refused batch has written %v", infos)
	}
	if info(t, pool, one).InStep {
		t.Error("a refused batch has appended its first item")
	}
	both := []Sequence{one, two}
	refused(t, step.AppendBatch(both, []uint32{1}, nil, nil), ErrInvalid, "counts")
	refused(t, step.AppendBatch(both, []uint32{1, 2}, []uint32{1, 2}, nil), ErrInvalid, "tokens")
	refused(t, step.AppendBatch(both, []uint32{1, 2}, nil, infos[:1]), ErrInvalid, "infos")
	refused(t, step.AppendBatch(both, []uint32{1, 0}, nil, infos), ErrInvalid, "item 1")
	refused(t, step.AppendBatch(nil, nil, nil, nil), ErrInvalid, "items")
	refused(t, step.AppendBatch(make([]Sequence, 5), make([]uint32, 5), nil, nil), ErrLimit,
		"max_step_sequences")
	refused(t, step.AppendBatch(both, []uint32{1 << 31, 1 << 31}, nil, nil), ErrLimit, "item 0")
	refused(t, step.AcceptBatch(both, []uint32{1}), ErrInvalid, "counts")
	_, err = step.Append(one, 3, []uint32{1, 2})
	refused(t, err, ErrInvalid, "tokens")
	_, err = step.Append(one, 0, nil)
	refused(t, err, ErrInvalid, "count")
	_, err = step.Append(one, 1025, nil)
	refused(t, err, ErrLimit, "max_step_tokens")
	must(t, step.AppendBatch(both[:1], []uint32{2}, []uint32{5, 6}, infos[:1]))
	must(t, step.AppendBatch(both[1:], []uint32{3}, nil, infos[1:]))
	if infos[1] != (AppendInfo{FirstPosition: 0, Item: 1, FirstRow: 2}) {
		t.Errorf("%+v", infos[1])
	}
}

// The results of a batch that is larger than those before it need more memory.
func TestBatchesGrow(t *testing.T) {
	pool := newPool(t, smallConfig(0), fullModel(1, FormatF16))
	sequences := make([]Sequence, 4)
	for i := range sequences {
		sequences[i] = newSequence(t, pool, nil)
	}
	for _, size := range []int{1, 4, 2} {
		step, err := pool.BeginStep()
		must(t, err)
		counts, infos := []uint32{9, 8, 7, 6}, make([]AppendInfo, size)
		must(t, step.AppendBatch(sequences[:size], counts[:size], nil, infos))
		first := uint32(0)
		for i, got := range infos {
			if got != (AppendInfo{Item: uint32(i), FirstRow: first}) {
				t.Errorf("item %d of %d: %+v", i, size, got)
			}
			first += counts[i]
		}
		if pool.infoCap < size {
			t.Errorf("memory for %d results holds %d", pool.infoCap, size)
		}
		must(t, step.Cancel())
	}
}
