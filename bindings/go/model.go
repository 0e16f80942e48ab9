// The description of a model and of a pool, and its copy in C for the length of a call.

package kvrt

// #include "shims.h"
import "C"

import (
	"math"
	"unsafe"
)

// RopeStyle is which dimensions a rotation pairs.
type RopeStyle uint32

// The styles of kvrt.h.
const (
	RopeNone        RopeStyle = C.KV_ROPE_NONE
	RopeHalf        RopeStyle = C.KV_ROPE_HALF
	RopeInterleaved RopeStyle = C.KV_ROPE_INTERLEAVED
)

// Rope is how the engine rotated the keys and queries it hands over. TriAttention needs it,
// and keys in FormatAffine4.
type Rope struct {
	Style              RopeStyle
	Dimensions         uint32    // rotated dimensions of a head; 0: all of KeyDim
	Theta              float64   // base; 0: 10000. Ignored when InverseFrequencies are given
	AttentionFactor    float64   // on rotated queries and keys (YaRN); 0: 1
	InverseFrequencies []float64 // [Dimensions / 2], or nil
}

// LayerFlags are the KV_LAYER_* of kvrt.h.
type LayerFlags uint32

// The flags of a layer.
const (
	// LayerShared is a layer that stores nothing and attends over the cache of SharedLayer.
	LayerShared LayerFlags = C.KV_LAYER_SHARED

	// LayerLanePerHead gives each KV head blocks of its own, so that policies may keep other
	// numbers of tokens in each. Not with LayerShared.
	LayerLanePerHead LayerFlags = C.KV_LAYER_LANE_PER_HEAD

	// LayerCachePositions takes queries and keys before rotation: the library rotates them, as Rope
	// says, by their places in the cache. Not with LayerShared, which follows its owner.
	LayerCachePositions LayerFlags = C.KV_LAYER_CACHE_POSITIONS
)

// Layer is one layer of a model. Zero means the default: a Llama-like layer needs the heads and
// KeyDim alone.
type Layer struct {
	Flags        LayerFlags
	QueryHeads   uint32 // a multiple of KVHeads
	KVHeads      uint32
	KeyDim       uint32 // 32 to 256, a multiple of 8
	ValueDim     uint32 // 0: KeyDim
	KeyFormat    Format
	ValueFormat  Format // 0: KeyFormat
	SharedLayer  uint32 // with LayerShared
	Window       uint32 // a query at p sees positions > p - Window; 0: all
	WindowSinks  uint32 // positions below this stay visible behind the window
	SoftmaxScale float32
	LogitSoftcap float32
	SinkLogits   []float32 // [QueryHeads], or nil: a logit that only joins the denominator
	AlibiSlopes  []float32 // [QueryHeads], or nil
	Rope         *Rope     // nil: not rotated, or not told
	KeyStorage   *Storage  // nil: the format needs nothing more
	ValueStorage *Storage  // nil: the format needs nothing more

	// DemotedKeyFormat, where it is not 0: full blocks of older tokens are coded into this format,
	// from the oldest on, and their bytes return. Token-local, and not FormatAffine4; keys and
	// values are f32, f16 or bf16 before. With StorageRotate rows are written rotated, too.
	DemotedKeyFormat    Format
	DemotedValueFormat  Format // token-local, or ValueFormat; 0: DemotedKeyFormat
	DemoteAfter         uint32 // retained tokens that stay as they are; 0: all until pressure
	DemotedKeyStorage   *Storage
	DemotedValueStorage *Storage
}

// Model is the layers of a model, 1 to 1024.
type Model struct {
	Layers []Layer
}

// Device is where a pool's arena lies.
type Device uint32

// The devices of kvrt.h.
const (
	DeviceDefault Device = C.KV_DEVICE_DEFAULT
	DeviceCPU     Device = C.KV_DEVICE_CPU
	DeviceCUDA    Device = C.KV_DEVICE_CUDA
)

// Layout is how the tiles of a block lie.
type Layout uint32

// The layouts of kvrt.h.
const (
	LayoutNative Layout = C.KV_LAYOUT_NATIVE
	LayoutHND    Layout = C.KV_LAYOUT_HND
	LayoutNHD    Layout = C.KV_LAYOUT_NHD
)

