#include "step/device_verbs.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "step/step.hpp"

namespace kvrt {

namespace {

constexpr uint32_t nothing = 0xffffffffu;
constexpr uint64_t line_words = device_tables::line_words;
constexpr uint64_t target_words = 3;
constexpr uint64_t sequence_words = sizeof(kvrt_attend_sequence) / sizeof(uint32_t);
constexpr uint64_t piece_words = sizeof(kvrt_attend_piece) / sizeof(uint32_t);
/// Partial results that any pool has room for: of short prompts, a piece each.
constexpr uint64_t least_partials = 256;

kvrt_operand operand_of(const operand_layout& layout) {
    kvrt_operand made = {};
    made.format = layout.format->id;
    made.kind = static_cast<uint32_t>(layout.format->kind);
    made.type = static_cast<uint32_t>(layout.type);
    made.dim = layout.dim;
    made.words = layout.words;
    made.word_bytes = layout.word_bytes;
    made.rotated = layout.rotated ? 1 : 0;
    made.inline_form = layout.inline_form ? 1 : 0;
    made.offset = layout.offset;
    made.group_stride = layout.group_stride;
    made.slot_stride = layout.slot_stride;
    made.head_stride = layout.head_stride;
    made.word_stride = layout.word_stride;
    made.tile_tokens = layout.tile_tokens;
    if (layout.turning != nullptr) {
        made.turned_pairs = layout.turning->pairs;
        made.turned_interleaved = layout.turning->interleaved ? 1 : 0;
        made.turning_gain = layout.turning->gain;
    }
    return made;
}

/// But for constants.
kvrt_lane lane_of(const block_store& blocks, const lane_geometry& lane, const tile_layout& layout) {
    kvrt_lane made = {};
    made.arena = blocks.arena();
    made.order = static_cast<uint32_t>(layout.order);
    made.block_tokens = layout.block_tokens;
    made.kv_heads = lane.kv_heads;
    made.block_bytes = layout.block_bytes;
    made.id_shift = static_cast<uint32_t>(std::countr_zero(units_per_id(blocks, lane)));
    made.keys = operand_of(layout.keys);
    made.values = operand_of(layout.values);
    return made;
}

kvrt_device_tensor tensor_of(const tensor_view& view) {
    kvrt_device_tensor made = {};
    made.data = view.data;
    made.type = static_cast<uint32_t>(view.type);
    made.row_stride = view.row_stride;
    made.head_stride = view.head_stride;
    made.dim_stride = view.dim_stride;
    return made;
}

/// The part of a layer's tensor that begins at one of its heads.
tensor_view from_head(const tensor_view& whole, uint32_t head) {
    tensor_view made = whole;
    made.data = whole.at(0, head, 0);
    return made;
}

status require_kernels(const cache& store, const char* verb) {
    const status verdict = store.device.kernels();
    if (verdict == KV_OK) return KV_OK;
    const std::string reason = message_buffer();
    return fail(verdict, "{}: {}", verb, reason);
}

/// So many slots of every lane fill the arena.
uint64_t slots_of_arena(const cache& store) {
    uint64_t bytes = 0;
    for (const lane_geometry& lane : store.model.lanes) bytes += lane.layout.block_bytes;
    return store.blocks.slab_count() * slab_bytes / bytes * store.model.block_tokens;
}

/// Of keys that are levelled.
uint64_t channels_of(const lane_geometry& lane) {
    return lane.layout.keys.channel_means == nullptr
               ? 0
               : uint64_t{lane.kv_heads} * lane.layout.keys.dim;
}

/// What kernels read of a table of rotations.
uint64_t turning_floats(const position_rotation& turning) {
    return uint64_t{turning_digits} * turning_digit_values * 2 * turning.pairs;
}

uint64_t constant_words(const step_context& context) {
    const model_geometry& model = context.store->model;
    uint64_t words = 0;
    for (const position_rotation& turning : model.turnings) words += turning_floats(turning);
    for (const lane_geometry& lane : model.lanes) {
        words += 2 * lane.kv_heads + 2 * channels_of(lane);
    }
    for (const attend_layer& layer : context.layers) words += 2 * layer.query_heads;
    return words;
}

}  // namespace

status device_verbs::measure(const step_context& context, uint32_t places, uint64_t tables_words,
                             uint64_t& words) {
    const cache& store = *context.store;
    words = tables_words;
    available = store.device.kernels() == KV_OK;
    if (!available) return KV_OK;
    const uint64_t items = store.limits.max_step_sequences;
    const uint32_t most_slots = store.limits.max_tokens_per_sequence;
    // Longer sequences may have fewer: their pieces are larger.
    const uint32_t smallest_piece = store.device.attend_piece_slots(1);
    for (uint32_t slots = smallest_piece; slots < most_slots + smallest_piece;
         slots += smallest_piece) {
        pieces_each =
            std::max(pieces_each, ceil_divide(slots, store.device.attend_piece_slots(slots)));
    }
    const uint64_t of_arena = ceil_divide<uint64_t>(slots_of_arena(store), smallest_piece) + items;
    most_pieces =
        static_cast<uint32_t>(std::min({items * pieces_each, of_arena, uint64_t{1} << 24}));
    most_partials = std::max(uint64_t{2} * most_pieces, least_partials);
    sequences = round_up<uint64_t>(target_words * store.limits.max_step_tokens, line_words);
    pieces = sequences + round_up<uint64_t>(items * sequence_words, line_words);
    lane_words = pieces + round_up<uint64_t>(most_pieces * piece_words, line_words);
    place_words = lane_words * store.model.lanes.size();
    first_word = round_up<uint64_t>(tables_words, line_words);
    words = first_word + places * place_words + constant_words(context);

    host_allocator& allocator = context.store->allocator;
    KVRT_TRY(lanes.allocate(allocator, store.model.lanes.size(), "lanes on the device"));
    KVRT_TRY(sealed_lanes.allocate(allocator, store.model.lanes.size(), "lanes on the device"));
    KVRT_TRY(constants.allocate(allocator, context.layers.size(), "lanes on the device"));
    KVRT_TRY(planned.allocate(allocator, places * store.model.lanes.size(), "plans of steps"));
    KVRT_TRY(last_items.allocate(allocator, uint64_t{places} * 2, "plans of steps"));
    return row_scratch.allocate(allocator,
                                std::max({sequences, pieces - sequences, lane_words - pieces}),
                                "plans of steps");
}

status device_verbs::create(step_context& context) {
    if (!available) return KV_OK;
    cache& store = *context.store;
    const device_tables& tables = context.tables;
    uint64_t next = first_word + max_open_steps * place_words;
    const auto keep = [&](const float* values, uint64_t count) -> const float* {
        if (values == nullptr) return nullptr;
        store.device.write_table(next, reinterpret_cast<const uint32_t*>(values), count);
        const void* const address = tables.at(next);
        next += count;
        return static_cast<const float*>(address);
    };
    const host_array<position_rotation>& turnings = store.model.turnings;
    const uint64_t first_turning = next;
    for (const position_rotation& each : turnings) (void)keep(each.table, turning_floats(each));
    const auto kept_turning = [&](const position_rotation* turning) -> const float* {
        if (turning == nullptr) return nullptr;
        uint64_t word = first_turning;
        for (const position_rotation* each = turnings.data(); each != turning; ++each) {
            word += turning_floats(*each);
        }
        return static_cast<const float*>(tables.at(word));
    };
    for (uint32_t i = 0; i < lanes.size(); ++i) {
        const lane_geometry& lane = store.model.lanes[i];
        kvrt_operand shared = {};  // of both layouts
        const operand_layout& keys = lane.layout.keys;
        shared.scales = keep(keys.scales, lane.kv_heads);
        shared.channel_means = keep(keys.channel_means, channels_of(lane));
        shared.channel_scales = keep(keys.channel_scales, channels_of(lane));
        shared.turning_table = kept_turning(keys.turning);
        const float* const value_scales = keep(lane.layout.values.scales, lane.kv_heads);
        lanes[i] = lane_of(store.blocks, lane, lane.layout);
        if (lane.seals) sealed_lanes[i] = lane_of(store.blocks, lane, lane.sealed_layout);
        for (kvrt_lane* made : {&lanes[i], &sealed_lanes[i]}) {
            made->keys.scales = shared.scales;
            made->keys.channel_means = shared.channel_means;
            made->keys.channel_scales = shared.channel_scales;
            made->keys.turning_table = shared.turning_table;
            made->values.scales = value_scales;
        }
    }
    KVRT_TRY(context.counts.create(store));
    uint64_t vector_floats = 0;
    for (uint32_t i = 0; i < constants.size(); ++i) {
        const attend_layer& layer = context.layers[i];
        constants[i] = {keep(layer.sink_logits, layer.query_heads),
                        keep(layer.alibi_slopes, layer.query_heads)};
        vector_floats =
            std::max(vector_floats, uint64_t{layer.query_heads} * (layer.layout.values.dim + 2));
    }
    return store.device.create_workspace(most_partials * vector_floats * sizeof(float), &workspace);
}

void device_verbs::plan_targets(const step& target, uint32_t lane) {
    uint32_t* const words = row_scratch.data();
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        for (uint32_t r = 0; r < item.rows; ++r) {
            uint32_t* const made = words + target_words * (item.first_row + r);
            made[0] = i;
            made[1] = item.owner->lanes[lane].slots + r;
            made[2] = static_cast<uint32_t>(item.owner->next_position + r);
        }
    }
    const uint32_t end = std::max(target.rows, last_items[2 * target.place + 1]);
    std::fill(words + target_words * target.rows, words + target_words * end, nothing);
    target.context->store->device.write_table(part(target.place, lane), words, target_words * end);
}

