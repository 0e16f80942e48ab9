// Query statistics: gathered from rotated queries, set, saved, loaded, and scored by.

package kvrt

import (
	"math"
	"os"
	"path/filepath"
	"testing"
)

const ropeBands = keyDim / 2

// ropeModel has one layer whose rotation pairs dimension i with i + 32.
func ropeModel(frequencies []float64) Model {
	model := fullModel(1, FormatF32)
	model.Layers[0].Rope = &Rope{Style: RopeHalf, InverseFrequencies: frequencies}
	return model
}

func defaultFrequencies() []float64 {
	frequencies := make([]float64, ropeBands)
	for f := range frequencies {
		frequencies[f] = math.Pow(10000, -float64(f)/ropeBands)
	}
	return frequencies
}

// rotate turns a head's vector to its position.
func rotate(vector []float64, position int, frequencies []float64) []float32 {
	out := make([]float32, keyDim)
	for f, frequency := range frequencies {
		sine, cosine := math.Sincos(float64(position) * frequency)
		a, b := vector[f], vector[f+ropeBands]
		out[f], out[f+ropeBands] = float32(a*cosine-b*sine), float32(a*sine+b*cosine)
	}
	return out
}

func emptyStatistics() QueryStatistics {
	const size = queryHeads * ropeBands
	return QueryStatistics{QueryHeads: queryHeads, Bands: ropeBands,
		MeanReal: make([]float32, size), MeanImaginary: make([]float32, size),
		MeanMagnitude: make([]float32, size)}
}

// Every query of a head is the same vector before rotation: that is its mean.
func TestStatisticsOfRotatedQueries(t *testing.T) {
	frequencies := defaultFrequencies()
	frequencies[3] = 0.77 // not the default: what is given is used
	pool := newPool(t, smallConfig(0), ropeModel(frequencies))
	sequence, err := pool.CreateSequence(SequenceConfig{Flags: SequenceGatherStatistics})
	must(t, err)
	const rows = 50
	vectors := make([][]float64, queryHeads)
	for head := range vectors {
		vectors[head] = make([]float64, keyDim)
		for d, value := range random(keyDim, int64(head)) {
			vectors[head][d] = float64(value)
		}
	}
	queries := []float32{}
	for row := 0; row < rows; row++ {
		for head := 0; head < queryHeads; head++ {
			queries = append(queries, rotate(vectors[head], row, frequencies)...)
		}
	}
	step := reserve(t, pool, sequence, rows)
	keys := Float32(random(rows*kvHeads*keyDim, 5), rows, kvHeads, keyDim)
	values := Float32(random(rows*kvHeads*valueDim, 6), rows, kvHeads, valueDim)
	out := Float32(make([]float32, rows*queryHeads*valueDim), rows, queryHeads, valueDim)
	q := Float32(queries, rows, queryHeads, keyDim)
	must(t, step.WriteAttend(0, keys, values, q, out, AttendOptions{}))
	must(t, step.Attend(0, q, out, AttendOptions{Flags: AttendNoStatistics}))
	_, err = step.End()
	must(t, err)
	got := emptyStatistics()
	must(t, pool.GetStatistics(sequence, &got))
	if got.Tokens != rows {
		t.Errorf("%d tokens, want %d: AttendNoStatistics must not count", got.Tokens, rows)
	}
	for head, vector := range vectors {
		for f := 0; f < ropeBands; f++ {
			at := head*ropeBands + f
			real, imaginary := vector[f], vector[f+ropeBands]
			for name, pair := range map[string][2]float64{
				"real":      {float64(got.MeanReal[at]), real},
				"imaginary": {float64(got.MeanImaginary[at]), imaginary},
				"magnitude": {float64(got.MeanMagnitude[at]), math.Hypot(real, imaginary)},
			} {
				if math.Abs(pair[0]-pair[1]) > 1e-4 {
					t.Errorf("head %d band %d: %s is %v, want %v", head, f, name, pair[0], pair[1])
				}
			}
		}
	}

	path := filepath.Join(t.TempDir(), "statistics")
	must(t, pool.SaveStatistics(sequence, path))
	refused(t, pool.SaveStatistics(sequence, path+"/below/a/file"), ErrIO, "")
	refused(t, pool.SaveStatistics(sequence, path+"\x00"), ErrInvalid, "zero byte")
	loadIntoAnotherPool(t, path, frequencies)
}

