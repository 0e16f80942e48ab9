// kv_write of pools on a device: what reserve plans for its kernels, and the launches on that,
// which depend on nothing but the number of rows and items and so may be captured.
//
// The plan is words behind those of device_tables, of each place and lane:
//   targets    [max_step_tokens][3]    row of the block table, slot, position; -1: no row
// then those of device_attention, and behind all of them the constants of lanes and layers, which
// never change.
#pragma once

#include "attention/attend.hpp"
#include "step/device_shares.hpp"

namespace kvrt {

struct step;
struct step_context;

struct device_verbs {
    bool available = false;  ///< the plugin has kernels
    uint64_t first_word = 0, place_words = 0, lane_words = 0, constants_word = 0;
    host_array<kvrt_lane> lanes;         ///< by lane
    host_array<kvrt_lane> sealed_lanes;  ///< by lane, of those that seal
    host_array<plan_part> targets;       ///< [places][lanes]
    host_array<uint32_t> row_scratch;    ///< words of a lane

    /// Before the tables are created, whose words these follow: how many there are, with those of
    /// the context's attention.
    status measure(step_context& context, uint32_t places, uint64_t tables_words, uint64_t& words);
    /// Behind that.
    status create(step_context& context);
    /// As device_attention::plan.
    status plan(const step& target);
    /// Where a lane's targets begin, in words of the table.
    uint64_t targets_of(uint32_t place, uint32_t lane) const {
        return first_word + place * place_words + lane * lane_words;
    }

  private:
    void plan_targets(const step& target, uint32_t lane);
    friend status write_on_device(step&, uint32_t, const tensor_view&, const tensor_view&);
};

kvrt_device_tensor tensor_of(const tensor_view& view);
/// The part of a layer's tensor that begins at one of its heads.
tensor_view from_head(const tensor_view& whole, uint32_t head);
/// UNSUPPORTED, with the reason, where the plugin has none.
status require_kernels(const cache& store, const char* verb);

/// The tensors' rows into the lanes of a layer.
status write_on_device(step& target, uint32_t layer, const tensor_view& keys,
                       const tensor_view& values);

}  // namespace kvrt