/// Sequences, and their contexts cut into pieces; none of these where they do not fit.
void device_verbs::plan_attention(const step& target, uint32_t lane) {
    plugin_device& device = target.context->store->device;
    const int64_t window = target.context->store->model.lanes[lane].window;
    lane_plan& plan = planned[uint64_t{target.place} * lanes.size() + lane];
    const uint32_t listed_before = plan.listed;
    plan = {};
    uint32_t* const words = row_scratch.data();
    kvrt_attend_sequence* const list = reinterpret_cast<kvrt_attend_sequence*>(words);
    uint64_t count = 0;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        const lane_state& state = item.owner->lanes[lane];
        kvrt_attend_sequence& made = list[i];
        made = {};
        made.table = i;
        made.first_row = item.first_row;
        made.rows = item.rows;
        made.slots = state.slots + item.rows;
        made.explicit_slots = state.explicit_slots;
        made.next_position = static_cast<uint32_t>(item.owner->next_position + item.rows);
        made.window_first = static_cast<int32_t>(int64_t{state.slots} - window + 1);
        made.first_partial = static_cast<uint32_t>(plan.partials);
        made.pieces = ceil_divide(made.slots, device.attend_piece_slots(made.slots));
        plan.partials += uint64_t{made.pieces} * made.rows;
        count += made.pieces;
    }
    const uint32_t item_end = std::max(target.item_count, last_items[2 * target.place]);
    std::fill(words + target.item_count * sequence_words, words + item_end * sequence_words,
              nothing);
    const bool fits = count <= most_pieces && plan.partials <= most_partials;
    if (!fits) std::fill(words, words + target.item_count * sequence_words, nothing);
    const uint64_t begin = part(target.place, lane);
    device.write_table(begin + sequences, words, item_end * sequence_words);

    kvrt_attend_piece* piece = reinterpret_cast<kvrt_attend_piece*>(words);
    uint32_t partial = 0;
    for (uint32_t i = 0; fits && i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        const uint32_t slots = item.owner->lanes[lane].slots + item.rows;
        const uint32_t each = device.attend_piece_slots(slots);
        for (uint32_t slot = 0; slot < slots; slot += each, partial += item.rows) {
            *piece++ = {i, slot, std::min(slot + each, slots), partial};
        }
    }
    plan.pieces = plan.listed = fits ? static_cast<uint32_t>(count) : 0;
    const uint32_t end = std::max(plan.listed, listed_before);
    std::fill(words + plan.listed * piece_words, words + end * piece_words, nothing);
    device.write_table(begin + pieces, words, end * piece_words);
}

