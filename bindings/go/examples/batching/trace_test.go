// Traces: one that is well formed, and files that are not.

package main

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math"
	"math/rand"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const (
	testHeads, testKVHeads, testDim = 4, 2, 32
	testLayers                      = 2
)

// traceWriter writes the format of docs/trace.md, independently of the reader.
type traceWriter struct{ bytes.Buffer }

func (w *traceWriter) put(values ...any) {
	for _, value := range values {
		if err := binary.Write(w, binary.LittleEndian, value); err != nil {
			panic(err)
		}
	}
}

// sealed is the file with its checksum.
func (w *traceWriter) sealed() []byte {
	sum := fnv.New64a()
	sum.Write(w.Bytes())
	return binary.LittleEndian.AppendUint64(append([]byte{}, w.Bytes()...), sum.Sum64())
}

// smallNumber is a random multiple of 1/64 in [-1, 1), which f16 holds exactly, with its bits.
func smallNumber(source *rand.Rand) (float64, uint16) {
	units := source.Intn(128) - 64
	value := float64(units) / 64
	if units == 0 {
		return 0, 0
	}
	fraction, exponent := math.Frexp(math.Abs(value)) // in [0.5, 1)
	bits := uint16(exponent+14)<<10 | uint16(fraction*2048)&1023
	if units < 0 {
		bits |= 0x8000
	}
	return value, bits
}

// headerFields are those behind the magic, in order; tests change some.
func headerFields() []uint32 {
	return []uint32{testLayers, testHeads, testKVHeads, testDim, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
		2}
}

// syntheticTrace is two requests without a policy: a prompt in chunks, a token, one with drafts
// that are rolled back. The outputs are those of a softmax in double.
func syntheticTrace(header []uint32) []byte {
	w := &traceWriter{}
	w.WriteString("KVTRACE1")
	w.put(header, uint64(0), []uint32{3, 7})
	for number := int64(0); number < 2; number++ {
		turns := [][2]uint32{{5, 5}, {1, 1}, {4, 2}, {1, 1}} // rows, accepted
		w.put(uint32(5), uint32(len(turns)), uint32(0), uint32(9), []uint32{9, 9})
		source := rand.New(rand.NewSource(number))
		var keys, values [testLayers][]float64
		for _, turn := range turns {
			rows, accepted := int(turn[0]), int(turn[1])
			w.put(turn[0], turn[1], turn[0], make([]uint32, rows))
			for layer := 0; layer < testLayers; layer++ {
				queries, queryBits := numbers(source, rows*testHeads*testDim)
				newKeys, keyBits := numbers(source, rows*testKVHeads*testDim)
				newValues, valueBits := numbers(source, rows*testKVHeads*testDim)
				kept := len(keys[layer])
				keys[layer] = append(keys[layer], newKeys...)
				values[layer] = append(values[layer], newValues...)
				outputs := softmax(queries, keys[layer], values[layer], rows)
				w.put(queryBits, keyBits, valueBits, outputs)
				kept += accepted * testKVHeads * testDim
				keys[layer], values[layer] = keys[layer][:kept], values[layer][:kept]
			}
		}
	}
	return w.sealed()
}

func numbers(source *rand.Rand, count int) ([]float64, []uint16) {
	values, bits := make([]float64, count), make([]uint16, count)
	for i := range values {
		values[i], bits[i] = smallNumber(source)
	}
	return values, bits
}

// softmax attends with the last `rows` positions' queries.
func softmax(queries, keys, values []float64, rows int) []float32 {
	total := len(keys) / (testKVHeads * testDim)
	outputs := make([]float32, rows*testHeads*testDim)
	for row := 0; row < rows; row++ {
		for head := 0; head < testHeads; head++ {
			at := (row*testHeads + head) * testDim
			group := head / (testHeads / testKVHeads)
			sum, out := 0.0, make([]float64, testDim)
			for position := 0; position <= total-rows+row; position++ {
				from := (position*testKVHeads + group) * testDim
				logit := 0.0
				for d := 0; d < testDim; d++ {
					logit += queries[at+d] * keys[from+d]
				}
				weight := math.Exp(logit / math.Sqrt(testDim))
				sum += weight
				for d := range out {
					out[d] += weight * values[from+d]
				}
			}
			for d := range out {
				outputs[at+d] = float32(out[d] / sum)
			}
		}
	}
	return outputs
}

