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

	// By the attention that Step.Attend observes (Config.MaxObservedSequences).
	ScorerH2O           Scorer = C.KV_SCORER_H2O
	ScorerScissorhands  Scorer = C.KV_SCORER_SCISSORHANDS
	ScorerTOVA          Scorer = C.KV_SCORER_TOVA
	ScorerSnapKV        Scorer = C.KV_SCORER_SNAPKV
	ScorerRKV           Scorer = C.KV_SCORER_RKV
	ScorerVaSEAttention Scorer = C.KV_SCORER_VASE_ATTENTION
	ScorerBlend         Scorer = C.KV_SCORER_BLEND // and what TriAttention expects

	// By keys and values alone.
	ScorerVaSESketch Scorer = C.KV_SCORER_VASE_SKETCH
	ScorerKeyDiff    Scorer = C.KV_SCORER_KEYDIFF
	ScorerLagKV      Scorer = C.KV_SCORER_LAGKV

	// By query statistics, as TriAttention.
	ScorerExpectedAttention Scorer = C.KV_SCORER_EXPECTED_ATTENTION

	// By numbers that the host gives (SetScores); takes one of Config.MaxObservedSequences too.
	ScorerHost Scorer = C.KV_SCORER_HOST
)

// Selection says which sets of survivors may differ.
type Selection uint32

// The selections of kvrt.h.
const (
	SelectDefault         Selection = C.KV_SELECT_DEFAULT
	SelectPerLayerPerHead Selection = C.KV_SELECT_PER_LAYER_PER_HEAD
	SelectPerHead         Selection = C.KV_SELECT_PER_HEAD
	SelectUnion           Selection = C.KV_SELECT_UNION
	SelectPerLayer        Selection = C.KV_SELECT_PER_LAYER
)

// Allocator says how many tokens each layer and head keeps of a round's budget.
type Allocator uint32

// The allocators of kvrt.h.
const (
	AllocateDefault   Allocator = C.KV_ALLOCATE_DEFAULT // AllocateUniform
	AllocateUniform   Allocator = C.KV_ALLOCATE_UNIFORM
	AllocatePyramid   Allocator = C.KV_ALLOCATE_PYRAMID   // falls from layer to layer
	AllocateAdaptive  Allocator = C.KV_ALLOCATE_ADAPTIVE  // heads compete: LayerLanePerHead
	AllocateThreshold Allocator = C.KV_ALLOCATE_THRESHOLD // what scores Threshold or more
)

// PolicyFlags are the KV_POLICY_* of kvrt.h.
type PolicyFlags uint32

// The flags of a policy.
const (
	PolicyProtectPrompt    PolicyFlags = C.KV_POLICY_PROTECT_PROMPT
	PolicyPromptOnTop      PolicyFlags = C.KV_POLICY_PROMPT_ON_TOP
	PolicyOffsetsMax       PolicyFlags = C.KV_POLICY_OFFSETS_MAX
	PolicyStatisticsOnline PolicyFlags = C.KV_POLICY_STATISTICS_ONLINE

	PolicySample          PolicyFlags = C.KV_POLICY_SAMPLE           // survivors are drawn
	PolicyPoolMax         PolicyFlags = C.KV_POLICY_POOL_MAX         // PoolWidth: the greatest
	PolicyExactRedundancy PolicyFlags = C.KV_POLICY_EXACT_REDUNDANCY // RKV; its cost is quadratic
	PolicyAtPromptEnd     PolicyFlags = C.KV_POLICY_AT_PROMPT_END    // a round after PromptTokens
)

