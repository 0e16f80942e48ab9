// Counters, plans, capabilities, and what is refused at creation.

package kvrt

import (
	"testing"
)

func TestStatsAddUp(t *testing.T) {
	model := smallModel()
	pool := newPool(t, smallConfig(PoolDebug), model)
	sequence := newSequence(t, pool, nil)
	grow(t, pool, model, sequence, 100)
	step := reserve(t, pool, sequence, 1)
	got := stats(t, pool)
	var sum ClassStats
	for class := uint32(0); class < got.Classes; class++ {
		one, err := pool.ClassStats(class)
		must(t, err)
		if one.Total != one.Free+one.Cached+one.Pinned+one.Parked+one.Loading ||
			one.Total != one.Slabs*one.BlocksPerSlab || one.BlockBytes == 0 {
			t.Errorf("class %d: %+v", class, one)
		}
		sum.Total += one.Total
		sum.Free += one.Free
		sum.Cached += one.Cached
		sum.Pinned += one.Pinned
		sum.Parked += one.Parked
		sum.Loading += one.Loading
	}
	if got.Total != sum.Total || got.Free != sum.Free || got.Cached != sum.Cached ||
		got.Pinned != sum.Pinned || got.Parked != sum.Parked || got.Loading != sum.Loading {
		t.Errorf("%+v, its classes %+v", got, sum)
	}
	if got.SlabBytes != 2<<20 || got.SlabsTotal != 2 || got.ArenaBytes != 4<<20 ||
		got.LiveBlocks != got.Pinned || got.PeakLiveBlocks < got.LiveBlocks ||
		got.BlocksAllocated != got.BlocksReturned+got.Pinned || got.StepsEnded != 1 ||
		got.TokensAccepted != 100 || got.Sequences != 1 || got.OpenSteps != 1 ||
		got.MetadataBytes == 0 || got.HostAllocations == 0 || got.SlabsResident == 0 {
		t.Errorf("%+v", got)
	}
	_, err := pool.ClassStats(got.Classes)
	refused(t, err, ErrInvalid, "class")
	if live := LiveCount(LiveSteps); live != 1 {
		t.Errorf("%d live steps, want 1", live)
	}
	must(t, step.Cancel())
	if LiveCount(LiveSteps) != 0 || LiveCount(LiveSequences) != 1 || LiveCount(LivePools) != 1 {
		t.Error("live counts do not follow")
	}
	if LiveCount(99) != 0 {
		t.Error("an unknown kind lives")
	}
}

func TestPlan(t *testing.T) {
	// A token is 2 heads of (64 + 32) dimensions in f16 in each of 3 layers; 100 tokens need 7
	// blocks a layer.
	plan, err := MakePlan(smallConfig(0), fullModel(3, FormatF16), 10, 100)
	must(t, err)
	const token = 3 * kvHeads * (keyDim + valueDim) * 2
	const slab = 2 << 20
	sequence := uint64(7 * 16 * token)
	perSlab := uint64(slab / (16 * token / 3))
	want := Plan{Sequences: 10, TokensPerSequence: 100, BytesPerToken: token,
		BytesPerSequence: sequence, ArenaBytesNeeded: slab, SequencesThatFit: 2 * perSlab / 21,
		TokensThatFit: min(4096, 2*perSlab/3*16), MetadataBytes: plan.MetadataBytes,
		BytesPerBlock: 16 * token, BlocksPerSequence: 21, FullBytesPerToken: token,
		TokensThatFitEach: 2 * perSlab / 30 * 16, TokensByBytes: 2 * slab / token,
		LayerBytesPerBlock: 16 * token / 3, LayerBytesPerSequence: sequence / 3}
	if plan != want || plan.MetadataBytes == 0 {
		t.Errorf("%+v, want %+v", plan, want)
	}
	pool := newPool(t, smallConfig(0), fullModel(3, FormatF16))
	if got := stats(t, pool).MetadataBytes; got != plan.MetadataBytes {
		t.Errorf("the pool took %d bytes of host memory, the plan says %d", got, plan.MetadataBytes)
	}
	plan, err = MakePlan(smallConfig(0), fullModel(3, FormatF16), 0, 0)
	must(t, err)
	if plan.Sequences != 8 || plan.TokensPerSequence != 4096 {
		t.Errorf("defaults: %+v", plan)
	}
}

