#include "step/device_attention.hpp"

#include <algorithm>
#include <cstring>

#include "step/step.hpp"

namespace kvrt {

namespace {

constexpr uint64_t line_words = device_tables::line_words;
constexpr uint32_t kinds = 2;  ///< of blocks: as they are written, sealed
constexpr uint64_t sequence_words = sizeof(kvrt_attend_sequence) / sizeof(uint32_t);
constexpr uint64_t piece_words = sizeof(kvrt_attend_piece) / sizeof(uint32_t);
constexpr uint64_t row_piece_words = sizeof(kvrt_rows_piece) / sizeof(uint32_t);
/// Partial results that any pool has room for, of the layer with most query heads.
constexpr uint64_t least_partials = 256;

/// So many slots of every lane fill the arena.
uint64_t slots_of_arena(const cache& store) {
    uint64_t bytes = 0;
    for (const lane_geometry& lane : store.model.lanes) {
        bytes += lane.seals ? std::min(lane.layout.block_bytes, lane.sealed_layout.block_bytes)
                            : lane.layout.block_bytes;
    }
    return store.blocks.slab_count() * slab_bytes / bytes * store.model.block_tokens;
}

/// Of a row, which keeps weights of all its slots, and of one query head; plugin.h.
uint64_t kept_entries_of_row(const cache& store) {
    return ceil_divide<uint64_t>(store.limits.max_tokens_per_sequence, 16) + 1;
}
constexpr uint32_t query_vectors_of_tile = 16;  ///< of a KV head
constexpr uint64_t kept_entry_bytes = 16 * sizeof(uint16_t) + sizeof(float);
/// Prompts of the longest sequences are cut into parts of so many rows, if they are not wider yet.
constexpr uint64_t least_kept_rows = 16;
constexpr uint64_t most_least_entries = uint64_t{1} << 31;

uint64_t floats_of_partial(const attend_layer& layer) {
    return uint64_t{layer.query_heads} * (layer.layout.values.dim + 2);
}

/// Steps of so many items, rows and rows of an item, before they are bounded.
kvrt_attend_bounds steps_of(const cache& store, const kvrt_attend_view& look, uint32_t items,
                            uint32_t rows, uint32_t item_rows) {
    kvrt_attend_bounds made = {};
    made.view = look;
    made.items = items;
    made.rows = rows;
    made.item_rows = item_rows;
    made.slots = store.limits.max_tokens_per_sequence;
    return made;
}

uint32_t most_item_rows(const step& target) {
    uint32_t most = 0;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        most = std::max(most, target.arrays->items[i].rows);
    }
    return most;
}

template <class entry>
entry* entries(host_array<uint32_t>& words) {
    return reinterpret_cast<entry*>(words.data());
}

}  // namespace

/// Layers that look at a lane alike have one view.
void device_attention::find_views(const step_context& context) {
    const model_geometry& model = context.store->model;
    view_count = 0;
    for (uint32_t layer = 0; layer < model.layers.size(); ++layer) {
        const layer_geometry& geometry = model.layers[layer];
        for (uint32_t i = 0; i < geometry.lanes; ++i) {
            const uint32_t lane = geometry.first_lane + i;
            const kvrt_attend_view look = {geometry.group(), geometry.window, geometry.window_sinks,
                                           model.lanes[lane].seals ? 1u : 0};
            uint32_t v = 0;
            for (; v < view_count; ++v) {
                const view& known = views[v];
                if (known.lane == lane && known.look.group == look.group &&
                    known.look.window == look.window &&
                    known.look.window_sinks == look.window_sinks) {
                    break;
                }
            }
            if (v == view_count) {
                views[view_count].lane = lane;
                views[view_count++].look = look;
            }
            layers[context.first_layer[layer] + i].view = v;
        }
    }
}

