// Statistics of queries of pools on a device. Sums lie there, in a place for each sequence; how
// many tokens they are of, and whether what is pending counts, the host knows, as on the CPU.
// kernels/gather_queries.hpp says what is there.
#pragma once

#include "format/element.hpp"
#include "retention/statistics.hpp"

namespace kvrt {

struct step;
struct step_context;

struct device_queries {
    bool prepared = false;
    kvrt_query_memory memory = {};
    host_array<uint64_t> first_head;     ///< [layers]: of its query heads, among those of all
    host_array<kvrt_gather_item> items;  ///< [step's sequences]

    /// Memory on the device and the host, when a sequence is first to gather. NO_MEMORY; it can be
    /// called again then.
    status prepare(step_context& context);

    /// Where a round finds the moments of a sequence, of a layer's query head.
    const float* moments_at(uint32_t place, uint64_t band) const {
        return memory.pending + uint64_t{place} * query_sum_arrays * memory.length + band;
    }
};

/// What kv_attend gathers of a layer. UNSUPPORTED while the step's stream is captured; nothing has
/// happened then.
status gather_on_device(step& target, uint32_t layer, const tensor_view& queries);

/// Sums go with a fork, behind all that was enqueued.
status copy_queries(step_context& context, uint32_t from, uint32_t to);

/// As online_moments: waits for the device.
status read_moments(step_context& context, uint32_t sequence_index, uint32_t layer,
                    const query_moments<float>& out, uint64_t& tokens);

}  // namespace kvrt