// Policy is a scorer, a budget, guards and a trigger.
type Policy struct {
	Flags        PolicyFlags
	Scorer       Scorer
	Selection    Selection
	Budget       uint32 // tokens retained per layer and head after a round; > 0
	Every        uint32 // a round when so many were accepted since the last; 0: Compress only
	PromptTokens uint32 // the prompt's length, for what is said of the prompt
	Sinks        uint32 // positions below this stay
	Recent       uint32 // the last so many tokens stay
	OffsetMax    uint32 // TriAttention: largest future offset, a power of two; 0: 65536
	SkipLayers   uint32 // the first so many layers are left whole (KeyNorm: 2 is usual)
	Seed         uint64 // of all draws

	Allocator    Allocator
	Slack        uint32  // a round when so much is above what a round keeps; 0: Every alone
	Window       uint32  // the last so many queries count; 0: the scorer's own
	PoolWidth    uint32  // scores become the mean of so many neighbours, odd; 0: the scorer's own
	ObserveEvery uint32  // every so-manieth one-token step is observed; 0: 4 (H2O, Blend), 1
	Decay        float32 // H2O, Blend: what a query counts after each one behind it; 0: 1, 0.97
	PriorShare   float32 // Blend: share of what is expected; 0: 0.1
	Redundancy   float32 // RKV: weight of redundancy, up to 1; 0: 0.9. Blend: of unlikeness; 0: 0.3
	Similarity   float32 // PolicyExactRedundancy: keys are similar above this cosine; 0: 0.5
	FloorShare   float32 // AllocateAdaptive: of its budget each head is sure of; 0: 0.2
	Threshold    float32 // AllocateThreshold
	Steepness    uint32  // AllocatePyramid: the last layer has Budget / Steepness; 0: 20
	ValueReserve uint32  // so many tokens whose values have the widest range stay
	Segments     uint32  // the prompt in so many equal parts; 0: off
	SegmentQuota uint32  // of each of which at least so many tokens stay
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
	out.allocator = C.uint32_t(p.Allocator)
	out.slack = C.uint32_t(p.Slack)
	out.window = C.uint32_t(p.Window)
	out.pool_width = C.uint32_t(p.PoolWidth)
	out.observe_every = C.uint32_t(p.ObserveEvery)
	out.decay = C.float(p.Decay)
	out.prior_share = C.float(p.PriorShare)
	out.redundancy = C.float(p.Redundancy)
	out.similarity = C.float(p.Similarity)
	out.floor_share = C.float(p.FloorShare)
	out.threshold = C.float(p.Threshold)
	out.steepness = C.uint32_t(p.Steepness)
	out.value_reserve = C.uint32_t(p.ValueReserve)
	out.segments = C.uint32_t(p.Segments)
	out.segment_quota = C.uint32_t(p.SegmentQuota)
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

	// CompressNoObservations: nothing was observed for this scorer, or the host gave no scores.
	CompressNoObservations CompressOutcome = C.KV_COMPRESS_NO_OBSERVATIONS
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
	BlocksCopied   uint64 // fresh ones, where the old were shared, or of another format
	SlabsGivenBack uint64
	Nanoseconds    uint64
	RecodedRows    uint64  // of FormatKIVI4 and the like: rows that left a block, coded again
	RecodingError  float64 // their change, root mean square, as a share of their own
	LostAttention  float64 // as in RetentionInfo, the mean of the heads that lost tokens
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
		LostAttention:  float64(from.lost_attention),
	}
}

// PolicyFootprint is what a sequence under a policy takes once its rounds run.
type PolicyFootprint struct {
	StepTokens       uint64 // as asked
	Tokens           uint64 // as asked
	TokensAfterRound uint64 // per layer and head
	TokensSteady     uint64 // the most before the next round, an open step's included
	BlocksSteady     uint64
	BytesSteady      uint64
}

// PolicyFootprint says what a sequence takes under a policy, so that a scheduler can admit by it.
// stepTokens are the most tokens of the sequence in a step, a prefill chunk or a token with its
// drafts; 0: 1. tokens is its length, for windows and layers that the policy leaves whole; 0:
// TokensSteady, and full windows. Pinned ranges come on top. ErrInvalid: a policy with neither
// Every nor Slack has no steady state. ErrTooLarge: more than MaxTokensPerSequence.
func (p *Pool) PolicyFootprint(policy *Policy, stepTokens, tokens uint64) (PolicyFootprint, error) {
	if err := p.enter(); err != nil {
		return PolicyFootprint{}, err
	}
	defer p.leave()
	read := C.kvgo_pool_policy_footprint(p.handle, policy.native(), C.uint64_t(stepTokens),
		C.uint64_t(tokens))
	if err := p.failure(read.result); err != nil {
		return PolicyFootprint{}, err
	}
	return policyFootprintOf(&read.footprint), nil
}

