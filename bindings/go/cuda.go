// Pools on a CUDA device (Config.Device): which one it is, the streams of their steps, tables and
// tensors in its memory.

package kvrt

// #include "shims.h"
import "C"

import "unsafe"

// CUDADevice is the device that pools are made on: the one that is current for the calling thread,
// or the first.
type CUDADevice struct {
	Name                       string
	MemoryBytes                uint64
	Ordinal                    uint32 // as the driver counts
	ComputeMajor, ComputeMinor uint32
	Multiprocessors            uint32
	DriverVersion              uint32 // 13000: made for CUDA 13.0
	Elastic                    bool   // it can map memory piece by piece, as PoolElastic needs
	WithoutKernels             string // why pools there have no kernels; "": they have
}

// GetCUDADevice says what there is, or what is missing (ErrUnsupported: no plugin, no driver or no
// device). It loads the driver and starts it: processes forked from this one afterwards cannot use
// CUDA.
func GetCUDADevice() (CUDADevice, error) {
	got := C.kvgo_cuda_get_device()
	if err := failure(got.result); err != nil {
		return CUDADevice{}, err
	}
	device := CUDADevice{
		Name:            C.GoString(&got.device.name[0]),
		MemoryBytes:     uint64(got.device.memory_bytes),
		Ordinal:         uint32(got.device.ordinal),
		ComputeMajor:    uint32(got.device.compute_major),
		ComputeMinor:    uint32(got.device.compute_minor),
		Multiprocessors: uint32(got.device.multiprocessors),
		DriverVersion:   uint32(got.device.driver_version),
		Elastic:         got.device.elastic != 0,
	}
	if got.device.has_kernels == 0 {
		device.WithoutKernels = C.GoString(&got.device.reason[0])
	}
	return device, nil
}

// CUDAAllocator is whose device memory a pool lives in: functions in C, as allocate and release of
// kv_cuda_memory in kv_cuda.h, and what they get as `user`. They stay until the pool is closed.
type CUDAAllocator struct {
	User, Allocate, Release unsafe.Pointer
}

// NewCUDAPool is NewPool for a config on DeviceCUDA without PoolElastic, with all of the pool's
// device memory from the allocator.
func NewCUDAPool(config Config, model Model, allocator CUDAAllocator) (*Pool, error) {
	return createPool(config, model, func(native *C.kv_pool_config,
		description *C.kv_model) C.kvgo_pool {
		return C.kvgo_cuda_pool_create(native, description,
			C.uintptr_t(uintptr(allocator.User)), C.uintptr_t(uintptr(allocator.Allocate)),
			C.uintptr_t(uintptr(allocator.Release)))
	})
}

// CUDAMemory is how many bytes of device memory are behind the pool's arena now.
func (p *Pool) CUDAMemory() (uint64, error) {
	if err := p.enter(); err != nil {
		return 0, err
	}
	defer p.leave()
	got := C.kvgo_cuda_pool_memory(p.handle)
	return uint64(got.count), p.failure(got.result)
}

// SetCUDAScores is SetScores for [KV heads, tokens] scores of float32 in device memory, which are
// read behind all that stream has: a CUstream or cudaStream_t of the device's primary context, not
// the default one. Nobody can check that they are there.
func (p *Pool) SetCUDAScores(sequence Sequence, layer uint32, first, tokens uint64,
	scores, stream unsafe.Pointer) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return p.failure(C.kvgo_cuda_seq_set_scores(p.handle, C.kv_seq(sequence), C.uint32_t(layer),
		C.uint64_t(first), C.uint64_t(tokens), C.uintptr_t(uintptr(scores)),
		C.uintptr_t(uintptr(stream))))
}

// CUDAScoreMethod is who scores keys by TriAttention on a CUDA device.
type CUDAScoreMethod uint32

