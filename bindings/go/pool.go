// Pools: creation, the end, and how a call enters and leaves one.

package kvrt

// #cgo pkg-config: kvrt
// #include "shims.h"
import "C"

import (
	"log"
	"runtime"
	"sync"
	"sync/atomic"
	"unsafe"
)

// Pool is the cache of one model on one device. Make it with NewPool, end it with Close.
type Pool struct {
	handle C.uintptr_t
	hooks  *hookSet
	waits  bool // PoolThreadSafe: a second caller waits instead of failing
	onCUDA bool // its tensors and blocks are in device memory

	life lifetime
	// turn is held by the call that is inside. The library would order or refuse callers itself,
	// but waiting for it holds an OS thread, and the fields below need the same order.
	turn    sync.Mutex
	open    []openStep
	begun   uint64            // steps, ever
	infos   *C.kv_append_info // what AppendBatch reads its results from
	infoCap int
}

// NewPool creates a pool for one model.
func NewPool(config Config, model Model) (*Pool, error) {
	return createPool(config, model, func(native *C.kv_pool_config,
		description *C.kv_model) C.kvgo_pool {
		return C.kvgo_pool_create(native, description)
	})
}

func createPool(config Config, model Model,
	create func(*C.kv_pool_config, *C.kv_model) C.kvgo_pool) (*Pool, error) {
	var memory transfer
	defer memory.free()
	native, description, hooks, err := describe(&memory, config, model)
	if err != nil {
		return nil, err
	}
	created := create(native, description)
	if err := hooks.after(failure(created.result)); err != nil {
		C.kvgo_pool_release(created.pool) // it may exist, if a hook panicked
		hooks.free()
		return nil, err
	}
	p := &Pool{handle: created.pool, hooks: hooks, waits: config.Flags&PoolThreadSafe != 0,
		onCUDA: config.Device == DeviceCUDA}
	runtime.SetFinalizer(p, (*Pool).collected)
	return p, nil
}

// describe makes C's copy of what NewPool and MakePlan take. The hooks are to be freed, unless
// there is an error.
func describe(memory *transfer, config Config, model Model) (*C.kv_pool_config, *C.kv_model,
	*hookSet, error) {
	description, err := memory.model(model)
	if err != nil {
		return nil, nil, nil, err
	}
	native := memory.config(config)
	hooks := newHookSet(config.Hooks)
	if err := hooks.install(memory, native); err != nil {
		hooks.free()
		return nil, nil, nil, err
	}
	return native, description, hooks, nil
}

// Close ends the pool with all its sequences and steps; their later use is an error. It may be
// called again, and while calls of other goroutines are inside: it does not wait for them, the
// memory goes when the last of them returns.
func (p *Pool) Close() error {
	if p == nil || !p.life.close() {
		return nil
	}
	return p.release()
}

// release is called once, when the pool is closed and nobody is inside.
func (p *Pool) release() error {
	runtime.SetFinalizer(p, nil)
	C.kvgo_pool_release(p.handle)
	C.free(unsafe.Pointer(p.infos))
	p.handle, p.infos, p.open = 0, nil, nil
	err := p.hooks.after(nil)
	p.hooks.free()
	return err
}

var leakHandler atomic.Pointer[func(message string)]

// SetLeakHandler replaces what happens when the collector finds a Pool that nobody closed. By
// default a line goes to the standard log. The memory is given back in any case. The handler must
// not block. nil restores the default.
func SetLeakHandler(handler func(message string)) {
	if handler == nil {
		leakHandler.Store(nil)
		return
	}
	leakHandler.Store(&handler)
}

// collected is the finaliser. Nobody can be inside: a call keeps its pool reachable.
func (p *Pool) collected() {
	p.Close()
	const message = "kvrt: a Pool was collected without Close"
	if handler := leakHandler.Load(); handler != nil {
		(*handler)(message)
		return
	}
	log.Print(message)
}

// enter begins a call that the header calls external; leave must follow if it returns nil.
func (p *Pool) enter() error {
	if err := p.stay(); err != nil {
		return err
	}
	if p.turn.TryLock() {
		return nil
	}
	err := errPoolBusy
	if p.hooks.running() {
		err = errInsideHook
	} else if p.waits {
		p.turn.Lock()
		return nil
	}
	p.quit()
	return err
}

func (p *Pool) leave() {
	p.turn.Unlock()
	p.quit()
}

// stay keeps the native pool until quit: all that a call needs which the header calls safe.
func (p *Pool) stay() error {
	if p == nil || !p.life.enter() {
		return errPoolClosed
	}
	return nil
}

func (p *Pool) quit() {
	if p.life.exit() {
		_ = p.release() // a panic of the Release hook has no call left to return it
	}
}

// failure is that of a call on this pool, with the panic of a hook if there was one.
func (p *Pool) failure(result C.kvgo_result) error { return p.hooks.after(failure(result)) }

// PassFence says, of a pool with PoolHostFences, that all steps with a fence number up to `fence`
// have been read to the end.
func (p *Pool) PassFence(fence uint64) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return p.failure(C.kvgo_pool_pass_fence(p.handle, C.uint64_t(fence)))
}

// Check walks everything and compares. Slow; for tests and for hunting defects.
func (p *Pool) Check() error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return p.failure(C.kvgo_pool_check(p.handle))
}