/// Room for weights: of the rows that a tile of query vectors has, of every sequence that observes,
/// or of so many rows of all slots that fill the arena; of two at least, since blocks are shared.
/// What a captured launch keeps is kept in one wave.
void device_attention::measure_kept(const step_context& context) {
    const cache& store = *context.store;
    const uint64_t sequences =
        std::min(store.limits.max_step_sequences, store.limits.max_observed_sequences);
    if (sequences == 0) return;
    const auto heads_of = [&](const view& each) {
        return uint64_t{each.look.group} * store.model.lanes[each.lane].kv_heads;
    };
    const auto observes = [&](const view& each) { return store.model.lanes[each.lane].evictable; };
    for (uint32_t v = 0; v < view_count; ++v) {
        if (!observes(views[v])) continue;
        const uint64_t row = kept_entries_of_row(store) * heads_of(views[v]);
        const uint64_t least = std::clamp<uint64_t>(most_least_entries / row, 1, least_kept_rows);
        const uint64_t rows = std::max(query_vectors_of_tile / views[v].look.group, 2u);
        const uint64_t of_arena =
            rows * (slots_of_arena(store) / 16 + sequences) * heads_of(views[v]);
        kept_entries =
            std::max({kept_entries, least * row, std::min(rows * sequences * row, of_arena)});
    }
    for (uint32_t v = 0; v < view_count; ++v) {
        if (!observes(views[v])) continue;
        views[v].most_kept = static_cast<uint32_t>(kept_entries / heads_of(views[v]));
    }
}

void device_attention::measure_view(const step_context& context, view& made, uint64_t& words) {
    const cache_limits& limits = context.store->limits;
    made.most = steps_of(*context.store, made.look, limits.max_step_sequences,
                         limits.max_step_tokens, limits.max_step_tokens);
    made.most.most_kept = made.most_kept;
    context.store->device.bound_attention(made.most);
    made.first_word = words;
    const auto add = [&](uint64_t count, uint64_t each) {
        const uint64_t at = words - made.first_word;
        words += round_up<uint64_t>(count * each, line_words);
        return at;
    };
    add(made.most.sequences, sequence_words);
    for (uint32_t kind = 0; kind < (made.look.seals != 0 ? kinds : 1); ++kind) {
        made.pieces[kind] = add(made.most.pieces, piece_words);
        made.row_pieces[kind] = add(made.most.row_pieces, row_piece_words);
    }
    if (made.most_kept != 0) {
        made.observe_waves = add(made.most.sequences, sizeof(kvrt_observe_wave) / sizeof(uint32_t));
        made.observe_items = add(made.most.sequences, sizeof(kvrt_observe_item) / sizeof(uint32_t));
    }
    made.first_wave = place_waves;
    place_waves += made.most.sequences;
}

