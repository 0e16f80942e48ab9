// Sequences: handles, block tables, positions.
//
//   sequence_table   all sequences of a pool; a handle is (generation << 32 | index + 1)
//     sequence       one request: next position, policy, pinned ranges, a lane_state per lane
//       lane_state   block table, how much of it is sealed, and how many slots are retained
//
// Position of slot s of a lane, for a KV head:
//   s <  explicit_slots: stored beside the block (a compaction or a window put it there)
//   s >= explicit_slots: consecutive, ending at next_position - 1
// Invariants: slots <= blocks * block_tokens, positions ascend with slots in every head; sealed
// blocks come before all others. The last of them may be partly filled after going back: whoever
// appends behind it opens it first.
#pragma once

#include "base/host_memory.hpp"
#include "memory/blocks.hpp"
#include "sequence/slots.hpp"

namespace kvrt {

inline constexpr uint64_t max_position = (uint64_t{1} << 31) - 1;  ///< exported as int32

struct lane_state {
    block_id* table = nullptr;  ///< [max_blocks]
    uint32_t blocks = 0;
    uint32_t slots = 0;  ///< accepted and retained
    uint32_t explicit_slots = 0;
    uint32_t sealed_blocks = 0;  ///< in lanes that seal
    /// Leading slots of the first block that is not sealed which were in a tile before: coding them
    /// again adds to their error.
    uint32_t opened_slots = 0;
};

struct sequence {
    uint32_t generation = 0;
    bool alive = false;
    bool in_step = false;
    bool release_at_step_end = false;
    bool compress_at_step_end = false;
    bool has_policy = false;
    bool asked_under_pressure = false;  ///< by the present search for memory
    bool gathers_statistics = false;    ///< asked for by the host, whatever the policy
    bool has_deferred_policy = false;
    bool prompt_was_in = false;       ///< when its policy came, which wants a round at its end
    bool statistics_pending = false;  ///< the open step has gathered queries
    uint64_t next_position = 0;
    uint64_t last_fence = 0;          ///< number of the last step that read it
    uint64_t tokens_since_round = 0;  ///< accepted since the last round of its policy
    uint64_t rounds_run = 0;          ///< numbers the draws of random scorers
    uint64_t user_data = 0;
    /// Steps that put blocks behind those of its tables, and all else that changed them: whoever
    /// has a copy of the tables knows by these what to do about it.
    uint64_t table_growths = 0;
    uint64_t table_changes = 0;
    uint32_t item = 0;           ///< its place in the open step
    uint32_t room = 0;           ///< tokens that every lane surely takes without a block or a copy
    uint32_t reserved_rows = 0;  ///< by the open step
    uint32_t written_rows = 0;   ///< the open step has been asked to write, or exported slots for
    uint32_t compactions = 0;
    uint64_t rounds_skipped = 0;
    uint32_t last_outcome = 0;       ///< KV_COMPRESS_* of its last round
    status last_round = KV_OK;       ///< what that returned
    uint32_t observation_place = 0;  ///< index + 1 of what is kept for its policy; 0: nothing is
    uint32_t pinned_count = 0;
    position_range pinned[max_pinned_ranges];
    kv_policy policy;
    kv_policy deferred_policy;  ///< of a kv_compress inside an open step
    lane_state* lanes = nullptr;
    uint32_t next_free = 0;
};

/// The one that kv_compress left to the end of a step that the sequence is no longer in.
inline void forget_deferred_round(sequence& owner) {
    owner.compress_at_step_end = false;
    owner.has_deferred_policy = false;
}

class sequence_table {
  public:
    status create(host_allocator& allocator, uint32_t max_sequences, uint32_t lane_count,
                  uint32_t max_blocks);

    /// A sequence without tokens, or nullptr when max_sequences are alive.
    sequence* open();
    /// Its tables are empty already. The handle is stale from now on.
    void close(sequence& target);

    /// nullptr for a stale or invalid handle; `fail_stale` says which.
    sequence* find(kv_seq handle);
    /// Could this handle have come from here, now or earlier?
    bool is_handle(kv_seq handle) const;
    status fail_stale(kv_seq handle) const;

    kv_seq handle(const sequence& source) const;
    uint32_t index(const sequence& source) const {
        return static_cast<uint32_t>(&source - sequences_.data());
    }
    uint32_t alive() const { return alive_; }
    uint32_t free() const { return static_cast<uint32_t>(sequences_.size()) - alive_; }
    uint32_t max_blocks() const { return max_blocks_; }
    uint32_t lane_count() const { return lane_count_; }
    sequence* begin() { return sequences_.begin(); }
    sequence* end() { return sequences_.end(); }

  private:
    host_array<sequence> sequences_;
    host_array<lane_state> lanes_;
    host_array<block_id> tables_;
    uint32_t lane_count_ = 0;
    uint32_t max_blocks_ = 0;
    uint32_t first_free_ = 0;  ///< index + 1, 0: none
    uint32_t alive_ = 0;
};

}  // namespace kvrt