// The methods of kv_cuda.h.
const (
	CUDAScoreKernel   CUDAScoreMethod = C.KV_CUDA_SCORE_KERNEL   // the library's own; a pool begins so
	CUDAScoreProducts CUDAScoreMethod = C.KV_CUDA_SCORE_PRODUCTS // matrix products by cuBLASLt
	CUDAScoreMeasured CUDAScoreMethod = C.KV_CUDA_SCORE_MEASURED // whichever is faster

	cudaScoringTF32 = uint32(C.KV_CUDA_SCORING_TF32)

	cudaTablesAttended = uint32(C.KV_CUDA_TABLES_ATTENDED)
)

// CUDAScoring is how keys are scored by TriAttention.
type CUDAScoring struct {
	Method         CUDAScoreMethod
	WorkspaceBytes uint64 // of products, in device memory; 0: the library's choice
	TF32           bool   // products may round keys and weights to 11 bits
}

// CUDAScoringReport is how keys were scored so far.
type CUDAScoringReport struct {
	CUDAScoring
	LibraryVersion                       uint32 // as cublasLtGetVersion counts; 0: never asked for
	KernelCohorts, ProductCohorts        uint64 // lanes of one kind that were scored together
	ShapeHits, ShapeMisses               uint64 // of products: descriptors that were there, or not
	KernelKinds, ProductKinds, OpenKinds uint32 // of work: decided, or still being timed
	Reason                               string // why a measured round last was the kernel's untimed
}

// SetCUDAScoring says who scores, from the next round on. What products take stays until the pool
// is closed.
func (p *Pool) SetCUDAScoring(scoring CUDAScoring) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	var flags uint32
	if scoring.TF32 {
		flags = cudaScoringTF32
	}
	return p.failure(C.kvgo_cuda_pool_set_scoring(p.handle, C.uint32_t(scoring.Method),
		C.uint64_t(scoring.WorkspaceBytes), C.uint32_t(flags)))
}

// CUDAScoring is how keys are scored, and were.
func (p *Pool) CUDAScoring() (CUDAScoringReport, error) {
	if err := p.enter(); err != nil {
		return CUDAScoringReport{}, err
	}
	defer p.leave()
	got := C.kvgo_cuda_pool_get_scoring(p.handle)
	if err := p.failure(got.result); err != nil {
		return CUDAScoringReport{}, err
	}
	return CUDAScoringReport{
		CUDAScoring: CUDAScoring{
			Method:         CUDAScoreMethod(got.report.method),
			WorkspaceBytes: uint64(got.report.workspace_bytes),
			TF32:           uint32(got.report.scoring_flags)&cudaScoringTF32 != 0,
		},
		LibraryVersion: uint32(got.report.library_version),
		KernelCohorts:  uint64(got.report.kernel_cohorts),
		ProductCohorts: uint64(got.report.product_cohorts),
		ShapeHits:      uint64(got.report.shape_hits),
		ShapeMisses:    uint64(got.report.shape_misses),
		KernelKinds:    uint32(got.report.kernel_kinds),
		ProductKinds:   uint32(got.report.product_kinds),
		OpenKinds:      uint32(got.report.open_kinds),
		Reason:         C.GoString(&got.report.reason[0]),
	}, nil
}

// UseCUDAStream names the stream that all of the step's work goes to, before Reserve: a CUstream or
// cudaStream_t of the device's primary context, not the default one, which lives until that work is
// done.
func (s Step) UseCUDAStream(stream unsafe.Pointer) error {
	step, err := s.enter()
	if err != nil {
		return err
	}
	defer s.pool.leave()
	return s.pool.failure(C.kvgo_cuda_step_use_stream(step.handle, C.uintptr_t(uintptr(stream))))
}

// CUDATables are addresses of a step's tables in device memory, filled as Step.Export fills them on
// the host. They stay: kernels on them can be captured in a graph, one for each place.
type CUDATables struct {
	Place            uint32  // which of the two sets, for the two steps that can be open: 0 or 1
	BlockTable       uintptr // [max step sequences, BlockTableStride] of int32; -1 behind a row's end
	BlockTableStride uint64
	SlotMapping      uintptr // [max step tokens] of int64; -1: no row
	QueryStart       uintptr // [max step sequences + 1] of int32
	KVLen            uintptr // [max step sequences] of int32; 0: no item
	Positions        uintptr // [max step tokens] of int32
}

