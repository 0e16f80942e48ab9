// What sequences observe of their attention, per lane, KV head and slot.
//
// A place belongs to one sequence at a time, and holds three arrays of sums per lane. A step's
// attention writes a new array from the present one, and the step's end makes it the present one: a
// cancelled step leaves no trace. Kinds that count the last `window` queries have a second array,
// of the window before, so that at least `window` queries and fewer than twice as many are seen.
//
// Of these kinds, and of that which counts the last query alone, steps of one token are left out
// whose query the next round does not count: when that comes follows from the policy, where memory
// pressure brings none early. Behind a gap the window begins anew. A round that the host asks for
// within one works with what was seen before it, and keeps the tokens that came since.
//
//   slot   of the lane; sums move with their slots when a lane is compacted, and end with it when
//          it is truncated. Slots beyond what was summed have 0.
#pragma once

#include "attention/attend.hpp"
#include "device/plugin.h"
#include "retention/scorers.hpp"
#include "sequence/cache.hpp"

namespace kvrt {

inline constexpr uint32_t observation_arrays = 3;

/// Of one lane of a place: which arrays hold what, and how much.
struct observed_lane {
    uint8_t present = 0;   ///< array of the sums so far; of given scores
    uint8_t previous = 1;  ///< array of the window before
    bool pending = false;  ///< the open step has left new sums in the third array
    uint32_t slots = 0;    ///< that have sums in the present array,
    uint32_t queries = 0;  ///< of so many queries
    uint32_t previous_slots = 0, previous_queries = 0;
    uint32_t pending_slots = 0, pending_queries = 0;
    uint64_t given_end = 0;  ///< the next position when the host last gave scores

