#include "model/storage.hpp"

#include <algorithm>
#include <cmath>

#include "base/sized_struct.hpp"

namespace kvrt {

status resolve_format(uint32_t id, operand_role role, const char* field, uint32_t layer,
                      const format_description*& out) {
    out = find_format(id, role);
    if (out != nullptr) return KV_OK;
    if (const format_description* keys = find_format(id, operand_role::keys); keys != nullptr) {
        return fail(KV_UNSUPPORTED, "layer {}: {} is {}, which is for keys alone: name another",
                    layer, field, keys->name);
    }
    return fail(KV_UNSUPPORTED,
                "layer {}: {} is {}: not a format that this library stores (kv_capabilities)",
                layer, field, id);
}

namespace {

status check_scales(const kv_storage& storage, uint32_t kv_heads, const char* field,
                    uint32_t layer) {
    if ((storage.scales == nullptr) != (storage.scale_count == 0)) {
        return fail(KV_INVALID, "layer {}: {}: scales and scale_count come together", layer, field);
    }
    if (storage.scales == nullptr) return KV_OK;
    if ((storage.flags & KV_STORAGE_SCALE_ONE) != 0) {
        return fail(KV_INVALID,
                    "layer {}: {}: scales, and KV_STORAGE_SCALE_ONE that says there are "
                    "none",
                    layer, field);
    }
    if (storage.scale_count != 1 && storage.scale_count != kv_heads) {
        return fail(KV_INVALID,
                    "layer {}: {}: scale_count is {}: 1, or one for each of {} KV heads", layer,
                    field, storage.scale_count, kv_heads);
    }
    for (uint32_t i = 0; i < storage.scale_count; ++i) {
        if (!std::isfinite(storage.scales[i]) || !(storage.scales[i] > 0.0f)) {
            return fail(KV_INVALID, "layer {}: {}: scales[{}] is {}: finite and positive", layer,
                        field, i, storage.scales[i]);
        }
    }
    return KV_OK;
}

status check_channels(const kv_storage& storage, uint32_t kv_heads, const char* field,
                      uint32_t layer, const operand_layout& operand) {
    const bool given = storage.channel_means != nullptr;
    if (given != (storage.channel_scales != nullptr) ||
        given != (storage.channel_heads != 0 && storage.channel_dim != 0)) {
        return fail(KV_INVALID,
                    "layer {}: {}: channel_means, channel_scales, channel_heads and channel_dim "
                    "come together",
                    layer, field);
    }
    if (!given && operand.format->needs_channels) {
        return fail(KV_INVALID,
                    "layer {}: {}: {} needs channel_means and channel_scales (kv_seq_fit_affine "
                    "measures them)",
                    layer, field, operand.format->name);
    }
    if (!given) return KV_OK;
    if (!operand.format->needs_channels) {
        return fail(KV_INVALID, "layer {}: {}: {} has no use for channel_means and channel_scales",
                    layer, field, operand.format->name);
    }
    if (storage.channel_heads != kv_heads || storage.channel_dim != operand.dim) {
        return fail(KV_INVALID,
                    "layer {}: {}: channel_means and channel_scales are [{}, {}], the layer has "
                    "[{}, {}]",
                    layer, field, storage.channel_heads, storage.channel_dim, kv_heads,
                    operand.dim);
    }
    for (uint64_t i = 0; i < uint64_t{kv_heads} * operand.dim; ++i) {
        if (!std::isfinite(storage.channel_means[i])) {
            return fail(KV_INVALID, "layer {}: {}: channel_means[{}] is not finite", layer, field,
                        i);
        }
        if (!std::isfinite(storage.channel_scales[i]) || !(storage.channel_scales[i] > 0.0f)) {
            return fail(KV_INVALID, "layer {}: {}: channel_scales[{}] is {}: finite and positive",
                        layer, field, i, storage.channel_scales[i]);
        }
    }
    return KV_OK;
}

/// Copies checked constants of channels.
void take_channels(const kv_storage& storage, uint32_t kv_heads, float*& next_value,
                   operand_layout& operand) {
    const uint64_t count = uint64_t{kv_heads} * operand.dim;
    operand.channel_means = next_value;
    next_value = std::copy_n(storage.channel_means, count, next_value);
    operand.channel_scales = next_value;
    next_value = std::copy_n(storage.channel_scales, count, next_value);
}

}  // namespace

status take_storage(const kv_storage* storage, uint32_t kv_heads, const char* field, uint32_t layer,
                    float*& next_value, operand_layout& operand) {
    kv_storage given = KV_INIT(kv_storage);
    if (storage != nullptr) {
        KVRT_TRY(adopt(storage, KV_STORAGE_SCALE_ONE | KV_STORAGE_ROTATE, field, given));
    }
    KVRT_TRY(check_scales(given, kv_heads, field, layer));
    KVRT_TRY(check_channels(given, kv_heads, field, layer, operand));
    const bool always = operand.format->always_rotated;
    operand.rotated = always || (given.flags & KV_STORAGE_ROTATE) != 0;
    if (operand.rotated && (operand.plain() || operand.format->needs_positions)) {
        return fail(KV_UNSUPPORTED, "layer {}: {}: {} is not stored rotated", layer, field,
                    operand.format->name);
    }
    if (operand.format->needs_channels) take_channels(given, kv_heads, next_value, operand);
    if (!operand.format->takes_scales) return KV_OK;
    if (operand.format->needs_scales && given.scales == nullptr &&
        (given.flags & KV_STORAGE_SCALE_ONE) == 0) {
        return fail(
            KV_INVALID,
            "layer {}: {}: {} needs static scales; say KV_STORAGE_SCALE_ONE if 1.0 is meant", layer,
            field, operand.format->name);
    }
    for (uint32_t head = 0; head < kv_heads; ++head) {
        next_value[head] =
            given.scales == nullptr ? 1.0f : given.scales[given.scale_count == 1 ? 0 : head];
    }
    operand.scales = next_value;
    next_value += kv_heads;
    return KV_OK;
}

}  // namespace kvrt
