// Constants of channels, which FormatAffine4 stores keys with.

package kvrt

// #include "shims.h"
import "C"

// AffineFit is the constants of FormatAffine4 for one layer. The arrays are [KVHeads, KeyDim].
type AffineFit struct {
	KVHeads       uint32
	KeyDim        uint32
	ChannelMeans  []float32
	ChannelScales []float32
	TokensUsed    uint64 // of the KV head that holds the fewest, also with ErrLimit
	Identity      uint64 // Tables.KeyIdentity of a layer that is stored with them
}

// Storage is what keys are stored with by these constants. It refers to the same arrays.
func (f *AffineFit) Storage() *Storage {
	return &Storage{ChannelMeans: f.ChannelMeans, ChannelScales: f.ChannelScales,
		ChannelHeads: f.KVHeads, ChannelDim: f.KeyDim}
}

// mostChannels is more than any layer has: a row of keys takes half a byte a channel, and fits a
// slab of 2 MiB.
const mostChannels = 1 << 22

// FitAffine measures the constants of FormatAffine4 for a layer, which has kvHeads and keyDim, on
// the retained keys of a sequence at positions [first, first + tokens); with 0 tokens at all from
// there on. The pool stores keys in f16, say, and its layers have a Rope. Some hundred tokens
// suffice, of a text like those that will be read. ErrInvalid: no Rope, or keys that are not
// finite. ErrLimit: fewer than 64 tokens.
func (p *Pool) FitAffine(sequence Sequence, layer, kvHeads, keyDim uint32, first,
	tokens uint64) (AffineFit, error) {
	channels := uint64(kvHeads) * uint64(keyDim)
	if channels == 0 || channels > mostChannels {
		return AffineFit{}, invalid("no layer has %d KV heads of %d channels", kvHeads, keyDim)
	}
	fit := AffineFit{KVHeads: kvHeads, KeyDim: keyDim, ChannelMeans: make([]float32, channels),
		ChannelScales: make([]float32, channels)}
	if err := p.enter(); err != nil {
		return AffineFit{}, err
	}
	defer p.leave()
	done := C.kvgo_seq_fit_affine(p.handle, C.kv_seq(sequence), C.uint32_t(layer),
		C.uint32_t(kvHeads), C.uint32_t(keyDim), C.uint64_t(first), C.uint64_t(tokens),
		(*C.float)(&fit.ChannelMeans[0]), (*C.float)(&fit.ChannelScales[0]))
	fit.TokensUsed, fit.Identity = uint64(done.tokens_used), uint64(done.identity)
	if err := p.failure(done.result); err != nil {
		return AffineFit{TokensUsed: fit.TokensUsed}, err
	}
	return fit, nil
}
