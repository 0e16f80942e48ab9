// How keys and values are stored: formats, and what some of them want besides.

package kvrt

// #include "shims.h"
import "C"

import (
	"math"
	"unsafe"
)

// Format is how keys or values are stored. GetCapabilities says which of them the library has, and
// docs/formats.md what each costs and loses.
type Format uint32

// The formats of kvrt.h. FormatDefault is f16.
const (
	FormatDefault   Format = C.KV_FORMAT_DEFAULT
	FormatF32       Format = C.KV_FORMAT_F32
	FormatF16       Format = C.KV_FORMAT_F16
	FormatBF16      Format = C.KV_FORMAT_BF16
	FormatFP8E4M3   Format = C.KV_FORMAT_FP8_E4M3 // times static scales, which Storage must name
	FormatFP8E5M2   Format = C.KV_FORMAT_FP8_E5M2 // the same, less precise and with more range
	FormatFP8Token  Format = C.KV_FORMAT_FP8_TOKEN
	FormatInt8Token Format = C.KV_FORMAT_INT8_TOKEN
	FormatInt4Token Format = C.KV_FORMAT_INT4_TOKEN
	FormatQ8_0      Format = C.KV_FORMAT_Q8_0
	FormatQ4_0      Format = C.KV_FORMAT_Q4_0
	FormatQ4_1      Format = C.KV_FORMAT_Q4_1
	FormatNVFP4     Format = C.KV_FORMAT_NVFP4
	FormatMXFP4     Format = C.KV_FORMAT_MXFP4
	// FormatKIVI4 is 4-bit integers; of keys, 32 tokens of a channel share a scale and a minimum,
	// of values 32 channels of a token. Keys stay f16 until their block is full. BlockTokens must
	// be a multiple of 32.
	FormatKIVI4 Format = C.KV_FORMAT_KIVI4
	FormatKIVI2 Format = C.KV_FORMAT_KIVI2 // the same with 2 bits
	// FormatKVARN4 is 4-bit integers of rotated rows whose variances are levelled over a block,
	// which stay f16 until it is full. BlockTokens must be a multiple of 64.
	FormatKVARN4 Format = C.KV_FORMAT_KVARN4
	FormatKVARN2 Format = C.KV_FORMAT_KVARN2 // the same with 2 bits
	// FormatTurbo4 is rotated rows in 4 bits: keys as a norm and levels of a normal distribution,
	// values with a scale and a minimum, per token and head.
	FormatTurbo4 Format = C.KV_FORMAT_TURBO4
	FormatTurbo3 Format = C.KV_FORMAT_TURBO3 // the same with 3 bits
	// FormatAffine4 is for keys alone, so that values need a format of their own: 4 bits, less a
	// mean of keys before rotation and over a scale per channel. It wants the channel constants of
	// Storage, and a Rope also where nothing is rotated (RopeNone).
	FormatAffine4 Format = C.KV_FORMAT_AFFINE4
)

// StorageFlags are the KV_STORAGE_* of kvrt.h.
type StorageFlags uint32

// The flags of a Storage.
const (
	StorageScaleOne StorageFlags = C.KV_STORAGE_SCALE_ONE // no static scales, and that is meant: 1
	// StorageRotate stores rows rotated by Hadamard's matrix, which spreads outliers; queries and
	// outputs are rotated to match. Not for f32, f16, bf16.
	StorageRotate StorageFlags = C.KV_STORAGE_ROTATE
)

// Preset is formats that go well together. All spare short windows, of at most 1,024 tokens: such
// layers stay in f16, or in FormatF32 or FormatBF16 where they say so.
type Preset uint32

// The presets of kvrt.h, all with StorageRotate.
const (
	PresetNearLossless Preset = C.KV_PRESET_NEAR_LOSSLESS // FormatInt8Token
	// PresetBalanced has FormatInt8Token for keys and FormatInt4Token for values. It spares the
	// first two and the last two layers that store, too.
	PresetBalanced Preset = C.KV_PRESET_BALANCED
	PresetSmallest Preset = C.KV_PRESET_SMALLEST // FormatInt4Token, spared as in PresetBalanced
)