// PoolFlags are the KV_POOL_* of kvrt.h.
type PoolFlags uint32

// The flags of a pool.
const (
	PoolElastic    PoolFlags = C.KV_POOL_ELASTIC     // empty slabs go back to the system
	PoolThreadSafe PoolFlags = C.KV_POOL_THREAD_SAFE // calls of several goroutines take turns
	PoolDebug      PoolFlags = C.KV_POOL_DEBUG       // NaN patterns and guards for Pool.Check
	PoolHostFences PoolFlags = C.KV_POOL_HOST_FENCES // fences pass through Pool.PassFence
)

// Config is the limits of a pool. All that it will ever need besides the arena is allocated at
// creation, by these. Zero means the default.
type Config struct {
	Flags                PoolFlags
	ArenaBytes           uint64 // keys and values; rounded down to slabs of 2 MiB
	Device               Device
	Layout               Layout
	BlockTokens          uint32 // 16 (default), 32, 64 or 128
	MaxSequences         uint32 // default 64
	MaxTokensPerSequence uint32 // default 32768
	MaxStepSequences     uint32 // default MaxSequences
	MaxStepTokens        uint32 // default 8192
	Threads              uint32 // of the library's own, the caller's included; 0: one per processor
	Hooks                *Hooks // copied; may be nil

	// MaxObservedSequences are those whose policies need observed attention, or scores of the host.
	// Each takes host memory: 12 bytes per layer, KV head and token of MaxTokensPerSequence.
	MaxObservedSequences uint32
	// PressurePercent: when more of the arena is pinned at a step's end, policies of sequences
	// outside of open steps run at once, until that is over; 0: never.
	PressurePercent uint32
}

// transfer is C memory that lives for the length of one call.
type transfer struct {
	blocks []unsafe.Pointer
}

func (t *transfer) take(bytes uintptr) unsafe.Pointer {
	memory := C.malloc(C.size_t(bytes))
	t.blocks = append(t.blocks, memory)
	return memory
}

func (t *transfer) free() {
	for _, block := range t.blocks {
		C.free(block)
	}
}

func (t *transfer) floats(values []float32) *C.float {
	if len(values) == 0 {
		return nil
	}
	memory := t.take(uintptr(len(values)) * unsafe.Sizeof(values[0]))
	copy(unsafe.Slice((*float32)(memory), len(values)), values)
	return (*C.float)(memory)
}

func (t *transfer) doubles(values []float64) *C.double {
	if len(values) == 0 {
		return nil
	}
	memory := t.take(uintptr(len(values)) * unsafe.Sizeof(values[0]))
	copy(unsafe.Slice((*float64)(memory), len(values)), values)
	return (*C.double)(memory)
}

// checkArrays makes sure that the library reads no further than the slices of a layer reach.
func (l *Layer) checkArrays(index int) error {
	if n := len(l.SinkLogits); n != 0 && uint64(n) != uint64(l.QueryHeads) {
		return invalid("layer %d: SinkLogits has %d elements, QueryHeads is %d", index, n,
			l.QueryHeads)
	}
	if n := len(l.AlibiSlopes); n != 0 && uint64(n) != uint64(l.QueryHeads) {
		return invalid("layer %d: AlibiSlopes has %d elements, QueryHeads is %d", index, n,
			l.QueryHeads)
	}
	if err := l.KeyStorage.check(index, "KeyStorage"); err != nil {
		return err
	}
	if err := l.ValueStorage.check(index, "ValueStorage"); err != nil {
		return err
	}
	if err := l.DemotedKeyStorage.check(index, "DemotedKeyStorage"); err != nil {
		return err
	}
	if err := l.DemotedValueStorage.check(index, "DemotedValueStorage"); err != nil {
		return err
	}
	if l.Rope == nil || len(l.Rope.InverseFrequencies) == 0 {
		return nil
	}
	dimensions := l.Rope.Dimensions
	if dimensions == 0 {
		dimensions = l.KeyDim
	}
	if n := len(l.Rope.InverseFrequencies); uint64(n) != uint64(dimensions/2) {
		return invalid("layer %d: InverseFrequencies has %d elements, half of %d rotated "+
			"dimensions are needed", index, n, dimensions)
	}
	return nil
}