func policyFootprintOf(from *C.kv_policy_footprint) PolicyFootprint {
	return PolicyFootprint{
		StepTokens:       uint64(from.step_tokens),
		Tokens:           uint64(from.tokens),
		TokensAfterRound: uint64(from.tokens_after_round),
		TokensSteady:     uint64(from.tokens_steady),
		BlocksSteady:     uint64(from.blocks_steady),
		BytesSteady:      uint64(from.bytes_steady),
	}
}

// RetentionInfo is what rounds have done to one layer and KV head of a sequence.
type RetentionInfo struct {
	Layer            uint32  // as asked
	KVHead           uint32  // as asked
	Rounds           uint64  // that removed tokens here
	TokensRemoved    uint64  // in all of them
	BlocksReturned   uint64  // by the layer, or by the head alone with LayerLanePerHead
	LostAttention    float64 // share of the observed attention that the last round removed
	LostAttentionSum float64 // of all rounds; each is a share of what was there then
}

// RetentionInfo reads what rounds have done to one layer and KV head of a sequence.
func (p *Pool) RetentionInfo(sequence Sequence, layer, kvHead uint32) (RetentionInfo, error) {
	if err := p.enter(); err != nil {
		return RetentionInfo{}, err
	}
	defer p.leave()
	read := C.kvgo_seq_get_retention(p.handle, C.kv_seq(sequence), C.uint32_t(layer),
		C.uint32_t(kvHead))
	if err := p.failure(read.result); err != nil {
		return RetentionInfo{}, err
	}
	return retentionInfoOf(&read.info), nil
}

func retentionInfoOf(from *C.kv_retention_info) RetentionInfo {
	return RetentionInfo{
		Layer:            uint32(from.layer),
		KVHead:           uint32(from.kv_head),
		Rounds:           uint64(from.rounds),
		TokensRemoved:    uint64(from.tokens_removed),
		BlocksReturned:   uint64(from.blocks_returned),
		LostAttention:    float64(from.lost_attention),
		LostAttentionSum: float64(from.lost_attention_sum),
	}
}

func floatPointer(values []float32) *C.float {
	if len(values) == 0 {
		return nil
	}
	return (*C.float)(&values[0])
}

// SetScores gives the scores of a layer for positions [first, first + tokens) to ScorerHost:
// [KV heads, tokens], higher stays, NaN goes first. Positions that a head no longer retains are
// passed over; a token that was given no score ranks above all that have one.
func (p *Pool) SetScores(sequence Sequence, layer uint32, first, tokens uint64,
	scores []float32) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	read := C.kvgo_pool_get_layer_stats(p.handle, C.uint32_t(layer), 0, nil, nil)
	if err := p.failure(read.result); err != nil {
		return err
	}
	// No product that wraps around: no slice has as many elements.
	heads, length := uint64(read.stats.kv_heads), uint64(len(scores))
	if tokens > length || heads*tokens != length {
		return invalid("scores has %d elements, %d tokens of %d KV heads are needed", length, tokens,
			heads)
	}
	return p.failure(C.kvgo_seq_set_scores(p.handle, C.kv_seq(sequence), C.uint32_t(layer),
		C.uint64_t(first), C.uint64_t(tokens), floatPointer(scores)))
}

// Scores writes what a sequence's scorer has observed of one layer and KV head, or was given, as
// far as `scores` reaches: a number per retained token, in the order of Positions. It returns how
// many there are: 0 where nothing was observed.
func (p *Pool) Scores(sequence Sequence, layer, kvHead uint32, scores []float32) (uint64, error) {
	if err := p.enter(); err != nil {
		return 0, err
	}
	defer p.leave()
	read := C.kvgo_seq_get_scores(p.handle, C.kv_seq(sequence), C.uint32_t(layer),
		C.uint32_t(kvHead), C.uint64_t(len(scores)), floatPointer(scores))
	return uint64(read.count), p.failure(read.result)
}
