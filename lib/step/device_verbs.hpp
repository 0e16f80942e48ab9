// kv_write and kv_attend of pools on a device: what reserve plans for their kernels, and the
// launches on that, which depend on nothing but the number of rows and items and so may be
// captured.
//
// The plan is words behind those of device_tables, of each place and lane:
//   targets    [max_step_tokens][3]    row of the block table, slot, position; -1: no row
//   sequences  [max_step_sequences]    kvrt_attend_sequence; -1: no item
//   pieces     [most_pieces]           kvrt_attend_piece; -1: nothing
// and behind all of them the constants of layers, which never change.
#pragma once

#include "attention/attend.hpp"
#include "sequence/cache.hpp"

namespace kvrt {

struct step;
struct step_context;
struct device_tables;

struct device_verbs {
    /// What a step has planned of a lane.
    struct lane_plan {
        uint32_t pieces = 0;  ///< 0: they did not fit
        uint32_t listed = 0;  ///< pieces in the table
        uint64_t partials = 0;
    };
    /// Beside an attend_layer: its constants on the device.
    struct layer_constants {
        const float* sink_logits = nullptr;
        const float* alibi_slopes = nullptr;
    };

    bool available = false;      ///< the plugin has kernels
    uint32_t captured_rows = 0;  ///< most of a step whose kv_attend was captured
    uint64_t first_word = 0, place_words = 0, lane_words = 0, sequences = 0, pieces = 0;
    uint32_t most_pieces = 0;  ///< of a step
    uint32_t pieces_each = 0;  ///< of an item, at most
    uint64_t most_partials = 0;
    std::byte* workspace = nullptr;         ///< of the device
    host_array<kvrt_lane> lanes;            ///< by lane
    host_array<kvrt_lane> sealed_lanes;     ///< by lane, of those that seal
    host_array<layer_constants> constants;  ///< as step_context::layers
    host_array<lane_plan> planned;          ///< [places][lanes]
    host_array<uint32_t> last_items;        ///< [places][2]: items and rows that were planned
    host_array<uint32_t> row_scratch;       ///< words of the longest part

    /// Before the tables are created, whose words these follow: how many there are.
    status measure(const step_context& context, uint32_t places, uint64_t tables_words,
                   uint64_t& words);
    /// Behind that.
    status create(step_context& context);
    /// LIMIT where a graph that attends may be replayed for the step, and its rows have more
    /// partial results than the workspace holds: no kv_attend would say so.
    status plan(const step& target);

  private:
    status check_fits(const step& target, uint32_t lane) const;
    uint64_t part(uint32_t place, uint32_t lane) const {
        return first_word + place * place_words + lane * lane_words;
    }
    void plan_targets(const step& target, uint32_t lane);
    void plan_attention(const step& target, uint32_t lane);
    friend status write_on_device(step&, uint32_t, const tensor_view&, const tensor_view&);
    friend status attend_on_device(step&, uint32_t, const attend_call&);
};

/// The tensors' rows into the lanes of a layer.
status write_on_device(step& target, uint32_t layer, const tensor_view& keys,
                       const tensor_view& values);
/// Of `call` the tensors, log_sum_exp and row_heads are read.
status attend_on_device(step& target, uint32_t layer, const attend_call& call);

}  // namespace kvrt
