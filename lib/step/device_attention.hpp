// kv_attend of pools on a device: reserve lists the step's rows, cut into pieces, for every view of
// a lane, and kv_attend launches on those lists, which lie at fixed addresses and so may be
// captured.
//
// A view is how some layers look at a lane: query heads of a KV head, window and sinks. Those that
// share a cache may differ. The lists are words behind those of device_verbs, of each place and
// view (plugin.h):
//   sequences             kvrt_attend_sequence; -1: none
//   pieces, row pieces    kvrt_attend_piece, kvrt_rows_piece; -1: nothing; then the same of sealed
//                         blocks, where the lane has any
#pragma once

#include "attention/attend.hpp"
#include "step/device_observations.hpp"
#include "step/device_shares.hpp"

namespace kvrt {

struct step;
struct step_context;

/// What graphs of a layer have, of kv_attend calls that were captured with statistics.
inline constexpr uint8_t captured_attention = 1, captured_gathering = 2;

struct device_attention {
    struct view {
        uint32_t lane = 0;
        kvrt_attend_view look = {};
        kvrt_attend_bounds most = {};  ///< of any step
        uint64_t most_partials = 0;    ///< that the workspace holds, of the layer with most floats
        uint32_t most_kept = 0;        ///< entries for weights of all query heads; 0: none
        uint64_t first_word = 0;       ///< in a place
        uint64_t pieces[2] = {0, 0};   ///< words behind first_word; of blocks as written, sealed
        uint64_t row_pieces[2] = {0, 0};
        uint64_t observe_waves = 0, observe_items = 0;  ///< the same, of views that keep weights
        uint32_t first_wave = 0;                        ///< in a place
    };
    /// What a step has listed.
    struct view_plan {
        uint32_t sequences = 0, waves = 0;
        uint32_t pieces[2] = {0, 0}, row_pieces[2] = {0, 0};
        plan_part sequence_part, piece_parts[2], row_piece_parts[2];
        observed_view observed;
    };
    /// Beside an attend_layer: its view, and its constants on the device.
    struct layer_entry {
        uint32_t view = 0;
        const float* sink_logits = nullptr;
        const float* alibi_slopes = nullptr;
        const float* turning_table = nullptr;
    };

    uint32_t captured_rows = 0;  ///< most of a step whose kv_attend was captured
    uint64_t first_word = 0, place_words = 0;
    uint32_t place_waves = 0;
    uint32_t captured_pieces = 0;  ///< that a captured launch has a grid for, at most
    uint64_t workspace_floats = 0;
    uint64_t kept_entries = 0;  ///< for weights, of one query head each, behind these
    device_observations observations;
    std::byte* workspace = nullptr;  ///< of the device
    host_array<view> views;
    uint32_t view_count = 0;
    host_array<layer_entry> layers;                 ///< as step_context::layers
    host_array<view_plan> planned;                  ///< [places][views]
    host_array<uint8_t> captured;                   ///< [places][layers]: bits, as below
    host_array<kvrt_attend_wave> waves;             ///< [places][place_waves]
    host_array<kvrt_attend_sequence> listed_items;  ///< [max_step_sequences]
    host_array<uint32_t> sequence_scratch;          ///< lists of a view
    host_array<uint32_t> piece_scratch[2];          ///< the same
    host_array<uint32_t> row_piece_scratch[2];      ///< the same

    /// Before the tables are created: its words begin at `words`, and end there then.
    status measure(const step_context& context, uint32_t places, uint64_t& words);
    /// Behind that. Constants of layers come from elsewhere.
    status create(step_context& context);
    /// LIMIT where a graph that attends may be replayed for the step, and has no room for it: no
    /// kv_attend would say so.
    status plan(const step& target);
    /// What is known of graphs of a layer in the step's place.
    uint8_t& captured_at(const step& target, uint32_t layer);

  private:
    void find_views(const step_context& context);
    void measure_kept(const step_context& context);
    void measure_view(const step_context& context, view& made, uint64_t& words);
    void list_items(const step& target, uint32_t index);
    bool advance_view(const step& target, uint32_t index);
    void plan_view(const step& target, uint32_t index);
    void copy_view(const step& target, uint32_t index, uint32_t from);
    uint32_t leading_view(const device_shares& shares, uint32_t index) const;
    status check_captured(const step& target, uint32_t index) const;
    friend status attend_on_device(step&, uint32_t, const attend_call&, bool);
};

/// Of `call` the tensors, log_sum_exp and row_heads are read. `observes`: where policies ask for
/// it.
status attend_on_device(step& target, uint32_t layer, const attend_call& call, bool observes);

/// The step replays a graph that attends with statistics. INVALID: there can be none that does what
/// the step asks for.
status check_replayed(const step& target, uint32_t layer);
/// What it has observed and gathered counts.
void note_replayed(step& target, uint32_t layer);

}  // namespace kvrt
