// Sequences: one request's cache each.

package kvrt

// #include "shims.h"
import "C"

import "math"

// Sequence is one request's cache in a pool: a value that the library checks at every use. One that
// was released gives ErrStale; 0 is never valid.
type Sequence uint64

// SequenceFlags are the KV_SEQ_* of kvrt.h.
type SequenceFlags uint32

// SequenceGatherStatistics gathers query statistics also without a policy that needs them.
const SequenceGatherStatistics SequenceFlags = C.KV_SEQ_GATHER_STATISTICS

// SequenceConfig is what a sequence begins with.
type SequenceConfig struct {
	Flags    SequenceFlags
	Policy   *Policy // copied; nil: keep everything
	UserData uint64  // returned by SequenceInfo
}

// SequenceInfo is the state of a sequence. The four lengths are in tokens seen.
type SequenceInfo struct {
	Capacity    uint64 // positions for which slots are reserved
	Written     uint64 // positions that the open step has been asked to write, or accepted
	Accepted    uint64 // the next position after the last step end
	Published   uint64 // visible to prefix match
	Blocks      uint64 // in this sequence's tables, shared ones included
	Bytes       uint64 // of those blocks
	UserData    uint64
	InStep      bool
	Compactions uint32 // rounds that have removed something

	RoundsSkipped uint64          // rounds of its policy that were due and removed nothing
	LastOutcome   CompressOutcome // of its last round, 0: there was none
	LastFailure   Status          // of its last round: Again when blocks were missing
}

// LayerInfo is what a sequence holds in one layer.
type LayerInfo struct {
	Retained     uint64 // tokens stored now (accepted ones)
	Blocks       uint64 // in this layer's table
	SharedBlocks uint64 // of those, read by others too
}

// sequencePointer is nil for an empty slice.
func sequencePointer(sequences []Sequence) *C.kv_seq {
	if len(sequences) == 0 {
		return nil
	}
	return (*C.kv_seq)(&sequences[0])
}

func uint32Pointer(values []uint32) *C.uint32_t {
	if len(values) == 0 {
		return nil
	}
	return (*C.uint32_t)(&values[0])
}

// count32 is a slice's length where the library takes 32 bits.
func count32(name string, length int) (C.uint32_t, error) {
	if uint64(length) > math.MaxUint32 {
		return 0, invalid("%s has %d elements", name, length)
	}
	return C.uint32_t(length), nil
}

// CreateSequence begins a sequence. The zero SequenceConfig keeps everything.
func (p *Pool) CreateSequence(config SequenceConfig) (Sequence, error) {
	if err := p.enter(); err != nil {
		return 0, err
	}
	defer p.leave()
	created := C.kvgo_seq_create(p.handle, C.uint32_t(config.Flags), C.uint64_t(config.UserData),
		config.Policy.native())
	return Sequence(created.seq), p.failure(created.result)
}

// ReleaseSequence ends a sequence, in any state; one that is gone already is no error. Inside an
// open step it takes effect at once, and the step still runs to its end.
func (p *Pool) ReleaseSequence(sequence Sequence) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return p.failure(C.kvgo_seq_release(p.handle, C.kv_seq(sequence)))
}

// Fork fills `children` with sequences that have the parent's accepted tokens, policy and
// statistics. All are made, or none. Nothing is copied until one writes what others read.
func (p *Pool) Fork(parent Sequence, children []Sequence) error {
	count, err := count32("children", len(children))
	if err != nil {
		return err
	}
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return p.failure(C.kvgo_seq_fork(p.handle, C.kv_seq(parent), count, sequencePointer(children)))
}

// Truncate forgets all tokens at positions >= tokensSeen, which becomes the next position.
// ErrNoSnapshot: what queries from there would see is no longer stored.
func (p *Pool) Truncate(sequence Sequence, tokensSeen uint64) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return p.failure(C.kvgo_seq_truncate(p.handle, C.kv_seq(sequence), C.uint64_t(tokensSeen)))
}

// SetPolicy replaces a sequence's policy; nil means none.
func (p *Pool) SetPolicy(sequence Sequence, policy *Policy) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return p.failure(C.kvgo_seq_set_policy(p.handle, C.kv_seq(sequence), policy.native()))
}

// Pin protects positions [first, first + count) from every policy; at most 16 ranges a sequence.
func (p *Pool) Pin(sequence Sequence, first, count uint64) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return p.failure(C.kvgo_seq_pin(p.handle, C.kv_seq(sequence), C.uint64_t(first),
		C.uint64_t(count)))
}

// Unpin removes all pinned ranges.
func (p *Pool) Unpin(sequence Sequence) error {
	if err := p.enter(); err != nil {
		return err
	}
	defer p.leave()
	return p.failure(C.kvgo_seq_unpin(p.handle, C.kv_seq(sequence)))
}

// SequenceInfo reads the state of a sequence.
func (p *Pool) SequenceInfo(sequence Sequence) (SequenceInfo, error) {
	if err := p.enter(); err != nil {
		return SequenceInfo{}, err
	}
	defer p.leave()
	read := C.kvgo_seq_get_info(p.handle, C.kv_seq(sequence))
	if err := p.failure(read.result); err != nil {
		return SequenceInfo{}, err
	}
	return sequenceInfoOf(&read.info), nil
}

func sequenceInfoOf(from *C.kv_seq_info) SequenceInfo {
	return SequenceInfo{
		Capacity:    uint64(from.capacity),
		Written:     uint64(from.written),
		Accepted:    uint64(from.accepted),
		Published:   uint64(from.published),
		Blocks:      uint64(from.blocks),
		Bytes:       uint64(from.bytes),
		UserData:    uint64(from.user_data),
		InStep:      from.in_step != 0,
		Compactions: uint32(from.compactions),

		RoundsSkipped: uint64(from.rounds_skipped),
		LastOutcome:   CompressOutcome(from.last_outcome),
		LastFailure:   Status(from.last_failure),
	}
}

// LayerInfo reads what a sequence holds in a layer.
func (p *Pool) LayerInfo(sequence Sequence, layer uint32) (LayerInfo, error) {
	if err := p.enter(); err != nil {
		return LayerInfo{}, err
	}
	defer p.leave()
	read := C.kvgo_seq_get_layer_info(p.handle, C.kv_seq(sequence), C.uint32_t(layer))
	if err := p.failure(read.result); err != nil {
		return LayerInfo{}, err
	}
	return layerInfoOf(&read.info), nil
}

func layerInfoOf(from *C.kv_seq_layer_info) LayerInfo {
	return LayerInfo{
		Retained:     uint64(from.retained),
		Blocks:       uint64(from.blocks),
		SharedBlocks: uint64(from.shared_blocks),
	}
}

// Positions writes the positions of the retained tokens of one KV head, ascending, as far as
// `positions` reaches, and returns how many there are.
func (p *Pool) Positions(sequence Sequence, layer, kvHead uint32, positions []uint32) (uint64,
	error) {
	if err := p.enter(); err != nil {
		return 0, err
	}
	defer p.leave()
	read := C.kvgo_seq_get_positions(p.handle, C.kv_seq(sequence), C.uint32_t(layer),
		C.uint32_t(kvHead), C.uint64_t(len(positions)), uint32Pointer(positions))
	return uint64(read.count), p.failure(read.result)
}
