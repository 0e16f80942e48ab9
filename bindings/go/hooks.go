// Hooks of the host: Go functions that the library calls. A panic in one never crosses C: it is
// kept, the library gets a harmless answer, and the call that was running returns a *HookPanic.

package kvrt

// #include "shims.h"
import "C"

import (
	"fmt"
	"runtime/cgo"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"unsafe"
)

// LogLevel is how grave a line of the log is.
type LogLevel int32

// The levels of kvrt.h.
const (
	LogDebug   LogLevel = C.KV_LOG_DEBUG
	LogInfo    LogLevel = C.KV_LOG_INFO
	LogWarning LogLevel = C.KV_LOG_WARNING
	LogError   LogLevel = C.KV_LOG_ERROR
)

// Hooks are functions of the host that a pool calls; each may be nil. They must not call their
// pool: that is ErrInvalid, but with PoolThreadSafe a call that a hook leaves to another goroutine,
// and waits for, waits without end. Nor may they call runtime.Goexit. They are kept until the pool
// is closed, with all that they refer to: a forgotten pool that one of its hooks refers to is never
// collected.
type Hooks struct {
	// Allocate and Release come together: all host memory of the pool but the arena. The memory
	// must not be Go's, for C keeps it. Alignment is a power of two; nil means refused. Called in
	// NewPool and when the pool is released.
	Allocate func(bytes, alignment uint64) unsafe.Pointer
	Release  func(memory unsafe.Pointer, bytes, alignment uint64)
	// Log takes one line without newline, from any thread that is inside a call.
	Log func(level LogLevel, line string)
	// Now is monotonic nanoseconds, for the times in reports.
	Now func() uint64
	// ParallelFor runs body once for every index in [0, count), in any order, on any goroutines,
	// and returns when all are done. It replaces the library's own threads. Indices that it leaves
	// out are run after it; an index too many is ignored.
	ParallelFor func(count uint32, body func(index uint32))
}

// HookPanic is a panic in a hook. The call in which it happened has run to its end.
type HookPanic struct {
	Hook  string // such as "Log"
	Value any    // what was handed to panic
	Stack []byte // of the goroutine that panicked
	Err   error  // what the call itself returned, nil if it succeeded
}

func (p *HookPanic) Error() string {
	if p.Err != nil {
		return fmt.Sprintf("kvrt: the hook %s panicked: %v; %v", p.Hook, p.Value, p.Err)
	}
	return fmt.Sprintf("kvrt: the hook %s panicked: %v", p.Hook, p.Value)
}

// Unwrap is the error of the call.
func (p *HookPanic) Unwrap() error { return p.Err }

// hookSet is the hooks of one pool, which C knows by a handle.
type hookSet struct {
	hooks  Hooks
	handle cgo.Handle
	panics atomic.Pointer[HookPanic] // the first one since it was last taken
}

func newHookSet(hooks *Hooks) *hookSet {
	if hooks == nil {
		return nil
	}
	set := &hookSet{hooks: *hooks}
	set.handle = cgo.NewHandle(set)
	return set
}

func (s *hookSet) free() {
	if s != nil {
		s.handle.Delete()
	}
}

// install points the C struct at the trampolines.
func (s *hookSet) install(t *transfer, config *C.kv_pool_config) error {
	if s == nil {
		return nil
	}
	if (s.hooks.Allocate == nil) != (s.hooks.Release == nil) {
		return invalid("Hooks: Allocate and Release come together")
	}
	var wanted C.uint32_t
	if s.hooks.Allocate != nil {
		wanted |= C.KVGO_HOOK_ALLOCATE
	}
	if s.hooks.Log != nil {
		wanted |= C.KVGO_HOOK_LOG
	}
	if s.hooks.Now != nil {
		wanted |= C.KVGO_HOOK_NOW
	}
	if s.hooks.ParallelFor != nil {
		wanted |= C.KVGO_HOOK_PARALLEL_FOR
	}
	hooks := (*C.kv_hooks)(t.take(C.sizeof_kv_hooks))
	C.kv_struct_init(unsafe.Pointer(hooks), C.sizeof_kv_hooks)
	C.kvgo_set_hooks(hooks, C.uintptr_t(s.handle), wanted)
	config.hooks = hooks
	return nil
}

