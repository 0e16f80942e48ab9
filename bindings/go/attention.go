// Writing keys and values, and attending over them.

package kvrt

// #include "shims.h"
import "C"

// AttendFlags are the KV_ATTEND_* of kvrt.h.
type AttendFlags uint32

// AttendNoStatistics does not learn query statistics from this call.
const AttendNoStatistics AttendFlags = C.KV_ATTEND_NO_STATISTICS

// AttendOptions are for one call.
type AttendOptions struct {
	Flags     AttendFlags
	LogSumExp []float32 // [rows, query heads] to be filled, natural logarithm; or nil
}

// logSumExp checks that the slice is as long as the results for these queries.
func (o *AttendOptions) logSumExp(queries *Tensor) (*C.float, error) {
	if o.LogSumExp == nil {
		return nil, nil
	}
	needed, fine := reach(queries.rows, int64(queries.heads))
	if !fine || needed < 1 || needed != int64(len(o.LogSumExp)) {
		return nil, invalid("LogSumExp has %d elements, %d rows of %d query heads need %d",
			len(o.LogSumExp), queries.rows, queries.heads, needed)
	}
	return (*C.float)(&o.LogSumExp[0]), nil
}

// Write stores the keys and values of all rows of the step in a layer: [rows, KV heads, dim] each,
// keys as attention will use them. A second call overwrites.
func (s Step) Write(layer uint32, keys, values Tensor) error {
	k, err := keys.native("keys")
	if err != nil {
		return err
	}
	v, err := values.native("values")
	if err != nil {
		return err
	}
	step, err := s.enterOn(DeviceCPU)
	if err != nil {
		return err
	}
	defer s.pool.leave()
	return s.pool.failure(C.kvgo_write(step.handle, C.uint32_t(layer), k, v))
}

// Attend computes out = softmax(scale * queries . K) V of a layer, over what each row may see.
// queries are [rows, query heads, key dim], out is [rows, query heads, value dim].
func (s Step) Attend(layer uint32, queries, out Tensor, options AttendOptions) error {
	q, err := queries.native("queries")
	if err != nil {
		return err
	}
	o, err := out.nativeOutput()
	if err != nil {
		return err
	}
	logSumExp, err := options.logSumExp(&queries)
	if err != nil {
		return err
	}
	step, err := s.enterOn(DeviceCPU)
	if err != nil {
		return err
	}
	defer s.pool.leave()
	return s.pool.failure(C.kvgo_attend(step.handle, C.uint32_t(layer), q, o,
		C.uint32_t(options.Flags), logSumExp))
}

// WriteAttend is Write and then Attend, in one call into C. If Attend's part fails, the layer has
// been written.
func (s Step) WriteAttend(layer uint32, keys, values, queries, out Tensor,
	options AttendOptions) error {
	k, err := keys.native("keys")
	if err != nil {
		return err
	}
	v, err := values.native("values")
	if err != nil {
		return err
	}
	q, err := queries.native("queries")
	if err != nil {
		return err
	}
	o, err := out.nativeOutput()
	if err != nil {
		return err
	}
	logSumExp, err := options.logSumExp(&queries)
	if err != nil {
		return err
	}
	step, err := s.enterOn(DeviceCPU)
	if err != nil {
		return err
	}
	defer s.pool.leave()
	return s.pool.failure(C.kvgo_write_attend(step.handle, C.uint32_t(layer), k, v, q, o,
		C.uint32_t(options.Flags), logSumExp))
}
