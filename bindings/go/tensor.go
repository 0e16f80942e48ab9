// Tensors: views of the engine's own memory.

package kvrt

// #include "shims.h"
import "C"

import (
	"math/bits"
	"unsafe"
)

// DataType is how the elements of a Tensor are stored.
type DataType uint32

// The types of kvrt.h.
const (
	TypeF32  DataType = C.KV_DTYPE_F32
	TypeF16  DataType = C.KV_DTYPE_F16
	TypeBF16 DataType = C.KV_DTYPE_BF16
)

// Tensor is a view of a slice as [rows, heads, dim]. A dense one fills its slice exactly; Strided
// takes part of it. It is used where it lies: nothing is copied. A view that does not fit its slice
// is refused by the call that it is handed to.
type Tensor struct {
	data              *byte // nil: the slice is empty
	length            int   // of the slice, in elements
	dataType          DataType
	rows, heads, dim  int
	strided           bool // else dense, and what follows is 0
	offset            int
	row, head, stride int64 // strides in elements
}

// Float32 is a dense view of 32-bit floats.
func Float32(data []float32, rows, heads, dim int) Tensor {
	if len(data) == 0 {
		return dense(nil, 0, TypeF32, rows, heads, dim)
	}
	return dense((*byte)(unsafe.Pointer(&data[0])), len(data), TypeF32, rows, heads, dim)
}

// Float16 is a dense view of the bits of IEEE 754 half-precision floats.
func Float16(data []uint16, rows, heads, dim int) Tensor {
	return half(data, TypeF16, rows, heads, dim)
}

// BFloat16 is a dense view of the bits of bfloat16 floats.
func BFloat16(data []uint16, rows, heads, dim int) Tensor {
	return half(data, TypeBF16, rows, heads, dim)
}

func half(data []uint16, dataType DataType, rows, heads, dim int) Tensor {
	if len(data) == 0 {
		return dense(nil, 0, dataType, rows, heads, dim)
	}
	return dense((*byte)(unsafe.Pointer(&data[0])), len(data), dataType, rows, heads, dim)
}

func dense(data *byte, length int, dataType DataType, rows, heads, dim int) Tensor {
	return Tensor{data: data, length: length, dataType: dataType, rows: rows, heads: heads,
		dim: dim}
}

// Strided is the same shape with its first element at data[offset] and these strides, in elements:
// the parts of a packed QKV buffer are used where they lie. Strides may be negative. All 0 is
// refused, for the library takes it for dense; so is an output whose elements lie on each other.
func (t Tensor) Strided(offset int, row, head, dim int64) Tensor {
	t.strided = true
	t.offset, t.row, t.head, t.stride = offset, row, head, dim
	return t
}

// native checks that every element lies in the slice. What the shape should be the library knows.
func (t *Tensor) native(name string) (C.kvgo_tensor, error) {
	if t.rows < 0 || t.heads < 0 || t.dim < 0 {
		return C.kvgo_tensor{}, invalid("%s is [%d, %d, %d]", name, t.rows, t.heads, t.dim)
	}
	if err := t.check(name); err != nil {
		return C.kvgo_tensor{}, err
	}
	data := t.data
	if t.offset > 0 && t.offset < t.length {
		size := 2
		if t.dataType == TypeF32 {
			size = 4
		}
		data = (*byte)(unsafe.Add(unsafe.Pointer(data), t.offset*size))
	}
	return C.kvgo_tensor{
		data:        (*C.uchar)(data),
		dtype:       C.uint32_t(t.dataType),
		rows:        C.uint64_t(t.rows),
		heads:       C.uint64_t(t.heads),
		dim:         C.uint64_t(t.dim),
		row_stride:  C.int64_t(t.row),
		head_stride: C.int64_t(t.head),
		dim_stride:  C.int64_t(t.stride),
	}, nil
}

// nativeOutput is native for what the library writes, from several threads: elements that share a
// place are refused.
func (t *Tensor) nativeOutput() (C.kvgo_tensor, error) {
	out, err := t.native("out")
	if err == nil && t.strided && !t.apart() {
		return C.kvgo_tensor{}, invalid("out: elements of [%d, %d, %d] with strides (%d, %d, %d) "+
			"lie on each other", t.rows, t.heads, t.dim, t.row, t.head, t.stride)
	}
	return out, err
}

// elements is how many a shape has, false if no slice is as long.
func (t *Tensor) elements() (int64, bool) {
	heads, fine := reach(t.heads, int64(t.dim))
	if !fine {
		return 0, false
	}
	return reach(t.rows, heads)
}

func (t *Tensor) check(name string) error {
	if !t.strided {
		needed, fine := t.elements()
		if !fine {
			return invalid("%s: a dense [%d, %d, %d] is longer than any slice, its slice has %d "+
				"elements", name, t.rows, t.heads, t.dim, t.length)
		}
		if needed != int64(t.length) {
			return invalid("%s: a dense [%d, %d, %d] takes %d elements, its slice has %d", name,
				t.rows, t.heads, t.dim, needed, t.length)
		}
		return nil
	}
	if t.row == 0 && t.head == 0 && t.stride == 0 {
		return invalid("%s: the strides are all 0", name)
	}
	if t.rows != 0 && t.heads != 0 && t.dim != 0 && !t.fits() {
		return invalid("%s: [%d, %d, %d] from element %d with strides (%d, %d, %d) reaches "+
			"beyond its %d elements", name, t.rows, t.heads, t.dim, t.offset, t.row, t.head,
			t.stride, t.length)
	}
	return nil
}

// fits is for strided shapes that have elements.
func (t *Tensor) fits() bool {
	if t.offset < 0 || t.offset >= t.length {
		return false
	}
	first, last := int64(t.offset), int64(t.offset)
	for _, axis := range t.axes() {
		distance, fine := reach(axis.count-1, axis.stride)
		if !fine {
			return false
		}
		if distance < 0 {
			first += distance
		} else {
			last += distance
		}
	}
	return first >= 0 && last < int64(t.length)
}

// axis is one dimension of a strided shape.
type axis struct {
	count  int
	stride int64
}

// step is the stride without its sign.
func (a axis) step() uint64 {
	if a.stride < 0 {
		return -uint64(a.stride)
	}
	return uint64(a.stride)
}

func (t *Tensor) axes() [3]axis {
	return [3]axis{{t.rows, t.row}, {t.heads, t.head}, {t.dim, t.stride}}
}

// apart is true if each axis steps over all that the narrower ones cover, which is enough for no
// two elements to share a place. It is for shapes that fit, so nothing overflows.
func (t *Tensor) apart() bool {
	axes := t.axes()
	for i := 1; i < len(axes); i++ { // by width of step, the narrowest first
		for j := i; j > 0 && axes[j].step() < axes[j-1].step(); j-- {
			axes[j], axes[j-1] = axes[j-1], axes[j]
		}
	}
	var covered uint64
	for _, axis := range axes {
		if axis.count <= 1 {
			continue
		}
		if axis.step() <= covered {
			return false
		}
		covered += uint64(axis.count-1) * axis.step()
	}
	return true
}

// reach is count * stride, false beyond 2^60: three of them and an offset add up in 64 bits, and no
// slice is as long.
func reach(count int, stride int64) (int64, bool) {
	high, low := bits.Mul64(uint64(count), axis{count, stride}.step())
	if high != 0 || low >= 1<<60 {
		return 0, false
	}
	if stride < 0 {
		return -int64(low), true
	}
	return int64(low), true
}
