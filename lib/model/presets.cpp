#include "model/presets.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "format/format.hpp"
#include "model/layer_array.hpp"

namespace kvrt {

namespace {

constexpr preset_operand int8_rotated = {KV_FORMAT_INT8_TOKEN, true};
constexpr preset_operand int4_rotated = {KV_FORMAT_INT4_TOKEN, true};

/// A window of 1,024 tokens does not grow, so there is little to gain; the first and the last two
/// layers are where TurboQuant's presets in vLLM found low-bit formats to lose most.
constexpr preset_description presets[] = {
    {KV_PRESET_NEAR_LOSSLESS, int8_rotated, int8_rotated, 1024, 0},
    {KV_PRESET_BALANCED, int8_rotated, int4_rotated, 1024, 2},
    {KV_PRESET_SMALLEST, int4_rotated, int4_rotated, 1024, 2},
};

constexpr kv_storage rotated() {
    kv_storage storage = {};
    storage.struct_size = sizeof storage;
    storage.flags = KV_STORAGE_ROTATE;
    return storage;
}
constexpr kv_storage rotated_storage = rotated();

bool plain(uint32_t id) {
    const format_description* format = find_format(id, operand_role::keys);
    return format != nullptr && format->kind == format_class::plain;
}

/// A spared layer keeps a plain format that it names.
void spare(kv_layer& layer) {
    if (layer.value_format == KV_FORMAT_DEFAULT) layer.value_format = layer.key_format;
    if (!plain(layer.key_format)) layer.key_format = KV_FORMAT_F16;
    if (!plain(layer.value_format)) layer.value_format = KV_FORMAT_F16;
    layer.key_storage = layer.value_storage = nullptr;
}

void store_as(const preset_description& preset, kv_layer& layer) {
    layer.key_format = preset.keys.format;
    layer.value_format = preset.values.format;
    layer.key_storage = preset.keys.rotated ? &rotated_storage : nullptr;
    layer.value_storage = preset.values.rotated ? &rotated_storage : nullptr;
}

/// Puts a field of `layer` into the caller's struct, which may lie off its alignment.
template <class field_type>
void put(const field_type& field, std::size_t offset, std::byte* target) {
    std::memcpy(target + offset, &field, sizeof field);
}

void write_layer(const kv_layer& layer, std::byte* target) {
    put(layer.key_format, offsetof(kv_layer, key_format), target);
    put(layer.value_format, offsetof(kv_layer, value_format), target);
    put(layer.key_storage, offsetof(kv_layer, key_storage), target);
    put(layer.value_storage, offsetof(kv_layer, value_storage), target);
}

}  // namespace

const preset_description* find_preset(uint32_t id) {
    const auto* found =
        std::find_if(std::begin(presets), std::end(presets),
                     [&](const preset_description& preset) { return preset.id == id; });
    return found == std::end(presets) ? nullptr : found;
}

status apply_preset(const preset_description& preset, kv_layer* layers, uint32_t count) {
    KVRT_TRY(check_layer_array(layers, count, "layers"));
    constexpr std::size_t end_of_storages =
        offsetof(kv_layer, value_storage) + sizeof(kv_layer::value_storage);
    uint32_t storing = 0;
    for (uint32_t i = 0; i < count; ++i) {
        kv_layer layer;
        KVRT_TRY(read_layer(layers, i, layer));
        if (layer.struct_size < end_of_storages) {
            return fail(KV_INVALID, "layers: struct_size is {}: too old to say how rows are stored",
                        layer.struct_size);
        }
        if ((layer.flags & KV_LAYER_SHARED) == 0) ++storing;
    }
    for (uint32_t i = 0, stored = 0; i < count; ++i) {
        kv_layer layer;
        KVRT_TRY(read_layer(layers, i, layer));
        if ((layer.flags & KV_LAYER_SHARED) != 0) continue;
        const uint32_t from_end = std::min(stored, storing - 1 - stored);
        ++stored;
        if (from_end < preset.edge_layers ||
            (layer.window != 0 && layer.window <= preset.short_window)) {
            spare(layer);
        } else {
            store_as(preset, layer);
        }
        write_layer(layer, const_cast<std::byte*>(layer_at(layers, i)));
    }
    return KV_OK;
}

}  // namespace kvrt