status device_attention::measure(const step_context& context, uint32_t places, uint64_t& words) {
    const cache& store = *context.store;
    host_allocator& allocator = context.store->allocator;
    const uint64_t items = store.limits.max_step_sequences;
    KVRT_TRY(layers.allocate(allocator, context.layers.size(), "attention on the device"));
    KVRT_TRY(views.allocate(allocator, context.layers.size(), "attention on the device"));
    find_views(context);
    measure_kept(context);
    first_word = round_up<uint64_t>(words, line_words);
    uint64_t in_place = 0, sequences = 0, pieces = 0, row_pieces = 0;
    for (uint32_t v = 0; v < view_count; ++v) {
        measure_view(context, views[v], in_place);
        const kvrt_attend_bounds& most = views[v].most;
        sequences = std::max<uint64_t>(sequences, most.sequences);
        pieces = std::max<uint64_t>(pieces, most.pieces);
        row_pieces = std::max<uint64_t>(row_pieces, most.row_pieces);
        observations.available = observations.available || views[v].most_kept != 0;
    }
    KVRT_TRY(observations.create(context, places, static_cast<uint32_t>(sequences)));
    place_words = in_place;
    words = first_word + places * place_words;

    // Twice as many partial results as there are pieces when the arena is full, and those of any
    // sequence.
    const uint32_t smallest_piece = view_count == 0 ? 1 : views[0].most.piece_slots;
    captured_pieces = static_cast<uint32_t>(std::min<uint64_t>(
        ceil_divide<uint64_t>(slots_of_arena(store), smallest_piece) + items, uint64_t{1} << 24));
    const uint64_t usual =
        std::max(2 * std::min<uint64_t>(captured_pieces, pieces), least_partials);
    for (uint32_t i = 0; i < layers.size(); ++i) {
        const uint64_t partials = std::max(usual, views[layers[i].view].most.partials + 1);
        workspace_floats =
            std::max(workspace_floats, partials * floats_of_partial(context.layers[i]));
    }
    for (uint32_t i = 0; i < layers.size(); ++i) {
        view& of = views[layers[i].view];
        const uint64_t partials = workspace_floats / floats_of_partial(context.layers[i]) / 2 * 2;
        of.most_partials = of.most_partials == 0 ? partials : std::min(of.most_partials, partials);
    }

    KVRT_TRY(planned.allocate(allocator, uint64_t{places} * view_count, "plans of steps"));
    KVRT_TRY(captured.allocate(allocator, places * store.model.layers.size(), "plans of steps"));
    KVRT_TRY(waves.allocate(allocator, uint64_t{places} * place_waves, "plans of steps"));
    KVRT_TRY(listed_items.allocate(allocator, items, "plans of steps"));
    KVRT_TRY(sequence_scratch.allocate(allocator, sequences * sequence_words, "plans of steps"));
    for (uint32_t kind = 0; kind < kinds; ++kind) {
        KVRT_TRY(piece_scratch[kind].allocate(allocator, pieces * piece_words, "plans of steps"));
        KVRT_TRY(row_piece_scratch[kind].allocate(allocator, row_pieces * row_piece_words,
                                                  "plans of steps"));
    }
    return KV_OK;
}

status device_attention::create(step_context& context) {
    workspace_floats = round_up<uint64_t>(workspace_floats, 64);  // weights lie behind them
    return context.store->device.create_workspace(
        workspace_floats * sizeof(float) + kept_entries * kept_entry_bytes, &workspace);
}

void device_attention::list_items(const step& target, uint32_t index) {
    const uint32_t block_tokens = target.context->store->model.block_tokens;
    const view& of = views[index];
    const uint32_t* const kept_rows =
        observations.rows.data() +
        uint64_t{target.place} * target.context->store->limits.max_step_sequences;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        const lane_state& state = item.owner->lanes[of.lane];
        kvrt_attend_sequence& made = listed_items[i];
        made = {};
        made.table = i;
        made.first_row = item.first_row;
        made.rows = item.rows;
        made.slots = state.slots + item.rows;
        made.explicit_slots = state.explicit_slots;
        made.next_position = static_cast<uint32_t>(item.owner->next_position + item.rows);
        made.window_first = static_cast<int32_t>(int64_t{state.slots} - of.look.window + 1);
        made.sealed_slots = std::min(state.sealed_blocks * block_tokens, made.slots);
        if (of.most_kept != 0) made.kept_rows = kept_rows[i];
    }
}

/// A step of the same sequences as the one before in this place, each a few slots longer, has the
/// same lists but for lengths. Where they are not just that, nothing has happened.
bool device_attention::advance_view(const step& target, uint32_t index) {
    const view& of = views[index];
    view_plan& last = planned[uint64_t{target.place} * view_count + index];
    const auto lies_there = [](const plan_part& part, uint64_t words) {
        return !part.copied && part.reach == words;
    };
    const uint64_t observed_words =
        of.most_kept == 0 ? 0 : last.waves * sizeof(kvrt_observe_wave) / sizeof(uint32_t);
    if (last.sequences != target.item_count || last.observed.items != 0 ||
        !lies_there(last.observed.wave_part, observed_words) ||
        !lies_there(last.sequence_part, last.sequences * sequence_words) ||
        !lies_there(last.piece_parts[0], last.pieces[0] * piece_words) ||
        !lies_there(last.row_piece_parts[0], 0) || last.piece_parts[1].reach != 0 ||
        last.row_piece_parts[1].reach != 0) {
        return false;
    }
    kvrt_attend_plan plan = {};
    plan.view = of.look;
    plan.items = listed_items.data();
    plan.item_count = target.item_count;
    plan.sequence_count = last.sequences;
    plan.wave_count = last.waves;
    const uint64_t begin = first_word + target.place * place_words + of.first_word;
    return target.context->store->device.advance_attention(plan, begin);
}