func TestPlanWithoutArena(t *testing.T) {
	const block = 16 * kvHeads * (keyDim + valueDim) * 2
	model := fullModel(3, FormatF16)
	model.Layers[1].Window = 32 // touches up to 3 blocks
	model.Layers[2].Flags, model.Layers[2].SharedLayer = LayerShared, 0
	for layer, blocks := range []uint64{63, 3, 0} {
		plan, err := MakePlanOfLayer(Config{}, model, 2, 1000, uint32(layer))
		must(t, err)
		want := Plan{Sequences: 2, TokensPerSequence: 1000, BytesPerToken: 2 * block / 16,
			BytesPerSequence: 66 * block, ArenaBytesNeeded: 2 << 20,
			MetadataBytes: plan.MetadataBytes, BytesPerBlock: 2 * block, BlocksPerSequence: 66,
			FullBytesPerToken: block / 16, ConstantBytesPerSequence: 3 * block,
			Layer: uint32(layer), LayerBytesPerSequence: blocks * block}
		if blocks != 0 {
			want.LayerBytesPerBlock = block
		}
		if plan != want || plan.MetadataBytes == 0 {
			t.Errorf("%+v, want %+v", plan, want)
		}
	}
	_, err := MakePlanOfLayer(Config{}, model, 2, 1000, 3)
	refused(t, err, ErrInvalid, "layer 3")
}

func min(a, b uint64) uint64 {
	if a < b {
		return a
	}
	return b
}