// running is true if the calling goroutine is inside one of these hooks.
func (s *hookSet) running() bool {
	return s != nil && C.kvgo_inside_hook(C.uintptr_t(s.handle)) != 0
}

// after adds a panic of a hook to what a call returned.
func (s *hookSet) after(err error) error {
	if s == nil || s.panics.Load() == nil {
		return err
	}
	caught := s.panics.Swap(nil)
	if caught == nil {
		return err
	}
	caught.Err = err
	return caught
}

// catch keeps a panic; it is deferred around every hook.
func (s *hookSet) catch(hook string) {
	if value := recover(); value != nil {
		s.panics.CompareAndSwap(nil, &HookPanic{Hook: hook, Value: value, Stack: debug.Stack()})
	}
}

func hooksOf(user C.uintptr_t) *hookSet { return cgo.Handle(user).Value().(*hookSet) }

//export kvgoHookAllocate
func kvgoHookAllocate(user C.uintptr_t, bytes, alignment C.size_t) (memory C.uintptr_t) {
	set := hooksOf(user)
	defer set.catch("Allocate")
	return C.uintptr_t(uintptr(set.hooks.Allocate(uint64(bytes), uint64(alignment))))
}

//export kvgoHookRelease
func kvgoHookRelease(user, memory C.uintptr_t, bytes, alignment C.size_t) {
	set := hooksOf(user)
	defer set.catch("Release")
	// The integer is an address of C, made into a pointer without Go taking it for its own.
	address := uintptr(memory)
	set.hooks.Release(*(*unsafe.Pointer)(unsafe.Pointer(&address)), uint64(bytes),
		uint64(alignment))
}

//export kvgoHookLog
func kvgoHookLog(user C.uintptr_t, level C.int32_t, text *C.char, length C.size_t) {
	set := hooksOf(user)
	defer set.catch("Log")
	line := string(unsafe.Slice((*byte)(unsafe.Pointer(text)), int(length)))
	set.hooks.Log(LogLevel(level), line)
}

//export kvgoHookNow
func kvgoHookNow(user C.uintptr_t) (nanoseconds C.uint64_t) {
	set := hooksOf(user)
	defer set.catch("Now")
	return C.uint64_t(set.hooks.Now())
}

//export kvgoHookParallelFor
func kvgoHookParallelFor(user C.uintptr_t, count C.uint32_t, body, context C.uintptr_t) {
	set := hooksOf(user)
	run := newParallelRun(uint32(count), func(index uint32) {
		C.kvgo_run_body(body, context, C.uint32_t(index))
	})
	func() {
		defer set.catch("ParallelFor")
		set.hooks.ParallelFor(uint32(count), run.once)
	}()
	run.finish()
}

// parallelRun is one parallel_for of the library. Whatever a hook does, every index runs exactly
// once, and all have run before the library goes on.
type parallelRun struct {
	body    func(index uint32)
	claimed []atomic.Bool
	open    sync.WaitGroup
}

func newParallelRun(count uint32, body func(index uint32)) *parallelRun {
	run := &parallelRun{body: body, claimed: make([]atomic.Bool, count)}
	run.open.Add(int(count))
	return run
}

func (r *parallelRun) once(index uint32) {
	if uint64(index) >= uint64(len(r.claimed)) || r.claimed[index].Swap(true) {
		return
	}
	defer r.open.Done()
	r.body(index)
}

// finish runs what is left, and waits for what other goroutines are still running.
func (r *parallelRun) finish() {
	for index := range r.claimed {
		r.once(uint32(index))
	}
	r.open.Wait()
}
