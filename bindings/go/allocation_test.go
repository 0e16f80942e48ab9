// The decode loop allocates nothing.

package kvrt

import "testing"

func TestDecodeAllocatesNothing(t *testing.T) {
	config := smallConfig(0)
	model := fullModel(4, FormatF16)
	pool := newPool(t, config, model)
	sequences := []Sequence{newSequence(t, pool, nil), newSequence(t, pool, nil)}
	counts, tokens := []uint32{1, 1}, []uint32{7, 8}
	infos, statuses := make([]AppendInfo, 2), make([]Status, 2)
	keys := Float32(random(2*kvHeads*keyDim, 1), 2, kvHeads, keyDim)
	values := BFloat16(make([]uint16, 2*kvHeads*valueDim), 2, kvHeads, valueDim)
	queries := Float16(make([]uint16, 2*queryHeads*keyDim), 2, queryHeads, keyDim)
	out := Float32(make([]float32, 2*queryHeads*valueDim), 2, queryHeads, valueDim)
	options := AttendOptions{LogSumExp: make([]float32, 2*queryHeads)}
	buffers := tableBuffers()
	decode := func() {
		step, err := pool.BeginStep()
		must(t, err)
		must(t, step.AppendBatch(sequences, counts, tokens, infos))
		_, err = step.Reserve(statuses)
		must(t, err)
		for layer := uint32(0); layer < 2; layer++ {
			must(t, step.WriteAttend(layer, keys, values, queries, out, options))
		}
		must(t, step.Write(2, keys, values))
		must(t, step.Attend(2, queries, out, options))
		_, err = step.Export(3, buffers, nil)
		must(t, err)
		must(t, step.AcceptBatch(sequences, counts))
		must(t, step.Accept(sequences[0], 1))
		_, err = step.End()
		must(t, err)
		if _, err = pool.SequenceInfo(sequences[0]); err != nil {
			t.Fatal(err)
		}
		_, err = pool.Stats()
		must(t, err)
	}
	decode() // the first batch makes room for its results
	if allocations := testing.AllocsPerRun(100, decode); allocations != 0 {
		t.Errorf("%v allocations per step", allocations)
	}
}