func writeTrace(t *testing.T, file []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "trace")
	if err := os.WriteFile(path, file, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// replayOf runs the program and returns what it printed.
func replayOf(arguments ...string) (string, error) {
	var out, complaints bytes.Buffer
	err := batching(arguments, &out, &complaints)
	return out.String(), err
}

func TestASyntheticTraceIsReplayed(t *testing.T) {
	path := writeTrace(t, syntheticTrace(headerFields()))
	for _, slots := range []string{"1", "2"} {
		text, err := replayOf(path, "--slots", slots, "--arena-mib", "2")
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(text, "\n")
		for i := 0; i < 2; i++ {
			want := fmt.Sprintf("%7d      5    11       2     9       18      0      2 ", i)
			if !strings.HasPrefix(lines[1+i], want) || !strings.HasSuffix(lines[1+i], " equal") {
				t.Errorf("slots %s: line %q, want %q", slots, lines[1+i], want)
			}
		}
		steps := map[string]string{"1": "steps 8, tokens 18, rounds 0,",
			"2": "steps 4, tokens 18, rounds 0,"}[slots]
		if !strings.HasPrefix(lines[3], steps) {
			t.Errorf("slots %s: totals %q, want %q", slots, lines[3], steps)
		}
	}
}

// The recorded trace, with room for all and for few: outputs do not depend on it.
func TestTheRecordedTraceIsReplayed(t *testing.T) {
	const path = "../../../../samples/batching/smollm2.trace"
	var requests [2]string
	for i, arguments := range [][]string{{path}, {"--slots", "2", "--arena-mib", "2", path}} {
		text, err := replayOf(arguments...)
		if err != nil {
			t.Fatal(err)
		}
		requests[i] = text[:strings.LastIndex(text, "steps ")]
		if rows := strings.Count(requests[i], " equal\n"); rows < 2 {
			t.Errorf("%d requests are equal:\n%s", rows, text)
		}
	}
	if requests[0] != requests[1] {
		t.Errorf("in other batches\n%sbecame\n%s", requests[0], requests[1])
	}
}

// A number in the file that is not what comes out is noticed.
func TestDifferencesAreReported(t *testing.T) {
	whole := syntheticTrace(headerFields())
	content := whole[:len(whole)-8]
	const firstRequest = 8 + 16*4 + 8 + 2*4
	for name, at := range map[string]int{
		"an output":  len(content) - 2, // the last one's exponent
		"rounds":     firstRequest + 8,
		"seen":       firstRequest + 12,
		"retained":   firstRequest + 16,
		"retained 1": firstRequest + 20,
	} {
		t.Run(name, func(t *testing.T) {
			w := &traceWriter{}
			w.Write(content)
			w.Bytes()[at] ^= 0x40
			text, err := replayOf(writeTrace(t, w.sealed()))
			if err != errDifferent || strings.Count(text, "DIFFERENT") != 1 {
				t.Errorf("%v\n%s", err, text)
			}
		})
	}
}

func TestHostileTraces(t *testing.T) {
	header := func(index int, value uint32) []byte {
		fields := headerFields()
		fields[index] = value
		return syntheticTrace(fields)
	}
	whole := syntheticTrace(headerFields())
	patched := func(at int, value uint32) []byte {
		w := &traceWriter{}
		w.Write(whole[:len(whole)-8])
		binary.LittleEndian.PutUint32(w.Bytes()[at:], value)
		return w.sealed()
	}
	cut := func(length int) []byte {
		w := &traceWriter{}
		w.Write(whole[:length])
		return w.sealed()
	}
	flipped := append([]byte{}, whole...)
	flipped[len(flipped)/2] ^= 1
	longer := &traceWriter{}
	longer.Write(whole[:len(whole)-8])
	longer.WriteByte(0)
	const firstRequest = 8 + 16*4 + 8 + 2*4
	const firstTurn = firstRequest + 6*4
	for name, hostile := range map[string]struct {
		file []byte
		word string
	}{
		"empty":              {nil, "KVTRACE1"},
		"magic":              {append([]byte("KVTRACE2"), whole[8:]...), "KVTRACE1"},
		"short":              {whole[:15], "KVTRACE1"},
		"flipped":            {flipped, "checksum"},
		"cut":                {whole[:len(whole)-9], "checksum"},
		"longer":             {longer.sealed(), "1 bytes lie behind"},
		"no layers":          {header(0, 0), "layers is 0"},
		"layers":             {header(0, 65), "layers is 65"},
		"no query heads":     {header(1, 0), "query_heads is 0"},
		"query heads":        {header(1, 1<<31), "query_heads is 2147483648"},
		"no KV heads":        {header(2, 0), "kv_heads is 0"},
		"KV heads":           {header(2, 3), "multiple of kv_heads"},
		"head dim":           {header(3, 1<<30), "head_dim is 1073741824"},
		"odd head dim":       {header(3, 36), "multiple of 8"},
		"rope dimensions":    {header(6, 64), "rope_dimensions is 64"},
		"rope without style": {header(6, 32), "rope_dimensions is 32"},
		"no requests":        {header(15, 0), "requests is 0"},
		"requests":           {header(15, 4097), "requests is 4097"},
		"more requests":      {header(15, 3), "the file ends within prompt_tokens"},
		"no turns":           {patched(firstRequest+4, 0), "turns is 0"},
		"turns":              {patched(firstRequest+4, 65537), "turns is 65537"},
		"no rows":            {patched(firstTurn, 0), "rows is 0"},
		"rows":               {patched(firstTurn, 8193), "rows is 8193"},
		"many rows":          {patched(firstTurn, 8192), "the file ends within queries"},
		"accepted":           {patched(firstTurn+4, 6), "accepted is 6"},
		"output rows":        {patched(firstTurn+8, 6), "output_rows is 6"},
		"in the header":      {cut(40), "the file ends within the header"},
		"in the outputs":     {cut(len(whole) - 12), "the file ends within outputs"},
	} {
		t.Run(name, func(t *testing.T) {
			text, err := replayOf(writeTrace(t, hostile.file))
			if err == nil || !strings.Contains(err.Error(), hostile.word) {
				t.Errorf("got %v, want %q", err, hostile.word)
			}
			if text != "" {
				t.Errorf("it printed %q", text)
			}
		})
	}
	// Every prefix, sealed again, is an error and no crash.
	for length := len(whole) - 9; length > 8; length -= 7 {
		if _, err := decodeTrace(cut(length)); err == nil {
			t.Fatalf("the first %d bytes are taken for a trace", length)
		}
	}
}

// What the reader lets through and the library does not, is the library's error.
func TestTheLibraryRefuses(t *testing.T) {
	for name, change := range map[string]struct {
		index int
		value uint32
		word  string
	}{
		"format": {4, 99, "KV_UNSUPPORTED"},
		"scorer": {7, 99, "KV_UNSUPPORTED"},
		"budget": {7, 2, "budget"},
	} {
		t.Run(name, func(t *testing.T) {
			fields := headerFields()
			fields[change.index] = change.value
			_, err := replayOf(writeTrace(t, syntheticTrace(fields)))
			if err == nil || !strings.Contains(err.Error(), change.word) {
				t.Errorf("got %v, want %q", err, change.word)
			}
		})
	}
}

func TestWrongArguments(t *testing.T) {
	path := writeTrace(t, syntheticTrace(headerFields()))
	for _, arguments := range [][]string{{}, {path, path}, {"--slots", "0", path},
		{"--slots", "4097", path}, {path, "--arena-mib", "1"}, {path, "--threads"},
		{"--threads", "-1", path}, {"--threads", "257", path}, {"--unknown", path}} {
		if _, err := replayOf(arguments...); err != errWrongArguments {
			t.Errorf("%v: got %v", arguments, err)
		}
	}
	if _, err := replayOf(path + ".absent"); !os.IsNotExist(err) {
		t.Errorf("no file: got %v", err)
	}
	if _, err := replayOf(t.TempDir()); err == nil {
		t.Error("a folder is taken for a trace")
	}
}
