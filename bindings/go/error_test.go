// Errors: matching by status and category, messages of the right call.

package kvrt

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
)

func TestErrorsMatchTheirStatusAndCategory(t *testing.T) {
	pool := newPool(t, smallConfig(0), smallModel())
	sequence := newSequence(t, pool, nil)
	must(t, pool.ReleaseSequence(sequence))
	err := fmt.Errorf("engine: %w", pool.Truncate(sequence, 0))
	for _, wanted := range []error{ErrStale, CategoryState} {
		if !errors.Is(err, wanted) {
			t.Errorf("%v is not %v", err, wanted)
		}
	}
	for _, other := range []error{ErrInvalid, ErrNoSnapshot, CategoryArgument, CategoryOK,
		StatusOK, errors.New("else")} {
		if errors.Is(err, other) {
			t.Errorf("%v is %v", err, other)
		}
	}
	var failed *Error
	if !errors.As(err, &failed) || failed.Status != ErrStale || failed.Message == "" {
		t.Errorf("%v is no *Error of ErrStale", err)
	}
	if text := failed.Error(); !strings.HasPrefix(text, "kvrt: KV_STALE: ") {
		t.Errorf("the error reads %q", text)
	}
	unknown := &Error{Status: -350, Message: "of a newer library"}
	if !errors.Is(unknown, CategoryCapacity) || errors.Is(unknown, ErrAgain) {
		t.Errorf("%v does not count as its category", unknown)
	}
	if text := CategoryCapacity.Error(); text != "kvrt: an error of the category capacity" {
		t.Errorf("the category reads %q", text)
	}
	if text := Category(99).String(); text != "category 99" {
		t.Errorf("an unknown category reads %q", text)
	}
}

// Goroutines move between threads, and messages belong to threads: each must get its own.
func TestMessagesBelongToTheirCall(t *testing.T) {
	pool := newPool(t, smallConfig(PoolThreadSafe), smallModel())
	sequence := newSequence(t, pool, nil)
	var all sync.WaitGroup
	for worker := 0; worker < 8; worker++ {
		all.Add(1)
		go func(worker int) {
			defer all.Done()
			for i := 0; i < 200; i++ {
				wanted := 1000 + worker*1000 + i
				refused(t, pool.Truncate(sequence, uint64(wanted)), ErrInvalid, fmt.Sprint(wanted))
			}
		}(worker)
	}
	all.Wait()
}

func TestUseAfterTheEndIsErrClosed(t *testing.T) {
	pool := newPool(t, smallConfig(0), fullModel(1, FormatF16))
	sequence := newSequence(t, pool, nil)
	step := reserve(t, pool, sequence, 1)
	var memory *BlockMemory
	_, err := step.Export(0, nil, func(lent *BlockMemory) error {
		memory = lent
		return nil
	})
	must(t, err)
	_, ofMemory := memory.Block(0)
	must(t, step.Cancel())
	_, ofStep := step.End()
	_, ofZeroStep := Step{}.End()
	misuse := pool.Truncate(sequence, 99)
	must(t, pool.Close())
	_, ofPool := pool.BeginStep()
	for name, err := range map[string]error{"memory": ofMemory, "step": ofStep,
		"zero step": ofZeroStep, "pool": ofPool, "step of a closed pool": step.Cancel()} {
		if err = fmt.Errorf("engine: %w", err); !errors.Is(err, ErrClosed) ||
			!errors.Is(err, ErrInvalid) || !errors.Is(err, CategoryArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if errors.Is(misuse, ErrClosed) || !errors.Is(misuse, ErrInvalid) {
		t.Errorf("%v", misuse)
	}
}