    uint8_t third() const { return static_cast<uint8_t>(3 - present - previous); }
    uint64_t seen() const { return uint64_t{queries} + previous_queries; }
};

struct observation_place {
    kv_seq owner = 0;  ///< 0: nobody ever
    observation_rules rules;
    uint32_t skipped = 0;      ///< one-token steps since the last observed one
    bool gap = false;          ///< some since then were left out
    bool pending_gap = false;  ///< the open step is left out
    uint64_t seen_end = 0;     ///< the next position after the last observed step
    uint64_t changes = 0;      ///< how often what was observed has been forgotten
    uint64_t listed_in = 0;    ///< on a device, the last step whose kernels may write there
};

struct observation_store {
    uint64_t slot_stride = 0;
    uint64_t length = 0;              ///< floats of all lanes of one array
    host_array<uint64_t> offset;      ///< [lanes]: where a lane's heads begin
    kvrt_sums_memory on_device = {};  ///< of a pool there
    host_array<float> sums;           ///< [places][arrays][length], of a pool on the CPU
    float* base = nullptr;            ///< the same wherever it is
    host_array<observed_lane> lanes;  ///< [places][lanes]
    host_array<observation_place> places;
};

/// Tokens behind the last step that was observed, where steps were left out since: rounds of this
/// policy, if it goes by what was observed, keep them.
uint64_t unseen_tokens(const observation_store& observations, const sequence& owner,
                       const kv_policy& policy);

status create_observations(cache& store, uint32_t places, observation_store& observations);

/// The sequence's place, or nullptr.
observation_place* place_of(observation_store& observations, const sequence& owner);
const observation_place* place_of(const observation_store& observations, const sequence& owner);

/// Before a sequence takes a policy: finds it a place, or lets go of the one it has, as the policy
/// wants. What was observed stays while the rules are the same. LIMIT when all places are taken;
/// nothing has changed then.
status prepare_observations(cache& store, observation_store& observations, sequence& owner,
                            const kv_policy* policy);

/// Are there places for so many children of this sequence? LIMIT if not.
status check_child_places(cache& store, observation_store& observations, const sequence& parent,
                          uint32_t children);
/// A child has seen what its parent has. On a device, whoever forks copies the arrays in use.
void copy_observations(cache& store, observation_store& observations, const sequence& parent,
                       sequence& child);

/// Which of a sequence's arrays have sums that count: bits.
uint32_t arrays_in_use(const observation_store& observations, const sequence& owner);
/// Where one begins, of all lanes.
uint64_t place_of_array(const observation_store& observations, const sequence& owner,
                        uint32_t array);

/// What is known of a lane of a sequence that observes.
const observed_lane& observed_lane_of(const observation_store& observations, const sequence& owner,
                                      uint32_t lane);
/// Floats before the sums of a lane's KV head in one of its arrays.
uint64_t place_of_sums(const observation_store& observations, const sequence& owner, uint32_t array,
                       uint32_t lane, uint32_t kv_head);

/// How a step's attention is to be observed, of all lanes.
struct observed_step {
    uint32_t rows = 0;        ///< its last ones; 0: none are
    bool leaves_out = false;  ///< lanes that have seen any query: no round counts this one
};
observed_step plan_observed(const cache& store, const observation_store& observations,
                            const sequence& owner, uint32_t rows);
/// And of one.
enum class lane_turn : uint8_t { none, left_out, observed };
lane_turn turn_of_lane(const cache& store, const observation_store& observations,
                       const sequence& owner, uint32_t lane, const observed_step& planned);

/// Numbers of arrays, among those of all places.
inline constexpr uint32_t no_array = 0xffffffffu;
struct observed_arrays {
    uint32_t sums = 0;
    uint32_t before = no_array;  ///< what they begin with
};
/// Of the first attention over a lane in a step.
observed_arrays arrays_to_observe(const observation_store& observations, const sequence& owner,
                                  uint32_t lane, uint32_t rows);

/// How the open step's attention over a lane is to be observed: false, not at all. Whoever attends
/// then says so with note_observed.
bool make_observer(const cache& store, observation_store& observations, const sequence& owner,
                   uint32_t lane, uint32_t rows, attend_observer& observer);
/// The open step is one that leaves a lane out.
void note_left_out(observation_store& observations, const sequence& owner);
void note_observed(observation_store& observations, const sequence& owner, uint32_t lane,
                   uint32_t rows, uint32_t slots);

/// The step's end, after lengths have changed; or its cancellation.
void commit_observations(const cache& store, observation_store& observations,
                         const sequence& owner);
void discard_observations(const cache& store, observation_store& observations,
                          const sequence& owner);

/// Lanes have become shorter.
void truncate_observations(const cache& store, observation_store& observations,
                           const sequence& owner);

/// Survivors of one lane and KV head, ascending, slide forward; end_compaction says once per lane
/// how many there are.
void compact_observations(observation_store& observations, const sequence& owner, uint32_t lane,
                          uint32_t kv_head, const uint32_t* survivors, uint32_t count);
void end_compaction(observation_store& observations, const sequence& owner, uint32_t lane,
                    uint32_t count);

/// How many queries stand behind a lane's sums; given scores count as one. 0: nothing was seen.
uint64_t observed_queries(const observation_store& observations, const sequence& owner,
                          uint32_t lane);

/// Positions since the host's last scores for a lane.
uint64_t positions_behind(const observation_store& observations, const sequence& owner,
                          uint32_t lane);

/// What slots have that were never summed: 0; of given scores +infinity.
float score_of_unknown(const observation_store& observations, const sequence& owner);

/// scores[slot] for [0, slots): the sums of a lane's KV head.
void read_observations(const observation_store& observations, const sequence& owner, uint32_t lane,
                       uint32_t kv_head, uint32_t slots, float* scores);

/// The host's scores of a head: scores[i] is that of position first + i.
void give_scores(observation_store& observations, const sequence& owner, uint32_t lane,
                 uint32_t kv_head, const slot_positions& positions, uint64_t first, uint64_t count,
                 const float* scores);
/// What was given is there.
void end_giving(observation_store& observations, const sequence& owner, uint32_t lane);

}  // namespace kvrt
