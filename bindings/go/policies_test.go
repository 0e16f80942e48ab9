// Policies by scores of the host and by observed attention, budgets shared among heads, what a
// policy takes and what it has done.

package kvrt

import (
	"errors"
	"math"
	"reflect"
	"sort"
	"testing"
)

// observingPool is a layer in f32 whose policies may keep scores.
func observingPool(t *testing.T, flags LayerFlags) (*Pool, Model) {
	model := fullModel(1, FormatF32)
	model.Layers[0].Flags = flags
	config := smallConfig(0)
	config.MaxObservedSequences = 2
	return newPool(t, config, model), model
}

// scoresOf reads all scores of a head of layer 0.
func scoresOf(t *testing.T, pool *Pool, sequence Sequence, head uint32) []float32 {
	t.Helper()
	count, err := pool.Scores(sequence, 0, head, nil)
	must(t, err)
	read := make([]float32, count)
	again, err := pool.Scores(sequence, 0, head, read)
	must(t, err)
	if again != count {
		t.Errorf("%d scores, then %d", count, again)
	}
	return read
}

// largest is the `count` positions with the largest numbers, ascending.
func largest(numbers []float64, count int) []uint32 {
	order := span(0, uint32(len(numbers)-1))
	sort.Slice(order, func(i, j int) bool { return numbers[order[i]] > numbers[order[j]] })
	order = order[:count]
	sort.Slice(order, func(i, j int) bool { return order[i] < order[j] })
	return order
}

func retention(t *testing.T, pool *Pool, sequence Sequence, head uint32) RetentionInfo {
	t.Helper()
	read, err := pool.RetentionInfo(sequence, 0, head)
	must(t, err)
	if read.Layer != 0 || read.KVHead != head {
		t.Errorf("asked for head %d of layer 0: %+v", head, read)
	}
	return read
}

func TestScoresOfTheHostChooseWhoStays(t *testing.T) {
	pool, model := observingPool(t, 0)
	sequence := newSequence(t, pool, &Policy{Scorer: ScorerHost, Budget: 24})
	grow(t, pool, model, sequence, 100)
	report, err := pool.Compress(sequence, nil)
	must(t, err)
	if got := info(t, pool, sequence); report.Outcome != CompressNoObservations ||
		got.LastOutcome != CompressNoObservations || got.LastFailure != StatusOK {
		t.Errorf("without scores: %+v, %+v", report, got)
	}
	given := func(head uint32, position int) float32 {
		return float32((position*37 + int(head)*11) % 101)
	}
	// [heads, positions], in two parts.
	for _, part := range [][2]int{{0, 60}, {60, 100}} {
		var scores []float32
		for head := uint32(0); head < kvHeads; head++ {
			for position := part[0]; position < part[1]; position++ {
				scores = append(scores, given(head, position))
			}
		}
		first, tokens := uint64(part[0]), uint64(part[1]-part[0])
		refused(t, pool.SetScores(sequence, 0, first, tokens, scores[1:]), ErrInvalid, "are needed")
		must(t, pool.SetScores(sequence, 0, first, tokens, scores))
	}
	report, err = pool.Compress(sequence, nil)
	must(t, err)
	if report.Outcome != CompressDone || report.LostAttention != 0 {
		t.Errorf("%+v", report)
	}
	for head := uint32(0); head < kvHeads; head++ {
		all := make([]float64, 100)
		for position := range all {
			all[position] = float64(given(head, position))
		}
		kept := largest(all, 24)
		if got := positions(t, pool, sequence, 0, head); !reflect.DeepEqual(got, kept) {
			t.Errorf("head %d: %v, want %v", head, got, kept)
		}
		// Scores stay with their tokens.
		for i, score := range scoresOf(t, pool, sequence, head) {
			if score != given(head, int(kept[i])) {
				t.Errorf("head %d: token %d has %v", head, kept[i], score)
			}
		}
		if got := retention(t, pool, sequence, head); got.Rounds != 1 || got.TokensRemoved != 76 ||
			got.BlocksReturned != 5 {
			t.Errorf("%+v", got)
		}
	}
	refused(t, pool.SetScores(sequence, 0, 90, 11, make([]float32, 22)), ErrInvalid, "100")
	refused(t, pool.SetScores(sequence, 0, 0, math.MaxUint64, make([]float32, 22)), ErrInvalid, "")
	refused(t, pool.SetScores(sequence, 0, 0, 1<<63, nil), ErrInvalid, "are needed")
	refused(t, pool.SetScores(sequence, 1, 0, 1, make([]float32, 2)), ErrInvalid, "layer 1")
	_, err = pool.RetentionInfo(sequence, 0, kvHeads)
	refused(t, err, ErrInvalid, "KV head 2")
	_, err = pool.Scores(sequence, 0, kvHeads, nil)
	refused(t, err, ErrInvalid, "KV head 2")
}

