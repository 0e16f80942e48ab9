// Traces: what a model handed to its cache for some requests and what it got back, in the file
// format of docs/trace.md. A file is not trusted: every count is checked against its bounds and
// against the bytes that are left before anything is allocated by it.

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"os"
)

const (
	traceMagic   = "KVTRACE1"
	mostLayers   = 64
	mostHeads    = 1024
	leastHeadDim = 32
	mostHeadDim  = 256
	mostRequests = 4096
	mostTurns    = 65536
	mostRows     = 8192
)

// layerRows is what one layer was handed in a turn, and gave back; f16 are bits.
type layerRows struct {
	queries []uint16  // [rows, query heads, head dim]
	keys    []uint16  // [rows, KV heads, head dim]
	values  []uint16  // [rows, KV heads, head dim]
	outputs []float32 // [output rows, query heads, head dim], the last rows'
}

// turn is what a request brought to one step.
type turn struct {
	accepted   uint32 // the first so many rows stayed
	outputRows uint32
	tokens     []uint32 // one a row
	layers     []layerRows
}

func (t *turn) rows() int { return len(t.tokens) }

// request is one sequence, from its creation to its release.
type request struct {
	promptTokens uint32
	rounds       uint32   // of compaction that removed something
	seen         uint32   // tokens accepted in all
	retained     []uint32 // by each layer, at the end
	turns        []turn
}

// traceHeader is the fixed part of a file behind the magic and the number of layers, in its order.
type traceHeader struct {
	QueryHeads, KVHeads, HeadDim   uint32
	Format                         uint32
	RopeStyle, RopeDimensions      uint32
	Scorer, Selection, PolicyFlags uint32
	Budget, Every, Sinks, Recent   uint32
	OffsetMax                      uint32
}

// recording is a whole trace.
type recording struct {
	traceHeader
	seed               uint64
	inverseFrequencies []float64
	layerNumbers       []uint32 // in the model
	requests           []request
}

func (r *recording) querySize() int { return int(r.QueryHeads) * int(r.HeadDim) }
func (r *recording) kvSize() int    { return int(r.KVHeads) * int(r.HeadDim) }

func readTrace(path string) (*recording, error) {
	file, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	read, err := decodeTrace(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return read, nil
}

func decodeTrace(file []byte) (*recording, error) {
	const checksumBytes = 8
	if len(file) < len(traceMagic)+checksumBytes || string(file[:len(traceMagic)]) != traceMagic {
		return nil, errors.New("this is not a trace: it does not begin with " + traceMagic)
	}
	content := file[:len(file)-checksumBytes]
	sum := fnv.New64a()
	sum.Write(content)
	if binary.LittleEndian.Uint64(file[len(content):]) != sum.Sum64() {
		return nil, errors.New("the checksum does not match: the file is damaged or cut short")
	}
	from := &traceReader{left: content[len(traceMagic):]}
	read := from.recording()
	if from.err == nil && len(from.left) != 0 {
		from.fail("%d bytes lie behind the last request", len(from.left))
	}
	return read, from.err
}

// traceReader takes a file apart. After the first error everything is zero and empty.
type traceReader struct {
	left []byte
	err  error
}

func (r *traceReader) fail(format string, arguments ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, arguments...)
	}
}

// bytes is the next `count` elements of `size` bytes, nil if the file has no such many.
func (r *traceReader) bytes(what string, count, size int) []byte {
	if r.err != nil {
		return nil
	}
	if count > len(r.left)/size {
		r.fail("the file ends within %s: %d elements of %d bytes are needed, %d bytes are left",
			what, count, size, len(r.left))
		return nil
	}
	taken := r.left[:count*size]
	r.left = r.left[count*size:]
	return taken
}

func (r *traceReader) uint32(what string) uint32 {
	if taken := r.bytes(what, 1, 4); taken != nil {
		return binary.LittleEndian.Uint32(taken)
	}
	return 0
}

func (r *traceReader) uint64(what string) uint64 {
	if taken := r.bytes(what, 1, 8); taken != nil {
		return binary.LittleEndian.Uint64(taken)
	}
	return 0
}

func (r *traceReader) uint32s(what string, count int) []uint32 {
	taken := r.bytes(what, count, 4)
	values := make([]uint32, len(taken)/4)
	for i := range values {
		values[i] = binary.LittleEndian.Uint32(taken[4*i:])
	}
	return values
}