void device_attention::plan_view(const step& target, uint32_t index) {
    list_items(target, index);
    if (advance_view(target, index)) return;
    plugin_device& device = target.context->store->device;
    const view& of = views[index];
    kvrt_attend_plan plan = {};
    plan.view = of.look;
    plan.items = listed_items.data();
    plan.item_count = target.item_count;
    plan.most_partials = of.most_partials;
    plan.most_kept = of.most_kept;
    plan.sequences = entries<kvrt_attend_sequence>(sequence_scratch);
    for (uint32_t kind = 0; kind < kinds; ++kind) {
        plan.pieces[kind] = entries<kvrt_attend_piece>(piece_scratch[kind]);
        plan.row_pieces[kind] = entries<kvrt_rows_piece>(row_piece_scratch[kind]);
    }
    plan.waves = waves.data() + uint64_t{target.place} * place_waves + of.first_wave;
    device.plan_attention(plan);

    view_plan& last = planned[uint64_t{target.place} * view_count + index];
    const uint64_t begin = first_word + target.place * place_words + of.first_word;
    device_shares& shares = target.context->tables.shares;
    shares.write(device, last.sequence_part, begin, sequence_scratch.data(),
                 plan.sequence_count * sequence_words);
    for (uint32_t kind = 0; kind < (of.look.seals != 0 ? kinds : 1); ++kind) {
        last.pieces[kind] = plan.piece_count[kind];
        last.row_pieces[kind] = plan.row_piece_count[kind];
        shares.write(device, last.piece_parts[kind], begin + of.pieces[kind],
                     piece_scratch[kind].data(), last.pieces[kind] * piece_words);
        shares.write(device, last.row_piece_parts[kind], begin + of.row_pieces[kind],
                     row_piece_scratch[kind].data(), last.row_pieces[kind] * row_piece_words);
    }
    last.sequences = plan.sequence_count;
    last.waves = plan.wave_count;
    if (of.most_kept == 0) return;
    observations.list(target, of.lane, plan, last.observed, begin + of.observe_waves,
                      begin + of.observe_items);
}

/// Views of lanes that have the same slots, that look alike and have as much room, have the same
/// lists, in parts that are laid out alike: the first such view.
uint32_t device_attention::leading_view(const device_shares& shares, uint32_t index) const {
    const view& mine = views[index];
    uint32_t first = 0;
    while (first < index) {
        const view& other = views[first];
        if (shares.leaders[other.lane] == shares.leaders[mine.lane] &&
            std::memcmp(&other.look, &mine.look, sizeof mine.look) == 0 &&
            other.most_partials == mine.most_partials && other.most_kept == mine.most_kept &&
            (mine.most_kept == 0 || observations.alike(other.lane, mine.lane))) {
            break;
        }
        ++first;
    }
    return first;
}