status device_verbs::check_fits(const step& target, uint32_t lane) const {
    const lane_plan& plan = planned[uint64_t{target.place} * lanes.size() + lane];
    if (plan.pieces != 0) return KV_OK;
    return fail(KV_LIMIT,
                "kv_attend: the step's rows have {} partial results, the pool's workspace on the "
                "device holds {}, of {} pieces: append fewer rows in a step",
                plan.partials, most_partials, most_pieces);
}

status device_verbs::plan(const step& target) {
    if (!available) return KV_OK;
    for (uint32_t lane = 0; lane < lanes.size(); ++lane) {
        plan_targets(target, lane);
        plan_attention(target, lane);
    }
    last_items[2 * target.place] = target.item_count;
    last_items[2 * target.place + 1] = target.rows;
    if (target.rows > captured_rows) return KV_OK;
    for (uint32_t lane = 0; lane < lanes.size(); ++lane) KVRT_TRY(check_fits(target, lane));
    return KV_OK;
}

status write_on_device(step& target, uint32_t layer, const tensor_view& keys,
                       const tensor_view& values) {
    cache& store = *target.context->store;
    const layer_geometry& geometry = store.model.layers[layer];
    const device_verbs& verbs = target.context->verbs;
    const device_tables& tables = target.context->tables;
    KVRT_TRY(require_kernels(store, "kv_write"));
    for (uint32_t lane = geometry.first_lane; lane < geometry.end_lane(); ++lane) {
        const uint32_t head = store.model.lanes[lane].first_head;
        kvrt_write_rows call = {};
        call.lane = &verbs.lanes[lane];
        call.block_table = static_cast<const uint32_t*>(
            tables.at(tables.parts_of(target.place, lane).block_table));
        call.block_table_stride = tables.stride;
        call.targets = static_cast<const uint32_t*>(tables.at(verbs.part(target.place, lane)));
        call.rows = target.rows;
        call.keys = tensor_of(from_head(keys, head));
        call.values = tensor_of(from_head(values, head));
        const saturation_counts counts = target.context->counts.of(store, lane);
        call.saturated_keys = counts.keys;
        call.saturated_values = counts.values;
        KVRT_TRY(store.device.write_rows(target.number, call));
        target.arrays->lane_written[lane] = 1;
    }
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        item.owner->written_rows = item.rows;
    }
    return KV_OK;
}