// WithPreset is a model of the same layers with the formats and storages of a preset, whatever they
// had. Layers that share another's cache stay as they are.
func (m Model) WithPreset(preset Preset) (Model, error) {
	var memory transfer
	defer memory.free()
	native, err := memory.model(m)
	if err != nil {
		return Model{}, err
	}
	lent := unsafe.Slice(native.layers, len(m.Layers))
	before := make([]C.kv_layer, len(lent))
	copy(before, lent)
	if err := failure(C.kvgo_model_apply_preset(native.layers, native.layer_count,
		C.uint32_t(preset))); err != nil {
		return Model{}, err
	}
	out := Model{Layers: append([]Layer(nil), m.Layers...)}
	for i := range out.Layers {
		layer, written := &out.Layers[i], &lent[i]
		layer.KeyFormat = Format(written.key_format)
		layer.ValueFormat = Format(written.value_format)
		if written.key_storage != before[i].key_storage {
			layer.KeyStorage = constantStorage(written.key_storage)
		}
		if written.value_storage != before[i].value_storage {
			layer.ValueStorage = constantStorage(written.value_storage)
		}
	}
	return out, nil
}

// constantStorage is a storage of the library's own, which has no arrays.
func constantStorage(from *C.kv_storage) *Storage {
	if from == nil {
		return nil
	}
	return &Storage{Flags: StorageFlags(from.flags)}
}

// Storage is what the keys or the values of a layer are stored with besides their format. Scales
// matter for FormatFP8E4M3, FormatFP8E5M2 and FormatNVFP4 alone.
type Storage struct {
	Flags  StorageFlags
	Scales []float32 // one of the layer, or [KVHeads]; finite and positive, copied

	// Constants for FormatAffine4, [ChannelHeads, ChannelDim] each, which Pool.FitAffine measures;
	// finite, and scales positive; copied. They belong to the model like its weights: pools and
	// processes that exchange bytes need the same.
	ChannelMeans  []float32
	ChannelScales []float32
	ChannelHeads  uint32 // the layer's KVHeads
	ChannelDim    uint32 // the layer's KeyDim
}

// check refuses what does not fit into a kv_storage.
func (s *Storage) check(layer int, name string) error {
	if s == nil {
		return nil
	}
	if uint64(len(s.Scales)) > math.MaxUint32 {
		return invalid("layer %d: %s has %d scales", layer, name, len(s.Scales))
	}
	needed := uint64(s.ChannelHeads) * uint64(s.ChannelDim)
	if uint64(len(s.ChannelMeans)) != needed {
		return invalid("layer %d: %s: ChannelMeans has %d elements, %d are needed", layer, name,
			len(s.ChannelMeans), needed)
	}
	if uint64(len(s.ChannelScales)) != needed {
		return invalid("layer %d: %s: ChannelScales has %d elements, %d are needed", layer, name,
			len(s.ChannelScales), needed)
	}
	return nil
}

func (t *transfer) storage(storage *Storage) *C.kv_storage {
	if storage == nil {
		return nil
	}
	out := (*C.kv_storage)(t.take(C.sizeof_kv_storage))
	C.kv_struct_init(unsafe.Pointer(out), C.sizeof_kv_storage)
	out.flags = C.uint32_t(storage.Flags)
	out.scales = t.floats(storage.Scales)
	out.scale_count = C.uint32_t(len(storage.Scales))
	out.channel_means = t.floats(storage.ChannelMeans)
	out.channel_scales = t.floats(storage.ChannelScales)
	out.channel_heads = C.uint32_t(storage.ChannelHeads)
	out.channel_dim = C.uint32_t(storage.ChannelDim)
	return out
}