void device_attention::copy_view(const step& target, uint32_t index, uint32_t from) {
    device_shares& shares = target.context->tables.shares;
    const view& of = views[index];
    view_plan& mine = planned[uint64_t{target.place} * view_count + index];
    const view_plan& other = planned[uint64_t{target.place} * view_count + from];
    const uint64_t place = first_word + target.place * place_words;
    const uint64_t begin = place + of.first_word, source = place + views[from].first_word;
    mine.sequences = other.sequences;
    shares.copy(mine.sequence_part, begin, source, mine.sequences * sequence_words);
    for (uint32_t kind = 0; kind < (of.look.seals != 0 ? kinds : 1); ++kind) {
        mine.pieces[kind] = other.pieces[kind];
        mine.row_pieces[kind] = other.row_pieces[kind];
        shares.copy(mine.piece_parts[kind], begin + of.pieces[kind], source + of.pieces[kind],
                    mine.pieces[kind] * piece_words);
        shares.copy(mine.row_piece_parts[kind], begin + of.row_pieces[kind],
                    source + of.row_pieces[kind], mine.row_pieces[kind] * row_piece_words);
    }
    mine.waves = other.waves;
    if (of.most_kept != 0) {
        mine.observed.items = other.observed.items;
        shares.copy(mine.observed.wave_part, begin + of.observe_waves,
                    source + views[from].observe_waves,
                    mine.waves * sizeof(kvrt_observe_wave) / sizeof(uint32_t));
    }
    if (of.most_kept != 0 && mine.observed.items != 0) {
        shares.copy(mine.observed.item_part, begin + of.observe_items,
                    source + views[from].observe_items,
                    mine.observed.items * sizeof(kvrt_observe_item) / sizeof(uint32_t));
    }
    const uint64_t first_wave = uint64_t{target.place} * place_waves;
    std::copy_n(waves.data() + first_wave + views[from].first_wave, other.waves,
                waves.data() + first_wave + of.first_wave);
}

status device_attention::check_captured(const step& target, uint32_t index) const {
    const view_plan& plan = planned[uint64_t{target.place} * view_count + index];
    const uint32_t pieces = std::max(plan.pieces[0], plan.pieces[1]);
    if (plan.waves == 1 && pieces <= captured_pieces) return KV_OK;
    return fail(
        KV_LIMIT,
        "kv_attend: the step takes {} launches and {} pieces of contexts, a captured one has "
        "one for {}: append fewer rows in a step",
        plan.waves, pieces, captured_pieces);
}

status device_attention::plan(const step& target) {
    observations.plan(target);
    for (uint32_t v = 0; v < view_count; ++v) {
        const uint32_t leading = leading_view(target.context->tables.shares, v);
        if (leading == v) {
            plan_view(target, v);
        } else {
            copy_view(target, v, leading);
        }
    }
    if (target.rows > captured_rows) return KV_OK;
    for (uint32_t v = 0; v < view_count; ++v) KVRT_TRY(check_captured(target, v));
    return KV_OK;
}

uint8_t& device_attention::captured_at(const step& target, uint32_t layer) {
    return captured[target.place * target.context->store->model.layers.size() + layer];
}

status check_replayed(const step& target, uint32_t layer) {
    if (!target.context->verbs.available) return require_kernels(*target.context->store, "tables");
    const uint8_t captured = target.context->attention.captured_at(target, layer);
    if ((captured & captured_attention) == 0) {
        return fail(KV_INVALID,
                    "tables: KV_CUDA_TABLES_ATTENDED: no kv_attend of layer {} was captured in "
                    "place {} without KV_ATTEND_NO_STATISTICS",
                    layer, target.place);
    }
    const uint32_t most_rows = target.context->attention.captured_rows;
    if (target.rows > most_rows) {
        return fail(KV_INVALID,
                    "tables: KV_CUDA_TABLES_ATTENDED: the step has {} rows, the largest that was "
                    "captured {}",
                    target.rows, most_rows);
    }
    if (target.context->queries.gathers_in(target, layer) && (captured & captured_gathering) == 0) {
        return fail(KV_INVALID,
                    "tables: KV_CUDA_TABLES_ATTENDED: kv_attend of layer {} was captured in place "
                    "{} before any sequence gathered statistics of queries: capture it again",
                    layer, target.place);
    }
    return KV_OK;
}

void note_replayed(step& target, uint32_t layer) {
    const layer_geometry& geometry = target.context->store->model.layers[layer];
    for (uint32_t lane = geometry.first_lane; lane < geometry.end_lane(); ++lane) {
        target.context->attention.observations.note_lane(target, lane);
    }
    target.context->queries.note_layer(target, layer);
}

