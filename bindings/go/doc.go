//go:build cgo

// Package kvrt is libkvrt for Go: a KV-cache runtime for LLM engines.
//
// A program's life with the package:
//
//	NewPool -> Pool.CreateSequence -> [ Pool.BeginStep, Step.AppendBatch, Step.Reserve,
//	    per layer: Step.WriteAttend, Step.End ] for each forward pass
//	-> Pool.Compress or a policy -> Pool.ReleaseSequence -> Pool.Close
//
// The words and the rules are those of kvrt.h, whose every call has a method here.
//
// # Ownership
//
// A Pool is closed with Close; a pool that the collector finds unclosed is released and reported
// (see SetLeakHandler), unless one of its hooks refers to it: then it is never collected. Sequences
// and steps are values that the pool owns and checks: one that is gone gives an error, never
// somebody else's data. Step.Close in a defer cancels what a return left open. Slices are used
// where they lie and never kept; nothing in the decode loop allocates.
//
// # Threads
//
// Calls on one pool are made one at a time, by any goroutine: two at once give ErrInvalid. A pool
// with PoolThreadSafe makes them wait for each other. Stats, ClassStats and LayerStats may be
// called by anyone at any time. Close is safe at any time too: the native pool goes when the last
// call inside has returned. A call into the library holds its OS thread until it returns; one layer
// of a step is one such call.
//
// # Errors
//
// Every failure of the library is an *Error. errors.Is compares it with a Status, such as ErrAgain,
// and with a Category, such as CategoryCapacity. Use after the end is ErrClosed as well.
package kvrt
