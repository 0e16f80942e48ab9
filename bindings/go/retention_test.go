// Policies and compaction: who survives, and what comes back.

package kvrt

import (
	"reflect"
	"sort"
	"testing"
)

func TestCompressReturnsBlocks(t *testing.T) {
	model := fullModel(2, FormatF16)
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, nil)
	grow(t, pool, model, sequence, 320)
	_, err := pool.Compress(sequence, nil)
	refused(t, err, ErrInvalid, "policy")
	report, err := pool.Compress(sequence, &Policy{Scorer: ScorerStreaming, Budget: 64, Sinks: 4})
	must(t, err)
	const block = 6144
	// Per layer 320 tokens in 20 blocks become 64 in 4; tokens count per KV head too.
	want := CompressReport{Outcome: CompressDone, Layers: 2, TokensBefore: 2 * 2 * 320,
		TokensAfter: 2 * 2 * 64, BlocksBefore: 40, BlocksAfter: 8, BytesBefore: 40 * block,
		BytesAfter: 8 * block, BlocksReturned: 32, BytesReturned: 32 * block}
	want.Nanoseconds = report.Nanoseconds
	if report != want {
		t.Errorf("%+v, want %+v", report, want)
	}
	if got := positions(t, pool, sequence, 1, 1); !reflect.DeepEqual(got,
		append(span(0, 3), span(260, 319)...)) {
		t.Errorf("survivors %v", got)
	}
	got := stats(t, pool)
	if got.LiveBlocks != 8 || got.BlocksReturnedByCompaction != 32 || got.Compactions != 1 {
		t.Errorf("%+v", got)
	}
	report, err = pool.Compress(sequence, &Policy{Scorer: ScorerStreaming, Budget: 64})
	must(t, err)
	if report.Outcome != CompressNothing {
		t.Errorf("nothing to do: %+v", report)
	}
	_, err = pool.Compress(sequence, &Policy{Scorer: ScorerTriAttention, Budget: 32})
	refused(t, err, ErrUnsupported, "kv_rope")
	must(t, pool.Check())
}

// The smallest key norms stay, each head with its own.
func TestKeyNormKeepsTheSmallestNorms(t *testing.T) {
	model := fullModel(1, FormatF32)
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, nil)
	const tokens, budget = 100, 48
	keys := grow(t, pool, model, sequence, tokens)
	_, err := pool.Compress(sequence, &Policy{Scorer: ScorerKeyNorm, Budget: budget})
	must(t, err)
	for head := uint32(0); head < kvHeads; head++ {
		norm := func(position uint32) (sum float64) {
			at := (int(position)*kvHeads + int(head)) * keyDim
			for _, value := range keys[at : at+keyDim] {
				sum += float64(value) * float64(value)
			}
			return sum
		}
		want := span(0, tokens-1)
		sort.Slice(want, func(i, j int) bool { return norm(want[i]) < norm(want[j]) })
		want = want[:budget]
		sort.Slice(want, func(i, j int) bool { return want[i] < want[j] })
		if got := positions(t, pool, sequence, 0, head); !reflect.DeepEqual(got, want) {
			t.Errorf("head %d: %v, want %v", head, got, want)
		}
	}
}

func TestPolicyRunsAtStepEnd(t *testing.T) {
	model := fullModel(1, FormatF16)
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, &Policy{Scorer: ScorerStreaming, Budget: 32, Every: 16,
		Sinks: 2, Flags: PolicyProtectPrompt, PromptTokens: 10})
	grow(t, pool, model, sequence, 40)
	// 10 of the prompt stay, 22 of the most recent.
	want := append(span(0, 9), span(18, 39)...)
	if got := positions(t, pool, sequence, 0, 0); !reflect.DeepEqual(got, want) {
		t.Errorf("after the prompt: %v, want %v", got, want)
	}
	if got := info(t, pool, sequence); got.Compactions != 1 || got.Accepted != 40 {
		t.Errorf("%+v", got)
	}
	// Inside a step a round is put off to its end, which reports it.
	must(t, pool.SetPolicy(sequence, nil))
	step := reserve(t, pool, sequence, 8)
	report, err := pool.Compress(sequence, &Policy{Scorer: ScorerStreaming, Budget: 16})
	must(t, err)
	if report.Outcome != CompressDeferred {
		t.Errorf("inside a step: %+v", report)
	}
	must(t, step.Write(0, Float32(make([]float32, 8*kvHeads*keyDim), 8, kvHeads, keyDim),
		Float32(make([]float32, 8*kvHeads*valueDim), 8, kvHeads, valueDim)))
	ended, err := step.End()
	must(t, err)
	if ended.Compactions != 1 || ended.AcceptedTokens != 8 || ended.BlocksReturned != 2 {
		t.Errorf("%+v", ended)
	}
	if got := positions(t, pool, sequence, 0, 0); !reflect.DeepEqual(got, span(32, 47)) {
		t.Errorf("after the step: %v", got)
	}
	refused(t, pool.Truncate(sequence, 20), ErrNoSnapshot, "")
}