func (t *transfer) rope(rope *Rope) *C.kv_rope {
	if rope == nil {
		return nil
	}
	out := (*C.kv_rope)(t.take(C.sizeof_kv_rope))
	C.kv_struct_init(unsafe.Pointer(out), C.sizeof_kv_rope)
	out.style = C.uint32_t(rope.Style)
	out.dimensions = C.uint32_t(rope.Dimensions)
	out.theta = C.double(rope.Theta)
	out.attention_factor = C.double(rope.AttentionFactor)
	out.inverse_frequencies = t.doubles(rope.InverseFrequencies)
	return out
}

func (t *transfer) model(model Model) (*C.kv_model, error) {
	count := len(model.Layers)
	if uint64(count) > math.MaxUint32 {
		return nil, invalid("a model of %d layers", count)
	}
	out := (*C.kv_model)(t.take(C.sizeof_kv_model))
	C.kv_struct_init(unsafe.Pointer(out), C.sizeof_kv_model)
	if count == 0 {
		return out, nil
	}
	layers := (*C.kv_layer)(t.take(uintptr(count) * C.sizeof_kv_layer))
	for i := range model.Layers {
		if err := model.Layers[i].checkArrays(i); err != nil {
			return nil, err
		}
		t.layer(&model.Layers[i], &unsafe.Slice(layers, count)[i])
	}
	out.layers = layers
	out.layer_count = C.uint32_t(count)
	return out, nil
}

func (t *transfer) layer(layer *Layer, out *C.kv_layer) {
	C.kv_struct_init(unsafe.Pointer(out), C.sizeof_kv_layer)
	out.flags = C.uint32_t(layer.Flags)
	out.query_heads = C.uint32_t(layer.QueryHeads)
	out.kv_heads = C.uint32_t(layer.KVHeads)
	out.key_dim = C.uint32_t(layer.KeyDim)
	out.value_dim = C.uint32_t(layer.ValueDim)
	out.key_format = C.uint32_t(layer.KeyFormat)
	out.value_format = C.uint32_t(layer.ValueFormat)
	out.shared_layer = C.uint32_t(layer.SharedLayer)
	out.window = C.uint32_t(layer.Window)
	out.window_sinks = C.uint32_t(layer.WindowSinks)
	out.softmax_scale = C.float(layer.SoftmaxScale)
	out.logit_softcap = C.float(layer.LogitSoftcap)
	out.sink_logits = t.floats(layer.SinkLogits)
	out.alibi_slopes = t.floats(layer.AlibiSlopes)
	out.rope = t.rope(layer.Rope)
	out.key_storage = t.storage(layer.KeyStorage)
	out.value_storage = t.storage(layer.ValueStorage)
	out.demoted_key_format = C.uint32_t(layer.DemotedKeyFormat)
	out.demoted_value_format = C.uint32_t(layer.DemotedValueFormat)
	out.demote_after = C.uint32_t(layer.DemoteAfter)
	out.demoted_key_storage = t.storage(layer.DemotedKeyStorage)
	out.demoted_value_storage = t.storage(layer.DemotedValueStorage)
}

func (t *transfer) config(config Config) *C.kv_pool_config {
	out := (*C.kv_pool_config)(t.take(C.sizeof_kv_pool_config))
	C.kv_struct_init(unsafe.Pointer(out), C.sizeof_kv_pool_config)
	out.flags = C.uint32_t(config.Flags)
	out.arena_bytes = C.uint64_t(config.ArenaBytes)
	out.device = C.uint32_t(config.Device)
	out.layout = C.uint32_t(config.Layout)
	out.block_tokens = C.uint32_t(config.BlockTokens)
	out.max_sequences = C.uint32_t(config.MaxSequences)
	out.max_tokens_per_sequence = C.uint32_t(config.MaxTokensPerSequence)
	out.max_step_sequences = C.uint32_t(config.MaxStepSequences)
	out.max_step_tokens = C.uint32_t(config.MaxStepTokens)
	out.threads = C.uint32_t(config.Threads)
	out.max_observed_sequences = C.uint32_t(config.MaxObservedSequences)
	out.pressure_percent = C.uint32_t(config.PressurePercent)
	return out
}
