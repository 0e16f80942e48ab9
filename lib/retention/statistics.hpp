// Query statistics of a pool: those that sequences gather from the queries attention sees, and
// those the host gave. Kept per sequence, so that what a sequence retains never depends on its
// batch.
//
// A step's sums are pending until its end: a cancelled step leaves no trace.
#pragma once

#include "retention/query_statistics.hpp"
#include "retention/statistics_file.hpp"
#include "sequence/cache.hpp"

namespace kvrt {

struct statistics_store {
    uint64_t length = 0;                  ///< bands of all query heads of all layers
    host_array<uint64_t> offset;          ///< [layers]: where a layer's bands start
    host_array<double> totals;            ///< [sequences][query_sum_arrays][length]
    host_array<float> pending;            ///< the same
    host_array<uint64_t> tokens;          ///< [sequences][layers] in totals
    host_array<uint32_t> pending_tokens;  ///< [sequences][layers]
    /// Where a device has the sums, [sequences][layers]: the step, if any, whose pending sums
    /// count; it adds them to its totals by itself, later.
    host_array<uint32_t> device_pending;
    host_array<float> given;             ///< [arrays of query_moments][length]
    host_array<uint64_t> given_tokens;   ///< [layers]; 0: nothing was given
    uint64_t given_changes = 0;          ///< of `given`, for whoever has a copy
    host_array<uint8_t> given_spread;    ///< [layers]: covariances are among what was given
    host_array<float> present;           ///< of the present round, as `given`
    host_array<uint8_t> present_spread;  ///< [layers], as given_spread
};

/// Does this layer have statistics: does it store, may policies evict from its lanes, and is its
/// rotation known?
bool has_statistics(const cache& store, uint32_t layer);
uint64_t layer_statistics_length(const cache& store, uint32_t layer);

/// A layer's part of `given` or `present`. Without covariances, when they are not `wanted`.
query_moments<float> moments_at(statistics_store& statistics, host_array<float>& arrays,
                                uint32_t layer, bool wanted = true);

status create_statistics(cache& store, statistics_store& statistics);

/// A new sequence has seen nothing; a child has seen what its parent has.
void reset_statistics(const cache& store, statistics_store& statistics, uint32_t sequence_index);
void copy_statistics(const cache& store, statistics_store& statistics, uint32_t from, uint32_t to);

/// Sets the pending sums of one sequence and layer to those of its rows in this call.
void gather_queries(const cache& store, statistics_store& statistics, uint32_t sequence_index,
                    uint32_t layer, const tensor_view& queries, uint32_t first_row, uint32_t rows,
                    uint64_t first_position);
/// `step` is what a device knows it by.
void commit_statistics(const cache& store, statistics_store& statistics, uint32_t sequence_index,
                       uint32_t step);
void discard_statistics(const cache& store, statistics_store& statistics, uint32_t sequence_index);

/// Is it worth gathering for this sequence?
bool gathers(const statistics_store& statistics, const sequence& owner);

/// Puts what a round of this sequence works with into statistics.present. False when the layer of a
/// lane in `lanes` (of [lane count], non-zero: wanted) has nothing.
bool load_moments(const cache& store, statistics_store& statistics, uint32_t sequence_index,
                  bool online_only, const uint8_t* lanes);

/// A sequence's own moments of one layer, into the caller's arrays; returns the tokens they
/// average.
uint64_t online_moments(const cache& store, const statistics_store& statistics,
                        uint32_t sequence_index, uint32_t layer, const query_moments<float>& out);

}  // namespace kvrt
