// The oracle: what a pool must hold, as plain vectors of tokens per sequence, lane and head, with
// every key and value as the rounded number that storage keeps, and block tables of counted
// references without memory behind them. It shares no code with the library.
//
// world (world.hpp) drives the library and the oracle together.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "geometry.hpp"

namespace property {

/// Deliberate defects of the oracle: each must make a stream fail, which proves that it can.
enum class mutation {
    none,
    wide_window,       // a query sees one position too many behind its window
    overwritten_tail,  // a write into a shared tail block reaches its other readers
    forgotten_block,   // a fork does not count the references of its last block
    late_protection,   // the first protected position may be evicted
    accepted_draft,    // one draft more than was accepted becomes part of the sequence
    unmoved_scores,    // a compaction leaves scores where they were
    kept_scores        // a policy of other rules goes on with what was observed by the old ones
};

/// Stored numbers of one token: per lane, per KV head, its key then its value.
using token_values = std::vector<float>;

struct token {
    uint32_t position = 0;
    std::shared_ptr<const token_values> values;
};

/// Fences as the header describes them: a step's readers are done when it has ended and, with host
/// fences, when the host has said so.
struct oracle_fences {
    std::array<uint64_t, 2> open = {0, 0};
    uint64_t last_begun = 0;
    uint64_t host_passed = 0;
    bool by_host = false;

    bool passed(uint64_t fence) const {
        if (fence == 0) return true;
        if (fence == open[0] || fence == open[1]) return false;
        return !by_host || fence <= host_passed;
    }
};

/// A block: alive while somebody refers to it. `live` counts those of its class.
struct oracle_block {
    oracle_block(int64_t& live_blocks) : live(live_blocks) { ++live; }
    oracle_block(const oracle_block&) = delete;
    oracle_block& operator=(const oracle_block&) = delete;
    ~oracle_block() { --live; }

    int64_t& live;
    uint64_t last_reader = 0;  // of those that have let go
};
using block_reference = std::shared_ptr<oracle_block>;

struct oracle_lane {
    std::vector<std::vector<token>> heads;  // ascending positions; all of one length
    std::vector<block_reference> table;
    std::size_t survivors = 0;  // of the last compaction, at the front of every head
    // What a policy has observed, or was given (oracle_observed.hpp), by head and slot. Slots
    // behind the end have 0, or no score.
    std::vector<std::vector<double>> sums, pending_sums;
    bool observed_any = false;
    bool pending = false;    // the open step leaves pending_sums
    uint64_t given_end = 0;  // the next position when the host last gave scores

    uint32_t slots() const { return static_cast<uint32_t>(heads[0].size()); }
};

struct position_span {
    uint64_t first = 0, count = 0;
};

struct oracle_sequence {
    kv_seq handle = 0;
    uint32_t serial = 0;
    bool released = false;  // while its step was open
    bool gathers = false;
    uint64_t user_data = 0;
    uint64_t next_position = 0;
    uint64_t last_fence = 0;
    uint64_t tokens_since_round = 0;
    uint32_t compactions = 0;
    uint32_t reserved_rows = 0;
    uint32_t written_rows = 0;
    bool has_policy = false;
    kv_policy policy = {};
    bool prompt_was_in = false;  // with the policy, which wants a round at its end
    bool round_deferred = false;
    bool has_deferred_policy = false;
    kv_policy deferred_policy = {};
    std::vector<position_span> pins;
    std::vector<oracle_lane> lanes;
    int step = -1;                  // which open step holds it
    uint32_t unobserved_steps = 0;  // since the last whose attention was observed
    bool gap = false;               // some of these were left out
    bool pending_gap = false;       // and the open one is
    uint64_t seen_end = 0;          // the next position after the last observed step
};

struct drop_count {
    uint64_t blocks = 0, bytes = 0;
};

/// Geometry of a lane, resolved once.
struct oracle_lane_shape {
    uint32_t layer = 0;
    uint32_t block_class = 0;
    uint64_t block_bytes = 0;
    uint32_t first_head = 0;  // of the layer
    uint32_t kv_heads = 0, key_dim = 0, value_dim = 0;
    uint32_t window = 0, window_sinks = 0;
    uint32_t values_offset = 0;  // of its first head in token_values
    bool evictable = true;

    const float* key(const token& source, uint32_t head) const {
        return source.values->data() + values_offset + head * (key_dim + value_dim);
    }
    const float* value(const token& source, uint32_t head) const {
        return key(source, head) + key_dim;
    }
};

struct oracle {
    explicit oracle(const pool_spec& pool, mutation deliberate = mutation::none);

    pool_spec spec;
    mutation defect = mutation::none;
    std::vector<oracle_lane_shape> lanes;
    std::vector<uint64_t> class_bytes;              // bytes of each block class
    std::unique_ptr<std::array<int64_t, 16>> live;  // blocks alive, by class
    uint32_t values_per_token = 0;
    oracle_fences fences;

    uint32_t blocks_for(uint64_t slots) const {
        return static_cast<uint32_t>((slots + spec.block_tokens - 1) / spec.block_tokens);
    }
    block_reference new_block(uint32_t lane);

    oracle_sequence empty_sequence() const;

    /// Lets go of a table's blocks from `keep` on.
    void shrink(oracle_sequence& owner, uint32_t lane, uint32_t keep, drop_count& returned);
    void drop(block_reference& block, uint32_t lane, uint64_t fence, drop_count& returned);

    void release(oracle_sequence& target);
    oracle_sequence fork(const oracle_sequence& parent) const;

    /// KV_OK, KV_INVALID or KV_NO_SNAPSHOT.
    kv_status truncate(oracle_sequence& target, uint64_t tokens_seen);

    /// Whole blocks that no later query can see leave the window lanes.
    void slide(oracle_sequence& target, drop_count& returned);

    /// Fresh blocks that `rows` more tokens need, by class; a shared tail counts as one.
    std::array<uint64_t, 16> need(const oracle_sequence& owner, uint32_t rows) const;
    bool tail_is_shared(const oracle_sequence& owner, uint32_t lane) const;
};

/// One query row of one layer: dense attention in double over `tokens`, by position.
struct attention_query {
    const oracle_lane_shape* lane = nullptr;
    const layer_spec* layer = nullptr;
    uint32_t query_head = 0;
    uint64_t position = 0;
    const float* query = nullptr;  // [key_dim]
};

/// out[value_dim], and where wanted each token's weight; returns the natural logarithm of the
/// denominator.
double attend(const oracle& model, const attention_query& query,
              const std::vector<const token*>& tokens, double* out,
              std::vector<double>* weights = nullptr);

}  // namespace property
