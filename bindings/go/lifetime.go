//go:build cgo

// How long a native object lives that several goroutines use: until it is closed and the last of
// them has left.

package kvrt

import "sync/atomic"

// lifetime counts users. Closing refuses new ones; whoever is last releases the object, be it the
// closer or a user. So closing never waits, not even from a hook that runs inside a call.
type lifetime struct {
	state atomic.Int64 // 2 per user, and 1 once it is closed
}

// enter is false once the object is closed; otherwise exit must follow.
func (l *lifetime) enter() bool {
	for {
		state := l.state.Load()
		if state&1 != 0 {
			return false
		}
		if l.state.CompareAndSwap(state, state+2) {
			return true
		}
	}
}

// exit is true if the caller must release the object.
func (l *lifetime) exit() bool { return l.state.Add(-2) == 1 }

// close is true if the caller must release the object; closing again does nothing.
func (l *lifetime) close() bool {
	for {
		state := l.state.Load()
		if state&1 != 0 {
			return false
		}
		if l.state.CompareAndSwap(state, state|1) {
			return state == 0
		}
	}
}