func (r *traceReader) halves(what string, count int) []uint16 {
	taken := r.bytes(what, count, 2)
	values := make([]uint16, len(taken)/2)
	for i := range values {
		values[i] = binary.LittleEndian.Uint16(taken[2*i:])
	}
	return values
}

func (r *traceReader) floats(what string, count int) []float32 {
	taken := r.bytes(what, count, 4)
	values := make([]float32, len(taken)/4)
	for i := range values {
		values[i] = math.Float32frombits(binary.LittleEndian.Uint32(taken[4*i:]))
	}
	return values
}

func (r *traceReader) doubles(what string, count int) []float64 {
	taken := r.bytes(what, count, 8)
	values := make([]float64, len(taken)/8)
	for i := range values {
		values[i] = math.Float64frombits(binary.LittleEndian.Uint64(taken[8*i:]))
	}
	return values
}

func (r *traceReader) inRange(what string, value, least, most uint32) {
	if value < least || value > most {
		r.fail("%s is %d, it must be %d to %d", what, value, least, most)
	}
}

// count is a number of things that follow.
func (r *traceReader) count(what string, least, most uint32) int {
	value := r.uint32(what)
	r.inRange(what, value, least, most)
	return int(value)
}

func (r *traceReader) recording() *recording {
	read := &recording{}
	layers := r.count("layers", 1, mostLayers)
	header := &read.traceHeader
	for _, field := range []*uint32{&header.QueryHeads, &header.KVHeads, &header.HeadDim,
		&header.Format, &header.RopeStyle, &header.RopeDimensions, &header.Scorer,
		&header.Selection, &header.PolicyFlags, &header.Budget, &header.Every, &header.Sinks,
		&header.Recent, &header.OffsetMax} {
		*field = r.uint32("the header")
	}
	r.checkGeometry(header)
	requests := r.count("requests", 1, mostRequests)
	read.seed = r.uint64("seed")
	if r.err != nil {
		return nil
	}
	read.inverseFrequencies = r.doubles("inverse_frequencies", int(header.RopeDimensions/2))
	read.layerNumbers = r.uint32s("layer_numbers", layers)
	for i := 0; i < requests && r.err == nil; i++ {
		read.requests = append(read.requests, r.request(read))
	}
	return read
}

func (r *traceReader) checkGeometry(header *traceHeader) {
	r.inRange("query_heads", header.QueryHeads, 1, mostHeads)
	r.inRange("kv_heads", header.KVHeads, 1, header.QueryHeads)
	r.inRange("head_dim", header.HeadDim, leastHeadDim, mostHeadDim)
	r.inRange("rope_dimensions", header.RopeDimensions, 0, header.HeadDim)
	if r.err == nil && header.QueryHeads%header.KVHeads != 0 {
		r.fail("query_heads is %d, it must be a multiple of kv_heads, %d", header.QueryHeads,
			header.KVHeads)
	}
	if header.HeadDim%8 != 0 {
		r.fail("head_dim is %d, it must be a multiple of 8", header.HeadDim)
	}
	if header.RopeDimensions%2 != 0 || (header.RopeDimensions == 0) != (header.RopeStyle == 0) {
		r.fail("rope_dimensions is %d, it must be even, and 0 exactly when nothing is rotated",
			header.RopeDimensions)
	}
}

func (r *traceReader) request(shape *recording) request {
	read := request{promptTokens: r.uint32("prompt_tokens")}
	turns := r.count("turns", 1, mostTurns)
	read.rounds = r.uint32("rounds")
	read.seen = r.uint32("seen")
	read.retained = r.uint32s("retained", len(shape.layerNumbers))
	for i := 0; i < turns && r.err == nil; i++ {
		read.turns = append(read.turns, r.turn(shape))
	}
	return read
}

func (r *traceReader) turn(shape *recording) turn {
	rows := r.count("rows", 1, mostRows)
	read := turn{
		accepted:   uint32(r.count("accepted", 0, uint32(rows))),
		outputRows: uint32(r.count("output_rows", 0, uint32(rows))),
	}
	if r.err != nil {
		return read
	}
	read.tokens = r.uint32s("token_ids", rows)
	for i := 0; i < len(shape.layerNumbers) && r.err == nil; i++ {
		read.layers = append(read.layers, layerRows{
			queries: r.halves("queries", rows*shape.querySize()),
			keys:    r.halves("keys", rows*shape.kvSize()),
			values:  r.halves("values", rows*shape.kvSize()),
			outputs: r.floats("outputs", int(read.outputRows)*shape.querySize()),
		})
	}
	return read
}
