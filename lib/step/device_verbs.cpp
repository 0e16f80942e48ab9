#include "step/device_verbs.hpp"

#include <algorithm>
#include <bit>
#include <string>

#include "step/step.hpp"

namespace kvrt {

namespace {

constexpr uint64_t line_words = device_tables::line_words;
constexpr uint64_t target_words = 3;

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

kvrt_device_tensor tensor_of(const tensor_view& view) {
    kvrt_device_tensor made = {};
    made.data = view.data;
    made.type = static_cast<uint32_t>(view.type);
    made.row_stride = view.row_stride;
    made.head_stride = view.head_stride;
    made.dim_stride = view.dim_stride;
    return made;
}

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

status device_verbs::measure(step_context& context, uint32_t places, uint64_t tables_words,
                             uint64_t& words) {
    const cache& store = *context.store;
    words = tables_words;
    available = store.device.kernels() == KV_OK;
    if (!available) return KV_OK;
    lane_words = round_up<uint64_t>(target_words * store.limits.max_step_tokens, line_words);
    place_words = lane_words * store.model.lanes.size();
    first_word = round_up<uint64_t>(tables_words, line_words);
    words = first_word + places * place_words;
    KVRT_TRY(context.attention.measure(context, places, words));
    constants_word = words;
    words += constant_words(context);

    host_allocator& allocator = context.store->allocator;
    KVRT_TRY(lanes.allocate(allocator, store.model.lanes.size(), "lanes on the device"));
    KVRT_TRY(sealed_lanes.allocate(allocator, store.model.lanes.size(), "lanes on the device"));
    KVRT_TRY(targets.allocate(allocator, places * store.model.lanes.size(), "plans of steps"));
    return row_scratch.allocate(allocator, lane_words, "plans of steps");
}

status device_verbs::create(step_context& context) {
    if (!available) return KV_OK;
    cache& store = *context.store;
    const device_tables& tables = context.tables;
    uint64_t next = constants_word;
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
    for (uint32_t i = 0; i < context.layers.size(); ++i) {
        const attend_layer& layer = context.layers[i];
        device_attention::layer_entry& entry = context.attention.layers[i];
        entry.sink_logits = keep(layer.sink_logits, layer.query_heads);
        entry.alibi_slopes = keep(layer.alibi_slopes, layer.query_heads);
        entry.turning_table = kept_turning(layer.slot_turning);
    }
    return context.attention.create(context);
}

void device_verbs::plan_targets(const step& target, uint32_t lane) {
    device_shares& shares = target.context->tables.shares;
    const uint64_t word = targets_of(target.place, lane);
    plan_part& part = targets[uint64_t{target.place} * lanes.size() + lane];
    const uint64_t count = target_words * target.rows;
    if (!shares.leads(lane)) {
        return shares.copy(part, word, targets_of(target.place, shares.leaders[lane]), count);
    }
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
    shares.write(target.context->store->device, part, word, words, count);
}

status device_verbs::plan(const step& target) {
    if (!available) return KV_OK;
    for (uint32_t lane = 0; lane < lanes.size(); ++lane) plan_targets(target, lane);
    return target.context->attention.plan(target);
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
        call.targets =
            static_cast<const uint32_t*>(tables.at(verbs.targets_of(target.place, lane)));
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

}  // namespace kvrt