// CUDATables are those of a layer's lane, from Reserve until the step's end. kvHead is 0 but with
// LayerLanePerHead. The layer counts as written.
func (s Step) CUDATables(layer, kvHead uint32) (CUDATables, error) {
	return s.cudaTables(layer, kvHead, 0)
}

// CUDATablesAttended are the same in a step that replays a graph in which the layer's attention was
// captured with statistics: what it observes and gathers counts.
func (s Step) CUDATablesAttended(layer, kvHead uint32) (CUDATables, error) {
	return s.cudaTables(layer, kvHead, cudaTablesAttended)
}

func (s Step) cudaTables(layer, kvHead, flags uint32) (CUDATables, error) {
	step, err := s.enter()
	if err != nil {
		return CUDATables{}, err
	}
	defer s.pool.leave()
	got := C.kvgo_cuda_step_tables(step.handle, C.uint32_t(layer), C.uint32_t(kvHead),
		C.uint32_t(flags))
	if err := s.pool.failure(got.result); err != nil {
		return CUDATables{}, err
	}
	return CUDATables{
		Place:            uint32(got.place),
		BlockTable:       uintptr(got.block_table),
		BlockTableStride: uint64(got.block_table_stride),
		SlotMapping:      uintptr(got.slot_mapping),
		QueryStart:       uintptr(got.query_start),
		KVLen:            uintptr(got.kv_len),
		Positions:        uintptr(got.positions),
	}, nil
}

// DeviceTensor is [Rows, Heads, Dim] in the memory of the pool's device, from an address on: dense,
// or with strides in elements. Nobody can check that it is there.
type DeviceTensor struct {
	Address                          uintptr
	Type                             DataType
	Rows, Heads, Dim                 uint64
	RowStride, HeadStride, DimStride int64 // all 0: dense
}

func (t *DeviceTensor) native() C.kvgo_device_tensor {
	return C.kvgo_device_tensor{
		address:     C.uintptr_t(t.Address),
		dtype:       C.uint32_t(t.Type),
		rows:        C.uint64_t(t.Rows),
		heads:       C.uint64_t(t.Heads),
		dim:         C.uint64_t(t.Dim),
		row_stride:  C.int64_t(t.RowStride),
		head_stride: C.int64_t(t.HeadStride),
		dim_stride:  C.int64_t(t.DimStride),
	}
}

// WriteOnDevice is Write of tensors in device memory, enqueued on the step's stream. They stay
// until it is done.
func (s Step) WriteOnDevice(layer uint32, keys, values DeviceTensor) error {
	step, err := s.enterOn(DeviceCUDA)
	if err != nil {
		return err
	}
	defer s.pool.leave()
	return s.pool.failure(C.kvgo_write_on_device(step.handle, C.uint32_t(layer), keys.native(),
		values.native()))
}

// AttendOnDevice is Attend of tensors in device memory, enqueued on the step's stream. logSumExp is
// the address of [rows, query heads] of float32, or 0.
func (s Step) AttendOnDevice(layer uint32, queries, out DeviceTensor, logSumExp uintptr) error {
	step, err := s.enterOn(DeviceCUDA)
	if err != nil {
		return err
	}
	defer s.pool.leave()
	return s.pool.failure(C.kvgo_attend_on_device(step.handle, C.uint32_t(layer), queries.native(),
		out.native(), C.uintptr_t(logSumExp)))
}

// enterOn is enter, for a call with tensors of one of the two memories: kernels must not follow the
// addresses of slices, nor the CPU those of the device.
func (s Step) enterOn(device Device) (*openStep, error) {
	step, err := s.enter()
	if err != nil {
		return nil, err
	}
	if s.pool.onCUDA == (device == DeviceCUDA) {
		return step, nil
	}
	s.pool.leave()
	if s.pool.onCUDA {
		return nil, invalid("the pool is on DeviceCUDA: its tensors are in device memory " +
			"(WriteOnDevice, AttendOnDevice)")
	}
	return nil, invalid("the pool is on the CPU: tensors of device memory are for one on DeviceCUDA")
}