status attend_on_device(step& target, uint32_t layer, const attend_call& call) {
    cache& store = *target.context->store;
    device_verbs& verbs = target.context->verbs;
    const layer_geometry& geometry = store.model.layers[layer];
    const device_tables& tables = target.context->tables;
    KVRT_TRY(require_kernels(store, "kv_attend"));
    uint32_t most_rows = 0;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        most_rows = std::max(most_rows, target.arrays->items[i].rows);
    }
    for (uint32_t i = 0; i < geometry.lanes; ++i) {
        const uint32_t lane = geometry.first_lane + i;
        const uint32_t index = target.context->first_layer[layer] + i;
        const attend_layer& over = target.context->layers[index];
        const device_verbs::lane_plan& plan =
            verbs.planned[uint64_t{target.place} * verbs.lanes.size() + lane];
        if (store.model.lanes[lane].seals) {
            return fail(KV_UNSUPPORTED,
                        "kv_attend: layer {} has blocks that are sealed: not on KV_DEVICE_CUDA in "
                        "this version",
                        layer);
        }
        if (over.slot_turning != nullptr) {
            return fail(KV_UNSUPPORTED,
                        "kv_attend: layer {} turns keys by cache positions: not on KV_DEVICE_CUDA "
                        "in this version",
                        layer);
        }
        if (over.window != store.model.lanes[lane].window) {
            return fail(KV_UNSUPPORTED,
                        "kv_attend: layer {} has another window than the layer whose cache it "
                        "shares: not on KV_DEVICE_CUDA in this version",
                        layer);
        }
        KVRT_TRY(verbs.check_fits(target, lane));
        const uint32_t first_query = store.model.lanes[lane].first_head * geometry.group();
        const uint64_t part = verbs.part(target.place, lane);
        kvrt_attend_rows rows = {};
        rows.lane = &verbs.lanes[lane];
        rows.block_table = static_cast<const uint32_t*>(
            tables.at(tables.parts_of(target.place, lane).block_table));
        rows.block_table_stride = tables.stride;
        rows.sequences =
            static_cast<const kvrt_attend_sequence*>(tables.at(part + verbs.sequences));
        rows.pieces = static_cast<const kvrt_attend_piece*>(tables.at(part + verbs.pieces));
        rows.sequence_count = target.item_count;
        rows.piece_count = plan.pieces;
        rows.captured_pieces = static_cast<uint32_t>(
            std::min<uint64_t>(verbs.most_pieces, uint64_t{target.item_count} * verbs.pieces_each));
        rows.most_rows = most_rows;
        rows.most_partials = verbs.most_partials;
        rows.workspace = verbs.workspace;
        rows.queries = tensor_of(from_head(call.queries, first_query));
        rows.out = tensor_of(from_head(call.out, first_query));
        if (call.log_sum_exp != nullptr) rows.log_sum_exp = call.log_sum_exp + first_query;
        rows.query_heads = over.query_heads;
        rows.row_heads = geometry.query_heads;
        rows.scale = over.scale;
        rows.softcap = over.softcap;
        rows.sink_logits = verbs.constants[index].sink_logits;
        rows.alibi_slopes = verbs.constants[index].alibi_slopes;
        rows.window = over.window;
        rows.window_sinks = over.window_sinks;
        KVRT_TRY(store.device.attend_rows(target.number, rows));
        if (rows.captured != 0) verbs.captured_rows = std::max(verbs.captured_rows, target.rows);
    }
    return KV_OK;
}

}  // namespace kvrt
