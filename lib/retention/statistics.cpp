#include "retention/statistics.hpp"

#include <algorithm>

namespace kvrt {

namespace {

template <class number>
query_sums<number> sums_of(number* base, const statistics_store& statistics,
                           uint32_t sequence_index, uint32_t lane) {
    number* first =
        base + uint64_t{sequence_index} * 3 * statistics.length + statistics.offset[lane];
    return {first, first + statistics.length, first + 2 * statistics.length};
}

}  // namespace

bool has_statistics(const cache& store, uint32_t lane) {
    const lane_geometry& geometry = store.model.lanes[lane];
    return geometry.evictable && store.model.layers[geometry.layer].rope_known;
}

uint64_t lane_statistics_length(const cache& store, uint32_t lane) {
    if (!has_statistics(store, lane)) return 0;
    const lane_geometry& geometry = store.model.lanes[lane];
    const layer_geometry& layer = store.model.layers[geometry.layer];
    return statistics_length(layer.rope, layer.query_heads, geometry.layout.keys.dim);
}

status create_statistics(cache& store, statistics_store& statistics) {
    const uint64_t lanes = store.model.lanes.size();
    const uint64_t sequences = store.limits.max_sequences;
    host_allocator& allocator = store.allocator;
    KVRT_TRY(statistics.offset.allocate(allocator, lanes, "query statistics"));
    statistics.length = 0;
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        statistics.offset[lane] = statistics.length;
        statistics.length += lane_statistics_length(store, lane);
    }
    const uint64_t whole = 3 * statistics.length;
    KVRT_TRY(statistics.totals.allocate(allocator, sequences * whole, "query statistics",
                                        memory_contents::undefined));
    KVRT_TRY(statistics.pending.allocate(allocator, sequences * whole, "query statistics",
                                         memory_contents::undefined));
    KVRT_TRY(statistics.tokens.allocate(allocator, sequences * lanes, "query statistics"));
    KVRT_TRY(statistics.pending_tokens.allocate(allocator, sequences * lanes, "query statistics"));
    KVRT_TRY(statistics.given.allocate(allocator, whole, "query statistics"));
    KVRT_TRY(statistics.given_tokens.allocate(allocator, lanes, "query statistics"));
    return statistics.means.allocate(allocator, whole, "query statistics");
}

void reset_statistics(const cache& store, statistics_store& statistics, uint32_t sequence_index) {
    const uint64_t lanes = store.model.lanes.size();
    std::fill_n(statistics.tokens.data() + sequence_index * lanes, lanes, uint64_t{0});
    std::fill_n(statistics.pending_tokens.data() + sequence_index * lanes, lanes, 0u);
}

void copy_statistics(const cache& store, statistics_store& statistics, uint32_t from, uint32_t to) {
    const uint64_t lanes = store.model.lanes.size();
    reset_statistics(store, statistics, to);
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        const uint64_t tokens = statistics.tokens[from * lanes + lane];
        statistics.tokens[to * lanes + lane] = tokens;
        if (tokens == 0) continue;
        const uint64_t length = lane_statistics_length(store, lane);
        const auto source = sums_of(statistics.totals.data(), statistics, from, lane);
        const auto target = sums_of(statistics.totals.data(), statistics, to, lane);
        std::copy_n(source.real, length, target.real);
        std::copy_n(source.imaginary, length, target.imaginary);
        std::copy_n(source.magnitude, length, target.magnitude);
    }
}

void gather_queries(const cache& store, statistics_store& statistics, uint32_t sequence_index,
                    uint32_t layer, const tensor_view& queries, uint32_t first_row, uint32_t rows,
                    uint64_t first_position) {
    const layer_geometry& geometry = store.model.layers[layer];
    if (!geometry.stores || !has_statistics(store, geometry.lane)) return;
    const uint32_t key_dim = store.model.lanes[geometry.lane].layout.keys.dim;
    const auto pending =
        sums_of(statistics.pending.data(), statistics, sequence_index, geometry.lane);
    const uint64_t length = lane_statistics_length(store, geometry.lane);
    std::fill_n(pending.real, length, 0.0f);
    std::fill_n(pending.imaginary, length, 0.0f);
    std::fill_n(pending.magnitude, length, 0.0f);
    add_queries(geometry.rope, key_dim, queries, first_row, rows, first_position, 0,
                geometry.query_heads, pending);
    statistics.pending_tokens[sequence_index * store.model.lanes.size() + geometry.lane] = rows;
}

void commit_statistics(const cache& store, statistics_store& statistics, uint32_t sequence_index) {
    const uint64_t lanes = store.model.lanes.size();
    for (uint32_t lane = 0; lane < lanes; ++lane) {
        uint32_t& rows = statistics.pending_tokens[sequence_index * lanes + lane];
        if (rows == 0) continue;
        uint64_t& tokens = statistics.tokens[sequence_index * lanes + lane];
        const uint64_t length = lane_statistics_length(store, lane);
        const auto total = sums_of(statistics.totals.data(), statistics, sequence_index, lane);
        if (tokens == 0) {
            std::fill_n(total.real, length, 0.0);
            std::fill_n(total.imaginary, length, 0.0);
            std::fill_n(total.magnitude, length, 0.0);
        }
        const auto pending = sums_of(statistics.pending.data(), statistics, sequence_index, lane);
        if (commit_queries(pending, length, total)) tokens += rows;
        rows = 0;
    }
}

void discard_statistics(const cache& store, statistics_store& statistics, uint32_t sequence_index) {
    const uint64_t lanes = store.model.lanes.size();
    std::fill_n(statistics.pending_tokens.data() + sequence_index * lanes, lanes, 0u);
}

bool gathers(const statistics_store& statistics, const sequence& owner) {
    if (owner.gathers_statistics) return true;
    if (!owner.has_policy || owner.policy.scorer != KV_SCORER_TRIATTENTION) return false;
    if ((owner.policy.flags & KV_POLICY_STATISTICS_ONLINE) != 0) return true;
    return std::all_of(statistics.given_tokens.begin(), statistics.given_tokens.end(),
                       [](uint64_t tokens) { return tokens == 0; });
}

uint64_t online_means(const cache& store, const statistics_store& statistics,
                      uint32_t sequence_index, uint32_t lane, float* real, float* imaginary,
                      float* magnitude) {
    const uint64_t tokens =
        statistics.tokens[uint64_t{sequence_index} * store.model.lanes.size() + lane];
    if (tokens == 0) return 0;
    const auto total =
        sums_of(const_cast<double*>(statistics.totals.data()), statistics, sequence_index, lane);
    query_means_of(total, lane_statistics_length(store, lane), tokens, real, imaginary, magnitude);
    return tokens;
}

bool load_means(const cache& store, statistics_store& statistics, uint32_t sequence_index,
                bool online_only, const uint8_t* lanes) {
    for (uint32_t lane = 0; lane < store.model.lanes.size(); ++lane) {
        if (lanes[lane] == 0) continue;
        float* real = statistics.means.data() + statistics.offset[lane];
        float* imaginary = real + statistics.length;
        float* magnitude = imaginary + statistics.length;
        if (!online_only && statistics.given_tokens[lane] != 0) {
            const float* given = statistics.given.data() + statistics.offset[lane];
            const uint64_t length = lane_statistics_length(store, lane);
            std::copy_n(given, length, real);
            std::copy_n(given + statistics.length, length, imaginary);
            std::copy_n(given + 2 * statistics.length, length, magnitude);
        } else if (online_means(store, statistics, sequence_index, lane, real, imaginary,
                                magnitude) == 0) {
            return false;
        }
    }
    return true;
}

}  // namespace kvrt
