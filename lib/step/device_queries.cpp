#include "step/device_queries.hpp"

#include <algorithm>

#include "step/device_words.hpp"
#include "step/step.hpp"

namespace kvrt {

namespace {

/// As query_count of the kernels.
struct query_count {
    uint64_t tokens;
    uint32_t pending, unused;
};
static_assert(sizeof(query_count) == 16);
constexpr uint64_t count_words = sizeof(query_count) / sizeof(uint32_t);

template <class type>
const uint32_t* words_at(const type* address) {
    return reinterpret_cast<const uint32_t*>(address);
}

/// Does what the device has pending of a sequence's layer count?
uint8_t& pending_counts(statistics_store& statistics, uint64_t layers, uint32_t sequence_index,
                        uint32_t layer) {
    return statistics.device_pending[sequence_index * layers + layer];
}

}  // namespace

status device_queries::prepare(step_context& context) {
    if (prepared) return KV_OK;
    const cache& store = *context.store;
    const model_geometry& model = store.model;
    KVRT_TRY(context.rounds.prepare(context));
    if (first_head.size() == 0) {
        KVRT_TRY(first_head.allocate(context.store->allocator, model.layers.size(),
                                     "queries on the device"));
    }
    if (items.size() == 0) {
        KVRT_TRY(items.allocate(context.store->allocator, store.limits.max_step_sequences,
                                "queries on the device"));
    }
    kvrt_query_memory wanted = {};
    wanted.length = context.retention->statistics.length;
    for (uint32_t layer = 0; layer < model.layers.size(); ++layer) {
        first_head[layer] = wanted.heads;
        if (has_statistics(store, layer)) wanted.heads += model.layers[layer].query_heads;
    }
    KVRT_TRY(context.store->device.create_queries(store.limits.max_sequences, wanted));
    memory = wanted;
    prepared = true;
    return KV_OK;
}

status gather_on_device(step& target, uint32_t layer, const tensor_view& queries) {
    cache& store = *target.context->store;
    device_queries& gathering = target.context->queries;
    statistics_store& statistics = target.context->retention->statistics;
    if (!gathering.prepared || !has_statistics(store, layer)) return KV_OK;
    const uint64_t layers = store.model.layers.size();
    const layer_geometry& geometry = store.model.layers[layer];
    kvrt_gather_queries call = {};
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        if (!gathers(statistics, *item.owner)) continue;
        const uint32_t place = store.sequences.index(*item.owner);
        kvrt_gather_item& made = gathering.items[call.count++];
        made = {};
        made.position = item.owner->next_position;
        made.place = place;
        made.first_row = item.first_row;
        made.rows = item.rows;
        made.begins = statistics.tokens[place * layers + layer] == 0 ? 1 : 0;
        made.counts = pending_counts(statistics, layers, place, layer);
    }
    if (call.count == 0) return KV_OK;
    call.memory = gathering.memory;
    call.first_band = statistics.offset[layer];
    call.first_head = gathering.first_head[layer];
    call.queries = tensor_of(queries);
    call.heads = geometry.query_heads;
    call.bands = geometry.rope.bands(store.model.lanes[geometry.first_lane].layout.keys.dim);
    call.rotated = geometry.rope.rotated_bands();
    call.interleaved = geometry.rope.style == KV_ROPE_INTERLEAVED ? 1 : 0;
    call.attention_factor = geometry.rope.attention_factor;
    call.inverse_frequencies = geometry.rope.inverse_frequencies;
    call.items = gathering.items.data();
    const status verdict = store.device.gather_queries(target.number, call);
    for (uint32_t i = 0; i < call.done; ++i) {
        const uint32_t place = gathering.items[i].place;
        pending_counts(statistics, layers, place, layer) = 0;
        statistics.pending_tokens[place * layers + layer] = gathering.items[i].rows;
    }
    KVRT_TRY(verdict);
    if (call.captured != 0) {
        return fail(KV_UNSUPPORTED,
                    "kv_attend: a captured step gathers no statistics of queries: leave them out "
                    "with KV_ATTEND_NO_STATISTICS, or capture without such sequences");
    }
    for (uint32_t i = 0; i < target.item_count; ++i) {
        sequence& owner = *target.arrays->items[i].owner;
        if (gathers(statistics, owner)) owner.statistics_pending = true;
    }
    return KV_OK;
}