// Queries of a head are a vector and its opposite in turn: the mean is 0, and the squares of the
// vector are the variances.
func TestCovariancesOfRotatedQueries(t *testing.T) {
	frequencies := defaultFrequencies()
	pool := newPool(t, smallConfig(0), ropeModel(frequencies))
	sequence, err := pool.CreateSequence(SequenceConfig{Flags: SequenceGatherStatistics})
	must(t, err)
	const rows = 40
	vector := random(keyDim, 3)
	queries := []float32{}
	for row := 0; row < rows; row++ {
		signed := make([]float64, keyDim)
		for d, value := range vector {
			signed[d] = float64(value) * float64(1-2*(row%2))
		}
		for head := 0; head < queryHeads; head++ {
			queries = append(queries, rotate(signed, row, frequencies)...)
		}
	}
	step := reserve(t, pool, sequence, rows)
	keys := Float32(random(rows*kvHeads*keyDim, 5), rows, kvHeads, keyDim)
	values := Float32(random(rows*kvHeads*valueDim, 6), rows, kvHeads, valueDim)
	out := Float32(make([]float32, rows*queryHeads*valueDim), rows, queryHeads, valueDim)
	q := Float32(queries, rows, queryHeads, keyDim)
	must(t, step.WriteAttend(0, keys, values, q, out, AttendOptions{}))
	_, err = step.End()
	must(t, err)
	got := emptyStatistics()
	got.VarianceReal = make([]float32, queryHeads*ropeBands)
	got.VarianceImaginary = make([]float32, queryHeads*ropeBands)
	got.Covariance = make([]float32, queryHeads*ropeBands)
	must(t, pool.GetStatistics(sequence, &got))
	for at := range got.Covariance {
		a, b := vector[at%ropeBands], vector[at%ropeBands+ropeBands]
		for name, pair := range map[string][2]float32{
			"mean":               {got.MeanReal[at], 0},
			"variance real":      {got.VarianceReal[at], a * a},
			"variance imaginary": {got.VarianceImaginary[at], b * b},
			"covariance":         {got.Covariance[at], a * b},
		} {
			if math.Abs(float64(pair[0]-pair[1])) > 1e-4 {
				t.Errorf("%d: %s is %v, want %v", at, name, pair[0], pair[1])
			}
		}
	}
	must(t, pool.SetStatistics(got))
	got.Covariance[3] = 99
	refused(t, pool.SetStatistics(got), ErrInvalid, "covariance")
	got.Covariance = nil
	refused(t, pool.SetStatistics(got), ErrInvalid, "Covariance")
}

// loadIntoAnotherPool: a pool with the file's statistics compacts without having seen a query;
// damaged files, other rotations and wrong paths are refused.
func loadIntoAnotherPool(t *testing.T, path string, frequencies []float64) {
	model := ropeModel(frequencies)
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, nil)
	grow(t, pool, model, sequence, 100)
	policy := &Policy{Scorer: ScorerTriAttention, Budget: 32}
	report, err := pool.Compress(sequence, policy)
	must(t, err)
	if report.Outcome != CompressNoStatistics {
		t.Errorf("before loading: %+v", report)
	}
	must(t, pool.LoadStatistics(path))
	report, err = pool.Compress(sequence, policy)
	must(t, err)
	if report.Outcome != CompressDone || report.TokensAfter != kvHeads*32 {
		t.Errorf("after loading: %+v", report)
	}
	other := newPool(t, smallConfig(0), ropeModel(defaultFrequencies()))
	refused(t, other.LoadStatistics(path), ErrCorrupt, "")
	whole, err := os.ReadFile(path)
	must(t, err)
	whole[len(whole)/2] ^= 1
	damaged := path + ".damaged"
	must(t, os.WriteFile(damaged, whole, 0o600))
	refused(t, pool.LoadStatistics(damaged), ErrCorrupt, "")
	refused(t, pool.LoadStatistics(path+".absent"), ErrIO, "")
	refused(t, pool.LoadStatistics(""), ErrIO, "")
	refused(t, pool.LoadStatistics(path+"\x00.more"), ErrInvalid, "zero byte")
	refused(t, pool.SaveStatistics(sequence, path), ErrInvalid, "gathered no queries")
}

// With mean queries that have a zero magnitude but for one band and head pair, the score of a key
// is its component there: what survives is known.
func TestSetStatistics(t *testing.T) {
	model := fullModel(1, FormatF32)
	model.Layers[0].Rope = &Rope{Style: RopeNone}
	pool := newPool(t, smallConfig(0), model)
	sequence := newSequence(t, pool, nil)
	keys := grow(t, pool, model, sequence, 100)
	statistics := emptyStatistics()
	statistics.Bands, statistics.Tokens = keyDim, 1 // nothing rotated: a band per dimension
	statistics.MeanReal = make([]float32, queryHeads*keyDim)
	statistics.MeanImaginary = make([]float32, queryHeads*keyDim)
	statistics.MeanMagnitude = make([]float32, queryHeads*keyDim)
	for head := 0; head < queryHeads; head++ {
		statistics.MeanReal[head*keyDim+7] = 1
		statistics.MeanMagnitude[head*keyDim+7] = 1
	}
	must(t, pool.SetStatistics(statistics))
	_, err := pool.Compress(sequence, &Policy{Scorer: ScorerTriAttention, Budget: 32})
	must(t, err)
	for head := uint32(0); head < kvHeads; head++ {
		kept := map[uint32]bool{}
		for _, position := range positions(t, pool, sequence, 0, head) {
			kept[position] = true
		}
		lowestKept, highestLost := float32(9), float32(-9)
		for position := uint32(0); position < 100; position++ {
			key := keys[(int(position)*kvHeads+int(head))*keyDim+7]
			if kept[position] && key < lowestKept {
				lowestKept = key
			}
			if !kept[position] && key > highestLost {
				highestLost = key
			}
		}
		if len(kept) != 32 || lowestKept < highestLost {
			t.Errorf("head %d: %d kept, the lowest %v, the highest lost %v", head, len(kept),
				lowestKept, highestLost)
		}
	}
	wrong := statistics
	wrong.MeanImaginary = wrong.MeanImaginary[:5]
	refused(t, pool.SetStatistics(wrong), ErrInvalid, "MeanImaginary")
	refused(t, pool.SetStatistics(QueryStatistics{}), ErrInvalid, "")
	wrong = statistics
	wrong.Layer = 1
	refused(t, pool.SetStatistics(wrong), ErrInvalid, "layer")
	refused(t, pool.GetStatistics(sequence, nil), ErrInvalid, "nil")
	refused(t, pool.GetStatistics(sequence, &QueryStatistics{QueryHeads: 1 << 31, Bands: 1 << 31}),
		ErrInvalid, "MeanReal")
}
