#include "model/geometry.hpp"

#include <cmath>

#include "base/sized_struct.hpp"
#include "model/identity.hpp"
#include "model/storage.hpp"
#include "model/turning.hpp"

namespace kvrt {

namespace {

status check_dim(uint32_t dim, const char* field, uint32_t layer) {
    if (dim < min_head_dim || dim > max_head_dim || dim % head_dim_multiple != 0) {
        return fail(KV_UNSUPPORTED, "layer {}: {} is {}: {} to {} in multiples of {}", layer, field,
                    dim, min_head_dim, max_head_dim, head_dim_multiple);
    }
    return KV_OK;
}

status check_finite(float value, const char* field, uint32_t layer) {
    if (!std::isfinite(value) || value < 0.0f) {
        return fail(KV_INVALID, "layer {}: {} must be finite and not negative (0: the default)",
                    layer, field);
    }
    return KV_OK;
}

status check_layer(kv_layer& layer, uint32_t index) {
    if (layer.kv_heads == 0 || layer.query_heads == 0 || layer.query_heads > max_heads ||
        layer.query_heads % layer.kv_heads != 0) {
        return fail(KV_INVALID,
                    "layer {}: query_heads {} must be a multiple of kv_heads {}, at most {}", index,
                    layer.query_heads, layer.kv_heads, max_heads);
    }
    if (layer.value_dim == 0) layer.value_dim = layer.key_dim;
    if (layer.value_format == KV_FORMAT_DEFAULT) layer.value_format = layer.key_format;
    KVRT_TRY(check_dim(layer.key_dim, "key_dim", index));
    KVRT_TRY(check_dim(layer.value_dim, "value_dim", index));
    KVRT_TRY(check_finite(layer.softmax_scale, "softmax_scale", index));
    KVRT_TRY(check_finite(layer.logit_softcap, "logit_softcap", index));
    if (layer.window_sinks != 0 && layer.window == 0) {
        return fail(KV_INVALID, "layer {}: window_sinks is {} without a window", index,
                    layer.window_sinks);
    }
    constexpr uint32_t longest = 1u << 30;
    if (layer.window > longest || layer.window_sinks > longest) {
        return fail(KV_INVALID, "layer {}: window {} and window_sinks {} go up to {}", index,
                    layer.window, layer.window_sinks, longest);
    }
    return KV_OK;
}

status find_class(uint32_t block_bytes, uint32_t positions, model_geometry& out,
                  uint32_t& class_index) {
    for (class_index = 0; class_index < out.class_count; ++class_index) {
        block_store::class_description& known = out.classes[class_index];
        if (known.block_bytes != block_bytes) continue;
        known.positions_per_block = std::max(known.positions_per_block, positions);
        return KV_OK;
    }
    if (out.class_count == max_block_classes) {
        return fail(KV_UNSUPPORTED, "the layers need more than {} sizes of blocks",
                    max_block_classes);
    }
    out.classes[out.class_count++] = {block_bytes, positions};
    return KV_OK;
}

/// What rows are written as: tile-local formats keep them raw until their block is full.
const format_description& written_format(const format_description& format) {
    return format.kind == format_class::tile_local ? *find_format(KV_FORMAT_F16, operand_role::keys)
                                                   : format;
}

status check_tile(const format_description& format, const char* field, uint32_t block_tokens,
                  uint32_t layer) {
    if (format.kind != format_class::tile_local || block_tokens % format.tile.token_multiple == 0) {
        return KV_OK;
    }
    return fail(KV_UNSUPPORTED,
                "layer {}: {} {} codes {} tokens together: block_tokens is {}, and must be a "
                "multiple of that",
                layer, field, format.name, format.tile.token_multiple, block_tokens);
}

/// What belongs to a KV head of the layer and those behind it.
void skip_heads(uint32_t heads, operand_layout& operand) {
    if (operand.scales != nullptr) operand.scales += heads;
    if (operand.channel_means != nullptr) {
        operand.channel_means += uint64_t{heads} * operand.dim;
        operand.channel_scales += uint64_t{heads} * operand.dim;
    }
}

uint32_t lanes_of(const kv_layer& layer) {
    if ((layer.flags & KV_LAYER_SHARED) != 0) return 0;
    return (layer.flags & KV_LAYER_LANE_PER_HEAD) != 0 ? layer.kv_heads : 1;
}

/// How rows of a lane are stored, where they are written and where they end.
struct lane_formats {
    const format_description* written_keys = nullptr;
    const format_description* written_values = nullptr;
    const format_description* keys = nullptr;
    const format_description* values = nullptr;
    const kv_storage* key_storage = nullptr;
    const kv_storage* value_storage = nullptr;
};

/// What rows become when they are demoted: records that move one by one, or plain rows.
status resolve_demoted(uint32_t id, operand_role role, uint32_t index,
                       const format_description*& out) {
    const char* field = role == operand_role::keys ? "demoted_key_format" : "demoted_value_format";
    KVRT_TRY(resolve_format(id, role, field, index, out));
    if (out->kind != format_class::tile_local && !out->needs_positions) return KV_OK;
    return fail(KV_UNSUPPORTED,
                "layer {}: {} is {}: demoted rows move one by one, so it must be a token-local "
                "format, and not affine4",
                index, field, out->name);
}

/// A layer that is not to demote says nothing of it.
status check_undemoted(const kv_layer& layer, uint32_t index) {
    const char* field = nullptr;
    if (layer.demoted_value_format != KV_FORMAT_DEFAULT) field = "demoted_value_format";
    if (layer.demote_after != 0) field = "demote_after";
    if (layer.demoted_key_storage != nullptr) field = "demoted_key_storage";
    if (layer.demoted_value_storage != nullptr) field = "demoted_value_storage";
    if (field == nullptr) return KV_OK;
    return fail(KV_INVALID,
                "layer {}: {} without demoted_key_format: name key_format there if keys are to "
                "stay as they are",
                index, field);
}

/// A layer's demoted formats; `formats` has those of its rows before.
status resolve_demotion(const kv_layer& layer, uint32_t index, lane_formats& formats) {
    if (!formats.written_keys->plain() || !formats.written_values->plain()) {
        return fail(KV_UNSUPPORTED,
                    "layer {}: demoted_key_format with key_format {} and value_format {}: rows are "
                    "coded once, when they are demoted, so both must be f32, f16 or bf16",
                    index, formats.written_keys->name, formats.written_values->name);
    }
    const uint32_t values = layer.demoted_value_format != KV_FORMAT_DEFAULT
                                ? layer.demoted_value_format
                                : layer.demoted_key_format;
    KVRT_TRY(resolve_demoted(layer.demoted_key_format, operand_role::keys, index, formats.keys));
    KVRT_TRY(resolve_demoted(values, operand_role::values, index, formats.values));
    formats.key_storage = layer.demoted_key_storage;
    formats.value_storage = layer.demoted_value_storage;
    if (layer.demote_after > max_demote_after) {
        return fail(KV_INVALID,
                    "layer {}: demote_after is {}: at most {}, or 0 for demotion under "
                    "pressure alone",
                    index, layer.demote_after, max_demote_after);
    }
    return KV_OK;
}

status resolve_formats(const kv_layer& layer, uint32_t index, lane_formats& out) {
    KVRT_TRY(resolve_format(layer.key_format, operand_role::keys, "key_format", index, out.keys));
    KVRT_TRY(resolve_format(layer.value_format, operand_role::values, "value_format", index,
                            out.values));
    out.key_storage = layer.key_storage;
    out.value_storage = layer.value_storage;
    if (layer.demoted_key_format == KV_FORMAT_DEFAULT) {
        out.written_keys = &written_format(*out.keys);
        out.written_values = &written_format(*out.values);
        return check_undemoted(layer, index);
    }
    out.written_keys = out.keys;
    out.written_values = out.values;
    return resolve_demotion(layer, index, out);
}

/// Fills the lanes of a layer: the first, and the others like it.
status describe_lanes(const kv_layer& layer, uint32_t index, tile_order order, model_geometry& out,
                      float*& next_value, lane_geometry* lanes) {
    const uint32_t lane_count = lanes_of(layer);
    const uint32_t kv_heads = layer.kv_heads / lane_count;
    lane_geometry& lane = lanes[0];
    lane_formats formats;
    KVRT_TRY(resolve_formats(layer, index, formats));
    lane.layer = index;
    lane.kv_heads = kv_heads;
    lane.window = layer.window;
    lane.window_sinks = layer.window_sinks;
    lane.first_counter = out.counters;
    out.counters += 2 * layer.kv_heads;
    lane.demotes = layer.demoted_key_format != KV_FORMAT_DEFAULT;
    lane.demote_after = layer.demote_after != 0 ? layer.demote_after : never_demoted;
    KVRT_TRY(check_tile(*formats.keys, "key_format", out.block_tokens, index));
    KVRT_TRY(check_tile(*formats.values, "value_format", out.block_tokens, index));
    const uint64_t bytes = uint64_t{out.block_tokens} * kv_heads *
                           (record_bytes(*formats.written_keys, layer.key_dim) +
                            record_bytes(*formats.written_values, layer.value_dim));
    if (bytes + guard_bytes > slab_bytes) {
        return fail(KV_UNSUPPORTED,
                    "layer {}: a block of {} tokens takes {} bytes, more than a slab of {}: use a "
                    "smaller block_tokens or a smaller format",
                    index, out.block_tokens, bytes, slab_bytes);
    }
    const auto layout_of = [&](const format_description& keys, const format_description& values) {
        return make_tile_layout(order, out.block_tokens, kv_heads, layer.key_dim, layer.value_dim,
                                keys, values);
    };
    lane.sealed_layout = layout_of(*formats.keys, *formats.values);
    lane.layout = layout_of(*formats.written_keys, *formats.written_values);
    if (lane.demotes) {  // what plain formats say of storage is nothing, and is to be that
        KVRT_TRY(take_storage(layer.key_storage, layer.kv_heads, "key_storage", index, next_value,
                              lane.layout.keys));
        KVRT_TRY(take_storage(layer.value_storage, layer.kv_heads, "value_storage", index,
                              next_value, lane.layout.values));
    }
    const char* key_field = lane.demotes ? "demoted_key_storage" : "key_storage";
    const char* value_field = lane.demotes ? "demoted_value_storage" : "value_storage";
    KVRT_TRY(take_storage(formats.key_storage, layer.kv_heads, key_field, index, next_value,
                          lane.sealed_layout.keys));
    KVRT_TRY(take_storage(formats.value_storage, layer.kv_heads, value_field, index, next_value,
                          lane.sealed_layout.values));
    lane.layout.keys.share_constants(lane.sealed_layout.keys);
    lane.layout.values.share_constants(lane.sealed_layout.values);
    lane.seals =
        lane.demotes || lane.sealed_layout.keys.tiled() || lane.sealed_layout.values.tiled();
    if (lane.demotes && lane.sealed_layout.block_bytes >= lane.layout.block_bytes) {
        return fail(
            KV_INVALID,
            "layer {}: demoted_key_format {} and demoted_value_format {} save nothing: blocks "
            "take {} bytes, and {} before: name smaller ones, or no demoted_key_format",
            index, formats.keys->name, formats.values->name, lane.sealed_layout.block_bytes,
            lane.layout.block_bytes);
    }
    const uint32_t positions = kv_heads * out.block_tokens;
    KVRT_TRY(find_class(lane.layout.block_bytes, positions, out, lane.class_index));
    KVRT_TRY(find_class(lane.sealed_layout.block_bytes, positions, out, lane.sealed_class_index));
    for (uint32_t i = 1; i < lane_count; ++i) {
        lanes[i] = lane;
        lanes[i].first_head = i * kv_heads;
        for (tile_layout* part : {&lanes[i].layout, &lanes[i].sealed_layout}) {
            skip_heads(lanes[i].first_head, part->keys);
            skip_heads(lanes[i].first_head, part->values);
        }
    }
    return KV_OK;
}

/// A layer that shares another's cache must fit it: what it does not say is the owner's.
status check_shared(const kv_layer& layer, uint32_t index, const model_geometry& out) {
    if ((layer.flags & KV_LAYER_LANE_PER_HEAD) != 0) {
        return fail(
            KV_INVALID,
            "layer {}: KV_LAYER_LANE_PER_HEAD with KV_LAYER_SHARED: say it of shared_layer, "
            "whose lanes these are",
            index);
    }
    if ((layer.flags & KV_LAYER_CACHE_POSITIONS) != 0) {
        return fail(KV_INVALID,
                    "layer {}: KV_LAYER_CACHE_POSITIONS with KV_LAYER_SHARED: say it of "
                    "shared_layer, whose keys these are",
                    index);
    }
    if (layer.shared_layer >= index || !out.layers[layer.shared_layer].stores) {
        return fail(KV_INVALID, "layer {}: shared_layer {} must be an earlier layer that stores",
                    index, layer.shared_layer);
    }
    const layer_geometry& owning = out.layers[layer.shared_layer];
    const lane_geometry& owner = out.lanes[owning.first_lane];
    if (layer.kv_heads != owning.kv_heads || layer.key_dim != owner.layout.keys.dim ||
        layer.value_dim != owner.layout.values.dim) {
        return fail(KV_INVALID,
                    "layer {}: kv_heads {}, key_dim {}, value_dim {} differ from {}, {}, {} of "
                    "shared_layer {}",
                    index, layer.kv_heads, layer.key_dim, layer.value_dim, owning.kv_heads,
                    owner.layout.keys.dim, owner.layout.values.dim, layer.shared_layer);
    }
    // A narrower window than the owner's is a mask; a wider one would see blocks that are gone.
    if (owner.window != 0 && (layer.window == 0 || layer.window > owner.window ||
                              layer.window_sinks > owner.window_sinks)) {
        return fail(KV_INVALID, "layer {}: its window must lie within that of shared_layer {}",
                    index, layer.shared_layer);
    }
    return KV_OK;
}

/// A layer that shares another's cache sees its keys where the owner's slots are. They are rotated
/// as the owner says.
status follow_owner(const layer_geometry& owner, uint32_t index, layer_geometry& sharing) {
    sharing.cache_positions = owner.cache_positions;
    if (!owner.cache_positions) return KV_OK;
    if (sharing.rope_known && owner.rope_known && !same_rotation(sharing.rope, owner.rope)) {
        return fail(KV_INVALID,
                    "layer {}: its rope differs from that of its shared_layer, which has "
                    "KV_LAYER_CACHE_POSITIONS: say the same, or none",
                    index);
    }
    sharing.rope_known = owner.rope_known;
    sharing.rope = owner.rope;
    return KV_OK;
}

/// Copies a per-head array of the caller's behind the others.
status take_head_values(const float* source, uint32_t count, const char* field, uint32_t layer,
                        float*& next, const float*& out) {
    if (source == nullptr) return KV_OK;
    for (uint32_t i = 0; i < count; ++i) {
        if (!std::isfinite(source[i])) {
            return fail(KV_INVALID, "layer {}: {}[{}] is not finite", layer, field, i);
        }
        next[i] = source[i];
    }
    out = next;
    next += count;
    return KV_OK;
}

status read_checked_layer(const kv_model& model, uint32_t index, kv_layer& layer) {
    KVRT_TRY(read_layer(model.layers, index, layer));
    return check_layer(layer, index);
}

}  // namespace

status describe_model(const kv_model* model_argument, uint32_t block_tokens, tile_order order,
                      host_allocator& allocator, model_geometry& out) {
    kv_model model;
    KVRT_TRY(adopt(model_argument, 0, "model (kv_model)", model));
    KVRT_TRY(check_layer_array(model.layers, model.layer_count, "model"));
    out.block_tokens = block_tokens;

    uint64_t head_values = 0;
    uint32_t lane_count = 0;
    for (uint32_t i = 0; i < model.layer_count; ++i) {
        kv_layer layer;
        KVRT_TRY(read_checked_layer(model, i, layer));
        if (layer.sink_logits != nullptr) head_values += layer.query_heads;
        if (layer.alibi_slopes != nullptr) head_values += layer.query_heads;
        lane_count += lanes_of(layer);
        if (lane_count > max_lanes) {
            return fail(KV_UNSUPPORTED,
                        "layer {}: the model has more than {} lanes with those of its KV heads", i,
                        max_lanes);
        }
        if ((layer.flags & KV_LAYER_SHARED) == 0) {
            head_values += 2 * uint64_t{layer.kv_heads};  // static scales, at most
            const format_description* keys = find_format(layer.key_format, operand_role::keys);
            if (keys != nullptr && keys->needs_channels) {
                head_values += 2 * uint64_t{layer.kv_heads} * layer.key_dim;
            }
        }
    }
    KVRT_TRY(out.layers.allocate(allocator, model.layer_count, "layers"));
    KVRT_TRY(out.lanes.allocate(allocator, lane_count, "lanes"));
    KVRT_TRY(out.head_values.allocate(allocator, head_values, "constants of heads"));

    float* next_value = out.head_values.data();
    uint32_t next_lane = 0;
    for (uint32_t i = 0; i < model.layer_count; ++i) {
        kv_layer layer;
        KVRT_TRY(read_checked_layer(model, i, layer));
        layer_geometry& target = out.layers[i];
        target.stores = (layer.flags & KV_LAYER_SHARED) == 0;
        if (target.stores) {
            target.first_lane = next_lane;
            target.lanes = lanes_of(layer);
            next_lane += target.lanes;
            KVRT_TRY(
                describe_lanes(layer, i, order, out, next_value, &out.lanes[target.first_lane]));
        } else {
            KVRT_TRY(check_shared(layer, i, out));
            target.first_lane = out.layers[layer.shared_layer].first_lane;
            target.lanes = out.layers[layer.shared_layer].lanes;
        }
        for (uint32_t lane = target.first_lane; layer.window != 0 && lane < target.end_lane();
             ++lane) {
            out.lanes[lane].evictable = false;
        }
        target.query_heads = layer.query_heads;
        target.kv_heads = layer.kv_heads;
        target.window = layer.window;
        target.window_sinks = layer.window_sinks;
        target.scale = layer.softmax_scale != 0.0f
                           ? layer.softmax_scale
                           : 1.0f / std::sqrt(static_cast<float>(layer.key_dim));
        target.softcap = layer.logit_softcap;
        KVRT_TRY(take_head_values(layer.sink_logits, layer.query_heads, "sink_logits", i,
                                  next_value, target.sink_logits));
        KVRT_TRY(take_head_values(layer.alibi_slopes, layer.query_heads, "alibi_slopes", i,
                                  next_value, target.alibi_slopes));
        target.rope_known = layer.rope != nullptr;
        KVRT_TRY(describe_rope(layer.rope, layer.key_dim, i, target.rope));
        if (target.stores) {
            target.cache_positions = (layer.flags & KV_LAYER_CACHE_POSITIONS) != 0;
        } else {
            KVRT_TRY(follow_owner(out.layers[layer.shared_layer], i, target));
        }
    }
    KVRT_TRY(make_turnings(allocator, out));
    for (lane_geometry& lane : out.lanes) {
        const layer_geometry& layer = out.layers[lane.layer];
        const stored_rotation rotation = {layer.stored_rope(), layer.cache_positions};
        const auto identity = [&](operand_layout tile_layout::*operand,
                                  const stored_rotation& stored) {
            const operand_layout* written = lane.demotes ? &(lane.layout.*operand) : nullptr;
            return operand_identity(lane.sealed_layout.*operand, lane.kv_heads, stored, written);
        };
        lane.key_identity = identity(&tile_layout::keys, rotation);
        lane.value_identity = identity(&tile_layout::values, {});
    }
    return KV_OK;
}

}  // namespace kvrt
