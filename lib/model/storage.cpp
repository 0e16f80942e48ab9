#include "model/storage.hpp"

#include <algorithm>
#include <cmath>

#include "base/sized_struct.hpp"

namespace kvrt {

status resolve_format(uint32_t id, operand_role role, uint32_t layer,
                      const format_description*& out) {
    out = find_format(id, role);
    if (out != nullptr) return KV_OK;
    const char* field = role == operand_role::keys ? "key_format" : "value_format";
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

}  // namespace

status take_storage(const kv_storage* storage, uint32_t kv_heads, const char* field, uint32_t layer,
                    float*& next_value, operand_layout& operand) {
    kv_storage given = KV_INIT(kv_storage);
    if (storage != nullptr) {
        KVRT_TRY(adopt(storage, KV_STORAGE_SCALE_ONE | KV_STORAGE_ROTATE, field, given));
    }
    KVRT_TRY(check_scales(given, kv_heads, field, layer));
    const bool always = operand.format->always_rotated;
    operand.rotated = always || (given.flags & KV_STORAGE_ROTATE) != 0;
    if (operand.rotated && operand.plain()) {
        return fail(KV_UNSUPPORTED, "layer {}: {}: {} is not stored rotated", layer, field,
                    operand.format->name);
    }
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