status copy_queries(step_context& context, uint32_t from, uint32_t to) {
    cache& store = *context.store;
    const kvrt_query_memory& memory = context.queries.memory;
    const uint64_t layers = store.model.layers.size();
    const uint64_t* const tokens = context.retention->statistics.tokens.data() + from * layers;
    if (!context.queries.prepared ||
        std::all_of(tokens, tokens + layers, [](uint64_t seen) { return seen == 0; })) {
        return KV_OK;
    }
    const uint64_t number = ++store.fences.last_begun;
    KVRT_TRY(store.device.open_round(number));
    const auto copy = [&](uint32_t* all, uint64_t words) {
        return store.device.copy_words(number, all + to * words, all + from * words, words);
    };
    const uint64_t sums = query_sum_arrays * memory.length;
    status verdict = copy(reinterpret_cast<uint32_t*>(memory.totals), 2 * sums);
    if (verdict == KV_OK) verdict = copy(reinterpret_cast<uint32_t*>(memory.pending), sums);
    if (verdict == KV_OK) {
        verdict = copy(static_cast<uint32_t*>(memory.counts), memory.heads * count_words);
    }
    const status ended = store.device.end_step(number);
    return verdict < 0 ? verdict : ended;
}

status read_moments(step_context& context, uint32_t sequence_index, uint32_t layer,
                    const query_moments<float>& out, uint64_t& tokens) {
    cache& store = *context.store;
    statistics_store& statistics = context.retention->statistics;
    const kvrt_query_memory& memory = context.queries.memory;
    const uint64_t layers = store.model.layers.size();
    tokens = statistics.tokens[sequence_index * layers + layer];
    if (tokens == 0 || !context.queries.prepared) return KV_OK;
    const uint64_t length = layer_statistics_length(store, layer);
    const uint32_t heads = store.model.layers[layer].query_heads;
    host_allocator own;
    host_array<uint32_t> words;
    word_pieces pieces;
    const uint64_t of_sums = query_sum_arrays * length;
    KVRT_TRY(words.allocate(own, 3 * of_sums + heads * count_words, "statistics of a device"));
    KVRT_TRY(pieces.allocate(own, 3 * of_sums + heads * count_words, 2 * query_sum_arrays + 1));
    const uint64_t first =
        sequence_index * query_sum_arrays * memory.length + statistics.offset[layer];
    for (uint32_t i = 0; i < query_sum_arrays; ++i) {
        pieces.add(words_at(memory.totals + first + i * memory.length), 2 * length);
    }
    for (uint32_t i = 0; i < query_sum_arrays; ++i) {
        pieces.add(words_at(memory.pending + first + i * memory.length), length);
    }
    pieces.add(
        static_cast<const uint32_t*>(memory.counts) +
            (sequence_index * memory.heads + context.queries.first_head[layer]) * count_words,
        heads * count_words);
    KVRT_TRY(pieces.read(context, words.data()));

    double* const totals = reinterpret_cast<double*>(words.data());
    float* const pending = reinterpret_cast<float*>(words.data() + 2 * of_sums);
    const auto* const counts = reinterpret_cast<const query_count*>(words.data() + 3 * of_sums);
    tokens = counts[0].tokens;
    if (tokens == 0) std::fill_n(totals, of_sums, 0.0);
    const query_sums<double> total = query_sums_at(totals, length);
    if (pending_counts(statistics, layers, sequence_index, layer) != 0 &&
        commit_queries(query_sums_at(pending, length), length, total)) {
        tokens += counts[0].pending;
    }
    if (tokens == 0) return KV_OK;
    query_moments_of(total, length, tokens, out);
    return KV_OK;
}

}  // namespace kvrt
