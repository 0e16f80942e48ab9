// Counters, capacity, capabilities, version.

package kvrt

// #include "shims.h"
import "C"

// The version of kvrt.h that the program was compiled with.
const (
	VersionMajor = C.KVRT_VERSION_MAJOR
	VersionMinor = C.KVRT_VERSION_MINOR
	VersionPatch = C.KVRT_VERSION_PATCH
	Version      = C.KVRT_VERSION // major * 10000 + minor * 100 + patch
)

// LibraryVersion is the Version of the library that is loaded.
func LibraryVersion() uint32 { return uint32(C.kvrt_version()) }

// LiveKind is a kind of object that LiveCount counts.
type LiveKind uint32

// The kinds of kvrt.h.
const (
	LivePools     LiveKind = C.KV_LIVE_POOLS
	LiveSequences LiveKind = C.KV_LIVE_SEQUENCES
	LiveSteps     LiveKind = C.KV_LIVE_STEPS
)

// LiveCount is how many objects of a kind are alive in this process, over all pools.
func LiveCount(kind LiveKind) uint64 { return uint64(C.kv_live_count(C.uint32_t(kind))) }

// PoolStats is a snapshot. Of blocks, over all classes:
// Total = Free + Cached + Pinned + Parked + Loading.
type PoolStats struct {
	SlabBytes                  uint64
	SlabsTotal                 uint64
	SlabsFree                  uint64
	SlabsResident              uint64 // backed by memory now
	ArenaBytes                 uint64 // SlabsTotal * SlabBytes
	LiveBytes                  uint64 // of pinned blocks
	LiveBlocks                 uint64
	PeakLiveBlocks             uint64
	Total                      uint64
	Free                       uint64
	Cached                     uint64
	Pinned                     uint64
	Parked                     uint64
	Loading                    uint64
	BlocksAllocated            uint64 // since creation, as what follows
	BlocksReturned             uint64
	BytesReturned              uint64
	BlocksReturnedByCompaction uint64
	BytesReturnedByCompaction  uint64
	Compactions                uint64
	CompactionsSkipped         uint64
	SlabsGivenBack             uint64
	StepsEnded                 uint64
	StepsCancelled             uint64
	TokensAccepted             uint64
	HostAllocations            uint64
	Sequences                  uint32
	OpenSteps                  uint32
	Classes                    uint32
	MetadataBytes              uint64 // host memory besides the arena
}

// ClassStats is a snapshot of one class of blocks:
// Total = Free + Cached + Pinned + Parked + Loading.
type ClassStats struct {
	BlockBytes    uint64
	BlocksPerSlab uint64
	Slabs         uint64
	Total         uint64
	Free          uint64
	Cached        uint64
	Pinned        uint64
	Parked        uint64
	Loading       uint64
}

// Stats may be called by any goroutine at any time: the values belong to one moment.
func (p *Pool) Stats() (PoolStats, error) {
	if err := p.stay(); err != nil {
		return PoolStats{}, err
	}
	defer p.quit()
	read := C.kvgo_pool_get_stats(p.handle)
	if err := failure(read.result); err != nil {
		return PoolStats{}, err
	}
	return poolStatsOf(&read.stats), nil
}

func poolStatsOf(from *C.kv_pool_stats) PoolStats {
	return PoolStats{
		SlabBytes:                  uint64(from.slab_bytes),
		SlabsTotal:                 uint64(from.slabs_total),
		SlabsFree:                  uint64(from.slabs_free),
		SlabsResident:              uint64(from.slabs_resident),
		ArenaBytes:                 uint64(from.arena_bytes),
		LiveBytes:                  uint64(from.live_bytes),
		LiveBlocks:                 uint64(from.live_blocks),
		PeakLiveBlocks:             uint64(from.peak_live_blocks),
		Total:                      uint64(from.total),
		Free:                       uint64(from.free),
		Cached:                     uint64(from.cached),
		Pinned:                     uint64(from.pinned),
		Parked:                     uint64(from.parked),
		Loading:                    uint64(from.loading),
		BlocksAllocated:            uint64(from.blocks_allocated),
		BlocksReturned:             uint64(from.blocks_returned),
		BytesReturned:              uint64(from.bytes_returned),
		BlocksReturnedByCompaction: uint64(from.blocks_returned_by_compaction),
		BytesReturnedByCompaction:  uint64(from.bytes_returned_by_compaction),
		Compactions:                uint64(from.compactions),
		CompactionsSkipped:         uint64(from.compactions_skipped),
		SlabsGivenBack:             uint64(from.slabs_given_back),
		StepsEnded:                 uint64(from.steps_ended),
		StepsCancelled:             uint64(from.steps_cancelled),
		TokensAccepted:             uint64(from.tokens_accepted),
		HostAllocations:            uint64(from.host_allocations),
		Sequences:                  uint32(from.sequences),
		OpenSteps:                  uint32(from.open_steps),
		Classes:                    uint32(from.classes),
		MetadataBytes:              uint64(from.metadata_bytes),
	}
}

