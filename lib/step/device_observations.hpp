// Observed attention of pools on a device: sums per slot lie there, what is known of them (which
// array, of how many slots and queries) is the host's, as ever. Attention keeps the weights of
// rows that reserve has listed, and adds them up behind its output.
//
// What is added up, and where, is in lists, too, of each place and view that keeps weights:
//   waves    kvrt_observe_wave     one for each of attention's
//   items    kvrt_observe_item
// so that a graph observes whatever step it is replayed for. Of a launch that is captured nothing
// counts: the host says where it was replayed.
#pragma once

#include "attention/attend.hpp"
#include "device/plugin.h"
#include "retention/observations.hpp"
#include "step/device_shares.hpp"

namespace kvrt {

struct step;
struct step_context;

/// What a step has listed of a view.
struct observed_view {
    uint32_t items = 0;
    plan_part wave_part, item_part;
};

struct device_observations {
    /// What a step of a sequence was listed by: it counts as long as these are the same.
    struct listed_from {
        uint32_t place = 0;  ///< observation_place of the sequence
        uint64_t changes = 0;
    };
    bool available = false;           ///< the pool observes
    host_array<uint32_t> rows;        ///< [places][items]: the last ones, of which weights are kept
    host_array<lane_turn> turns;      ///< [places][items][lanes]
    host_array<listed_from> sources;  ///< [places][items]
    bool any = false;                 ///< of the step at hand: rows are kept
    host_array<uint32_t> leaders;     ///< [lanes]: the first that is observed as this one is
    host_array<uint32_t> wave_words, item_words;  ///< lists of a view

    /// `most_listed`: sequences that attention lists of any view.
    status create(const step_context& context, uint32_t places, uint32_t most_listed);
    /// Before views are planned.
    void plan(const step& target);
    bool alike(uint32_t lane, uint32_t other) const {
        return !any || leaders[lane] == leaders[other];
    }
    /// Lists of a view, from words of the table on; and those of another.
    void list(const step& target, uint32_t lane, kvrt_attend_plan& plan, observed_view& view,
              uint64_t wave_word, uint64_t item_word);

    /// The open step's attention over a lane is observed, as listed.
    void note_lane(step& target, uint32_t lane) const;

  private:
    void plan_item(const step& target, uint32_t index);
    void find_leaders(const step& target);
};

/// Sums go with a fork, behind all that was enqueued.
status copy_sums(step_context& context, const sequence& parent, const kv_seq* children,
                 uint32_t count);

/// As read_observations: waits for the device.
status read_sums(step_context& context, const sequence& owner, uint32_t lane, uint32_t kv_head,
                 uint32_t slots, float* scores);

/// Where a round finds them.
kvrt_round_sums sums_of(const observation_store& observations, const sequence& owner,
                        uint32_t lane);

}  // namespace kvrt
