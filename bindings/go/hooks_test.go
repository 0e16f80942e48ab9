// Hooks: each is called as the header says, and nothing that it does gets into C.

package kvrt

import (
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

// hostMemory hands out pages of the system, which are not Go's.
type hostMemory struct {
	lock   sync.Mutex
	blocks map[unsafe.Pointer][]byte
	refuse int // allocations to go before one is refused; negative: none is
	wrong  int // releases of what was not allocated
}

func newHostMemory() *hostMemory {
	return &hostMemory{blocks: map[unsafe.Pointer][]byte{}, refuse: -1}
}

func (m *hostMemory) allocate(bytes, alignment uint64) unsafe.Pointer {
	m.lock.Lock()
	defer m.lock.Unlock()
	if m.refuse == 0 || alignment > 4096 {
		return nil
	}
	m.refuse--
	block, err := syscall.Mmap(-1, 0, int(bytes), syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return nil
	}
	m.blocks[unsafe.Pointer(&block[0])] = block
	return unsafe.Pointer(&block[0])
}

func (m *hostMemory) release(memory unsafe.Pointer, bytes, alignment uint64) {
	m.lock.Lock()
	defer m.lock.Unlock()
	block := m.blocks[memory]
	if uint64(len(block)) != bytes || syscall.Munmap(block) != nil {
		m.wrong++
	}
	delete(m.blocks, memory)
}

func TestHostAllocator(t *testing.T) {
	memory := newHostMemory()
	config := smallConfig(0)
	config.Hooks = &Hooks{Allocate: memory.allocate, Release: memory.release}
	pool, err := NewPool(config, smallModel())
	must(t, err)
	taken := len(memory.blocks)
	if uint64(taken) != stats(t, pool).HostAllocations || taken == 0 {
		t.Errorf("%d allocations, the pool counts %d", taken, stats(t, pool).HostAllocations)
	}
	must(t, pool.Close())
	if len(memory.blocks) != 0 || memory.wrong != 0 {
		t.Errorf("%d blocks are left, %d releases were wrong", len(memory.blocks), memory.wrong)
	}
	for refuse := 0; refuse < taken; refuse++ {
		memory.refuse = refuse
		_, err := NewPool(config, smallModel())
		refused(t, err, ErrNoMemory, "refused")
		if len(memory.blocks) != 0 {
			t.Fatalf("%d blocks are left when allocation %d is refused", len(memory.blocks), refuse)
		}
	}
}

func TestLogOfADamagedPool(t *testing.T) {
	var lines []string
	var levels []LogLevel
	config := smallConfig(PoolDebug)
	config.Hooks = &Hooks{Log: func(level LogLevel, line string) {
		levels, lines = append(levels, level), append(lines, line)
	}}
	pool := newPool(t, config, fullModel(1, FormatF16))
	step := reserve(t, pool, newSequence(t, pool, nil), 1)
	buffers := &TableBuffers{Indices: make([]int32, 1)}
	tables, err := step.Export(0, buffers, nil)
	must(t, err)
	must(t, pool.Check())
	_, err = step.Export(0, nil, func(memory *BlockMemory) error {
		block, err := memory.Block(buffers.Indices[0])
		must(t, err)
		*(*byte)(unsafe.Add(unsafe.Pointer(&block[0]), tables.BlockBytes)) ^= 1 // in the guard
		return nil
	})
	must(t, err)
	err = pool.Check()
	refused(t, err, ErrInternal, "")
	var failed *Error
	if !errors.As(err, &failed) || len(lines) != 1 || lines[0] != failed.Message ||
		levels[0] != LogError {
		t.Errorf("%v; logged %q at %v", err, lines, levels)
	}
}

func TestClock(t *testing.T) {
	ticks := uint64(0)
	config := smallConfig(0)
	config.Hooks = &Hooks{Now: func() uint64 { ticks += 1000; return ticks }}
	model := fullModel(1, FormatF16)
	pool := newPool(t, config, model)
	sequence := newSequence(t, pool, nil)
	grow(t, pool, model, sequence, 100)
	before := ticks
	report, err := pool.Compress(sequence, &Policy{Scorer: ScorerStreaming, Budget: 32})
	must(t, err)
	if report.Nanoseconds != ticks-before-1000 || report.Nanoseconds == 0 {
		t.Errorf("%d nanoseconds by a clock that went %d", report.Nanoseconds, ticks-before)
	}
}

// attendWith is the output of a step of 200 rows over a pool with these hooks.
func attendWith(t *testing.T, hooks *Hooks) ([]float32, error) {
	t.Helper()
	config := smallConfig(0)
	config.Hooks = hooks
	pool := newPool(t, config, fullModel(1, FormatF32))
	const rows = 200
	step := reserve(t, pool, newSequence(t, pool, nil), rows)
	out := make([]float32, rows*queryHeads*valueDim)
	err := step.WriteAttend(0, Float32(random(rows*kvHeads*keyDim, 1), rows, kvHeads, keyDim),
		Float32(random(rows*kvHeads*valueDim, 2), rows, kvHeads, valueDim),
		Float32(random(rows*queryHeads*keyDim, 3), rows, queryHeads, keyDim),
		Float32(out, rows, queryHeads, valueDim), AttendOptions{})
	_, ended := step.End()
	must(t, ended)
	return out, err
}

// Whatever an executor does, every part runs once, and before the call returns.
func TestExecutors(t *testing.T) {
	want, err := attendWith(t, nil)
	must(t, err)
	late := make(chan func(uint32), 64)
	for name, run := range map[string]func(count uint32, body func(uint32)){
		"in order": func(count uint32, body func(uint32)) {
			for i := uint32(0); i < count; i++ {
				body(i)
			}
		},
		"goroutines": func(count uint32, body func(uint32)) {
			var all sync.WaitGroup
			for i := uint32(0); i < count; i++ {
				all.Add(1)
				go func(i uint32) { defer all.Done(); body(i) }(i)
			}
			all.Wait()
		},
		"none":       func(uint32, func(uint32)) {},
		"not waited": func(count uint32, body func(uint32)) { go body(0); go body(count - 1) },
		"too many": func(count uint32, body func(uint32)) {
			for i := uint32(0); i < 2*count; i++ {
				body(i)
				body(i)
			}
			body(1<<32 - 1)
		},
		"kept": func(_ uint32, body func(uint32)) { late <- body },
	} {
		t.Run(name, func(t *testing.T) {
			var calls atomic.Int32
			got, err := attendWith(t, &Hooks{ParallelFor: func(count uint32, body func(uint32)) {
				calls.Add(1)
				run(count, body)
			}})
			must(t, err)
			if calls.Load() == 0 {
				t.Error("the hook was not called")
			}
			for i := range want {
				if got[i] != want[i] {
					t.Fatalf("element %d is %v, want the same bits as %v", i, got[i], want[i])
				}
			}
		})
	}
	close(late)
	for body := range late {
		body(0) // its pool is gone: nothing may happen
	}
}

// A part that runs on when the hook has returned is waited for.
func TestPartsThatRunOnAreWaitedFor(t *testing.T) {
	var done atomic.Int32
	inside, leave := make(chan struct{}), make(chan struct{})
	run := newParallelRun(3, func(index uint32) {
		if index == 1 {
			close(inside)
			<-leave
		}
		done.Add(1)
	})
	go run.once(1)
	<-inside
	time.AfterFunc(50*time.Millisecond, func() { close(leave) })
	run.finish()
	if done.Load() != 3 {
		t.Errorf("%d of 3 parts have ended", done.Load())
	}
}

func TestPanicsInHooks(t *testing.T) {
	cause := errors.New("the cause")
	check := func(t *testing.T, err error, hook string) {
		t.Helper()
		var caught *HookPanic
		if !errors.As(err, &caught) || caught.Hook != hook || caught.Value != cause ||
			!strings.Contains(err.Error(), hook+" panicked: the cause") ||
			!strings.Contains(string(caught.Stack), "hooks_test.go") {
			t.Errorf("got %v, want a panic of %s", err, hook)
		}
	}
	t.Run("ParallelFor", func(t *testing.T) {
		want, err := attendWith(t, nil)
		must(t, err)
		got, err := attendWith(t, &Hooks{ParallelFor: func(count uint32, body func(uint32)) {
			body(count / 2)
			panic(cause)
		}})
		check(t, err, "ParallelFor")
		for i := range want {
			if got[i] != want[i] {
				t.Fatal("the call has not run to its end")
			}
		}
	})
	t.Run("Allocate", func(t *testing.T) {
		config := smallConfig(0)
		config.Hooks = &Hooks{Allocate: func(_, _ uint64) unsafe.Pointer { panic(cause) },
			Release: func(unsafe.Pointer, uint64, uint64) {}}
		_, err := NewPool(config, smallModel())
		check(t, err, "Allocate")
		if !errors.Is(err, ErrNoMemory) {
			t.Errorf("%v is not ErrNoMemory", err)
		}
	})
	t.Run("Release", func(t *testing.T) {
		memory := newHostMemory()
		config := smallConfig(0)
		config.Hooks = &Hooks{Allocate: memory.allocate,
			Release: func(block unsafe.Pointer, bytes, alignment uint64) {
				memory.release(block, bytes, alignment)
				panic(cause)
			}}
		pool, err := NewPool(config, smallModel())
		must(t, err)
		check(t, pool.Close(), "Release")
		if len(memory.blocks) != 0 {
			t.Errorf("%d blocks are left", len(memory.blocks))
		}
	})
	t.Run("Now", func(t *testing.T) {
		config := smallConfig(0)
		config.Hooks = &Hooks{Now: func() uint64 { panic(cause) }}
		model := fullModel(1, FormatF16)
		pool := newPool(t, config, model)
		sequence := newSequence(t, pool, nil)
		grow(t, pool, model, sequence, 100)
		report, err := pool.Compress(sequence, &Policy{Scorer: ScorerStreaming, Budget: 32})
		check(t, err, "Now")
		if report.Outcome != CompressDone {
			t.Errorf("the round has not run: %+v", report)
		}
		_, err = pool.SequenceInfo(sequence)
		must(t, err) // reported once
	})
}

// A hook that calls its pool gets an error, also with another pool's hook between, and one that
// closes it does no harm: the memory goes when the call returns.
func TestHooksThatCallTheirPool(t *testing.T) {
	for name, flags := range map[string]PoolFlags{"plain": 0, "thread safe": PoolThreadSafe} {
		t.Run(name, func(t *testing.T) { testHooksThatCallTheirPool(t, flags) })
	}
}

func testHooksThatCallTheirPool(t *testing.T, flags PoolFlags) {
	model := fullModel(1, FormatF16)
	var pool *Pool
	var again, between error
	closes := false
	inner := smallConfig(0)
	inner.Hooks = &Hooks{Now: func() uint64 {
		between = pool.Check()
		return 1
	}}
	second := newPool(t, inner, model)
	filled := newSequence(t, second, nil)
	grow(t, second, model, filled, 100)
	config := smallConfig(flags)
	config.Hooks = &Hooks{Now: func() uint64 {
		again = pool.Check()
		_, err := second.Compress(filled, &Policy{Scorer: ScorerStreaming, Budget: 64})
		must(t, err)
		must(t, second.Check())
		if !closes {
			_, err = pool.Stats()
			must(t, err)
		}
		if closes {
			must(t, pool.Close())
			if LiveCount(LivePools) != 2 {
				t.Error("the pool has gone with a call inside")
			}
		}
		return uint64(time.Now().UnixNano())
	}}
	pool, err := NewPool(config, model)
	must(t, err)
	sequence := newSequence(t, pool, nil)
	grow(t, pool, model, sequence, 100)
	_, err = pool.Compress(sequence, &Policy{Scorer: ScorerStreaming, Budget: 64})
	must(t, err)
	refused(t, again, ErrInvalid, "from a hook of this pool")
	refused(t, between, ErrInvalid, "from a hook of this pool")
	must(t, pool.Check()) // which is not inside a hook any more
	closes = true
	_, err = pool.Compress(sequence, &Policy{Scorer: ScorerStreaming, Budget: 32})
	must(t, err)
	if LiveCount(LivePools) != 1 {
		t.Error("the pool is still there after the last call")
	}
}
