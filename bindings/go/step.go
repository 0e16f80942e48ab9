// Steps: one forward pass over a batch each, a transaction.

package kvrt

// #include "shims.h"
import "C"

import "unsafe"

// Step is an open step of a pool: a value, like Sequence. It ends with End, Cancel or Close, or
// with its pool; its use after that is an error. The zero Step is closed.
type Step struct {
	pool   *Pool
	number uint64
}

// openStep is a step that the pool knows; number 0 is a free place.
type openStep struct {
	handle C.uintptr_t
	number uint64
}

// AppendInfo is where appended tokens went.
type AppendInfo struct {
	FirstPosition uint64
	Item          uint32 // the sequence's row in the exported tables
	FirstRow      uint32 // of its tokens in queries, keys, values and out
}

// ReserveReport is what Reserve found, over all block classes.
type ReserveReport struct {
	NeedBlocks          uint64
	NeedBytes           uint64
	FreeBytesNow        uint64
	FreeBytesAfterFence uint64 // with what is parked behind open steps and fences
	ItemsThatFit        uint32 // the first so many would have fitted
}

// StepReport is what the end of a step did.
type StepReport struct {
	Fence                uint64 // the step's number, for Pool.PassFence
	AcceptedTokens       uint64
	WindowBlocksReturned uint64
	Compactions          uint64
	CompactionsSkipped   uint64
	BlocksReturned       uint64
	BytesReturned        uint64
	PressureRounds       uint64          // rounds run because of Config.PressurePercent
	LastSkipOutcome      CompressOutcome // of the last round that was skipped; 0: none was
	LastSkipStatus       Status          // its status: Again when blocks were missing
	DemotedBlocks        uint64          // coded into their layers' smaller formats
	DemotedBytes         uint64          // how many fewer these take now
}

// BeginStep opens a step. Two may be open at once, over different sequences.
func (p *Pool) BeginStep() (Step, error) {
	if err := p.enter(); err != nil {
		return Step{}, err
	}
	defer p.leave()
	begun := C.kvgo_step_begin(p.handle)
	if begun.step == 0 {
		return Step{}, p.failure(begun.result)
	}
	p.begun++
	step := Step{p, p.begun}
	place := p.place(0)
	if place == nil {
		p.open = append(p.open, openStep{})
		place = &p.open[len(p.open)-1]
	}
	*place = openStep{begun.step, step.number}
	return step, p.failure(begun.result)
}

// place finds a step by its number, nil if it is not open.
func (p *Pool) place(number uint64) *openStep {
	for i := range p.open {
		if p.open[i].number == number {
			return &p.open[i]
		}
	}
	return nil
}

// enter begins a call on the step's pool; its leave must follow if the error is nil.
func (s Step) enter() (*openStep, error) {
	if s.pool == nil {
		return nil, errStepClosed
	}
	if err := s.pool.enter(); err != nil {
		return nil, err
	}
	if place := s.pool.place(s.number); place != nil {
		return place, nil
	}
	s.pool.leave()
	return nil, errStepClosed
}

// Append adds `count` tokens of a sequence: a prefill chunk, a decode token, or a token with drafts
// behind it. tokens are their [count] ids, or nil.
func (s Step) Append(sequence Sequence, count uint32, tokens []uint32) (AppendInfo, error) {
	if len(tokens) != 0 && uint64(len(tokens)) != uint64(count) {
		return AppendInfo{}, invalid("tokens has %d elements, count is %d", len(tokens), count)
	}
	step, err := s.enter()
	if err != nil {
		return AppendInfo{}, err
	}
	defer s.pool.leave()
	appended := C.kvgo_seq_append(step.handle, C.kv_seq(sequence), uint32Pointer(tokens),
		C.uint32_t(count))
	if err := s.pool.failure(appended.result); err != nil {
		return AppendInfo{}, err
	}
	return appendInfoOf(&appended.info), nil
}

func appendInfoOf(from *C.kv_append_info) AppendInfo {
	return AppendInfo{
		FirstPosition: uint64(from.first_position),
		Item:          uint32(from.item),
		FirstRow:      uint32(from.first_row),
	}
}

// AppendBatch is Append for a whole batch in one call: counts[i] tokens of sequences[i]. tokens are
// those of all sequences, one behind the other, or nil; infos is [len(sequences)] to be filled, or
// nil. All are appended, or none.
func (s Step) AppendBatch(sequences []Sequence, counts, tokens []uint32, infos []AppendInfo) error {
	items, err := checkBatch(sequences, counts)
	if err != nil {
		return err
	}
	if len(infos) != 0 && len(infos) != len(sequences) {
		return invalid("infos has %d elements, sequences has %d", len(infos), len(sequences))
	}
	if len(tokens) != 0 {
		var sum uint64 // of at most 2^32 numbers below 2^32
		for _, count := range counts {
			sum += uint64(count)
		}
		if sum != uint64(len(tokens)) {
			return invalid("tokens has %d elements, counts add up to %d", len(tokens), sum)
		}
	}
	step, err := s.enter()
	if err != nil {
		return err
	}
	defer s.pool.leave()
	results := s.pool.batchInfos(len(infos))
	err = s.pool.failure(C.kvgo_step_append_batch(step.handle, items, sequencePointer(sequences),
		uint32Pointer(counts), uint32Pointer(tokens),
		C.uintptr_t(uintptr(unsafe.Pointer(results)))))
	if err != nil || len(infos) == 0 {
		return err
	}
	for i := range infos {
		infos[i] = appendInfoOf(&unsafe.Slice(results, len(infos))[i])
	}
	return nil
}