// What all tokens together give each other in attention, over the query heads of a KV head.
func TestObservedAttentionIsWhatTheDefinitionGives(t *testing.T) {
	pool, _ := observingPool(t, 0)
	sequence := newSequence(t, pool, &Policy{Scorer: ScorerH2O, Budget: 40, ObserveEvery: 1})
	const tokens, group = 100, queryHeads / kvHeads
	keys := random(tokens*kvHeads*keyDim, 1)
	queries := random(tokens*queryHeads*keyDim, 2)
	step := reserve(t, pool, sequence, tokens)
	must(t, step.Write(0, Float32(keys, tokens, kvHeads, keyDim),
		Float32(random(tokens*kvHeads*valueDim, 3), tokens, kvHeads, valueDim)))
	must(t, step.Attend(0, Float32(queries, tokens, queryHeads, keyDim),
		Float32(make([]float32, tokens*queryHeads*valueDim), tokens, queryHeads, valueDim),
		AttendOptions{}))
	_, err := step.End()
	must(t, err)

	var all [kvHeads][]float64
	for head := range all {
		all[head] = make([]float64, tokens)
		for row := 0; row < tokens*group; row++ {
			token, query := row/group, queries[(row/group*queryHeads+head*group+row%group)*keyDim:]
			weights, total := make([]float64, token+1), 0.0
			for at := range weights {
				dot := 0.0
				for d, k := range keys[(at*kvHeads+head)*keyDim : (at*kvHeads+head+1)*keyDim] {
					dot += float64(query[d]) * float64(k)
				}
				weights[at] = math.Exp(dot / math.Sqrt(keyDim))
				total += weights[at]
			}
			for at := range weights {
				all[head][at] += weights[at] / total
			}
		}
		for at, score := range scoresOf(t, pool, sequence, uint32(head)) {
			want := all[head][at]
			if !(math.Abs(float64(score)-want) < 5e-5*(1+want)) {
				t.Errorf("head %d: token %d was given %v, want %v", head, at, score, want)
			}
		}
	}
	report, err := pool.Compress(sequence, nil)
	must(t, err)
	mean := 0.0
	for head := range all {
		kept, lost := largest(all[head], 40), 0.0
		if got := positions(t, pool, sequence, 0, uint32(head)); !reflect.DeepEqual(got, kept) {
			t.Errorf("head %d: %v, want %v", head, got, kept)
		}
		for _, position := range kept {
			lost -= all[head][position]
		}
		sum := 0.0
		for _, score := range all[head] {
			sum += score
		}
		lost = 1 + lost/sum
		got := retention(t, pool, sequence, uint32(head))
		if math.Abs(got.LostAttention-lost) > 1e-5 || got.LostAttentionSum != got.LostAttention {
			t.Errorf("head %d: %+v, want %v", head, got, lost)
		}
		mean += lost / kvHeads
	}
	if math.Abs(report.LostAttention-mean) > 1e-5 {
		t.Errorf("%+v, want %v", report, mean)
	}
	// Two may observe, and no third.
	newSequence(t, pool, &Policy{Scorer: ScorerSnapKV, Budget: 40})
	_, err = pool.CreateSequence(SequenceConfig{Policy: &Policy{Scorer: ScorerTOVA, Budget: 40}})
	refused(t, err, ErrLimit, "max_observed_sequences")
}

func TestHeadsWithLanesOfTheirOwnShareABudget(t *testing.T) {
	pool, model := observingPool(t, LayerLanePerHead)
	policy := &Policy{Scorer: ScorerHost, Budget: 32, Allocator: AllocateAdaptive, FloorShare: 0.25}
	sequence := newSequence(t, pool, policy)
	grow(t, pool, model, sequence, 96)
	// All of head 1 is better than anything of head 0, which is sure of a quarter of 32.
	given := make([]float32, 2*96)
	for i := range given {
		given[i] = float32(i)
	}
	must(t, pool.SetScores(sequence, 0, 0, 96, given))
	report, err := pool.Compress(sequence, nil)
	must(t, err)
	if report.TokensAfter != 64 || report.BlocksReturned != 7 {
		t.Errorf("%+v", report)
	}
	step := reserve(t, pool, sequence, 1)
	defer step.Close()
	for head, want := range []struct{ first, blocks, returned uint32 }{{88, 1, 5}, {40, 4, 2}} {
		head := uint32(head)
		if got := positions(t, pool, sequence, 0, head); !reflect.DeepEqual(got,
			span(want.first, 95)) {
			t.Errorf("head %d: %v", head, got)
		}
		if got := retention(t, pool, sequence, head); got.BlocksReturned != uint64(want.returned) ||
			got.Rounds != 1 || got.TokensRemoved != uint64(want.first) {
			t.Errorf("%+v", got)
		}
		// Tables are those of a head.
		buffers := TableBuffers{KVLen: make([]int32, 1), Indices: make([]int32, 8)}
		tables, err := step.ExportHead(0, head, &buffers, func(memory *BlockMemory) error {
			block, err := memory.Block(buffers.Indices[0])
			if len(block) != 16*(keyDim+valueDim)*4 {
				t.Errorf("a block of %d bytes", len(block))
			}
			return err
		})
		must(t, err)
		if tables.KVHead != head || buffers.KVLen[0] != int32(97-want.first) ||
			tables.IndicesCount != uint64(want.blocks) {
			t.Errorf("head %d: %+v, KVLen %v", head, tables, buffers.KVLen)
		}
	}
	_, err = step.ExportHead(0, kvHeads, nil, nil)
	refused(t, err, ErrInvalid, "kv_head")
	together, _ := observingPool(t, 0)
	_, err = together.CreateSequence(SequenceConfig{Policy: policy})
	refused(t, err, ErrUnsupported, "LANE_PER_HEAD")
}