// ClassStats may be called by any goroutine at any time. Classes are numbered from 0 to
// PoolStats.Classes.
func (p *Pool) ClassStats(class uint32) (ClassStats, error) {
	if err := p.stay(); err != nil {
		return ClassStats{}, err
	}
	defer p.quit()
	read := C.kvgo_pool_get_class_stats(p.handle, C.uint32_t(class))
	if err := failure(read.result); err != nil {
		return ClassStats{}, err
	}
	return classStatsOf(&read.stats), nil
}

func classStatsOf(from *C.kv_class_stats) ClassStats {
	return ClassStats{
		BlockBytes:    uint64(from.block_bytes),
		BlocksPerSlab: uint64(from.blocks_per_slab),
		Slabs:         uint64(from.slabs),
		Total:         uint64(from.total),
		Free:          uint64(from.free),
		Cached:        uint64(from.cached),
		Pinned:        uint64(from.pinned),
		Parked:        uint64(from.parked),
		Loading:       uint64(from.loading),
	}
}

// LayerStats counts what happened to a layer since the pool's creation. Saturated are, per KV head,
// the elements written that were beyond the largest number of their format and scale, and were
// stored as that number. Static fp8 is where it happens: a layer whose counts grow needs other
// scales, or a format that scales each token.
type LayerStats struct {
	SaturatedKeys   []uint64 // [KVHeads]
	SaturatedValues []uint64 // [KVHeads]

	// Of FormatKIVI4 and the like: rows that left a block and were coded again, by compaction or
	// after a sequence went back, and their change, root mean square, as a share of their own.
	RecodedRows   uint64
	RecodingError float64
}

// LayerStats may be called by any goroutine at any time. A layer that shares another's cache shows
// its owner's.
func (p *Pool) LayerStats(layer uint32) (LayerStats, error) {
	if err := p.stay(); err != nil {
		return LayerStats{}, err
	}
	defer p.quit()
	read := C.kvgo_pool_get_layer_stats(p.handle, C.uint32_t(layer), 0, nil, nil)
	if err := failure(read.result); err != nil {
		return LayerStats{}, err
	}
	heads := read.stats.kv_heads
	stats := LayerStats{SaturatedKeys: make([]uint64, heads), SaturatedValues: make([]uint64, heads)}
	read = C.kvgo_pool_get_layer_stats(p.handle, C.uint32_t(layer), heads,
		(*C.uint64_t)(&stats.SaturatedKeys[0]), (*C.uint64_t)(&stats.SaturatedValues[0]))
	if err := failure(read.result); err != nil {
		return LayerStats{}, err
	}
	stats.RecodedRows = uint64(read.stats.recoded_rows)
	stats.RecodingError = float64(read.stats.recoding_error)
	return stats, nil
}

// Plan is what a pool would need and hold.
type Plan struct {
	Sequences         uint64 // as asked
	TokensPerSequence uint64 // as asked
	BytesPerToken     uint64 // over all layers, full blocks, windows not yet full
	BytesPerSequence  uint64 // of that length, whole blocks, windows respected
	ArenaBytesNeeded  uint64 // for all those sequences, whole slabs
	SequencesThatFit  uint64 // of that length in Config.ArenaBytes
	TokensThatFit     uint64 // of one sequence alone in Config.ArenaBytes
	MetadataBytes     uint64 // host memory that NewPool will allocate
	BytesPerBlock     uint64 // a block's tokens of one sequence, over all layers
	BlocksPerSequence uint64 // of that length, over all layers
	FullBytesPerToken uint64 // what a token adds to a sequence whose windows are full

	// Of full windows, and blocks that KIVI and KVARN still keep raw.
	ConstantBytesPerSequence uint64
	TokensThatFitEach        uint64 // of each of Sequences in Config.ArenaBytes
	TokensByBytes            uint64 // Config.ArenaBytes / BytesPerToken
	Layer                    uint32 // as asked
	LayerBytesPerBlock       uint64 // 0: it shares another's cache
	LayerBytesPerSequence    uint64 // of that length
}

