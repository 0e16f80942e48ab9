// Tensors that do not fit: their slices, the step, or themselves.

package kvrt

import "testing"

func TestWrongTensors(t *testing.T) {
	pool := newPool(t, smallConfig(0), fullModel(1, FormatF32))
	step := reserve(t, pool, newSequence(t, pool, nil), 2)
	defer step.Close()
	values := Float32(make([]float32, 2*kvHeads*valueDim), 2, kvHeads, valueDim)
	full := make([]float32, 2*kvHeads*keyDim)
	bits := make([]uint16, 2*kvHeads*keyDim)
	view := func(data []float32) Tensor { return Float32(data, 2, kvHeads, keyDim) }
	const far = int64(1) << 62
	for name, wrong := range map[string]struct {
		tensor Tensor
		word   string
	}{
		"nil":               {view(nil), "keys: a dense [2, 2, 64] takes 256 elements"},
		"zero":              {Tensor{}, "keys"},
		"empty":             {view(full[:0]), "keys"},
		"one short":         {view(full[:len(full)-1]), "takes 256 elements, its slice has 255"},
		"one long":          {view(append(full, 0)), "takes 256 elements, its slice has 257"},
		"f16 one short":     {Float16(bits[:255], 2, kvHeads, keyDim), "its slice has 255"},
		"f16 one long":      {Float16(append(bits, 0), 2, kvHeads, keyDim), "its slice has 257"},
		"bf16 one short":    {BFloat16(bits[:255], 2, kvHeads, keyDim), "its slice has 255"},
		"strided one short": {view(full[:255]).Strided(0, 128, 64, 1), "beyond its 255 elements"},
		"rows":              {Float32(full[:128], 1, kvHeads, keyDim), "[1, 2, 64]"},
		"heads":             {Float32(full[:128], 2, 1, keyDim), "[2, 1, 64]"},
		"dim":               {Float32(full[:128], 2, kvHeads, 32), "[2, 2, 32]"},
		"no rows":           {Float32(full[:0], 0, kvHeads, keyDim), "keys"},
		"negative":          {Float32(full, -2, kvHeads, -keyDim), "[-2, 2, -64]"},
		"huge":              {Float32(full, 1<<62, 1<<62, 1<<62), "longer than any slice"},
		"huge and empty":    {Float32(nil, 1<<62, 1<<62, 0), "keys"},
		"stride too far":    {view(full).Strided(0, 129, 64, 1), "beyond"},
		"offset":            {view(full).Strided(1, 128, 64, 1), "beyond"},
		"offset at the end": {view(full).Strided(256, 128, 64, 1), "beyond"},
		"negative offset":   {view(full).Strided(-1, 128, 64, 1), "beyond"},
		"no rows, strided":  {Float32(full, 0, kvHeads, keyDim).Strided(-9, 128, 64, 1), "[0, 2, 6"},
		"strides of 0":      {view(full).Strided(0, 0, 0, 0), "strides are all 0"},
		"largest offset":    {view(full).Strided(1<<63-1, far, far, far), "beyond"},
		"negative stride":   {view(full).Strided(0, 128, 64, -1), "beyond"},
		"smallest stride":   {view(full).Strided(0, -1<<63, -1<<63, -1<<63), "beyond"},
		"largest stride":    {view(full).Strided(0, 1<<63-1, 1<<63-1, 1<<63-1), "beyond"},
		"strides that wrap": {view(full).Strided(0, far, -far, 1), "beyond"},
	} {
		t.Run(name, func(t *testing.T) {
			refused(t, step.Write(0, wrong.tensor, values), ErrInvalid, wrong.word)
		})
	}
	must(t, step.Write(0, view(full), values))
	queries := Float32(make([]float32, 2*queryHeads*keyDim), 2, queryHeads, keyDim)
	out := Float32(make([]float32, 2*queryHeads*valueDim), 2, queryHeads, valueDim)
	short := Float32(make([]float32, 5), 2, queryHeads, valueDim)
	for name, err := range map[string]error{
		"values": step.Write(0, view(full), Float32(nil, 2, kvHeads, valueDim)),
		"queries": step.Attend(0, Float32(nil, 2, queryHeads, keyDim), out,
			AttendOptions{}),
		"out": step.Attend(0, queries, short, AttendOptions{}),
		"out: a dense [2, 4, 32] takes 256 elements, its slice has 257": step.Attend(0, queries,
			Float32(make([]float32, 257), 2, queryHeads, valueDim), AttendOptions{}),
		"LogSumExp has 9 elements, 2 rows of 4 query heads need 8": step.Attend(0, queries, out,
			AttendOptions{LogSumExp: make([]float32, 2*queryHeads+1)}),
		"LogSumExp": step.Attend(0, queries, out,
			AttendOptions{LogSumExp: make([]float32, 2*queryHeads-1)}),
		"flags":   step.Attend(0, queries, out, AttendOptions{Flags: 1 << 30}),
		"layer 1": step.Attend(1, queries, out, AttendOptions{}),
	} {
		t.Run(name, func(t *testing.T) {
			status := ErrInvalid
			if name == "flags" {
				status = ErrUnsupported
			}
			refused(t, err, status, name)
		})
	}
	refused(t, step.Attend(0, queries, out, AttendOptions{LogSumExp: []float32{}}), ErrInvalid,
		"LogSumExp")
	refused(t, step.WriteAttend(0, view(full), values, queries, short, AttendOptions{}),
		ErrInvalid, "out")
	refused(t, step.WriteAttend(0, Float32(full[:128], 1, kvHeads, keyDim), values, queries, out,
		AttendOptions{}), ErrInvalid, "[1, 2, 64]")
	must(t, step.Attend(0, queries, out, AttendOptions{LogSumExp: make([]float32, 2*queryHeads)}))
}

