// Pools on a CUDA device: what is told where there is none, that the two memories are not taken for
// each other, and the raw structs and functions.

package kvrt

import (
	"errors"
	"strings"
	"testing"
	"unsafe"
)

func cudaConfig() Config {
	config := smallConfig(0)
	config.Device = DeviceCUDA
	return config
}

func TestCUDADeviceOrReason(t *testing.T) {
	device, err := GetCUDADevice()
	if err == nil {
		if device.Name == "" || device.MemoryBytes == 0 || device.ComputeMajor == 0 {
			t.Errorf("%+v", device)
		}
		return
	}
	refused(t, err, ErrUnsupported, "CUDA")
	// A pool is refused for the same reason.
	_, poolErr := NewPool(cudaConfig(), smallModel())
	if poolErr == nil || poolErr.Error() != err.Error() {
		t.Errorf("%v, the pool says %v", err, poolErr)
	}
}

func TestCUDAAllocatorIsChecked(t *testing.T) {
	var function byte // refused before anybody calls it
	alone := CUDAAllocator{Allocate: unsafe.Pointer(&function)}
	_, err := NewCUDAPool(cudaConfig(), smallModel(), alone)
	refused(t, err, ErrInvalid, "come together")
	both := CUDAAllocator{Allocate: unsafe.Pointer(&function), Release: unsafe.Pointer(&function)}
	_, err = NewCUDAPool(smallConfig(0), smallModel(), both)
	refused(t, err, ErrInvalid, "KV_DEVICE_CUDA")
	config := cudaConfig()
	config.Flags |= PoolElastic
	_, err = NewCUDAPool(config, smallModel(), both)
	refused(t, err, ErrUnsupported, "KV_POOL_ELASTIC")
}

func TestPoolOnCPUTakesNothingOfADevice(t *testing.T) {
	pool := newPool(t, smallConfig(0), smallModel())
	_, err := pool.CUDAMemory()
	refused(t, err, ErrInvalid, "CPU")
	_, err = pool.CUDAScoring()
	refused(t, err, ErrInvalid, "CPU")
	scoring := CUDAScoring{Method: CUDAScoreProducts, TF32: true}
	refused(t, pool.SetCUDAScoring(scoring), ErrInvalid, "CPU")
	scoring.Method = 9
	refused(t, pool.SetCUDAScoring(scoring), ErrInvalid, "9")
	sequence, err := pool.CreateSequence(SequenceConfig{})
	must(t, err)
	refused(t, pool.SetCUDAScores(sequence, 0, 0, 1, nil, nil), ErrInvalid, "CPU")
	step, err := pool.BeginStep()
	must(t, err)
	defer step.Close()
	_, err = step.Append(sequence, 1, nil)
	must(t, err)
	var target byte
	refused(t, step.UseCUDAStream(unsafe.Pointer(&target)), ErrInvalid, "CPU")
	_, err = step.Reserve(nil)
	must(t, err)
	_, err = step.CUDATables(0, 0)
	refused(t, err, ErrInvalid, "")
	_, err = step.CUDATablesAttended(0, 0)
	refused(t, err, ErrInvalid, "on the CPU")
	nowhere := DeviceTensor{Address: 4096, Type: TypeF16, Rows: 1, Heads: kvHeads, Dim: keyDim}
	refused(t, step.WriteOnDevice(0, nowhere, nowhere), ErrInvalid, "on the CPU")
	refused(t, step.AttendOnDevice(0, nowhere, nowhere, 0), ErrInvalid, "on the CPU")
	must(t, step.Cancel())
	refused(t, step.UseCUDAStream(nil), ErrInvalid, "closed")
	_, err = step.CUDATables(0, 0)
	refused(t, err, ErrInvalid, "closed")
}

func TestPoolOnCUDATakesNothingOfTheHost(t *testing.T) {
	pool, err := NewPool(cudaConfig(), smallModel())
	if err != nil {
		if !errors.Is(err, ErrUnsupported) {
			t.Errorf("%v", err)
		}
		t.Logf("a pool on CUDA: skipped: %v", strings.TrimSpace(err.Error()))
		return
	}
	defer pool.Close()
	sequence, err := pool.CreateSequence(SequenceConfig{})
	must(t, err)
	step, err := pool.BeginStep()
	must(t, err)
	defer step.Close()
	_, err = step.Append(sequence, 1, nil)
	must(t, err)
	keys := Float32(make([]float32, kvHeads*keyDim), 1, kvHeads, keyDim)
	values := Float32(make([]float32, kvHeads*valueDim), 1, kvHeads, valueDim)
	refused(t, step.Write(0, keys, values), ErrInvalid, "WriteOnDevice")
}
