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
    uint64_t length = 0;                  ///< bands of all query heads of all lanes
    host_array<uint64_t> offset;          ///< [lanes]: where a lane's bands start
    host_array<double> totals;            ///< [sequences][real, imaginary, magnitude][length]
    host_array<float> pending;            ///< the same
    host_array<uint64_t> tokens;          ///< [sequences][lanes] in totals
    host_array<uint32_t> pending_tokens;  ///< [sequences][lanes]
    host_array<float> given;              ///< [real, imaginary, magnitude][length]
    host_array<uint64_t> given_tokens;    ///< [lanes]; 0: nothing was given
    host_array<float> means;  ///< [real, imaginary, magnitude][length] of the present round
};

/// Does this lane have statistics: may policies evict from it, and is its rotation known?
bool has_statistics(const cache& store, uint32_t lane);
uint64_t lane_statistics_length(const cache& store, uint32_t lane);

status create_statistics(cache& store, statistics_store& statistics);

/// A new sequence has seen nothing; a child has seen what its parent has.
void reset_statistics(const cache& store, statistics_store& statistics, uint32_t sequence_index);
void copy_statistics(const cache& store, statistics_store& statistics, uint32_t from, uint32_t to);

/// Sets the pending sums of one sequence and layer to those of its rows in this call.
void gather_queries(const cache& store, statistics_store& statistics, uint32_t sequence_index,
                    uint32_t layer, const tensor_view& queries, uint32_t first_row, uint32_t rows,
                    uint64_t first_position);
void commit_statistics(const cache& store, statistics_store& statistics, uint32_t sequence_index);
void discard_statistics(const cache& store, statistics_store& statistics, uint32_t sequence_index);

/// Is it worth gathering for this sequence?
bool gathers(const statistics_store& statistics, const sequence& owner);

/// Puts the means that a round of this sequence works with into statistics.means. False when a lane
/// in `lanes` (of [lane count], non-zero: wanted) has none.
bool load_means(const cache& store, statistics_store& statistics, uint32_t sequence_index,
                bool online_only, const uint8_t* lanes);

/// A sequence's own means of one lane, into the caller's arrays; returns the tokens they average.
uint64_t online_means(const cache& store, const statistics_store& statistics,
                      uint32_t sequence_index, uint32_t lane, float* real, float* imaginary,
                      float* magnitude);

}  // namespace kvrt
