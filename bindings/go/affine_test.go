// Constants of channels: measured on keys whose means and deviations are known, and stored with.

package kvrt

import (
	"fmt"
	"math"
	"reflect"
	"testing"
)

const (
	fitTokens   = 100
	fitChannels = kvHeads * keyDim
)

func channelMean(channel int) float32      { return float32(channel-40) / 8 }
func channelDeviation(channel int) float32 { return float32(1+channel%5) / 4 }

// fitKeys lie a channel's deviation above its mean at even positions, below at odd ones.
func fitKeys() []float32 {
	keys := make([]float32, fitTokens*fitChannels)
	for i := range keys {
		channel, side := i%fitChannels, float32(1)
		if i/fitChannels%2 == 1 {
			side = -1
		}
		keys[i] = channelMean(channel) + side*channelDeviation(channel)
	}
	return keys
}

func unrotated(keys Format, storage *Storage) Model {
	model := fullModel(1, keys)
	layer := &model.Layers[0]
	layer.ValueFormat, layer.Rope, layer.KeyStorage = FormatF32, &Rope{Style: RopeNone}, storage
	return model
}

// fill attends over fitKeys, and compares with the definition.
func fill(t *testing.T, pool *Pool, model Model, tolerance float64) Sequence {
	t.Helper()
	sequence := newSequence(t, pool, nil)
	keys, values := fitKeys(), random(fitTokens*kvHeads*valueDim, 2)
	queries := random(fitTokens*queryHeads*keyDim, 3)
	out := make([]float32, fitTokens*queryHeads*valueDim)
	step := reserve(t, pool, sequence, fitTokens)
	must(t, step.WriteAttend(0, Float32(keys, fitTokens, kvHeads, keyDim),
		Float32(values, fitTokens, kvHeads, valueDim),
		Float32(queries, fitTokens, queryHeads, keyDim),
		Float32(out, fitTokens, queryHeads, valueDim), AttendOptions{}))
	_, err := step.End()
	must(t, err)
	reference := past{layer: model.Layers[0]}
	reference.add(keys, values)
	for at := 0; at < fitTokens*queryHeads; at++ {
		want, _ := reference.attend(queries[at*keyDim:(at+1)*keyDim], at%queryHeads, at/queryHeads)
		near(t, fmt.Sprintf("row %d head %d", at/queryHeads, at%queryHeads),
			out[at*valueDim:(at+1)*valueDim], want, tolerance)
	}
	return sequence
}

func TestFitAffine(t *testing.T) {
	model := unrotated(FormatF32, nil)
	pool := newPool(t, smallConfig(0), model)
	sequence := fill(t, pool, model, 1e-4)
	whole, err := pool.FitAffine(sequence, 0, kvHeads, keyDim, 0, 0)
	must(t, err)
	if whole.TokensUsed != fitTokens || whole.KVHeads != kvHeads || whole.KeyDim != keyDim {
		t.Errorf("%+v", whole)
	}
	for channel := 0; channel < fitChannels; channel++ {
		mean, scale := channelMean(channel), math.Sqrt(float64(channelDeviation(channel)))
		if math.Abs(float64(whole.ChannelMeans[channel]-mean)) > 1e-6 ||
			math.Abs(float64(whole.ChannelScales[channel])-scale) > 1e-6 {
			t.Errorf("channel %d: %v and %v, want %v and %v", channel,
				whole.ChannelMeans[channel], whole.ChannelScales[channel], mean, scale)
		}
	}
	part, err := pool.FitAffine(sequence, 0, kvHeads, keyDim, 10, 70)
	must(t, err)
	if part.TokensUsed != 70 || math.Abs(float64(part.ChannelMeans[5]-channelMean(5))) > 1e-6 {
		t.Errorf("%+v", part)
	}
	rest, err := pool.FitAffine(sequence, 0, kvHeads, keyDim, 36, 0)
	must(t, err)
	if rest.TokensUsed != 64 {
		t.Errorf("%+v", rest)
	}
	for _, wrong := range []struct {
		layer, kvHeads, keyDim uint32
		first, tokens          uint64
		status                 Status
		word                   string
	}{
		{1, kvHeads, keyDim, 0, 0, ErrInvalid, "layer 1"},
		{0, kvHeads, keyDim - 1, 0, 0, ErrInvalid, "[2, 63]"},
		{0, kvHeads + 1, keyDim, 0, 0, ErrInvalid, "[3, 64]"},
		{0, 0, keyDim, 0, 0, ErrInvalid, "0 KV heads"},
		{0, math.MaxUint32, keyDim, 0, 0, ErrInvalid, "no layer has"},
		{0, math.MaxUint32, math.MaxUint32, 0, 0, ErrInvalid, "no layer has"},
		{0, kvHeads, keyDim, 0, 63, ErrLimit, "63"},
		{0, kvHeads, keyDim, math.MaxUint64, math.MaxUint64, ErrLimit, "0 such"},
	} {
		fit, err := pool.FitAffine(sequence, wrong.layer, wrong.kvHeads, wrong.keyDim, wrong.first,
			wrong.tokens)
		refused(t, err, wrong.status, wrong.word)
		want := AffineFit{}
		if wrong.tokens == 63 {
			want.TokensUsed = 63
		}
		if !reflect.DeepEqual(fit, want) {
			t.Errorf("%v, want %v", fit, want)
		}
	}
	must(t, pool.ReleaseSequence(sequence))
	_, err = pool.FitAffine(sequence, 0, kvHeads, keyDim, 0, 0)
	refused(t, err, ErrStale, "")
	untold := fullModel(1, FormatF32)
	other := newPool(t, smallConfig(0), untold)
	_, err = other.FitAffine(fill(t, other, untold, 1e-4), 0, kvHeads, keyDim, 0, 0)
	refused(t, err, ErrInvalid, "rope")
	must(t, other.Close())
	_, err = other.FitAffine(1, 0, kvHeads, keyDim, 0, 0)
	refused(t, err, ErrInvalid, "closed")
}

