// Statistics of queries of pools on a device. Sums lie there, in a place for each sequence; how
// many tokens they are of, and whose pending sums count, the host knows, as on the CPU.
// kernels/gather_queries.hpp says what is there.
//
// Who gathers in a step is in lists of each place, so that a graph gathers in whatever step it is
// replayed for: a word with what the device knows the step by, and for each layer that has
// statistics kvrt_gather_item by item.
#pragma once

#include "format/element.hpp"
#include "retention/statistics.hpp"
#include "step/device_shares.hpp"

namespace kvrt {

struct step;
struct step_context;

struct device_queries {
    bool prepared = false;
    kvrt_query_memory memory = {};
    host_array<uint64_t> first_head;  ///< [layers]: of its query heads, among those of all
    uint64_t first_word = 0, place_words = 0, layer_words = 0;
    host_array<plan_part> parts;        ///< [places][layers]
    host_array<uint8_t> listed;         ///< [places][items]: 1: gathers
    host_array<uint8_t> any_listed;     ///< [places]
    host_array<uint32_t> item_scratch;  ///< words of a layer

    /// Before the table is created: its words begin at `words`, and end there then.
    status measure(const step_context& context, uint32_t places, uint64_t& words);
    /// Lists of a step.
    void plan(const step& target);
    uint64_t words_of(uint32_t place, uint32_t layer) const;
    /// Does the step gather in a layer?
    bool gathers_in(const step& target, uint32_t layer) const;
    /// It does, as listed: the layer has been attended over.
    void note_layer(step& target, uint32_t layer) const;

    /// Memory on the device and the host, when a sequence is first to gather. NO_MEMORY; it can be
    /// called again then.
    status prepare(step_context& context);

    /// Where a round finds the moments of a sequence, of a layer's query head.
    const float* moments_at(uint32_t place, uint64_t band) const {
        return memory.pending + uint64_t{place} * query_sum_arrays * memory.length + band;
    }
};

/// What kv_attend gathers of a layer.
status gather_on_device(step& target, uint32_t layer, const tensor_view& queries);

/// Sums go with a fork, behind all that was enqueued.
status copy_queries(step_context& context, uint32_t from, uint32_t to);

/// As online_moments: waits for the device.
status read_moments(step_context& context, uint32_t sequence_index, uint32_t layer,
                    const query_moments<float>& out, uint64_t& tokens);

}  // namespace kvrt
