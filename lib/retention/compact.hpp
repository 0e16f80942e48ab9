// One round of a policy over one sequence: guards, scores, selection, compaction.
//
// Survivors slide forward in order until whole blocks at the end are empty, and those return.
// Blocks that others read, or whose readers' fence has not passed, are not touched: survivors move
// to fresh blocks instead, and the references are dropped. Keys and values move bit by bit; those
// of tile-local formats are coded into new tiles.
#pragma once

#include "attention/attend.hpp"
#include "retention/allocate.hpp"
#include "retention/observations.hpp"
#include "retention/statistics.hpp"
#include "sequence/seal.hpp"

namespace kvrt {

/// How the survivors of one lane move.
struct lane_move {
    block_id* target = nullptr;  ///< [max blocks]: the table to be
    uint32_t kept_blocks = 0;
    // Lanes that seal:
    uint32_t first_rebuilt = 0;  ///< block
    uint32_t sealed_blocks = 0;  ///< of the table to be
    uint32_t opened_end = 0;     ///< slots below were in a tile before
};

/// What rounds did to one KV head of a sequence.
struct head_history {
    uint64_t rounds = 0;
    uint64_t tokens_removed = 0;
    double lost = 0.0;      ///< share of the observed attention that the last round's tokens had
    double lost_sum = 0.0;  ///< of all rounds
};

struct retention_history {
    host_array<head_history> heads;  ///< [sequences][KV heads of all lanes]
    host_array<uint64_t> blocks;     ///< [sequences][lanes]: returned
    uint32_t head_count = 0;
};

/// What some scorers work in.
struct scoring_scratch {
    host_array<float> measures;       ///< [kv_heads][slot_stride]
    host_array<float> ranges;         ///< [kv_heads][slot_stride]: of sets common to layers
    host_array<double> unit_sums;     ///< [kv_heads][unit_sums_stride]: parts of slots, by channel
    host_array<float> sketch;         ///< [channels][directions]
    host_array<std::byte> lag;        ///< [kv_heads][lag_stride]
    host_array<float> unlike;         ///< [kv_heads][slot_stride]: how far keys are from others
    host_array<float> units;          ///< directions of all keys of one head, in pools that observe
    host_array<uint32_t> latest;      ///< [slots], in pools that observe,
    host_array<float> latest_cosine;  ///< and this
    host_array<head_share> shares;    ///< [kv_heads]
    host_array<uint32_t> budgets;     ///< [layers]
    uint64_t unit_sums_stride = 0;
    uint64_t lag_stride = 0;
};

/// What rounds work with besides the cache. Scratch is sized for the longest sequence, and by KV
/// head for one layer at a time, whatever its lanes.
struct retention_context {
    statistics_store statistics;
    observation_store observations;
    host_array<uint8_t> chosen_lanes;    ///< [lanes]: the round compacts these
    host_array<uint32_t> keep;           ///< [lanes]: to so many slots, fewer than they have
    host_array<float> scores;            ///< [kv_heads * group][slot_stride]
    host_array<float> totals;            ///< [kv_heads][slot_stride]: sums over layers
    host_array<uint32_t> survivors;      ///< [kv_heads][slot_stride]
    host_array<lane_move> moves;         ///< [lanes of a layer]
    host_array<block_id> target_tables;  ///< [lanes of a layer][max blocks]
    host_array<recoding> recoded;        ///< [kv_heads]
    host_array<double> phases;           ///< [lanes that differ in rotation: one at a time]
    host_array<float> weights;           ///< [kv_heads][weight_stride]
    scoring_scratch scratch;
    retention_history history;
    uint64_t slot_stride = 0;
    uint64_t weight_stride = 0;
    uint64_t compactions = 0;
    uint64_t compactions_skipped = 0;
    returned_blocks returned;  ///< by compactions, since creation
};

struct compaction_report {
    uint32_t outcome = KV_COMPRESS_NOTHING;
    uint32_t layers = 0;
    uint64_t tokens_before = 0, tokens_after = 0;
    returned_blocks tables_before, tables_after;
    returned_blocks returned;
    uint64_t blocks_copied = 0;
    recoding recoded;         ///< of tile-local formats
    double lost = 0.0;        ///< sum over heads_lost heads of what they lost of their attention
    uint64_t heads_lost = 0;  ///< KV heads that lost tokens
    demotion demoted;         ///< of what is old now
};

status create_retention(cache& store, retention_context& context);

status create_history(cache& store, retention_history& history);

/// The history of a lane's KV head.
head_history& history_of(const cache& store, retention_context& context, const sequence& owner,
                         uint32_t lane, uint32_t kv_head);
uint64_t& blocks_returned_of(const cache& store, retention_context& context, const sequence& owner,
                             uint32_t lane);
/// A new sequence has none; a child has its parent's.
void reset_history(const cache& store, retention_context& context, const sequence& owner);
void copy_history(const cache& store, retention_context& context, const sequence& from,
                  const sequence& to);

/// What a sequence with a policy retains beyond its budget, in all lanes and heads that take part.
uint64_t tokens_above_budget(const cache& store, const sequence& owner);

/// While more than `watermark` bytes of the arena are pinned: sequences outside of open steps
/// demote what they can, the one that saves most first; then rounds of their policies run, that of
/// the one that retains most above its budget first. Adds to the report of a step's end.
struct pressure_report {
    uint64_t rounds = 0;
    returned_blocks returned;
    demotion demoted;
};
void relieve_pressure(cache& store, retention_context& context, uint64_t watermark,
                      pressure_report& report);

/// Checks a policy against the model: INVALID or UNSUPPORTED.
status check_policy(const cache& store, const kv_policy& policy);

/// KV_SELECT_*: what the policy says, or its scorer where it says nothing.
uint32_t resolved_selection(const kv_policy& policy);

/// Does the policy choose tokens of this layer?
bool takes_part(const cache& store, const kv_policy& policy, uint32_t layer);

/// What a round of the policy keeps of a long sequence per layer and head, in the mean where they
/// share, pinned ranges apart. (Guards of a pyramid's last layers may hold more than their share,
/// which is not counted here.)
uint64_t tokens_after_round(const kv_policy& policy);

/// Would the sequence's own policy run a round at this step end? `accepted`: tokens of the step.
bool round_is_due(cache& store, retention_context& context, sequence& owner, uint64_t accepted);

/// Errors: AGAIN (no blocks for copies), INVALID (layers or heads that this selection treats as one
/// retain different tokens); nothing has changed then. Outcomes other than DONE are no errors.
status compact_sequence(cache& store, retention_context& context, sequence& owner,
                        const kv_policy& policy, compaction_report& report);

}  // namespace kvrt