func TestSelectionsAndSeeds(t *testing.T) {
	model := fullModel(2, FormatF16)
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, nil)
	grow(t, pool, model, sequence, 200)
	survivors := func(policy *Policy) (sets [2][2][]uint32) {
		child := make([]Sequence, 1)
		must(t, pool.Fork(sequence, child))
		_, err := pool.Compress(child[0], policy)
		must(t, err)
		for layer := range sets {
			for head := range sets[layer] {
				sets[layer][head] = positions(t, pool, child[0], uint32(layer), uint32(head))
			}
		}
		must(t, pool.ReleaseSequence(child[0]))
		return sets
	}
	same := reflect.DeepEqual
	one := survivors(&Policy{Scorer: ScorerRandom, Budget: 64, Seed: 1, Selection: SelectUnion})
	if !same(one[0][0], one[0][1]) || !same(one[0][0], one[1][0]) {
		t.Error("SelectUnion: sets differ")
	}
	two := survivors(&Policy{Scorer: ScorerRandom, Budget: 64, Seed: 2, Selection: SelectUnion})
	if same(one, two) {
		t.Error("another seed draws the same")
	}
	own := survivors(&Policy{Scorer: ScorerRandom, Budget: 64, Seed: 1,
		Selection: SelectPerLayerPerHead})
	if same(own[0][0], own[0][1]) || same(own[0][0], own[1][0]) {
		t.Error("SelectPerLayerPerHead: sets are the same")
	}
	heads := survivors(&Policy{Scorer: ScorerRandom, Budget: 64, Seed: 1,
		Selection: SelectPerHead})
	if same(heads[0][0], heads[0][1]) || !same(heads[0][0], heads[1][0]) {
		t.Error("SelectPerHead: not one set per head, the same in all layers")
	}
	skipped := survivors(&Policy{Scorer: ScorerKeyNorm, Budget: 64, SkipLayers: 1, Recent: 16})
	if len(skipped[0][0]) != 200 || len(skipped[1][0]) != 64 {
		t.Errorf("SkipLayers: %d and %d tokens", len(skipped[0][0]), len(skipped[1][0]))
	}
	if tail := skipped[1][0][48:]; !same(tail, span(184, 199)) {
		t.Errorf("Recent: the last 16 are %v", tail)
	}
}

func TestWrongPolicies(t *testing.T) {
	pool := newPool(t, smallConfig(0), fullModel(1, FormatF16))
	sequence := newSequence(t, pool, nil)
	for name, wrong := range map[string]struct {
		policy Policy
		status Status
		word   string
	}{
		"no budget": {Policy{Scorer: ScorerStreaming}, ErrInvalid, "budget"},
		"scorer":    {Policy{Scorer: 99, Budget: 16}, ErrUnsupported, "scorer"},
		"selection": {Policy{Scorer: ScorerStreaming, Budget: 16, Selection: 99}, ErrUnsupported,
			"selection"},
		"flags": {Policy{Scorer: ScorerStreaming, Budget: 16, Flags: 1 << 30}, ErrUnsupported,
			"flags"},
		"offset_max": {Policy{Scorer: ScorerTriAttention, Budget: 16, OffsetMax: 3}, ErrInvalid,
			"offset_max"},
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, pool.SetPolicy(sequence, &wrong.policy), wrong.status, wrong.word)
			_, err := pool.CreateSequence(SequenceConfig{Policy: &wrong.policy})
			refused(t, err, wrong.status, wrong.word)
			_, err = pool.Compress(sequence, &wrong.policy)
			refused(t, err, wrong.status, wrong.word)
		})
	}
}