// What the library writes must have a place for each element; what it reads need not.
func TestOutputsThatLieOnThemselves(t *testing.T) {
	const rows = 3
	pool := newPool(t, smallConfig(0), fullModel(1, FormatF32))
	step := reserve(t, pool, newSequence(t, pool, nil), rows)
	defer step.Close()
	row := make([]float32, kvHeads*keyDim)
	broadcast := Float32(row, rows, kvHeads, keyDim).Strided(0, 0, keyDim, 1)
	values := Float32(make([]float32, rows*kvHeads*valueDim), rows, kvHeads, valueDim)
	must(t, step.Write(0, broadcast, values))
	queries := Float32(make([]float32, queryHeads*keyDim), rows, queryHeads, keyDim).Strided(0, 0,
		keyDim, 1)
	data := make([]float32, 4096)
	out := Float32(data, rows, queryHeads, valueDim)
	for name, strides := range map[string][4]int64{
		"rows on each other":   {0, 0, valueDim, 1},
		"heads on each other":  {0, 128, 0, 1},
		"elements of a head":   {0, 128, 32, 0},
		"rows overlap by one":  {0, 127, 32, 1},
		"heads overlap by one": {0, 128, 31, 1},
		"backwards":            {4095, -128, -31, -1},
		"interleaved":          {0, 1, 2, 8},
	} {
		t.Run(name, func(t *testing.T) {
			view := out.Strided(int(strides[0]), strides[1], strides[2], strides[3])
			refused(t, step.Attend(0, queries, view, AttendOptions{}), ErrInvalid, "lie on each")
			refused(t, step.WriteAttend(0, broadcast, values, queries, view, AttendOptions{}),
				ErrInvalid, "lie on each other")
		})
	}
	for name, strides := range map[string][4]int64{
		"dense":       {0, 128, 32, 1},
		"backwards":   {4095, -128, -32, -1},
		"gaps":        {1, 200, 40, 1},
		"transposed":  {0, 32, 96, 1},
		"interleaved": {0, 1, 3, 12},
	} {
		t.Run(name, func(t *testing.T) {
			must(t, step.Attend(0, queries, out.Strided(int(strides[0]), strides[1], strides[2],
				strides[3]), AttendOptions{}))
		})
	}
	// Of one row it does not matter where the next would be.
	other := newPool(t, smallConfig(0), fullModel(1, FormatF32))
	single := reserve(t, other, newSequence(t, other, nil), 1)
	defer single.Close()
	must(t, single.WriteAttend(0, Float32(row, 1, kvHeads, keyDim),
		Float32(data[:kvHeads*valueDim], 1, kvHeads, valueDim),
		Float32(make([]float32, queryHeads*keyDim), 1, queryHeads, keyDim),
		Float32(data, 1, queryHeads, valueDim).Strided(0, 0, valueDim, 1), AttendOptions{}))
}