// MakePlan asks before buying: what `sequences` of `tokensPerSequence` retained tokens need. 0
// takes the number from config. With no ArenaBytes it says how much memory that takes, and nothing
// fits.
func MakePlan(config Config, model Model, sequences, tokensPerSequence uint64) (Plan, error) {
	return MakePlanOfLayer(config, model, sequences, tokensPerSequence, 0)
}

// MakePlanOfLayer is MakePlan with the share of one layer.
func MakePlanOfLayer(config Config, model Model, sequences, tokensPerSequence uint64,
	layer uint32) (Plan, error) {
	var memory transfer
	defer memory.free()
	native, description, hooks, err := describe(&memory, config, model)
	if err != nil {
		return Plan{}, err
	}
	defer hooks.free()
	made := C.kvgo_plan(native, description, C.uint64_t(sequences), C.uint64_t(tokensPerSequence),
		C.uint32_t(layer))
	if err := failure(made.result); err != nil {
		return Plan{}, err
	}
	return planOf(&made.report), nil
}

func planOf(from *C.kv_plan_report) Plan {
	return Plan{
		Sequences:         uint64(from.sequences),
		TokensPerSequence: uint64(from.tokens_per_sequence),
		BytesPerToken:     uint64(from.bytes_per_token),
		BytesPerSequence:  uint64(from.bytes_per_sequence),
		ArenaBytesNeeded:  uint64(from.arena_bytes_needed),
		SequencesThatFit:  uint64(from.sequences_that_fit),
		TokensThatFit:     uint64(from.tokens_that_fit),
		MetadataBytes:     uint64(from.metadata_bytes),
		BytesPerBlock:     uint64(from.bytes_per_block),
		BlocksPerSequence: uint64(from.blocks_per_sequence),
		FullBytesPerToken: uint64(from.full_bytes_per_token),

		ConstantBytesPerSequence: uint64(from.constant_bytes_per_sequence),
		TokensThatFitEach:        uint64(from.tokens_that_fit_each),
		TokensByBytes:            uint64(from.tokens_by_bytes),
		Layer:                    uint32(from.layer),
		LayerBytesPerBlock:       uint64(from.layer_bytes_per_block),
		LayerBytesPerSequence:    uint64(from.layer_bytes_per_sequence),
	}
}

// Capabilities is what the library at hand can do. In Formats, Devices, Layouts, Scorers and
// Selections the bit of a constant's value is set. A bit of Formats means that keys can be stored
// so; values too, but for FormatAffine4.
type Capabilities struct {
	Formats         uint64
	Devices         uint64
	Layouts         uint64
	Scorers         uint64
	Selections      uint64
	MinHeadDim      uint32
	MaxHeadDim      uint32
	HeadDimMultiple uint32
	MaxLayers       uint32
	SIMDTarget      string // what the kernels run on here, such as "AVX3_ZEN4"
}

// GetCapabilities asks the library.
func GetCapabilities() (Capabilities, error) {
	read := C.kvgo_capabilities()
	if err := failure(read.result); err != nil {
		return Capabilities{}, err
	}
	return capabilitiesOf(&read.report), nil
}

func capabilitiesOf(from *C.kv_capabilities_report) Capabilities {
	return Capabilities{
		Formats:         uint64(from.formats),
		Devices:         uint64(from.devices),
		Layouts:         uint64(from.layouts),
		Scorers:         uint64(from.scorers),
		Selections:      uint64(from.selections),
		MinHeadDim:      uint32(from.min_head_dim),
		MaxHeadDim:      uint32(from.max_head_dim),
		HeadDimMultiple: uint32(from.head_dim_multiple),
		MaxLayers:       uint32(from.max_layers),
		SIMDTarget:      C.GoString(&from.simd_target[0]),
	}
}
