// Opening a step and filling it: nothing of any sequence changes here but its in_step mark.
#include <algorithm>

#include "step/step.hpp"

namespace kvrt {

namespace {

/// What a layer is over one of its lanes.
attend_layer attend_layer_of(const layer_geometry& source, const lane_geometry& lane) {
    const uint32_t first_query = lane.first_head * source.group();
    attend_layer made;
    made.layout = lane.layout;
    if (lane.seals) made.sealed_layout = lane.sealed_layout;
    made.query_heads = lane.kv_heads * source.group();
    made.kv_heads = lane.kv_heads;
    made.scale = source.scale;
    made.softcap = source.softcap;
    if (source.sink_logits != nullptr) made.sink_logits = source.sink_logits + first_query;
    if (source.alibi_slopes != nullptr) made.alibi_slopes = source.alibi_slopes + first_query;
    made.window = source.window;
    made.window_sinks = source.window_sinks;
    made.slot_turning = source.slot_turning;
    return made;
}

}  // namespace

status create_step_context(cache& store, retention_context& retention, step_context& context) {
    context.store = &store;
    context.retention = &retention;
    host_allocator& allocator = store.allocator;
    const model_geometry& model = store.model;
    uint64_t most_lanes = 0, attend_layers = 0;
    for (const layer_geometry& layer : model.layers) {
        most_lanes = std::max<uint64_t>(most_lanes, layer.lanes);
        attend_layers += layer.lanes;
    }
    KVRT_TRY(context.layers.allocate(allocator, attend_layers, "attention layers"));
    KVRT_TRY(context.first_layer.allocate(allocator, model.layers.size(), "attention layers"));
    KVRT_TRY(context.attend_calls.allocate(allocator, most_lanes, "attention layers"));
    KVRT_TRY(context.write_calls.allocate(allocator, most_lanes, "attention layers"));
    uint64_t workspace = 0;
    uint32_t next = 0;
    for (uint32_t i = 0; i < model.layers.size(); ++i) {
        const layer_geometry& source = model.layers[i];
        context.first_layer[i] = next;
        for (uint32_t lane = source.first_lane; lane < source.end_lane(); ++lane) {
            context.layers[next++] = attend_layer_of(source, model.lanes[lane]);
        }
        workspace =
            std::max(workspace, attend_workspace_bytes(context.layers[next - 1],
                                                       store.limits.max_tokens_per_sequence,
                                                       store.limits.max_observed_sequences != 0));
    }
    // Room for several sequences at once, so that a batch of short ones runs in few waves.
    constexpr uint64_t comfortable = uint64_t{16} << 20;
    KVRT_TRY(context.workspace.allocate(allocator, std::max(workspace, comfortable),
                                        "attention workspace", memory_contents::scratch));
    if (store.on_device()) KVRT_TRY(context.tables.create(context, max_open_steps));
    for (step_storage& storage : context.storage) {
        const uint64_t items = store.limits.max_step_sequences;
        KVRT_TRY(storage.items.allocate(allocator, items, "step items"));
        KVRT_TRY(storage.undo.allocate(allocator, items * model.lanes.size(), "step undo"));
        KVRT_TRY(storage.attend_items.allocate(allocator, most_lanes * items, "step items"));
        KVRT_TRY(storage.observers.allocate(
            allocator, store.limits.max_observed_sequences == 0 ? 0 : most_lanes * items,
            "step items"));
        KVRT_TRY(storage.write_items.allocate(allocator, most_lanes * items, "step items"));
        KVRT_TRY(storage.lane_written.allocate(allocator, model.lanes.size(), "step lanes"));
        KVRT_TRY(storage.lane_exported.allocate(allocator, model.lanes.size(), "step lanes"));
    }
    return KV_OK;
}

status step_begin(step_context& context, step& target) {
    fence_clock& fences = context.store->fences;
    if (context.store->on_device()) KVRT_TRY(poll_device(*context.store));
    for (uint32_t place = 0; place < max_open_steps; ++place) {
        if (fences.open[place] != 0) continue;
        target = step{};
        target.context = &context;
        target.place = place;
        target.arrays = &context.storage[place];
        target.state = step_state::building;
        target.number = ++fences.last_begun;
        fences.open[place] = target.number;
        std::fill(target.arrays->lane_written.begin(), target.arrays->lane_written.end(),
                  uint8_t{0});
        std::fill(target.arrays->lane_exported.begin(), target.arrays->lane_exported.end(),
                  uint8_t{0});
        context.store->blocks.collect(fences);
        return KV_OK;
    }
    return fail(KV_LIMIT, "{} steps are open: end or cancel one first", max_open_steps);
}

status expect_state(const step& target, step_state wanted, const char* verb) {
    if (target.state == wanted) return KV_OK;
    switch (target.state) {
        case step_state::closed:
            return fail(KV_INVALID, "{}: the step was ended or cancelled", verb);
        case step_state::building:
            return fail(KV_INVALID, "{}: call kv_step_reserve first", verb);
        default:
            return fail(KV_INVALID, "{}: the step is reserved already", verb);
    }
}

step_item* find_item(step& target, const sequence& owner) {
    if (!owner.in_step || owner.item >= target.item_count) return nullptr;
    step_item& item = target.arrays->items[owner.item];
    return item.owner == &owner ? &item : nullptr;
}

status step_use_stream(step& target, void* stream) {
    KVRT_TRY(expect_state(target, step_state::building, "kv_cuda_step_use_stream"));
    cache& store = *target.context->store;
    if (!store.on_device()) {
        return fail(KV_INVALID, "kv_cuda_step_use_stream: the pool is on the CPU");
    }
    if (target.has_stream) {
        return fail(KV_INVALID, "kv_cuda_step_use_stream: the step has a stream already");
    }
    KVRT_TRY(store.device.begin_step(target.number, stream));
    target.has_stream = true;
    return KV_OK;
}

status step_append(step& target, sequence& owner, kv_seq handle, uint32_t count,
                   kv_append_info* info) {
    KVRT_TRY(expect_state(target, step_state::building, "kv_seq_append"));
    const cache_limits& limits = target.context->store->limits;
    if (owner.in_step) return fail(KV_INVALID, "seq {:#x} is in an open step already", handle);
    if (count == 0) return fail(KV_INVALID, "count is 0: append at least one token");
    if (target.item_count == limits.max_step_sequences) {
        return fail(KV_LIMIT, "the step holds max_step_sequences = {} sequences",
                    limits.max_step_sequences);
    }
    if (count > limits.max_step_tokens - target.rows) {
        return fail(KV_LIMIT, "{} tokens and {} more exceed max_step_tokens = {}", target.rows,
                    count, limits.max_step_tokens);
    }
    step_item& item = target.arrays->items[target.item_count];
    item = {&owner, handle, target.rows, count, count, false, 0};
    if (info != nullptr) {
        info->first_position = owner.next_position;
        info->item = target.item_count;
        info->first_row = target.rows;
    }
    owner.in_step = true;
    owner.item = target.item_count;
    ++target.item_count;
    target.rows += count;
    return KV_OK;
}

status step_remove(step& target, sequence& owner) {
    KVRT_TRY(expect_state(target, step_state::building, "kv_step_remove"));
    step_item* item = find_item(target, owner);
    if (item == nullptr) return fail(KV_INVALID, "seq is not in this step");
    owner.in_step = false;
    forget_deferred_round(owner);
    step_item* items = target.arrays->items.data();
    const uint32_t index = static_cast<uint32_t>(item - items);
    std::copy(items + index + 1, items + target.item_count, items + index);
    --target.item_count;
    target.rows = 0;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        items[i].first_row = target.rows;
        items[i].owner->item = i;
        target.rows += items[i].rows;
    }
    return KV_OK;
}

status check_accept(step& target, const sequence& owner, uint32_t count) {
    KVRT_TRY(expect_state(target, step_state::reserved, "kv_step_accept"));
    const step_item* item = find_item(target, owner);
    if (item == nullptr) return fail(KV_INVALID, "seq is not in this step");
    if (count <= item->rows) return KV_OK;
    return fail(KV_INVALID, "count is {}, the sequence appended {} tokens in this step", count,
                item->rows);
}

status step_accept(step& target, sequence& owner, uint32_t count) {
    KVRT_TRY(check_accept(target, owner, count));
    find_item(target, owner)->accepted = count;
    return KV_OK;
}

}  // namespace kvrt