func TestCapabilitiesAndVersion(t *testing.T) {
	got, err := GetCapabilities()
	must(t, err)
	for name, fine := range map[string]bool{
		"formats":    got.Formats == 1<<(FormatAffine4+1)-1<<FormatF32, // all but the default
		"devices":    got.Devices == 1<<DeviceCPU,
		"layouts":    got.Layouts == 1<<LayoutNative|1<<LayoutHND|1<<LayoutNHD,
		"scorers":    got.Scorers>>ScorerRandom&1 == 1,
		"selections": got.Selections>>SelectUnion&1 == 1,
		"dimensions": got.MinHeadDim == 32 && got.MaxHeadDim == 256 && got.HeadDimMultiple == 8,
		"layers":     got.MaxLayers == 1024,
		"target":     len(got.SIMDTarget) > 2,
		"version":    LibraryVersion() == Version,
	} {
		if !fine {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

func TestWrongPools(t *testing.T) {
	for name, wrong := range map[string]struct {
		change func(*Config, *Model)
		status Status
		word   string
	}{
		"no layers": {func(_ *Config, m *Model) { m.Layers = nil }, ErrInvalid, "layer"},
		"layers": {func(_ *Config, m *Model) { m.Layers = make([]Layer, 1025) },
			ErrInvalid, "1025"},
		"heads": {func(_ *Config, m *Model) { m.Layers[0].QueryHeads = 3 },
			ErrInvalid, "query_heads"},
		"dim": {func(_ *Config, m *Model) { m.Layers[0].KeyDim = 65 },
			ErrUnsupported, "key_dim"},
		"format": {func(_ *Config, m *Model) { m.Layers[0].KeyFormat = 99 },
			ErrUnsupported, "key_format"},
		"fp8 without scales": {func(_ *Config, m *Model) {
			m.Layers[0].KeyFormat = FormatFP8E4M3
		}, ErrInvalid, "needs static scales"},
		"count of scales": {func(_ *Config, m *Model) {
			m.Layers[0].KeyFormat = FormatFP8E5M2
			m.Layers[0].KeyStorage = &Storage{Scales: make([]float32, 3)}
		}, ErrInvalid, "scale_count"},
		"scale": {func(_ *Config, m *Model) {
			m.Layers[0].ValueFormat = FormatFP8E4M3
			m.Layers[0].ValueStorage = &Storage{Scales: []float32{1, -1}}
		}, ErrInvalid, "value_storage: scales[1]"},
		"scale one and another": {func(_ *Config, m *Model) {
			m.Layers[0].KeyFormat = FormatFP8E4M3
			m.Layers[0].KeyStorage = &Storage{Flags: StorageScaleOne, Scales: []float32{2}}
		}, ErrInvalid, "SCALE_ONE"},
		"storage flags": {func(_ *Config, m *Model) {
			m.Layers[0].KeyStorage = &Storage{Flags: 1 << 9}
		}, ErrUnsupported, "flags"},
		"rotated f16": {func(_ *Config, m *Model) {
			m.Layers[0].KeyStorage = &Storage{Flags: StorageRotate}
		}, ErrUnsupported, "rotated"},
		"layer flags": {func(_ *Config, m *Model) { m.Layers[0].Flags = 1 << 9 },
			ErrUnsupported, "flags"},
		"shared": {func(_ *Config, m *Model) {
			m.Layers[0].Flags, m.Layers[0].SharedLayer = LayerShared, 1
		}, ErrInvalid, "shared_layer"},
		"sinks": {func(_ *Config, m *Model) { m.Layers[0].SinkLogits = make([]float32, 3) },
			ErrInvalid, "SinkLogits"},
		"alibi": {func(_ *Config, m *Model) { m.Layers[0].AlibiSlopes = make([]float32, 5) },
			ErrInvalid, "AlibiSlopes"},
		"rope": {func(_ *Config, m *Model) {
			m.Layers[0].Rope = &Rope{Style: RopeHalf, InverseFrequencies: make([]float64, 31)}
		}, ErrInvalid, "InverseFrequencies"},
		"rope dimensions": {func(_ *Config, m *Model) {
			m.Layers[0].Rope = &Rope{Style: RopeHalf, Dimensions: 1 << 31}
		}, ErrInvalid, "dimensions"},
		"rope style": {func(_ *Config, m *Model) { m.Layers[0].Rope = &Rope{Style: 9} },
			ErrInvalid, "style"},
		"arena": {func(c *Config, _ *Model) { c.ArenaBytes = 1 },
			ErrInvalid, "arena_bytes"},
		"large arena": {func(c *Config, _ *Model) { c.ArenaBytes = 1 << 40 },
			ErrTooLarge, "arena_bytes"},
		"block tokens": {func(c *Config, _ *Model) { c.BlockTokens = 17 },
			ErrInvalid, "block_tokens"},
		"device": {func(c *Config, _ *Model) { c.Device = 9 },
			ErrUnsupported, "device"},
		"layout": {func(c *Config, _ *Model) { c.Layout = 9 }, ErrUnsupported, "layout"},
		"sequences": {func(c *Config, _ *Model) { c.MaxSequences = 1 << 20 },
			ErrInvalid, "max_sequences"},
		"flags": {func(c *Config, _ *Model) { c.Flags = 1 << 30 },
			ErrUnsupported, "flags"},
		"half of the allocator": {func(c *Config, _ *Model) {
			c.Hooks = &Hooks{Allocate: newHostMemory().allocate}
		}, ErrInvalid, "together"},
	} {
		t.Run(name, func(t *testing.T) {
			config, model := smallConfig(0), smallModel()
			wrong.change(&config, &model)
			pool, err := NewPool(config, model)
			refused(t, err, wrong.status, wrong.word)
			if pool != nil {
				t.Error("a pool came with the error")
			}
			_, err = MakePlan(config, model, 1, 1)
			refused(t, err, wrong.status, wrong.word)
		})
	}
}
