// Statistics of queries, which TriAttention and Expected Attention score by.

package kvrt

// #include "shims.h"
import "C"

import (
	"strings"
	"unsafe"
)

// QueryStatistics is what TriAttention knows of a layer's queries before rotation. The arrays are
// [QueryHeads, Bands], dense; Bands is rotated dimensions / 2 + the others.
//
// Expected Attention works with the mean and, where all three are known, with the variances of a
// band's two dimensions and their covariance: all of these arrays are given, or none.
type QueryStatistics struct {
	Layer         uint32
	QueryHeads    uint32
	Bands         uint32
	Tokens        uint64 // how many queries were averaged
	MeanReal      []float32
	MeanImaginary []float32
	MeanMagnitude []float32

	VarianceReal      []float32
	VarianceImaginary []float32
	Covariance        []float32
}

func (q *QueryStatistics) native() (C.kvgo_statistics, error) {
	needed := uint64(q.QueryHeads) * uint64(q.Bands)
	arrays := [6][]float32{q.MeanReal, q.MeanImaginary, q.MeanMagnitude,
		q.VarianceReal, q.VarianceImaginary, q.Covariance}
	names := [6]string{"MeanReal", "MeanImaginary", "MeanMagnitude",
		"VarianceReal", "VarianceImaginary", "Covariance"}
	var pointers [6]*C.float
	hasCovariances := len(q.VarianceReal)+len(q.VarianceImaginary)+len(q.Covariance) != 0
	for i, name := range names {
		if i >= 3 && !hasCovariances {
			break
		}
		if uint64(len(arrays[i])) != needed {
			return C.kvgo_statistics{}, invalid("%s has %d elements, %d heads of %d bands need %d",
				name, len(arrays[i]), q.QueryHeads, q.Bands, needed)
		}
		if needed != 0 {
			pointers[i] = (*C.float)(&arrays[i][0])
		}
	}
	return C.kvgo_statistics{
		layer:          C.uint32_t(q.Layer),
		query_heads:    C.uint32_t(q.QueryHeads),
		bands:          C.uint32_t(q.Bands),
		tokens:         C.uint64_t(q.Tokens),
		mean_real:      pointers[0],
		mean_imaginary: pointers[1],
		mean_magnitude: pointers[2],

		variance_real:      pointers[3],
		variance_imaginary: pointers[4],
		covariance:         pointers[5],
	}, nil
}

// SetStatistics gives the pool a layer's statistics (copied).
func (p *Pool) SetStatistics(statistics QueryStatistics) error {
	native, err := statistics.native()
	if err != nil {
		return err
	}
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return p.failure(C.kvgo_pool_set_statistics(p.handle, native))
}

// GetStatistics reads what a sequence has gathered so far into the arrays, and sets Tokens. Layer,
// QueryHeads, Bands and the arrays say what is wanted.
func (p *Pool) GetStatistics(sequence Sequence, statistics *QueryStatistics) error {
	if statistics == nil {
		return invalid("statistics is nil")
	}
	native, err := statistics.native()
	if err != nil {
		return err
	}
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	read := C.kvgo_seq_get_statistics(p.handle, C.kv_seq(sequence), native)
	if err := p.failure(read.result); err != nil {
		return err
	}
	statistics.Tokens = uint64(read.count)
	return nil
}

// cPath refuses what C would read as a shorter path.
func cPath(path string) (*C.char, error) {
	if strings.IndexByte(path, 0) >= 0 {
		return nil, invalid("path %q holds a zero byte", path)
	}
	return C.CString(path), nil
}

// SaveStatistics writes what a sequence has gathered, of every layer, to a file.
func (p *Pool) SaveStatistics(sequence Sequence, path string) error {
	name, err := cPath(path)
	if err != nil {
		return err
	}
	defer C.free(unsafe.Pointer(name))
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return p.failure(C.kvgo_seq_save_statistics(p.handle, C.kv_seq(sequence), name))
}

// LoadStatistics sets a file's statistics on the pool, all layers or none.
func (p *Pool) LoadStatistics(path string) error {
	name, err := cPath(path)
	if err != nil {
		return err
	}
	defer C.free(unsafe.Pointer(name))
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return p.failure(C.kvgo_pool_load_statistics(p.handle, name))
}