// Keys that were measured are stored with their constants, and the tables say that they are.
func TestKeysInAffine4(t *testing.T) {
	plain := unrotated(FormatF16, nil)
	source := newPool(t, smallConfig(0), plain)
	fit, err := source.FitAffine(fill(t, source, plain, 1e-2), 0, kvHeads, keyDim, 0, 0)
	must(t, err)
	identity := func(storage *Storage) uint64 {
		model := unrotated(FormatAffine4, storage)
		pool := newPool(t, smallConfig(PoolDebug), model)
		step := reserve(t, pool, fill(t, pool, model, 0.3), 1)
		defer step.Close()
		tables, err := step.Export(0, nil, nil)
		must(t, err)
		// 4 bits of 32 channels, a scale and a minimum, twice.
		if bytes := tables.KeyWords * tables.KeyWordBytes; bytes != 2*(16+4) {
			t.Errorf("a row of keys has %d bytes", bytes)
		}
		return tables.KeyIdentity
	}
	if got := identity(fit.Storage()); got != fit.Identity {
		t.Errorf("the keys' identity is %x, the fit's %x", got, fit.Identity)
	}
	other := *fit.Storage()
	other.ChannelMeans = append([]float32(nil), fit.ChannelMeans...)
	other.ChannelMeans[fitChannels-1] += 0.5
	if identity(&other) == fit.Identity {
		t.Error("other constants have the same identity")
	}
}

func TestChannelConstantsMustFit(t *testing.T) {
	ones := func(heads, dim uint32, means, scales int) *Storage {
		storage := &Storage{ChannelHeads: heads, ChannelDim: dim,
			ChannelMeans: make([]float32, means), ChannelScales: make([]float32, scales)}
		for i := range storage.ChannelScales {
			storage.ChannelScales[i] = 1
		}
		return storage
	}
	good := func() *Storage { return ones(kvHeads, keyDim, fitChannels, fitChannels) }
	create := func(model Model) error {
		pool, err := NewPool(smallConfig(0), model)
		if err == nil {
			must(t, pool.Close())
		}
		return err
	}
	must(t, create(unrotated(FormatAffine4, good())))
	flawed := good()
	flawed.ChannelScales[3] = 0
	untold := unrotated(FormatAffine4, good())
	untold.Layers[0].Rope = nil
	values := unrotated(FormatF16, nil)
	values.Layers[0].ValueStorage = ones(kvHeads, keyDim, 1, fitChannels)
	for word, model := range map[string]Model{
		"KeyStorage: ChannelMeans has 127 elements, 128 are needed": unrotated(FormatAffine4,
			ones(kvHeads, keyDim, 127, 128)),
		"KeyStorage: ChannelScales has 129 elements": unrotated(FormatAffine4,
			ones(kvHeads, keyDim, 128, 129)),
		"KeyStorage: ChannelScales has 0 elements": unrotated(FormatAffine4,
			ones(kvHeads, keyDim, 128, 0)),
		"ChannelMeans has 1 elements, 18446744065119617025 are": unrotated(FormatAffine4,
			ones(math.MaxUint32, math.MaxUint32, 1, 1)),
		"ValueStorage: ChannelMeans has 1 elements": values,
		"[4, 32]":           unrotated(FormatAffine4, ones(4, 32, 128, 128)),
		"channel_scales[3]": unrotated(FormatAffine4, flawed),
		"kv_seq_fit_affine": unrotated(FormatAffine4, nil),
		"no use":            unrotated(FormatQ4_1, good()),
		"KV_ROPE_NONE":      untold,
	} {
		refused(t, create(model), ErrInvalid, word)
	}
	for _, format := range []Format{FormatAffine4, FormatDefault} {
		model := unrotated(FormatAffine4, good())
		model.Layers[0].ValueFormat = format
		refused(t, create(model), ErrUnsupported, "keys alone")
	}
}
