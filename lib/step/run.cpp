// Write and attend: the caller's tensors are checked once, then the kernels run.
#include "base/sized_struct.hpp"
#include "format/element.hpp"
#include "step/step.hpp"

namespace kvrt {

namespace {

constexpr int64_t max_stride = int64_t{1} << 40;

/// Checks a tensor of [rows, heads, dim] and resolves dense strides.
status view_tensor(const kv_tensor* tensor, const char* name, uint64_t rows, uint64_t heads,
                   uint64_t dim, tensor_view& view) {
    kv_tensor local;
    KVRT_TRY(adopt(tensor, 0, name, local));
    if (local.data == nullptr) return fail(KV_INVALID, "{}: data is NULL", name);
    if (local.dtype < KV_DTYPE_F32 || local.dtype > KV_DTYPE_BF16) {
        return fail(KV_INVALID, "{}: dtype {} is not KV_DTYPE_F32, F16 or BF16", name, local.dtype);
    }
    if (local.rows != rows || local.heads != heads || local.dim != dim) {
        return fail(KV_INVALID, "{} is [{}, {}, {}], this step and layer need [{}, {}, {}]", name,
                    local.rows, local.heads, local.dim, rows, heads, dim);
    }
    view.data = static_cast<std::byte*>(local.data);
    view.type = static_cast<element>(local.dtype);
    if (reinterpret_cast<uintptr_t>(view.data) % element_bytes(view.type) != 0) {
        return fail(KV_INVALID, "{}: data is not aligned to its {}-byte elements", name,
                    element_bytes(view.type));
    }
    if (local.row_stride == 0 && local.head_stride == 0 && local.dim_stride == 0) {
        local.dim_stride = 1;
        local.head_stride = static_cast<int64_t>(dim);
        local.row_stride = static_cast<int64_t>(heads * dim);
    }
    for (const int64_t stride : {local.row_stride, local.head_stride, local.dim_stride}) {
        if (stride > max_stride || stride < -max_stride) {
            return fail(KV_INVALID, "{}: a stride of {} elements is out of reach", name, stride);
        }
    }
    view.row_stride = local.row_stride;
    view.head_stride = local.head_stride;
    view.dim_stride = local.dim_stride;
    return KV_OK;
}

status check_layer_index(const step& target, uint32_t layer) {
    const std::size_t count = target.context->store->model.layers.size();
    if (layer < count) return KV_OK;
    return fail(KV_INVALID, "layer {} of a model of {} layers", layer, count);
}

/// The rows of all items over one lane of a layer.
void fill_attend_items(const step& target, const layer_geometry& layer, uint32_t lane,
                       attend_item* items) {
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        const lane_state& state = item.owner->lanes[lane];
        attend_item& row_set = items[i];
        row_set.blocks = state.table;
        row_set.first_row = item.first_row;
        row_set.rows = item.rows;
        row_set.slots = state.slots + item.rows;
        row_set.explicit_slots = state.explicit_slots;
        row_set.sealed_blocks = state.sealed_blocks;
        row_set.window_first = int64_t{state.slots} - int64_t{layer.window} + 1;
        row_set.next_position = item.owner->next_position + item.rows;
        row_set.observer = nullptr;
    }
}

/// Gives the items of a layer's lanes their observers, where sequences observe.
void attach_observers(step& target, const layer_geometry& layer) {
    cache& store = *target.context->store;
    observation_store& observations = target.context->retention->observations;
    if (target.arrays->observers.size() == 0) return;
    for (uint32_t k = 0; k < layer.lanes * target.item_count; ++k) {
        const step_item& item = target.arrays->items[k % target.item_count];
        const uint32_t lane = layer.first_lane + k / target.item_count;
        attend_observer& observer = target.arrays->observers[k];
        if (make_observer(store, observations, *item.owner, lane, item.rows, observer)) {
            target.arrays->attend_items[k].observer = &observer;
        }
    }
}

/// What attention has left there is the open step's.
void note_observers(step& target, const layer_geometry& layer) {
    observation_store& observations = target.context->retention->observations;
    for (uint32_t k = 0; k < layer.lanes * target.item_count; ++k) {
        const attend_item& attended = target.arrays->attend_items[k];
        if (attended.observer == nullptr) continue;
        note_observed(observations, *target.arrays->items[k % target.item_count].owner,
                      layer.first_lane + k / target.item_count, attended.rows, attended.slots);
    }
}

/// Whether a lane's rows of this step are there, or may be.
bool is_written(const step& target, uint32_t lane) {
    return target.arrays->lane_written[lane] != 0 || target.arrays->lane_exported[lane] != 0;
}

}  // namespace