status attend_on_device(step& target, uint32_t layer, const attend_call& call, bool observes) {
    cache& store = *target.context->store;
    const device_verbs& verbs = target.context->verbs;
    device_attention& attention = target.context->attention;
    const layer_geometry& geometry = store.model.layers[layer];
    const device_tables& tables = target.context->tables;
    KVRT_TRY(require_kernels(store, "kv_attend"));
    const uint32_t item_rows = most_item_rows(target);
    for (uint32_t i = 0; i < geometry.lanes; ++i) {
        const uint32_t lane = geometry.first_lane + i;
        const uint32_t index = target.context->first_layer[layer] + i;
        const attend_layer& over = target.context->layers[index];
        const device_attention::layer_entry& entry = attention.layers[index];
        const device_attention::view& of = attention.views[entry.view];
        const uint32_t first_query = store.model.lanes[lane].first_head * geometry.group();
        const uint64_t begin =
            attention.first_word + target.place * attention.place_words + of.first_word;
        kvrt_attend_rows rows = {};
        rows.lane = &verbs.lanes[lane];
        rows.sealed = of.look.seals != 0 ? &verbs.sealed_lanes[lane] : nullptr;
        rows.block_table = static_cast<const uint32_t*>(
            tables.at(tables.parts_of(target.place, lane).block_table));
        rows.block_table_stride = tables.stride;
        rows.sequences = static_cast<const kvrt_attend_sequence*>(tables.at(begin));
        for (uint32_t kind = 0; kind < kinds; ++kind) {
            rows.pieces[kind] =
                static_cast<const kvrt_attend_piece*>(tables.at(begin + of.pieces[kind]));
            rows.row_pieces[kind] =
                static_cast<const kvrt_rows_piece*>(tables.at(begin + of.row_pieces[kind]));
        }
        const device_attention::view_plan& plan =
            attention.planned[uint64_t{target.place} * attention.view_count + entry.view];
        rows.waves =
            attention.waves.data() + uint64_t{target.place} * attention.place_waves + of.first_wave;
        rows.wave_count = plan.waves;
        rows.bounds = steps_of(store, of.look, target.item_count, target.rows, item_rows);
        rows.bounds.most_kept = of.most_kept;
        rows.most_pieces = attention.captured_pieces;
        rows.most_partials = of.most_partials;
        rows.workspace = attention.workspace;
        rows.kept_at = attention.workspace_floats * sizeof(float);
        rows.kept_entries = attention.kept_entries;
        if (observes && of.most_kept != 0) {
            const observation_store& observed = target.context->retention->observations;
            rows.observes = 1;
            rows.sums = observed.on_device;
            rows.first_head = static_cast<uint32_t>(observed.offset[lane] / observed.slot_stride);
            rows.observe_waves =
                static_cast<const kvrt_observe_wave*>(tables.at(begin + of.observe_waves));
            rows.observe_items =
                static_cast<const kvrt_observe_item*>(tables.at(begin + of.observe_items));
        }
        rows.queries = tensor_of(from_head(call.queries, first_query));
        rows.out = tensor_of(from_head(call.out, first_query));
        if (call.log_sum_exp != nullptr) rows.log_sum_exp = call.log_sum_exp + first_query;
        rows.query_heads = over.query_heads;
        rows.row_heads = geometry.query_heads;
        rows.scale = over.scale;
        rows.softcap = over.softcap;
        rows.sink_logits = entry.sink_logits;
        rows.alibi_slopes = entry.alibi_slopes;
        rows.window = over.window;
        rows.window_sinks = over.window_sinks;
        if (over.slot_turning != nullptr) {
            rows.turned_pairs = over.slot_turning->pairs;
            rows.turned_interleaved = over.slot_turning->interleaved ? 1 : 0;
            rows.turning_gain = over.slot_turning->gain;
            rows.turning_table = entry.turning_table;
        }
        KVRT_TRY(store.device.attend_rows(target.number, rows));
        if (rows.captured == 0) {
            if (observes) attention.observations.note_lane(target, lane);
            continue;
        }
        attention.captured_rows = std::max(attention.captured_rows, target.rows);
        if (observes) attention.captured_at(target, layer) |= captured_attention;
    }
    return KV_OK;
}

}  // namespace kvrt
