#include "step/device_queries.hpp"

#include <algorithm>

#include "step/device_words.hpp"
#include "step/step.hpp"

namespace kvrt {

namespace {

/// As query_count of the kernels.
struct query_count {
    uint64_t tokens;
    uint32_t pending, step;
};
static_assert(sizeof(query_count) == 16);
constexpr uint64_t count_words = sizeof(query_count) / sizeof(uint32_t);
constexpr uint64_t item_words = sizeof(kvrt_gather_item) / sizeof(uint32_t);
constexpr uint64_t line_words = device_tables::line_words;

template <class type>
const uint32_t* words_at(const type* address) {
    return reinterpret_cast<const uint32_t*>(address);
}

/// What a list says of a sequence in a layer.
kvrt_gather_item item_of(const statistics_store& statistics, uint64_t layers, uint32_t place,
                         uint32_t layer) {
    const uint64_t at = place * layers + layer;
    return {place | (statistics.tokens[at] == 0 ? KVRT_GATHER_BEGINS : 0),
            statistics.device_pending[at]};
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

status device_queries::measure(const step_context& context, uint32_t places, uint64_t& words) {
    const cache& store = *context.store;
    if (!context.verbs.available) return KV_OK;
    host_allocator& allocator = context.store->allocator;
    constexpr const char* what = "queries on the device";
    const uint64_t layers = store.model.layers.size(), items = store.limits.max_step_sequences;
    layer_words = round_up<uint64_t>(items * item_words, line_words);
    place_words = line_words + layers * layer_words;
    first_word = round_up<uint64_t>(words, line_words);
    words = first_word + places * place_words;
    KVRT_TRY(parts.allocate(allocator, places * layers, what));
    KVRT_TRY(listed.allocate(allocator, places * items, what));
    KVRT_TRY(any_listed.allocate(allocator, places, what));
    return item_scratch.allocate(allocator, layer_words, what);
}

uint64_t device_queries::words_of(uint32_t place, uint32_t layer) const {
    return first_word + place * place_words + line_words + layer * layer_words;
}

/// Layers that have seen as much of all sequences have the same list.
void device_queries::plan(const step& target) {
    if (!prepared) return;
    const cache& store = *target.context->store;
    const statistics_store& statistics = target.context->retention->statistics;
    device_shares& shares = target.context->tables.shares;
    const uint32_t layers = static_cast<uint32_t>(store.model.layers.size());
    uint8_t* const gathering = listed.data() + target.place * store.limits.max_step_sequences;
    uint8_t& any = any_listed[target.place];
    any = 0;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        gathering[i] = gathers(statistics, *target.arrays->items[i].owner) ? 1 : 0;
        any |= gathering[i];
    }
    const uint32_t mark = mark_of_step(target.number);
    if (any != 0) {
        target.context->store->device.write_table(first_word + target.place * place_words, &mark,
                                                  1);
    }
    const auto of_item = [&](uint32_t i, uint32_t layer) {
        const uint32_t place = store.sequences.index(*target.arrays->items[i].owner);
        return item_of(statistics, layers, place, layer);
    };
    const auto same = [&](uint32_t a, uint32_t b) {
        for (uint32_t i = 0; i < target.item_count; ++i) {
            if (gathering[i] == 0) continue;
            const kvrt_gather_item mine = of_item(i, a), other = of_item(i, b);
            if (mine.place != other.place || mine.counted != other.counted) return false;
        }
        return true;
    };
    const uint64_t count = any != 0 ? target.item_count * item_words : 0;
    uint32_t leader = layers;  // of those so far, the last that was written
    for (uint32_t layer = 0; layer < layers; ++layer) {
        if (!has_statistics(store, layer)) continue;
        plan_part& part = parts[uint64_t{target.place} * layers + layer];
        const uint64_t word = words_of(target.place, layer);
        if (leader != layers && same(leader, layer)) {
            shares.copy(part, word, words_of(target.place, leader), count);
            continue;
        }
        leader = layer;
        auto* const items = reinterpret_cast<kvrt_gather_item*>(item_scratch.data());
        for (uint32_t i = 0; i < target.item_count && any != 0; ++i) {
            items[i] = gathering[i] != 0 ? of_item(i, layer) : kvrt_gather_item{~0u, ~0u};
        }
        shares.write(target.context->store->device, part, word, item_scratch.data(), count);
    }
}

bool device_queries::gathers_in(const step& target, uint32_t layer) const {
    return prepared && any_listed[target.place] != 0 &&
           has_statistics(*target.context->store, layer);
}

void device_queries::note_layer(step& target, uint32_t layer) const {
    if (!gathers_in(target, layer)) return;
    const cache& store = *target.context->store;
    statistics_store& statistics = target.context->retention->statistics;
    const uint8_t* const gathering = listed.data() + target.place * store.limits.max_step_sequences;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        if (gathering[i] == 0) continue;
        const step_item& item = target.arrays->items[i];
        const uint64_t place = store.sequences.index(*item.owner);
        statistics.pending_tokens[place * store.model.layers.size() + layer] = item.rows;
        item.owner->statistics_pending = true;
    }
}

status gather_on_device(step& target, uint32_t layer, const tensor_view& queries) {
    cache& store = *target.context->store;
    const device_queries& gathering = target.context->queries;
    const device_tables& tables = target.context->tables;
    const statistics_store& statistics = target.context->retention->statistics;
    if (!gathering.prepared || !has_statistics(store, layer)) return KV_OK;
    const layer_geometry& geometry = store.model.layers[layer];
    const auto words = [&](uint64_t word) { return static_cast<const uint32_t*>(tables.at(word)); };
    kvrt_gather_queries call = {};
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
    call.items =
        static_cast<const kvrt_gather_item*>(tables.at(gathering.words_of(target.place, layer)));
    call.step = words(gathering.first_word + target.place * gathering.place_words);
    call.query_start = words(tables.items_of(target.place));
    call.positions = words(tables.positions_of(target.place));
    call.count = target.item_count;
    call.gathers = gathering.gathers_in(target, layer) ? 1 : 0;
    KVRT_TRY(store.device.gather_queries(target.number, call));
    if (call.captured == 0) {
        gathering.note_layer(target, layer);
    } else {
        target.context->attention.captured_at(target, layer) |= captured_gathering;
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
    const statistics_store& statistics = context.retention->statistics;
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
    if (counts[0].pending != 0 &&
        counts[0].step == statistics.device_pending[sequence_index * layers + layer] &&
        commit_queries(query_sums_at(pending, length), length, total)) {
        tokens += counts[0].pending;
    }
    if (tokens == 0) return KV_OK;
    query_moments_of(total, length, tokens, out);
    return KV_OK;
}

}  // namespace kvrt