// batchInfos is C memory for so many results, nil for none; it grows with the largest batch.
func (p *Pool) batchInfos(count int) *C.kv_append_info {
	if count == 0 {
		return nil
	}
	if count > p.infoCap {
		C.free(unsafe.Pointer(p.infos))
		p.infos = (*C.kv_append_info)(C.malloc(C.size_t(count) * C.sizeof_kv_append_info))
		p.infoCap = count
	}
	return p.infos
}

func checkBatch(sequences []Sequence, counts []uint32) (C.uint32_t, error) {
	if len(counts) != len(sequences) {
		return 0, invalid("counts has %d elements, sequences has %d", len(counts), len(sequences))
	}
	return count32("sequences", len(sequences))
}

// Reserve takes slots for everything appended: all blocks, or none and an error. On ErrAgain the
// step stays open: release or compress others, or Remove items, and call it again; the report says
// how much is missing. statuses is filled with a Status per item, as far as it reaches; it may be
// nil.
func (s Step) Reserve(statuses []Status) (ReserveReport, error) {
	capacity, err := count32("statuses", len(statuses))
	if err != nil {
		return ReserveReport{}, err
	}
	step, err := s.enter()
	if err != nil {
		return ReserveReport{}, err
	}
	defer s.pool.leave()
	var list *C.kv_status
	if len(statuses) != 0 {
		list = (*C.kv_status)(&statuses[0])
	}
	reserved := C.kvgo_step_reserve(step.handle, list, capacity)
	return reserveReportOf(&reserved.report), s.pool.failure(reserved.result)
}

func reserveReportOf(from *C.kv_reserve_report) ReserveReport {
	return ReserveReport{
		NeedBlocks:          uint64(from.need_blocks),
		NeedBytes:           uint64(from.need_bytes),
		FreeBytesNow:        uint64(from.free_bytes_now),
		FreeBytesAfterFence: uint64(from.free_bytes_after_fence),
		ItemsThatFit:        uint32(from.items_that_fit),
	}
}

// Remove takes a sequence out of a step that has not been reserved. Items and rows behind it move
// up.
func (s Step) Remove(sequence Sequence) error {
	step, err := s.enter()
	if err != nil {
		return err
	}
	defer s.pool.leave()
	return s.pool.failure(C.kvgo_step_remove(step.handle, C.kv_seq(sequence)))
}

// Accept keeps the first `count` of the tokens that a sequence appended; the others are rolled back
// at the end of the step. Without it all are kept.
func (s Step) Accept(sequence Sequence, count uint32) error {
	step, err := s.enter()
	if err != nil {
		return err
	}
	defer s.pool.leave()
	return s.pool.failure(C.kvgo_step_accept(step.handle, C.kv_seq(sequence), C.uint32_t(count)))
}

// AcceptBatch is Accept for several sequences in one call. All are noted, or none.
func (s Step) AcceptBatch(sequences []Sequence, counts []uint32) error {
	items, err := checkBatch(sequences, counts)
	if err != nil {
		return err
	}
	step, err := s.enter()
	if err != nil {
		return err
	}
	defer s.pool.leave()
	return s.pool.failure(C.kvgo_step_accept_batch(step.handle, items, sequencePointer(sequences),
		uint32Pointer(counts)))
}

// End makes accepted tokens part of their sequences, rolls the rest back, returns blocks behind
// windows and runs the policies that are due. The step is closed afterwards, whatever is returned;
// if it was not reserved, or a layer that stores was not written, it is cancelled.
func (s Step) End() (StepReport, error) {
	step, err := s.enter()
	if err != nil {
		return StepReport{}, err
	}
	defer s.pool.leave()
	ended := C.kvgo_step_end(step.handle)
	*step = openStep{}
	return stepReportOf(&ended.report), s.pool.failure(ended.result)
}

func stepReportOf(from *C.kv_step_report) StepReport {
	return StepReport{
		Fence:                uint64(from.fence),
		AcceptedTokens:       uint64(from.accepted_tokens),
		WindowBlocksReturned: uint64(from.window_blocks_returned),
		Compactions:          uint64(from.compactions),
		CompactionsSkipped:   uint64(from.compactions_skipped),
		BlocksReturned:       uint64(from.blocks_returned),
		BytesReturned:        uint64(from.bytes_returned),
		PressureRounds:       uint64(from.pressure_rounds),
		LastSkipOutcome:      CompressOutcome(from.last_skip_outcome),
		LastSkipStatus:       Status(from.last_skip_status),
		DemotedBlocks:        uint64(from.demoted_blocks),
		DemotedBytes:         uint64(from.demoted_bytes),
	}
}

// Cancel undoes the step: every sequence is as before BeginStep.
func (s Step) Cancel() error {
	step, err := s.enter()
	if err != nil {
		return err
	}
	defer s.pool.leave()
	cancelled := C.kvgo_step_cancel(step.handle)
	*step = openStep{}
	return s.pool.failure(cancelled)
}

// Close cancels the step if it is still open; it is meant for a defer behind BeginStep.
func (s Step) Close() error {
	if err := s.Cancel(); err != errStepClosed && err != errPoolClosed {
		return err
	}
	return nil
}
