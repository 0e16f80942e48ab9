// Retention: which tokens stay, and rounds of compaction.

package kvrt

// #include "shims.h"
import "C"

import "unsafe"

// Scorer says which tokens matter.
type Scorer uint32

// The scorers of kvrt.h.
const (
	ScorerNone         Scorer = C.KV_SCORER_NONE
	ScorerTriAttention Scorer = C.KV_SCORER_TRIATTENTION
	ScorerStreaming    Scorer = C.KV_SCORER_STREAMING
	ScorerKeyNorm      Scorer = C.KV_SCORER_KEY_NORM
	ScorerRandom       Scorer = C.KV_SCORER_RANDOM
)

// Selection says which sets of survivors may differ.
type Selection uint32

// The selections of kvrt.h.
const (
	SelectDefault         Selection = C.KV_SELECT_DEFAULT
	SelectPerLayerPerHead Selection = C.KV_SELECT_PER_LAYER_PER_HEAD
	SelectPerHead         Selection = C.KV_SELECT_PER_HEAD
	SelectUnion           Selection = C.KV_SELECT_UNION
)

// PolicyFlags are the KV_POLICY_* of kvrt.h.
type PolicyFlags uint32

// The flags of a policy.
const (
	PolicyProtectPrompt    PolicyFlags = C.KV_POLICY_PROTECT_PROMPT
	PolicyPromptOnTop      PolicyFlags = C.KV_POLICY_PROMPT_ON_TOP
	PolicyOffsetsMax       PolicyFlags = C.KV_POLICY_OFFSETS_MAX
	PolicyStatisticsOnline PolicyFlags = C.KV_POLICY_STATISTICS_ONLINE
)

// Policy is a scorer, a budget, guards and a trigger.
type Policy struct {
	Flags        PolicyFlags
	Scorer       Scorer
	Selection    Selection
	Budget       uint32 // tokens retained per layer and head after a round; > 0
	Every        uint32 // a round when so many were accepted since the last; 0: Compress only
	PromptTokens uint32 // the prompt's length, for PolicyProtectPrompt
	Sinks        uint32 // positions below this stay
	Recent       uint32 // the last so many tokens stay
	OffsetMax    uint32 // TriAttention: largest future offset, a power of two; 0: 65536
	SkipLayers   uint32 // KeyNorm: the first so many layers are left whole
	Seed         uint64 // Random
}

// native is a copy that C may read during a call; nil for nil.
func (p *Policy) native() *C.kv_policy {
	if p == nil {
		return nil
	}
	out := new(C.kv_policy)
	C.kv_struct_init(unsafe.Pointer(out), C.sizeof_kv_policy)
	out.flags = C.uint32_t(p.Flags)
	out.scorer = C.uint32_t(p.Scorer)
	out.selection = C.uint32_t(p.Selection)
	out.budget = C.uint32_t(p.Budget)
	out.every = C.uint32_t(p.Every)
	out.prompt_tokens = C.uint32_t(p.PromptTokens)
	out.sinks = C.uint32_t(p.Sinks)
	out.recent = C.uint32_t(p.Recent)
	out.offset_max = C.uint32_t(p.OffsetMax)
	out.skip_layers = C.uint32_t(p.SkipLayers)
	out.seed = C.uint64_t(p.Seed)
	return out
}

// CompressOutcome is how a round went.
type CompressOutcome uint32

// The outcomes of kvrt.h.
const (
	CompressDone         CompressOutcome = C.KV_COMPRESS_DONE
	CompressNothing      CompressOutcome = C.KV_COMPRESS_NOTHING
	CompressDeferred     CompressOutcome = C.KV_COMPRESS_DEFERRED
	CompressNoStatistics CompressOutcome = C.KV_COMPRESS_NO_STATISTICS
)

// CompressReport is what a round did: sums over layers; tokens count per layer and KV head.
type CompressReport struct {
	Outcome        CompressOutcome
	Layers         uint32 // compacted
	TokensBefore   uint64
	TokensAfter    uint64
	BlocksBefore   uint64 // in the sequence's tables
	BlocksAfter    uint64
	BytesBefore    uint64
	BytesAfter     uint64
	BlocksReturned uint64 // to the allocator
	BytesReturned  uint64
	BlocksCopied   uint64 // fresh ones, taken because the old ones were shared
	SlabsGivenBack uint64
	Nanoseconds    uint64
	RecodedRows    uint64  // of FormatKIVI4 and the like: rows that left a block, coded again
	RecodingError  float64 // their change, root mean square, as a share of their own
}

// Compress runs one round now, by `policy` or, if it is nil, the sequence's own. Inside an open
// step it runs at the step's end (CompressDeferred). ErrAgain: there are no blocks to move the
// survivors of shared ones to, and nothing has changed.
func (p *Pool) Compress(sequence Sequence, policy *Policy) (CompressReport, error) {
	if err := p.enter(); err != nil {
		return CompressReport{}, err
	}
	defer p.leave()
	done := C.kvgo_compress(p.handle, C.kv_seq(sequence), policy.native())
	return compressReportOf(&done.report), p.failure(done.result)
}

func compressReportOf(from *C.kv_compress_report) CompressReport {
	return CompressReport{
		Outcome:        CompressOutcome(from.outcome),
		Layers:         uint32(from.layers),
		TokensBefore:   uint64(from.tokens_before),
		TokensAfter:    uint64(from.tokens_after),
		BlocksBefore:   uint64(from.blocks_before),
		BlocksAfter:    uint64(from.blocks_after),
		BytesBefore:    uint64(from.bytes_before),
		BytesAfter:     uint64(from.bytes_after),
		BlocksReturned: uint64(from.blocks_returned),
		BytesReturned:  uint64(from.bytes_returned),
		BlocksCopied:   uint64(from.blocks_copied),
		SlabsGivenBack: uint64(from.slabs_given_back),
		Nanoseconds:    uint64(from.nanoseconds),
		RecodedRows:    uint64(from.recoded_rows),
		RecodingError:  float64(from.recoding_error),
	}
}
