#include "retention/statistics.hpp"

#include <algorithm>

#include "retention/scorers.hpp"

namespace kvrt {

namespace {

template <class number>
query_sums<number> sums_of(number* base, const statistics_store& statistics,
                           uint32_t sequence_index, uint32_t layer) {
    number* first = base + uint64_t{sequence_index} * query_sum_arrays * statistics.length +
                    statistics.offset[layer];
    return query_sums_at(first, statistics.length);
}

}  // namespace

bool has_statistics(const cache& store, uint32_t layer) {
    const layer_geometry& geometry = store.model.layers[layer];
    return geometry.stores && geometry.rope_known && !geometry.cache_positions &&
           store.model.lanes[geometry.first_lane].evictable;
}

uint64_t layer_statistics_length(const cache& store, uint32_t layer) {
    if (!has_statistics(store, layer)) return 0;
    const layer_geometry& geometry = store.model.layers[layer];
    const uint32_t key_dim = store.model.lanes[geometry.first_lane].layout.keys.dim;
    return statistics_length(geometry.rope, geometry.query_heads, key_dim);
}

status create_statistics(cache& store, statistics_store& statistics) {
    const uint64_t layers = store.model.layers.size();
    const uint64_t sequences = store.limits.max_sequences;
    host_allocator& allocator = store.allocator;
    KVRT_TRY(statistics.offset.allocate(allocator, layers, "query statistics"));
    statistics.length = 0;
    for (uint32_t layer = 0; layer < layers; ++layer) {
        statistics.offset[layer] = statistics.length;
        statistics.length += layer_statistics_length(store, layer);
    }
    const uint64_t whole = query_sum_arrays * statistics.length;
    const uint64_t sums = store.on_device() ? 0 : sequences * whole;
    KVRT_TRY(statistics.totals.allocate(allocator, sums, "query statistics",
                                        memory_contents::undefined));
    KVRT_TRY(statistics.pending.allocate(allocator, sums, "query statistics",
                                         memory_contents::undefined));
    if (store.on_device()) {
        KVRT_TRY(
            statistics.device_pending.allocate(allocator, sequences * layers, "query statistics"));
    }
    KVRT_TRY(statistics.tokens.allocate(allocator, sequences * layers, "query statistics"));
    KVRT_TRY(statistics.pending_tokens.allocate(allocator, sequences * layers, "query statistics"));
    KVRT_TRY(statistics.given.allocate(allocator, whole, "query statistics"));
    KVRT_TRY(statistics.given_tokens.allocate(allocator, layers, "query statistics"));
    KVRT_TRY(statistics.given_spread.allocate(allocator, layers, "query statistics"));
    KVRT_TRY(statistics.present_spread.allocate(allocator, layers, "query statistics"));
    return statistics.present.allocate(allocator, whole, "query statistics");
}

void reset_statistics(const cache& store, statistics_store& statistics, uint32_t sequence_index) {
    const uint64_t layers = store.model.layers.size();
    std::fill_n(statistics.tokens.data() + sequence_index * layers, layers, uint64_t{0});
    std::fill_n(statistics.pending_tokens.data() + sequence_index * layers, layers, 0u);
    if (!store.on_device()) return;
    std::fill_n(statistics.device_pending.data() + sequence_index * layers, layers, 0u);
}

void copy_statistics(const cache& store, statistics_store& statistics, uint32_t from, uint32_t to) {
    const uint64_t layers = store.model.layers.size();
    reset_statistics(store, statistics, to);
    for (uint32_t layer = 0; layer < layers; ++layer) {
        const uint64_t tokens = statistics.tokens[from * layers + layer];
        statistics.tokens[to * layers + layer] = tokens;
        if (store.on_device()) {
            statistics.device_pending[to * layers + layer] =
                statistics.device_pending[from * layers + layer];
        }
        if (tokens == 0 || store.on_device()) continue;
        const uint64_t length = layer_statistics_length(store, layer);
        const auto source = sums_of(statistics.totals.data(), statistics, from, layer);
        const auto target = sums_of(statistics.totals.data(), statistics, to, layer);
        for (uint32_t i = 0; i < query_sum_arrays; ++i) {
            std::copy_n(source.real + i * statistics.length, length,
                        target.real + i * statistics.length);
        }
    }
}

void gather_queries(const cache& store, statistics_store& statistics, uint32_t sequence_index,
                    uint32_t layer, const tensor_view& queries, uint32_t first_row, uint32_t rows,
                    uint64_t first_position) {
    if (!has_statistics(store, layer)) return;
    const layer_geometry& geometry = store.model.layers[layer];
    const uint32_t key_dim = store.model.lanes[geometry.first_lane].layout.keys.dim;
    const auto pending = sums_of(statistics.pending.data(), statistics, sequence_index, layer);
    const uint64_t length = layer_statistics_length(store, layer);
    for (uint32_t i = 0; i < query_sum_arrays; ++i) {
        std::fill_n(pending.real + i * statistics.length, length, 0.0f);
    }
    add_queries(geometry.rope, key_dim, queries, first_row, rows, first_position, 0,
                geometry.query_heads, pending);
    statistics.pending_tokens[sequence_index * store.model.layers.size() + layer] = rows;
}

void commit_statistics(const cache& store, statistics_store& statistics, uint32_t sequence_index,
                       uint32_t step) {
    const uint64_t layers = store.model.layers.size();
    for (uint32_t layer = 0; layer < layers; ++layer) {
        uint32_t& rows = statistics.pending_tokens[sequence_index * layers + layer];
        if (rows == 0) continue;
        uint64_t& tokens = statistics.tokens[sequence_index * layers + layer];
        if (store.on_device()) {
            tokens += rows;
            statistics.device_pending[sequence_index * layers + layer] = step;
            rows = 0;
            continue;
        }
        const uint64_t length = layer_statistics_length(store, layer);
        const auto total = sums_of(statistics.totals.data(), statistics, sequence_index, layer);
        for (uint32_t i = 0; tokens == 0 && i < query_sum_arrays; ++i) {
            std::fill_n(total.real + i * statistics.length, length, 0.0);
        }
        const auto pending = sums_of(statistics.pending.data(), statistics, sequence_index, layer);
        if (commit_queries(pending, length, total)) tokens += rows;
        rows = 0;
    }
}

void discard_statistics(const cache& store, statistics_store& statistics, uint32_t sequence_index) {
    const uint64_t layers = store.model.layers.size();
    std::fill_n(statistics.pending_tokens.data() + sequence_index * layers, layers, 0u);
}

bool gathers(const statistics_store& statistics, const sequence& owner) {
    if (owner.gathers_statistics) return true;
    if (!owner.has_policy || !find_scorer(owner.policy.scorer)->query_statistics) return false;
    if ((owner.policy.flags & KV_POLICY_STATISTICS_ONLINE) != 0) return true;
    return std::all_of(statistics.given_tokens.begin(), statistics.given_tokens.end(),
                       [](uint64_t tokens) { return tokens == 0; });
}

query_moments<float> moments_at(statistics_store& statistics, host_array<float>& arrays,
                                uint32_t layer, bool wanted) {
    float* first = arrays.data() + statistics.offset[layer];
    const uint64_t stride = statistics.length;
    query_moments<float> found = {first, first + stride, first + 2 * stride};
    if (!wanted) return found;
    found.variance_real = first + 3 * stride;
    found.variance_imaginary = first + 4 * stride;
    found.covariance = first + 5 * stride;
    return found;
}

uint64_t online_moments(const cache& store, const statistics_store& statistics,
                        uint32_t sequence_index, uint32_t layer, const query_moments<float>& out) {
    const uint64_t tokens =
        statistics.tokens[uint64_t{sequence_index} * store.model.layers.size() + layer];
    if (tokens == 0) return 0;
    const auto total =
        sums_of(const_cast<double*>(statistics.totals.data()), statistics, sequence_index, layer);
    query_moments_of(total, layer_statistics_length(store, layer), tokens, out);
    return tokens;
}

bool load_moments(const cache& store, statistics_store& statistics, uint32_t sequence_index,
                  bool online_only, const uint8_t* lanes) {
    for (uint32_t layer = 0; layer < store.model.layers.size(); ++layer) {
        const layer_geometry& geometry = store.model.layers[layer];
        if (!geometry.stores ||
            std::all_of(lanes + geometry.first_lane, lanes + geometry.end_lane(),
                        [](uint8_t wanted) { return wanted == 0; })) {
            continue;
        }
        statistics.present_spread[layer] = 1;
        const query_moments<float> target = moments_at(statistics, statistics.present, layer);
        if (!online_only && statistics.given_tokens[layer] != 0) {
            const float* given = statistics.given.data() + statistics.offset[layer];
            const uint64_t length = layer_statistics_length(store, layer);
            for (uint32_t i = 0; i < query_sum_arrays; ++i) {
                std::copy_n(given + i * statistics.length, length,
                            target.mean_real + i * statistics.length);
            }
            statistics.present_spread[layer] = statistics.given_spread[layer];
        } else if (online_moments(store, statistics, sequence_index, layer, target) == 0) {
            return false;
        }
    }
    return true;
}

}  // namespace kvrt
