// The end of pools, two goroutines at once, and what the collector finds.

package kvrt

import (
	"errors"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

func TestUseAfterClose(t *testing.T) {
	model := fullModel(1, FormatF16)
	pool, err := NewPool(smallConfig(0), model)
	must(t, err)
	sequence := newSequence(t, pool, nil)
	step := reserve(t, pool, sequence, 1)
	must(t, pool.Close())
	must(t, pool.Close())
	if LiveCount(LivePools)+LiveCount(LiveSequences)+LiveCount(LiveSteps) != 0 {
		t.Error("something lives after Close")
	}
	for name, owner := range map[string]*Pool{"closed": pool, "nil": nil} {
		for call, err := range poolCalls(owner, sequence) {
			t.Run(name+"/"+call, func(t *testing.T) {
				refused(t, err, ErrInvalid, "the pool is closed")
			})
		}
	}
	for call, err := range stepCalls(step, sequence) {
		t.Run("step/"+call, func(t *testing.T) {
			refused(t, err, ErrInvalid, "the pool is closed")
		})
	}
	must(t, step.Close())
	var none *Pool
	must(t, none.Close())
}

// A Pool that NewPool has not made is refused by the library.
func TestZeroPool(t *testing.T) {
	pool := new(Pool)
	for call, err := range poolCalls(pool, 1) {
		t.Run(call, func(t *testing.T) { refused(t, err, ErrInvalid, "NULL") })
	}
	must(t, pool.Close())
}

// poolCalls calls every method of a pool but Close.
func poolCalls(pool *Pool, sequence Sequence) map[string]error {
	statistics := emptyStatistics()
	calls := map[string]error{}
	calls["PassFence"] = pool.PassFence(1)
	calls["Check"] = pool.Check()
	_, calls["CreateSequence"] = pool.CreateSequence(SequenceConfig{})
	calls["ReleaseSequence"] = pool.ReleaseSequence(sequence)
	calls["Fork"] = pool.Fork(sequence, make([]Sequence, 1))
	calls["Truncate"] = pool.Truncate(sequence, 0)
	calls["SetPolicy"] = pool.SetPolicy(sequence, nil)
	calls["Pin"] = pool.Pin(sequence, 0, 1)
	calls["Unpin"] = pool.Unpin(sequence)
	_, calls["SequenceInfo"] = pool.SequenceInfo(sequence)
	_, calls["LayerInfo"] = pool.LayerInfo(sequence, 0)
	_, calls["Positions"] = pool.Positions(sequence, 0, 0, nil)
	_, calls["BeginStep"] = pool.BeginStep()
	_, calls["Compress"] = pool.Compress(sequence, nil)
	calls["SetStatistics"] = pool.SetStatistics(statistics)
	calls["GetStatistics"] = pool.GetStatistics(sequence, &statistics)
	calls["SaveStatistics"] = pool.SaveStatistics(sequence, "nowhere")
	calls["LoadStatistics"] = pool.LoadStatistics("nowhere")
	_, calls["Stats"] = pool.Stats()
	_, calls["ClassStats"] = pool.ClassStats(0)
	_, calls["LayerStats"] = pool.LayerStats(0)
	return calls
}

// gate is an executor that keeps the first call inside for as long as the test likes.
type gate struct {
	inside, leave chan struct{}
	once          sync.Once
}

func newGate() *gate { return &gate{inside: make(chan struct{}), leave: make(chan struct{})} }

func (g *gate) hooks() *Hooks {
	return &Hooks{ParallelFor: func(uint32, func(uint32)) {
		g.once.Do(func() {
			close(g.inside)
			<-g.leave
		})
	}}
}

// writeBehind begins a write on another goroutine, which is inside when it returns.
func (g *gate) writeBehind(step Step, rows int) <-chan error {
	verdict := make(chan error, 1)
	go func() {
		verdict <- step.Write(0, Float32(make([]float32, rows*kvHeads*keyDim), rows, kvHeads,
			keyDim), Float32(make([]float32, rows*kvHeads*valueDim), rows, kvHeads, valueDim))
	}()
	<-g.inside
	return verdict
}

func TestASecondCallerIsRefused(t *testing.T) {
	held := newGate()
	config := smallConfig(0)
	config.Hooks = held.hooks()
	pool := newPool(t, config, fullModel(1, FormatF16))
	sequence := newSequence(t, pool, nil)
	step := reserve(t, pool, sequence, 20)
	verdict := held.writeBehind(step, 20)
	calls := poolCalls(pool, sequence)
	must(t, calls["Stats"])
	must(t, calls["ClassStats"])
	must(t, calls["LayerStats"])
	delete(calls, "Stats")
	delete(calls, "ClassStats")
	delete(calls, "LayerStats")
	for name, err := range stepCalls(step, sequence) {
		calls["step."+name] = err
	}
	for name, err := range calls {
		t.Run(name, func(t *testing.T) {
			refused(t, err, ErrInvalid, "another goroutine is inside a call on this pool")
		})
	}
	close(held.leave)
	must(t, <-verdict)
	// Nothing was damaged: the step, which End and Cancel were refused, is as it was.
	_, err := step.End()
	must(t, err)
	if got := info(t, pool, sequence).Accepted; got != 20 {
		t.Errorf("accepted %d, want 20", got)
	}
	must(t, pool.Check())
}

func TestCloseWhileACallIsInside(t *testing.T) {
	for name, flags := range map[string]PoolFlags{"plain": 0, "thread-safe": PoolThreadSafe} {
		t.Run(name, func(t *testing.T) {
			held := newGate()
			config := smallConfig(flags)
			config.Hooks = held.hooks()
			pool, err := NewPool(config, fullModel(1, FormatF16))
			must(t, err)
			step := reserve(t, pool, newSequence(t, pool, nil), 20)
			verdict := held.writeBehind(step, 20)
			must(t, pool.Close()) // does not wait
			if LiveCount(LivePools) != 1 {
				t.Error("the pool went with a call inside")
			}
			_, err = pool.Stats()
			refused(t, err, ErrInvalid, "closed")
			close(held.leave)
			must(t, <-verdict) // the call inside has succeeded
			if LiveCount(LivePools) != 0 {
				t.Error("the pool is still there after the last call")
			}
		})
	}
}

func TestCloseInsideAnExport(t *testing.T) {
	pool, err := NewPool(smallConfig(0), fullModel(1, FormatF16))
	must(t, err)
	step := reserve(t, pool, newSequence(t, pool, nil), 20)
	buffers := &TableBuffers{Indices: make([]int32, 2)}
	_, err = step.Export(0, buffers, func(memory *BlockMemory) error {
		must(t, pool.Close())
		block, err := memory.Block(buffers.Indices[1])
		must(t, err)
		block[0] = 1 // lent, so it is still there
		return nil
	})
	must(t, err)
	if LiveCount(LivePools) != 0 {
		t.Error("the pool is still there after the export")
	}
}

// Many goroutines share a pool, each with its own sequence; one of them closes it in the end.
func TestManyGoroutines(t *testing.T) {
	config := smallConfig(PoolThreadSafe)
	config.MaxSequences = 16
	config.Threads = 2
	model := fullModel(2, FormatF16)
	pool, err := NewPool(config, model)
	must(t, err)
	const workers, rounds = 6, 40
	var all, readers sync.WaitGroup
	var ended atomic.Uint64
	done := make(chan struct{})
	readers.Add(1)
	go func() {
		defer readers.Done()
		for {
			select {
			case <-done:
				return
			default:
			}
			got, err := pool.Stats()
			if err != nil || got.Total != got.Free+got.Cached+got.Pinned+got.Parked+got.Loading {
				t.Errorf("%+v, %v", got, err)
			}
		}
	}()
	for worker := 0; worker < workers; worker++ {
		all.Add(1)
		go func() {
			defer all.Done()
			work(t, pool, rounds, &ended)
		}()
	}
	all.Wait()
	close(done)
	readers.Wait()
	if got := stats(t, pool); got.StepsEnded != ended.Load() || got.LiveBlocks != 0 ||
		got.Sequences != 0 || got.StepsEnded != workers*rounds {
		t.Errorf("%d steps ended: %+v", ended.Load(), got)
	}
	must(t, pool.Check())
	must(t, pool.Close())
}

// work runs steps of 5 tokens on a sequence of its own.
func work(t *testing.T, pool *Pool, rounds int, ended *atomic.Uint64) {
	sequence, err := pool.CreateSequence(SequenceConfig{})
	if err != nil {
		t.Error(err)
		return
	}
	keys := Float32(random(5*kvHeads*keyDim, 1), 5, kvHeads, keyDim)
	values := Float32(random(5*kvHeads*valueDim, 2), 5, kvHeads, valueDim)
	queries := Float32(random(5*queryHeads*keyDim, 3), 5, queryHeads, keyDim)
	out := Float32(make([]float32, 5*queryHeads*valueDim), 5, queryHeads, valueDim)
	for round := 0; round < rounds; round++ {
		step, err := pool.BeginStep()
		for errors.Is(err, ErrLimit) { // two steps of others are open
			runtime.Gosched()
			step, err = pool.BeginStep()
		}
		if err == nil {
			_, err = step.Append(sequence, 5, nil)
		}
		if err == nil {
			_, err = step.Reserve(nil)
		}
		for layer := uint32(0); layer < 2 && err == nil; layer++ {
			err = step.WriteAttend(layer, keys, values, queries, out, AttendOptions{})
		}
		if err == nil {
			_, err = step.End()
		}
		if err != nil {
			t.Error(err)
			return
		}
		ended.Add(1)
	}
	if read, err := pool.SequenceInfo(sequence); err != nil || read.Accepted != uint64(5*rounds) {
		t.Errorf("%+v, %v", read, err)
	}
	if err := pool.ReleaseSequence(sequence); err != nil {
		t.Error(err)
	}
}

// Two goroutines end the same step: one of them does, the other gets an error.
func TestRacingEnds(t *testing.T) {
	model := fullModel(1, FormatF16)
	pool := newPool(t, smallConfig(PoolThreadSafe), model)
	sequence := newSequence(t, pool, nil)
	for round := 0; round < 50; round++ {
		step := reserve(t, pool, sequence, 1)
		var won atomic.Int32
		var all sync.WaitGroup
		for i := 0; i < 3; i++ {
			all.Add(1)
			go func() {
				defer all.Done()
				if step.Cancel() == nil {
					won.Add(1)
				}
			}()
		}
		all.Wait()
		if won.Load() != 1 {
			t.Fatalf("%d goroutines have cancelled one step", won.Load())
		}
	}
}

// Goroutines use a plain pool with no order at all while it is closed: errors, and no damage.
func TestRacingClose(t *testing.T) {
	for round := 0; round < 20; round++ {
		pool, err := NewPool(smallConfig(0), fullModel(1, FormatF16))
		must(t, err)
		var all sync.WaitGroup
		for i := 0; i < 4; i++ {
			all.Add(1)
			go func() {
				defer all.Done()
				for {
					sequence, err := pool.CreateSequence(SequenceConfig{})
					if err == nil {
						err = pool.ReleaseSequence(sequence)
					}
					var failed *Error
					if errors.As(err, &failed) && failed.Message == "the pool is closed" {
						return
					}
					if err != nil && !errors.Is(err, ErrInvalid) && !errors.Is(err, ErrLimit) {
						t.Error(err)
					}
				}
			}()
		}
		time.Sleep(time.Millisecond)
		must(t, pool.Close())
		all.Wait()
	}
	if LiveCount(LivePools) != 0 {
		t.Error("a pool is left")
	}
}

func TestTheCollectorReportsALeak(t *testing.T) {
	reports := make(chan string, 4)
	SetLeakHandler(func(message string) { reports <- message })
	defer SetLeakHandler(nil)
	func() {
		pool, err := NewPool(smallConfig(0), fullModel(1, FormatF16))
		must(t, err)
		newSequence(t, pool, nil)
		closed, err := NewPool(smallConfig(0), fullModel(1, FormatF16))
		must(t, err)
		must(t, closed.Close())
	}()
	deadline := time.After(20 * time.Second)
	for len(reports) == 0 {
		runtime.GC()
		select {
		case <-deadline:
			t.Fatal("no report of a pool that nobody closed")
		case <-time.After(time.Millisecond):
		}
	}
	if message := <-reports; !strings.Contains(message, "collected without Close") {
		t.Errorf("the report reads %q", message)
	}
	runtime.GC()
	time.Sleep(10 * time.Millisecond)
	if len(reports) != 0 || LiveCount(LivePools) != 0 || LiveCount(LiveSequences) != 0 {
		t.Errorf("%d more reports, %d pools", len(reports), LiveCount(LivePools))
	}
}