func TestWhatAPolicyTakesIsKnownBeforehand(t *testing.T) {
	pool := newPool(t, smallConfig(0), fullModel(2, FormatF16))
	policy := &Policy{Scorer: ScorerStreaming, Budget: 32, Every: 16}
	taken, err := pool.PolicyFootprint(policy, 0, 0)
	must(t, err)
	// 15 tokens may come before a step, and one in it: three blocks of 16 in each layer.
	const block = 16 * kvHeads * (keyDim + valueDim) * 2
	if want := (PolicyFootprint{TokensAfterRound: 32, TokensSteady: 48, BlocksSteady: 6,
		BytesSteady: 6 * block}); taken != want {
		t.Errorf("%+v, want %+v", taken, want)
	}
	// A layer left whole holds all of 100 tokens.
	policy.SkipLayers = 1
	taken, err = pool.PolicyFootprint(policy, 3, 100)
	must(t, err)
	if taken.StepTokens != 3 || taken.Tokens != 100 || taken.TokensSteady != 50 ||
		taken.BlocksSteady != 7+4 {
		t.Errorf("%+v", taken)
	}
	_, err = pool.PolicyFootprint(&Policy{Scorer: ScorerStreaming, Budget: 32}, 1, 0)
	refused(t, err, ErrInvalid, "every")
	_, err = pool.PolicyFootprint(nil, 1, 0)
	refused(t, err, ErrInvalid, "policy")
}

func TestRoundsThatRemoveNothingSayWhy(t *testing.T) {
	pool, _ := observingPool(t, 0)
	sequence := newSequence(t, pool, &Policy{Scorer: ScorerHost, Budget: 8, Every: 16})
	step := reserve(t, pool, sequence, 20)
	must(t, step.Write(0, Float32(make([]float32, 20*kvHeads*keyDim), 20, kvHeads, keyDim),
		Float32(make([]float32, 20*kvHeads*valueDim), 20, kvHeads, valueDim)))
	report, err := step.End()
	must(t, err)
	if report.Compactions != 0 || report.CompactionsSkipped != 1 || report.PressureRounds != 0 ||
		report.LastSkipOutcome != CompressNoObservations || report.LastSkipStatus != StatusOK {
		t.Errorf("%+v", report)
	}
	if got := info(t, pool, sequence); got.RoundsSkipped != 1 {
		t.Errorf("%+v", got)
	}
}

func TestPoliciesRunWhenMemoryRunsShort(t *testing.T) {
	// 2 MiB of which a half may be pinned: blocks of 12 KiB, in lanes of 30 a sequence.
	config := smallConfig(0)
	config.ArenaBytes, config.PressurePercent = 2<<20, 50
	model := fullModel(1, FormatF32)
	pool := newPool(t, config, model)
	policy := &Policy{Scorer: ScorerStreaming, Budget: 64}
	var rounds []uint64
	for i := 0; i < 3; i++ {
		step := reserve(t, pool, newSequence(t, pool, policy), 480)
		must(t, step.Write(0, Float32(make([]float32, 480*kvHeads*keyDim), 480, kvHeads, keyDim),
			Float32(make([]float32, 480*kvHeads*valueDim), 480, kvHeads, valueDim)))
		report, err := step.End()
		must(t, err)
		rounds = append(rounds, report.PressureRounds)
		if got := stats(t, pool); report.Compactions != 0 || got.LiveBytes > 1<<20 {
			t.Errorf("%+v, %+v", report, got)
		}
	}
	// 1 MiB is 85 blocks: the third sequence makes it 90, and a round takes 26 of them.
	if !reflect.DeepEqual(rounds, []uint64{0, 0, 1}) {
		t.Errorf("rounds %v", rounds)
	}
}

func TestErrorsOfPoliciesAfterTheEnd(t *testing.T) {
	pool, _ := observingPool(t, 0)
	sequence := newSequence(t, pool, nil)
	must(t, pool.ReleaseSequence(sequence))
	_, err := pool.RetentionInfo(sequence, 0, 0)
	refused(t, err, ErrStale, "")
	_, err = pool.Scores(sequence, 0, 0, nil)
	refused(t, err, ErrStale, "")
	refused(t, pool.SetScores(sequence, 0, 0, 1, make([]float32, kvHeads)), ErrStale, "")
	must(t, pool.Close())
	if _, err := pool.PolicyFootprint(&Policy{}, 0, 0); !errors.Is(err, errPoolClosed) {
		t.Error(err)
	}
	if err := pool.SetScores(sequence, 0, 0, 0, nil); !errors.Is(err, errPoolClosed) {
		t.Error(err)
	}
}
