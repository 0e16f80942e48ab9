// Statuses, their categories, and the error that carries them.

package kvrt

// #include "shims.h"
import "C"

import (
	"errors"
	"fmt"
	"unsafe"
)

// Status is what a call of the library returned. Negative ones are errors, in blocks of a hundred;
// a code that this package does not name counts as its category. A Status is an error so that
// errors.Is(err, ErrAgain) works; the errors that calls return are of type *Error.
type Status int32

// The statuses of kvrt.h, which says what each means.
const (
	StatusOK       Status = C.KV_OK
	ErrInvalid     Status = C.KV_INVALID
	ErrUnsupported Status = C.KV_UNSUPPORTED
	ErrStale       Status = C.KV_STALE
	ErrNoSnapshot  Status = C.KV_NO_SNAPSHOT
	ErrAgain       Status = C.KV_AGAIN
	ErrTooLarge    Status = C.KV_TOO_LARGE
	ErrLimit       Status = C.KV_LIMIT
	ErrNoMemory    Status = C.KV_NO_MEMORY
	ErrDevice      Status = C.KV_DEVICE
	ErrIO          Status = C.KV_IO
	ErrCorrupt     Status = C.KV_CORRUPT
	ErrInternal    Status = C.KV_INTERNAL
)

// Category is the block of a Status; errors.Is(err, CategoryCapacity) matches all of its codes.
type Category int32

// The categories of kvrt.h.
const (
	CategoryOK       Category = C.KV_CATEGORY_OK
	CategoryArgument Category = C.KV_CATEGORY_ARGUMENT
	CategoryState    Category = C.KV_CATEGORY_STATE
	CategoryCapacity Category = C.KV_CATEGORY_CAPACITY
	CategoryDevice   Category = C.KV_CATEGORY_DEVICE
	CategoryIO       Category = C.KV_CATEGORY_IO
	CategoryInternal Category = C.KV_CATEGORY_INTERNAL
)

// String is the name in kvrt.h, such as "KV_AGAIN"; an unknown code's has its number behind it.
func (s Status) String() string {
	name := C.GoString(C.kv_status_name(C.kv_status(s)))
	if name == "KV_UNKNOWN" {
		return fmt.Sprintf("%s(%d)", name, int32(s))
	}
	return name
}

func (s Status) Error() string { return "kvrt: " + s.String() }

// Category is the block that the code belongs to, also of a code that is not named here.
func (s Status) Category() Category { return Category(C.kv_status_category(C.kv_status(s))) }

var categoryNames = map[Category]string{
	CategoryOK: "ok", CategoryArgument: "argument", CategoryState: "state",
	CategoryCapacity: "capacity", CategoryDevice: "device", CategoryIO: "io",
	CategoryInternal: "internal",
}

// String is the category in a word, such as "capacity".
func (c Category) String() string {
	if name, known := categoryNames[c]; known {
		return name
	}
	return fmt.Sprintf("category %d", int32(c))
}

func (c Category) Error() string { return "kvrt: an error of the category " + c.String() }

// Error is a call that failed.
type Error struct {
	Status  Status
	Message string // one line: which argument, what was wrong, what would be right
}

func (e *Error) Error() string { return e.Status.Error() + ": " + e.Message }

// Is reports whether target is this error's Status or its Category, or ErrClosed if it is one.
func (e *Error) Is(target error) bool {
	if target == ErrClosed {
		return e == errPoolClosed || e == errStepClosed || e == errMemoryReturned
	}
	switch wanted := target.(type) {
	case Status:
		return e.Status == wanted
	case Category:
		return e.Status.Category() == wanted
	}
	return false
}

// ErrClosed is what errors.Is finds in the errors of a Pool, a Step or a BlockMemory that is used
// after its end; they are ErrInvalid as well.
var ErrClosed = errors.New("kvrt: closed")

// The errors of this package's own making, in the library's words where it has some.
var (
	errPoolClosed     = &Error{ErrInvalid, "the pool is closed"}
	errStepClosed     = &Error{ErrInvalid, "the step is closed: it was ended or cancelled"}
	errMemoryReturned = &Error{ErrInvalid, "the block memory was lent to a callback that has " +
		"returned"}
	errPoolBusy = &Error{ErrInvalid, "another goroutine is inside a call on this pool: take " +
		"turns, or create it with PoolThreadSafe"}
	errInsideHook = &Error{ErrInvalid, "the call comes from a hook of this pool, which is inside " +
		"another call"}
)

func invalid(format string, arguments ...any) error {
	return &Error{ErrInvalid, fmt.Sprintf(format, arguments...)}
}

// failure turns what a shim returned into an error, nil if there was none.
func failure(result C.kvgo_result) error {
	if result.status >= 0 {
		return nil
	}
	message := "no memory for the message"
	if result.message != nil {
		message = C.GoString(result.message)
		C.free(unsafe.Pointer(result.message))
	}
	return &Error{Status(result.status), message}
}