status step_write(step& target, uint32_t layer, const kv_tensor* keys, const kv_tensor* values) {
    KVRT_TRY(expect_state(target, step_state::reserved, "kv_write"));
    KVRT_TRY(check_layer_index(target, layer));
    cache& store = *target.context->store;
    const layer_geometry& geometry = store.model.layers[layer];
    if (!geometry.stores) {
        return fail(KV_INVALID, "layer {} attends over the cache of layer {}: it writes nothing",
                    layer, store.model.lanes[geometry.first_lane].layer);
    }
    const tile_layout& layout = store.model.lanes[geometry.first_lane].layout;
    tensor_view key_view;
    tensor_view value_view;
    KVRT_TRY(view_tensor(keys, "keys (kv_tensor)", target.rows, geometry.kv_heads, layout.keys.dim,
                         key_view));
    KVRT_TRY(view_tensor(values, "values (kv_tensor)", target.rows, geometry.kv_heads,
                         layout.values.dim, value_view));
    if (store.on_device()) return write_on_device(target, layer, key_view, value_view);
    write_item* next = target.arrays->write_items.data();
    for (uint32_t i = 0; i < geometry.lanes; ++i) {
        const uint32_t lane_index = geometry.first_lane + i;
        const lane_geometry& lane = store.model.lanes[lane_index];
        target.context->write_calls[i] = {&lane.layout,
                                          next,
                                          target.item_count,
                                          from_head(key_view, lane.first_head),
                                          from_head(value_view, lane.first_head),
                                          saturation_of(store, lane_index)};
        for (uint32_t k = 0; k < target.item_count; ++k) {
            const step_item& item = target.arrays->items[k];
            const lane_state& state = item.owner->lanes[lane_index];
            *next++ = {state.table, state.slots, item.first_row, item.rows,
                       static_cast<uint32_t>(item.owner->next_position)};
            item.owner->written_rows = item.rows;
        }
        target.arrays->lane_written[lane_index] = 1;
    }
    write_rows(target.context->write_calls.data(), geometry.lanes, store.blocks.arena(),
               store.threads);
    return KV_OK;
}

status step_attend(step& target, uint32_t layer, const kv_tensor* queries, const kv_tensor* out,
                   const kv_attend_options& options) {
    KVRT_TRY(expect_state(target, step_state::reserved, "kv_attend"));
    KVRT_TRY(check_layer_index(target, layer));
    cache& store = *target.context->store;
    const layer_geometry& geometry = store.model.layers[layer];
    const lane_geometry& first_lane = store.model.lanes[geometry.first_lane];
    for (uint32_t lane = geometry.first_lane; lane < geometry.end_lane(); ++lane) {
        if (is_written(target, lane)) continue;
        return fail(KV_INVALID, "layer {}: kv_write of layer {} comes first", layer,
                    first_lane.layer);
    }
    attend_call call;
    KVRT_TRY(view_tensor(queries, "queries (kv_tensor)", target.rows, geometry.query_heads,
                         first_lane.layout.keys.dim, call.queries));
    KVRT_TRY(view_tensor(out, "out (kv_tensor)", target.rows, geometry.query_heads,
                         first_lane.layout.values.dim, call.out));
    if (store.on_device()) {
        if ((options.flags & KV_ATTEND_NO_STATISTICS) == 0) {
            KVRT_TRY(gather_on_device(target, layer, call.queries));
        }
        call.log_sum_exp = options.log_sum_exp;
        return attend_on_device(target, layer, call,
                                (options.flags & KV_ATTEND_NO_STATISTICS) == 0);
    }
    call.arena = store.blocks.arena();
    const lane_positions positions = positions_of_lane(store, geometry.first_lane, 0);
    call.positions = positions.open;
    call.sealed_positions = positions.sealed;
    call.row_heads = geometry.query_heads;
    call.item_count = target.item_count;
    call.workspace = target.context->workspace.data();
    call.workspace_bytes = target.context->workspace.size();
    for (uint32_t i = 0; i < geometry.lanes; ++i) {
        const uint32_t first_query =
            store.model.lanes[geometry.first_lane + i].first_head * geometry.group();
        attend_item* items = target.arrays->attend_items.data() + uint64_t{i} * target.item_count;
        fill_attend_items(target, geometry, geometry.first_lane + i, items);
        attend_call& of_lane = target.context->attend_calls[i];
        of_lane = call;
        of_lane.layer = &target.context->layers[target.context->first_layer[layer] + i];
        of_lane.items = items;
        of_lane.queries = from_head(call.queries, first_query);
        of_lane.out = from_head(call.out, first_query);
        if (options.log_sum_exp != nullptr) of_lane.log_sum_exp = options.log_sum_exp + first_query;
    }
    const bool learns = (options.flags & KV_ATTEND_NO_STATISTICS) == 0;
    if (learns) attach_observers(target, geometry);
    attend(target.context->attend_calls.data(), geometry.lanes, store.threads);
    if (learns) note_observers(target, geometry);

    if ((options.flags & KV_ATTEND_NO_STATISTICS) != 0) return KV_OK;
    statistics_store& statistics = target.context->retention->statistics;
    for (uint32_t i = 0; i < target.item_count; ++i) {
        const step_item& item = target.arrays->items[i];
        if (!gathers(statistics, *item.owner)) continue;
        gather_queries(store, statistics, store.sequences.index(*item.owner), layer, call.queries,
                       item.first_row, item.rows, item.owner->next_position);
        item.owner->statistics_pending = true;
    }
    return KV_OK;
}

}  // namespace kvrt
